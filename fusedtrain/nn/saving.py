"""Common part of the activation modules that can keep their derivative in few bits."""

from typing import Any

from torch import nn

from ..ops.few_bit import SAVES, check_save


class SavingActivation(nn.Module):
    """An activation that can keep its derivative in few bits: see fusedtrain.functional."""

    __constants__ = ["inplace", "save"]  # noqa: RUF012 (as torch has it)
    _op: str
    save: str | None = None  # a class default: `convert` changes classes without `__init__`

    def __init__(self, inplace: bool = False, save: str | None = None) -> None:
        super().__init__(inplace)  # of torch's class of the activation
        self._keep(save)

    def _keep(self, save: str | None) -> None:
        check_save(self._op, save)
        if save is not None:
            self.save = save

    @classmethod
    def takes(cls, save: str) -> bool:
        return save in SAVES[cls._op]

    def extra_repr(self) -> str:
        text: Any = super().extra_repr()
        if self.save is None:
            return str(text)
        return f"{text}, save='{self.save}'" if text else f"save='{self.save}'"
