"""Lion."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from ._checks import two
from ._engine import FusedOptimizer
from ._options import FusedOptions


class Lion(FusedOptimizer):
    """Lion (arXiv 2302.06675), as timm's ``Lion`` has it: the sign of a momentum.

    The sign of 0 is 0: a parameter without gradient stays where it is.

    Args:
        params: parameters, or groups of them, float32, float64, float16 or bfloat16.
        lr: learning rate, a number or a tensor of one element.
        betas: weights of the average in the update and from step to step.
        weight_decay: fraction of lr that weights shrink by each step.
        caution: drops updates that disagree with the gradient's sign (arXiv 2411.16085).
        corrected_weight_decay: shrinks by lr^2 / (first lr) instead (arXiv 2506.02285).
        maximize: ascends.
        foreach: accepted; the step is the fused one in any case.
        options: see `FusedOptions`. Against float64, a step from 8-bit states ("q8") has
            another sign where ``|beta1 m + (1 - beta1) g|`` is below beta1 times the error of the
            stored ``m``, and nowhere else.

    Raises:
        ValueError: for values out of range.

    Example:
        >>> import torch, fusedtrain
        >>> weight = torch.nn.Parameter(torch.ones(3))
        >>> optimizer = fusedtrain.optim.Lion([weight], lr=0.25)
        >>> weight.grad = torch.tensor([3.0, -5.0, 0.0])
        >>> optimizer.step()
        >>> weight
        Parameter containing:
        tensor([0.7500, 1.2500, 1.0000], requires_grad=True)
    """

    _rule = "lion"
    _states = ("exp_avg",)
    _keys = (
        "lr", "betas", "weight_decay", "caution", "corrected_weight_decay", "foreach", "maximize",
    )  # fmt: skip
    _scalar_names = (None, None, None)
    _absent: ClassVar = {
        "caution": False, "corrected_weight_decay": False, "maximize": False, "foreach": None,
    }  # fmt: skip

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        caution: bool = False,
        corrected_weight_decay: bool = False,
        maximize: bool = False,
        foreach: bool | None = None,
        **options: Unpack[FusedOptions],
    ) -> None:
        self._start(locals())

    def _rule_options(self, group: dict[str, Any]) -> tuple[float, ...]:
        return two(group["betas"])
