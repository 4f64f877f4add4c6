"""Stochastic gradient descent: torch's, and timm's with decoupled weight decay."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from ._engine import FusedOptimizer
from ._options import FusedOptions


class SGD(FusedOptimizer, torch.optim.SGD):
    """`torch.optim.SGD` in one call: momentum, dampening, nesterov, weight decay, maximize.

    Args:
        params: parameters, or groups of them, float32, float64, float16 or bfloat16.
        lr: learning rate, a number or a tensor of one element.
        momentum: momentum factor.
        dampening: dampening of the gradient in the momentum buffer, except at the first step.
        weight_decay: L2 penalty.
        nesterov: Nesterov momentum.
        maximize: ascends.
        foreach, fused: accepted; the step is the fused one in any case.
        differentiable: not supported.
        options: see `FusedOptions`. Against float64, a step from 8-bit states ("q8") has a
            direction that is off by at most ``momentum`` times the error of the stored buffer.

    Raises:
        ValueError: for values out of range. RuntimeError: for `differentiable`.

    Example:
        >>> import torch, fusedtrain
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = fusedtrain.optim.SGD([weight], lr=0.5, momentum=0.9)
        >>> weight.grad = torch.ones(2)
        >>> optimizer.step()
        >>> weight
        Parameter containing:
        tensor([0.5000, 0.5000], requires_grad=True)
    """

    _rule = "sgd"
    _of_torch = True
    _states = ("momentum_buffer",)
    _scalar_names = (None, None, None)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        **options: Unpack[FusedOptions],
    ) -> None:
        self._start(locals())

    def _rule_options(self, group: dict[str, Any]) -> tuple[float, ...]:
        return (group["momentum"], group["dampening"], group["nesterov"], 0)


class SGDW(FusedOptimizer):
    """SGD with decoupled weight decay (arXiv 1711.05101), as timm's ``SGDW`` has it.

    Args:
        weight_decay: fraction of lr that weights shrink by each step.
        caution: drops updates that disagree with the gradient's sign (arXiv 2411.16085).
        corrected_weight_decay: shrinks by lr^2 / (first lr) instead (arXiv 2506.02285).
        params, lr, momentum, dampening, nesterov, maximize, foreach, differentiable, options: as in
            `SGD`.

    Raises:
        ValueError: for values out of range. RuntimeError: for `differentiable`.

    Example:
        >>> import torch, fusedtrain
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = fusedtrain.optim.SGDW([weight], lr=0.5, weight_decay=0.1)
        >>> weight.grad = torch.zeros(2)
        >>> optimizer.step()
        >>> weight
        Parameter containing:
        tensor([0.9500, 0.9500], requires_grad=True)
    """

    _rule = "sgd"
    _states = ("momentum_buffer",)
    _scalar_names = (None, None, None)
    _absent: ClassVar = {
        "caution": False, "corrected_weight_decay": False, "nesterov": False, "maximize": False,
        "foreach": None, "differentiable": False,
    }  # fmt: skip

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        caution: bool = False,
        corrected_weight_decay: bool = False,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        **options: Unpack[FusedOptions],
    ) -> None:
        self._start(locals())

    def _rule_options(self, group: dict[str, Any]) -> tuple[float, ...]:
        return (group["momentum"], group["dampening"], group["nesterov"], 1)
