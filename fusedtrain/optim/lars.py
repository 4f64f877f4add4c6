"""LARS and LARC."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from ..reference.optimizers import MEASURE_GRADIENTS, MEASURE_PARAMETERS
from ._engine import FusedOptimizer
from ._options import FusedOptions


class LARS(FusedOptimizer):
    """LARS (arXiv 1708.03888), and LARC with ``trust_clip``, as timm's ``Lars`` has it.

    SGD whose gradient, with weight decay added, is scaled in each tensor by
    trust_coeff |p| / (|g| + weight_decay |p| + eps).

    Args:
        params: parameters, or groups of them, float32, float64, float16 or bfloat16.
        lr: learning rate, a number or a tensor of one element.
        momentum, dampening, nesterov: as in `SGD`.
        weight_decay: L2 penalty. Groups without it are not scaled, unless `always_adapt`.
        trust_coeff: see above.
        eps: see above.
        trust_clip: limits the scale times lr to lr (LARC).
        always_adapt: scales groups without weight decay too.
        foreach: accepted; the step is the fused one in any case.
        options: see `FusedOptions`. Against float64, a step from 8-bit states ("q8") has a
            direction that is off by at most ``momentum`` times the error of the stored buffer.

    Raises:
        ValueError: for values out of range.

    Example:
        >>> import torch, fusedtrain
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = fusedtrain.optim.LARS([weight], lr=1.0, always_adapt=True, trust_coeff=0.5)
        >>> weight.grad = torch.tensor([5.0, 5.0])
        >>> optimizer.step()
        >>> weight
        Parameter containing:
        tensor([0.5000, 0.5000], requires_grad=True)
    """

    _rule = "lars"
    _states = ("momentum_buffer",)
    _not_negative = ("lr", "momentum", "weight_decay")
    _maximizes = False
    _scalar_names = (None, None, None)
    _norms = MEASURE_GRADIENTS | MEASURE_PARAMETERS
    _keys = (
        "lr", "momentum", "dampening", "weight_decay", "nesterov", "trust_coeff", "eps",
        "trust_clip", "always_adapt",
    )  # fmt: skip
    _absent: ClassVar = {"nesterov": False}

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1.0,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        trust_coeff: float = 0.001,
        eps: float = 1e-8,
        trust_clip: bool = False,
        always_adapt: bool = False,
        foreach: bool | None = None,
        **options: Unpack[FusedOptions],
    ) -> None:
        self._start(locals())

    def _rule_options(self, group: dict[str, Any]) -> tuple[float, ...]:
        return (
            group["momentum"], group["dampening"], group["nesterov"], group["trust_coeff"],
            group["eps"], group["trust_clip"], group["always_adapt"],
        )  # fmt: skip
