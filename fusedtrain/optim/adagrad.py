"""Adagrad."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from ._engine import FusedOptimizer
from ._options import FusedOptions


class Adagrad(FusedOptimizer, torch.optim.Adagrad):
    """`torch.optim.Adagrad` in one call.

    Args:
        params: parameters, or groups of them, float32, float64, float16 or bfloat16.
        lr: learning rate, a number or a tensor of one element.
        lr_decay: lr is divided by 1 + (step - 1) lr_decay.
        weight_decay: L2 penalty.
        initial_accumulator_value: initial value of the sum of squares.
        eps: added to the root.
        maximize: ascends.
        foreach, fused: accepted; the step is the fused one in any case.
        differentiable: not supported.
        options: see `FusedOptions`. Against float64, a step from 8-bit states ("q8") has a root
            that is off by at most the error of the stored root.

    Raises:
        ValueError: for values out of range. RuntimeError: for `differentiable`.

    Example:
        >>> import torch, fusedtrain
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = fusedtrain.optim.Adagrad([weight], lr=0.25)
        >>> weight.grad = torch.tensor([3.0, -5.0])
        >>> optimizer.step()
        >>> weight
        Parameter containing:
        tensor([0.7500, 1.2500], requires_grad=True)
    """

    _rule = "adagrad"
    _of_torch = True
    _states = ("sum",)
    _absent: ClassVar = {"lr_decay": 0, "initial_accumulator_value": 0}  # Apex has neither key

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        **options: Unpack[FusedOptions],
    ) -> None:
        self._start(locals())

    def __setstate__(self, state: dict[str, Any]) -> None:
        for group in state["param_groups"]:
            for p in group["params"]:
                if state["state"].get(p):  # Apex's states have no step count
                    state["state"][p].setdefault("step", torch.tensor(0.0))
        super().__setstate__(state)

    def _rule_options(self, group: dict[str, Any]) -> tuple[float, ...]:
        return (group["lr_decay"], group["eps"])

    def _initial(self, name: str) -> float:
        return float(self.defaults["initial_accumulator_value"])
