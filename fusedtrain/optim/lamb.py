"""LAMB."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from ..reference.optimizers import MEASURE_GRADIENTS, MEASURE_PARAMETERS
from ._checks import two
from ._engine import FusedOptimizer
from ._options import OtherOptions


class LAMB(FusedOptimizer):
    """LAMB (arXiv 1904.00962), as timm's ``Lamb`` has it: Adam's update, scaled by |p| / |update|.

    A trial update gives the norm: gradients, parameters and states are read twice.

    Bias correction counts the steps of each parameter, as Adam's does. timm counts steps by group,
    whether a parameter has a gradient or not, and so corrects parameters with fewer steps too
    little. A ``state_dict`` has both counts: the group's ``"step"``, for timm, is the largest of
    its parameters'. Loading timm's checkpoint sets all parameters with states to the group's count.

    Args:
        params: parameters, or groups of them, float32, float64, float16 or bfloat16.
        lr: learning rate, a number or a tensor of one element.
        bias_correction: corrects the averages for their start at 0.
        betas: decays of the averages of the gradient and of its square.
        eps: added to the denominator.
        weight_decay: L2 penalty of the update. Groups without it are not scaled, unless
            `always_adapt`.
        grad_averaging: multiplies the gradient by 1 - beta1 in its average.
        max_grad_norm: norm that all gradients together are clipped to, or None.
        trust_clip: limits the scale to 1 (LAMBC).
        always_adapt: scales groups without weight decay too.
        caution: drops updates that disagree with the gradient's sign (arXiv 2411.16085).
        decoupled_decay: fraction of lr that weights shrink by each step, instead of the penalty.
        corrected_weight_decay: shrinks by lr^2 / (first lr) instead (arXiv 2506.02285).
        foreach: accepted; the step is the fused one in any case.
        options: see `FusedOptions`. Against float64, a step from 8-bit states ("q8") has a
            numerator that is off by at most beta1 times the error of the stored average, and a root
            of the squares that is off by at most sqrt(beta2) times the error of the stored root.

    Raises:
        ValueError: for values out of range.

    Example:
        >>> import torch, fusedtrain
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = fusedtrain.optim.LAMB([weight], lr=0.25, weight_decay=0.0)
        >>> weight.grad = torch.tensor([0.3, -0.5])
        >>> optimizer.step()
        >>> weight
        Parameter containing:
        tensor([0.7500, 1.2500], requires_grad=True)
    """

    _rule = "lamb"
    _states = ("exp_avg", "exp_avg_sq")
    _maximizes = False
    _norms = MEASURE_GRADIENTS | MEASURE_PARAMETERS
    _tries = True
    _norm_eps = 0.0
    _keys: ClassVar[tuple[str, ...]] = (
        "lr", "bias_correction", "betas", "eps", "weight_decay", "grad_averaging", "max_grad_norm",
        "trust_clip", "always_adapt", "caution", "decoupled_decay", "corrected_weight_decay",
    )  # fmt: skip
    _absent: ClassVar = {
        "trust_clip": False, "always_adapt": False, "caution": False, "decoupled_decay": False,
        "corrected_weight_decay": False,
    }  # fmt: skip

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        grad_averaging: bool = True,
        max_grad_norm: float | None = 1.0,
        trust_clip: bool = False,
        always_adapt: bool = False,
        caution: bool = False,
        decoupled_decay: bool = False,
        corrected_weight_decay: bool = False,
        foreach: bool | None = None,
        **options: Unpack[OtherOptions],
    ) -> None:
        self._start(locals())

    def _rule_options(self, group: dict[str, Any]) -> tuple[float, ...]:
        return (
            *two(group["betas"]), group["eps"], group["bias_correction"], group["grad_averaging"],
            group["trust_clip"], group["always_adapt"], group["decoupled_decay"],
        )  # fmt: skip

    def _group_step(self, group: dict[str, Any], count: float) -> Tensor:
        return torch.tensor(count)  # as timm's
