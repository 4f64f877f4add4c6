"""RMSprop: torch's, and timm's in TensorFlow's manner."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from ._engine import FusedOptimizer
from ._options import FusedOptions


class _PositiveMomentum(FusedOptimizer):
    """A rule whose momentum counts if it is positive, as in torch and timm."""

    _states = ("square_avg", "momentum_buffer", "grad_avg")

    def _slots(self, group: dict[str, Any]) -> tuple[str | None, ...]:
        return super()._slots({**group, "momentum": max(group["momentum"], 0)})


class RMSprop(_PositiveMomentum, torch.optim.RMSprop):
    """`torch.optim.RMSprop` in one call.

    Args:
        params: parameters, or groups of them, float32, float64, float16 or bfloat16.
        lr: learning rate, a number or a tensor of one element.
        alpha: decay of the average of squares.
        eps: added to the root.
        weight_decay: L2 penalty.
        momentum: momentum factor.
        centered: divides by an estimate of the standard deviation. If rounding makes the variance
            negative, 0 is used (torch gives nan).
        maximize: ascends.
        foreach, capturable: accepted; the step is the fused, capturable one in any case.
        differentiable: not supported.
        options: see `FusedOptions`. Against float64, a step from 8-bit states ("q8") has a root
            that is off by at most sqrt(alpha) times the error of the stored root, and a momentum
            that is off by ``momentum`` times the error of the stored buffer.

    Raises:
        ValueError: for values out of range. RuntimeError: for `differentiable`.

    Example:
        >>> import torch, fusedtrain
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = fusedtrain.optim.RMSprop([weight], lr=0.25, alpha=0.75)
        >>> weight.grad = torch.tensor([3.0, -5.0])
        >>> optimizer.step()
        >>> weight
        Parameter containing:
        tensor([0.5000, 1.5000], requires_grad=True)
    """

    _rule = "rmsprop"
    _of_torch = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum: float = 0,
        centered: bool = False,
        capturable: bool = False,
        foreach: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
        **options: Unpack[FusedOptions],
    ) -> None:
        self._start(locals())

    def _rule_options(self, group: dict[str, Any]) -> tuple[float, ...]:
        momentum = max(group["momentum"], 0)  # as torch, which ignores a negative one
        return (group["alpha"], group["eps"], momentum, group["centered"])


class RMSpropTF(_PositiveMomentum):
    """RMSprop as in TensorFlow, for EfficientNet recipes: timm's ``RMSpropTF``.

    eps is inside the root, squares start at 1, and the learning rate enters the momentum buffer.

    Args:
        eps: added under the root.
        weight_decay: L2 penalty, or decoupled with `decoupled_decay`.
        decoupled_decay: fraction of lr that weights shrink by each step.
        corrected_weight_decay: shrinks by lr^2 / (first lr) instead (arXiv 2506.02285).
        lr_in_momentum: scales by lr before the momentum buffer, not after it.
        caution: drops updates that disagree with the gradient's sign (arXiv 2411.16085).
        params, lr, alpha, momentum, centered, foreach, options: as in `RMSprop`.

    Raises:
        ValueError: for values out of range.

    Example:
        >>> import torch, fusedtrain
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = fusedtrain.optim.RMSpropTF([weight], lr=0.5)
        >>> weight.grad = torch.tensor([1.0, -1.0])
        >>> optimizer.step()
        >>> weight
        Parameter containing:
        tensor([0.5000, 1.5000], requires_grad=True)
    """

    _rule = "rmsprop_tf"
    _maximizes = False
    _keys = (
        "lr", "momentum", "alpha", "eps", "centered", "weight_decay", "decoupled_decay",
        "corrected_weight_decay", "lr_in_momentum", "caution",
    )  # fmt: skip
    _absent: ClassVar = {
        "momentum": 0, "centered": False, "caution": False, "corrected_weight_decay": False,
    }  # fmt: skip

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        alpha: float = 0.9,
        eps: float = 1e-10,
        weight_decay: float = 0,
        momentum: float = 0.0,
        centered: bool = False,
        decoupled_decay: bool = False,
        corrected_weight_decay: bool = False,
        lr_in_momentum: bool = True,
        caution: bool = False,
        foreach: bool | None = None,
        **options: Unpack[FusedOptions],
    ) -> None:
        self._start(locals())

    def _rule_options(self, group: dict[str, Any]) -> tuple[float, ...]:
        return (
            group["alpha"], group["eps"], max(group["momentum"], 0), group["centered"],
            group["decoupled_decay"], group["lr_in_momentum"],
        )  # fmt: skip

    def _initial(self, name: str) -> float:
        return 1.0 if name == "square_avg" else 0.0
