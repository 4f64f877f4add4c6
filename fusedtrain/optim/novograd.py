"""NovoGrad."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from ..reference.optimizers import MEASURE_GRADIENTS
from ._checks import two
from ._engine import FusedOptimizer
from ._options import FusedOptions


class NovoGrad(FusedOptimizer):
    """NovoGrad (arXiv 1905.11286), as timm's ``NvNovoGrad`` has it: one second moment a tensor.

    Args:
        params: parameters, or groups of them, float32, float64, float16 or bfloat16.
        lr: learning rate, a number or a tensor of one element.
        betas: decays of the averages of the gradient and of its squared norm.
        eps: added to the denominator.
        weight_decay: L2 penalty of the normalised gradient.
        decoupled_decay: fraction of lr that weights shrink by each step, instead of the penalty.
        corrected_weight_decay: shrinks by lr^2 / (first lr) instead (arXiv 2506.02285).
        grad_averaging: multiplies the normalised gradient by 1 - beta1 in its average.
        amsgrad: divides by the largest second moment so far (arXiv 1904.09237).
        options: see `FusedOptions`. Against float64, a step from 8-bit states ("q8") has
            a direction that is off by at most beta1 times the error of the stored average.

    Raises:
        ValueError: for values out of range.

    Example:
        >>> import torch, fusedtrain
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = fusedtrain.optim.NovoGrad([weight], lr=0.25)
        >>> weight.grad = torch.tensor([3.0, -4.0])
        >>> optimizer.step()
        >>> weight
        Parameter containing:
        tensor([0.8500, 1.2000], requires_grad=True)
    """

    _rule = "novograd"
    _states = ("exp_avg",)
    _maximizes = False
    _scalar_names: ClassVar[tuple[str | None, ...]] = ("step", "exp_avg_sq", "max_exp_avg_sq")
    _norms = MEASURE_GRADIENTS
    _absent: ClassVar = {
        "amsgrad": False, "decoupled_decay": False, "corrected_weight_decay": False,
    }  # fmt: skip

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.95, 0.98),
        eps: float = 1e-8,
        weight_decay: float = 0,
        grad_averaging: bool = False,
        amsgrad: bool = False,
        decoupled_decay: bool = False,
        corrected_weight_decay: bool = False,
        **options: Unpack[FusedOptions],
    ) -> None:
        self._start(locals())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if any("exp_avg_sq" in group for group in state_dict["param_groups"]):
            raise ValueError(
                "norms by group are from Apex's FusedNovoGrad, which has a different update: load "
                "them into fusedtrain.apex.optimizers.FusedNovoGrad"
            )
        super().load_state_dict(state_dict)

    def _rule_options(self, group: dict[str, Any]) -> tuple[float, ...]:
        averages, amsgrad = group["grad_averaging"], group["amsgrad"]
        decay = 2 if group["decoupled_decay"] else 0
        return (*two(group["betas"]), group["eps"], averages, amsgrad, 0, decay)
