"""The optimizers of NVIDIA's Apex (``apex.optimizers``), on any device.

Constructors, attributes and parameter groups are Apex's. Checkpoints of Apex load, and those of
torch's optimizers with the same states. Steps are those of `fusedtrain.optim.FusedOptimizer`;
`fusedtrain.amp.GradScaler` does not wait for them. Formulas: Apex's ``csrc/multi_tensor_*.cu``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT, required
from typing_extensions import Unpack

from ..optim import FusedOptions
from ..optim._checks import two
from ..optim._options import SharedOptions
from ._apex_layerwise import FusedLAMB, FusedNovoGrad
from ._apex_optimizer import ApexOptimizer

__all__ = ["FusedAdagrad", "FusedAdam", "FusedLAMB", "FusedNovoGrad", "FusedSGD"]

_REQUIRED: Any = required


class _AdamOptions(SharedOptions, total=False):
    """`FusedOptions` without ``master_weights``."""

    max_grad_norm: float | None


class FusedAdam(ApexOptimizer):
    """Apex's ``FusedAdam``: Adam or AdamW (arXiv 1412.6980, 1711.05101).

    Args:
        params: parameters, or groups of them, float32, float64, float16 or bfloat16. States of
            16-bit parameters are float32, as in Apex, unless ``state_dtype`` is set.
        lr: learning rate, a number or a tensor of one element.
        bias_correction: corrects the averages for their start at 0.
        betas: decays of the averages of the gradient and of its square.
        eps: added to the denominator.
        adam_w_mode: weights shrink by the fraction lr * weight_decay; otherwise an L2 penalty. A
            loaded checkpoint does not change it.
        weight_decay: see above.
        amsgrad: not supported, as in Apex.
        set_grad_none: `zero_grad` makes gradients None instead of 0.
        capturable: learning rates become float32 tensors on the device of their group, which may
            change between replays of a CUDA graph. A CUDA graph can capture any step, except after
            ``amp.initialize``.
        master_weights: float32 weights behind float16 and bfloat16 parameters.
        options: see `FusedOptions`.

    Raises:
        ValueError: for values out of range. RuntimeError: for `amsgrad`, and for `master_weights`
            without `capturable`, as in Apex.

    Example:
        >>> import torch
        >>> from fusedtrain.apex.optimizers import FusedAdam
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = FusedAdam([weight], lr=0.25, weight_decay=0.1)
        >>> weight.grad = torch.tensor([3.0, -5.0])
        >>> optimizer.step()
        >>> weight
        Parameter containing:
        tensor([0.7250, 1.2250], requires_grad=True)
    """

    adam_w_mode: int
    capturable: bool
    _rule = "adam"
    _states = ("exp_avg", "exp_avg_sq")
    _keys = ("lr", "bias_correction", "betas", "eps", "weight_decay")
    _wide_states = True
    _attributes = ("set_grad_none", "adam_w_mode", "capturable")
    _counts = True
    _absent: ClassVar = {"bias_correction": True}  # torch's Adam has no such key

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        **options: Unpack[_AdamOptions],
    ) -> None:
        if master_weights and not capturable:
            raise RuntimeError("FusedAdam: master_weights needs capturable=True, as in Apex")
        self._start(locals())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if self.capturable and group["params"]:
            device = group["params"][0].device
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32).to(device, copy=True)

    def _group_step(self, group: dict[str, Any], count: float) -> Any:
        if not self.capturable:
            return int(count)
        return torch.tensor([int(count)], dtype=torch.int32, device=group["params"][0].device)

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        grads: None = None,
        output_params: None = None,
        scale: None = None,
        grad_norms: None = None,
    ) -> Any:
        """As `FusedOptimizer.step`; arguments of Apex's first version raise RuntimeError."""
        if any(argument is not None for argument in (grads, output_params, scale, grad_norms)):
            raise RuntimeError(
                "FusedAdam.step takes a closure and nothing else: grads, output_params, scale and "
                "grad_norms belong to an old version of Apex"
            )
        return super().step(closure)

    def _rule_options(self, group: dict[str, Any]) -> tuple[float, ...]:
        if group.get("amsgrad"):  # of a checkpoint of torch
            raise ValueError(
                "state_dict: of Adam with amsgrad=True, which FusedAdam does not support. Load it "
                "into fusedtrain.optim.Adam, or set amsgrad to False in the dict's groups"
            )
        uncorrected = not group["bias_correction"]
        return (*two(group["betas"]), group["eps"], self.adam_w_mode, uncorrected)


class FusedSGD(ApexOptimizer):
    """Apex's ``FusedSGD``: SGD with momentum, as `torch.optim.SGD`, or with decay after momentum.

    Args:
        params, set_grad_none, options: as in `FusedAdam`.
        lr: learning rate, a number or a tensor of one element; may be given by group instead.
        momentum: momentum factor.
        dampening: dampening of the gradient in the momentum buffer, except at the first step.
        weight_decay: L2 penalty.
        nesterov: Nesterov momentum.
        wd_after_momentum: adds the penalty to the update, not to the momentum.
        materialize_master_grads: an attribute for ``amp``; without effect on a step.

    Raises:
        ValueError: for values out of range.

    Example:
        >>> import torch
        >>> from fusedtrain.apex.optimizers import FusedSGD
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = FusedSGD([weight], lr=0.5, momentum=0.9)
        >>> weight.grad = torch.ones(2)
        >>> optimizer.step()
        >>> optimizer.zero_grad()
        >>> weight, weight.grad
        (Parameter containing:
        tensor([0.5000, 0.5000], requires_grad=True), tensor([0., 0.]))
    """

    wd_after_momentum: bool
    materialize_master_grads: bool
    _rule = "sgd"
    _states = ("momentum_buffer",)
    _keys = ("lr", "momentum", "dampening", "weight_decay", "nesterov")
    _scalar_names = (None, None, None)
    _attributes = ("set_grad_none", "wd_after_momentum", "materialize_master_grads")

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = _REQUIRED,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
        **options: Unpack[FusedOptions],
    ) -> None:
        self._start(locals())

    def _rule_options(self, group: dict[str, Any]) -> tuple[float, ...]:
        # p - lr (u + decay p) = (1 - lr decay) p - lr u
        decoupled = self.wd_after_momentum
        return (group["momentum"], group["dampening"], group["nesterov"], decoupled)


class FusedAdagrad(ApexOptimizer):
    """Apex's ``FusedAdagrad``: Adagrad with an L2 penalty or decoupled weight decay.

    Args:
        params, lr, set_grad_none, options: as in `FusedAdam`.
        eps: added to the root of the sum of squares.
        weight_decay: L2 penalty; with `adagrad_w_mode` the fraction of lr that weights shrink by.
        adagrad_w_mode: see above.

    Raises:
        ValueError: for values out of range.

    Example:
        >>> import torch
        >>> from fusedtrain.apex.optimizers import FusedAdagrad
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = FusedAdagrad([weight], lr=0.25, weight_decay=0.1, adagrad_w_mode=True)
        >>> weight.grad = torch.tensor([3.0, -5.0])
        >>> optimizer.step()
        >>> weight
        Parameter containing:
        tensor([0.7250, 1.2250], requires_grad=True)
    """

    adagrad_w_mode: int
    _rule = "adagrad"
    _states = ("sum",)
    _keys = ("lr", "eps", "weight_decay")
    _attributes = ("set_grad_none", "adagrad_w_mode")

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        adagrad_w_mode: bool = False,
        **options: Unpack[FusedOptions],
    ) -> None:
        self._start(locals())

    def _rule_options(self, group: dict[str, Any]) -> tuple[float, ...]:
        return (group.get("lr_decay", 0), group["eps"], self.adagrad_w_mode)
