"""Adam and its kin: torch's Adam and AdamW, timm's NAdamW."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from ._checks import two
from ._engine import FusedOptimizer
from ._options import FusedOptions


class Adam(FusedOptimizer, torch.optim.Adam):
    """`torch.optim.Adam` in one call: amsgrad, maximize, L2 or decoupled weight decay.

    Args:
        params: parameters, or groups of them, float32, float64, float16 or bfloat16.
        lr: learning rate, a number or a tensor of one element.
        betas: decays of the averages of the gradient and of its square.
        eps: added to the denominator.
        weight_decay: L2 penalty, or with `decoupled_weight_decay` AdamW's decay.
        amsgrad: divides by the largest second moment so far (arXiv 1904.09237).
        maximize: ascends.
        foreach, fused, capturable: accepted; the step is the fused, capturable one in any case.
        differentiable: not supported.
        options: see `FusedOptions`. Against float64, a step from 8-bit states ("q8") has a
            numerator that is off by at most beta1 times the error of the stored average, and a root
            of the squares that is off by at most sqrt(beta2) times the error of the stored root.

    Raises:
        ValueError: for values out of range. RuntimeError: for `differentiable`.

    Example:
        >>> import torch, fusedtrain
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = fusedtrain.optim.Adam([weight], lr=0.25)
        >>> weight.grad = torch.tensor([3.0, -5.0])
        >>> optimizer.step()
        >>> weight
        Parameter containing:
        tensor([0.7500, 1.2500], requires_grad=True)
    """

    _rule = "adam"
    _of_torch = True
    _states = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        **options: Unpack[FusedOptions],
    ) -> None:
        self._start(locals())

    def _rule_options(self, group: dict[str, Any]) -> tuple[float, ...]:
        return (*two(group["betas"]), group["eps"], group["decoupled_weight_decay"])


class AdamW(Adam, torch.optim.AdamW):
    """`torch.optim.AdamW` in one call: `Adam` with decoupled weight decay (arXiv 1711.05101).

    Args:
        weight_decay: fraction of lr that weights shrink by each step.
        params, lr, betas, eps, amsgrad, maximize, foreach, capturable, differentiable, fused,
            options: as in `Adam`.

    Raises:
        ValueError: for values out of range. RuntimeError: for `differentiable`.

    Example:
        >>> import torch, fusedtrain
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = fusedtrain.optim.AdamW([weight], lr=0.25, weight_decay=0.1)
        >>> weight.grad = torch.tensor([3.0, -5.0])
        >>> optimizer.step()
        >>> weight
        Parameter containing:
        tensor([0.7250, 1.2250], requires_grad=True)
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        **options: Unpack[FusedOptions],
    ) -> None:
        self._start(locals())

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group["decoupled_weight_decay"] = True


class NAdamW(FusedOptimizer):
    """AdamW with Nesterov momentum (table 1 of arXiv 1910.05446), as timm's ``NAdamW`` has it.

    A group with timm's ``clipping_threshold`` raises ValueError.

    Args:
        weight_decay: fraction of lr that weights shrink by each step.
        caution: drops updates that disagree with the gradient's sign (arXiv 2411.16085).
        corrected_weight_decay: shrinks by lr^2 / (first lr) instead (arXiv 2506.02285).
        params, lr, betas, eps, maximize, foreach, capturable, options: as in `Adam`.

    Raises:
        ValueError: for values out of range.

    Example:
        >>> import torch, fusedtrain
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = fusedtrain.optim.NAdamW([weight], lr=0.25, weight_decay=0.0)
        >>> weight.grad = torch.tensor([3.0, -5.0])
        >>> optimizer.step()
        >>> weight
        Parameter containing:
        tensor([0.5250, 1.4750], requires_grad=True)
    """

    _rule = "nadamw"
    _states = ("exp_avg", "exp_avg_sq")
    _keys = (
        "lr", "betas", "eps", "weight_decay", "caution", "corrected_weight_decay", "foreach",
        "maximize", "capturable",
    )  # fmt: skip
    _absent: ClassVar = {
        "caution": False, "corrected_weight_decay": False, "foreach": None, "maximize": False,
        "capturable": False,
    }  # fmt: skip

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        caution: bool = False,
        corrected_weight_decay: bool = False,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        **options: Unpack[FusedOptions],
    ) -> None:
        self._start(locals())

    def _rule_options(self, group: dict[str, Any]) -> tuple[float, ...]:
        if group.get("clipping_threshold") is not None:  # a checkpoint of timm 1.0.31
            raise ValueError("clipping_threshold of timm's NAdamW is not supported, take None")
        return (*two(group["betas"]), group["eps"], 1)
