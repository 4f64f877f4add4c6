"""LARC of ``apex.parallel``: layer-wise adaptive rates around any optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._torch_private import (
    foreach_add_,
    foreach_copy_,
    foreach_mul_,
    foreach_norm,
    group_tensors_by_device_and_dtype,
)
from ..optim._checks import check_not_negative
from ._apex_optimizer import attribute_of

__all__ = ["LARC"]

_WIDENED = (torch.float16, torch.bfloat16)


class LARC(torch.optim.Optimizer):
    """Scales the gradient of each parameter by an adaptive rate, then steps the optimizer.

    As Apex has it (arXiv 1708.03888)::

        rate = trust_coefficient * |p| / (|grad| + weight_decay * |p| + eps)
        rate = min(rate / lr, 1) if clip else rate
        grad = (grad + weight_decay * p) * rate

    If a parameter or a gradient is all zeros, its gradient does not change, and gets no weight
    decay. The optimizer sees a weight decay of 0. Gradients keep the adaptive rate after the step,
    as with Apex: read gradients before it. Norms of 16-bit tensors are summed in float32; the host
    waits for nothing.

    Except for the arguments below all attributes are the optimizer's, also states and checkpoints.
    Unlike Apex's, LARC is a :class:`torch.optim.Optimizer`: learning rate schedulers take it, and
    torch's GradScaler unscales before its step.

    Args:
        optimizer: the optimizer; groups without a ``"weight_decay"`` have none.
        trust_coefficient: see above.
        clip: whether rates are clipped to the learning rate, or multiplied by it.
        eps: see above.

    Raises:
        TypeError: if `optimizer` is not one. ValueError: for a negative number.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> optimizer = LARC(torch.optim.SGD([weight], lr=1.0), trust_coefficient=0.5, clip=False)
        >>> weight.grad = torch.tensor([0.0, 10.0])
        >>> optimizer.step()  # a step of 0.5 * 5 / 10 * 10
        >>> weight.data
        tensor([3.0000, 1.5000])
    """

    # Rates need the unscaled gradient's norm, so GradScaler must unscale before the step.
    _step_supports_amp_scaling = False

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        trust_coefficient: float = 0.02,
        clip: bool = True,
        eps: float = 1e-8,
    ) -> None:
        # Without Optimizer.__init__: groups and states are the inner optimizer's.
        if not hasattr(optimizer, "param_groups"):
            raise TypeError(f"optimizer must be an optimizer, got {type(optimizer).__name__}")
        check_not_negative(trust_coefficient=trust_coefficient, eps=eps)
        self.optim = optimizer
        self.trust_coefficient, self.clip, self.eps = trust_coefficient, clip, eps

    def __getattr__(self, name: str) -> Any:
        if name == "optim":  # missing while unpickling
            raise AttributeError(name)
        return getattr(self.optim, name)

    def __getstate__(self) -> dict[str, Any]:
        # Schedulers and amp set attributes on the instance that do not pickle.
        return {name: vars(self)[name] for name in ("optim", "trust_coefficient", "clip", "eps")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    state: Any = attribute_of("optim", "state", "States of the optimizer.")
    param_groups: Any = attribute_of("optim", "param_groups", "Groups of the optimizer.")

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state_dict: LARC has no state."""
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the optimizer's state."""
        self.optim.load_state_dict(state_dict)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Calls the optimizer's zero_grad."""
        self.optim.zero_grad(*args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the optimizer."""
        self.optim.add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Scales the gradients, and makes the optimizer's step.

        Args:
            closure: computes the loss and its gradients, and returns the loss. It is called once,
                before the gradients are scaled; optimizers that call it several times do not work.

        Returns:
            the closure's loss, or without a closure the result of the optimizer's step.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        decays = [(group, group.get("weight_decay", 0)) for group in self.optim.param_groups]
        self._scale_gradients()
        try:
            for group, decay in decays:
                if decay:
                    group["weight_decay"] = 0
            result = self.optim.step()
        finally:
            for group, decay in decays:
                if decay:
                    group["weight_decay"] = decay
        return result if closure is None else loss

    @torch.no_grad()
    def _scale_gradients(self) -> None:
        for group in self.optim.param_groups:
            decay = group.get("weight_decay", 0)
            params = [p.detach() for p in group["params"] if p.grad is not None]
            grads = [p.grad for p in group["params"] if p.grad is not None]
            if not params:
                continue
            kinds = group_tensors_by_device_and_dtype([params, grads])
            for (_, dtype), ((some_params, some_grads), _) in kinds.items():
                self._scale(some_params, some_grads, dtype, decay, group["lr"])

    def _scale(
        self, params: Any, grads: Any, dtype: torch.dtype, decay: float, lr: float | Tensor
    ) -> None:
        wide = torch.float32 if dtype in _WIDENED else None
        p = torch.stack(foreach_norm(params, 2, dtype=wide))
        g = torch.stack(foreach_norm(grads, 2, dtype=wide))
        rates = self.trust_coefficient * p / (g + p * decay + self.eps)
        if self.clip:
            rates = (rates / lr).clamp(max=1)
        # For p = 0 a rate of 1 keeps the gradient; for g = 0 a rate of 0 cancels the weight decay.
        rates = torch.where(p == 0, 1, torch.where(g == 0, 0, rates))
        # In float32: CUDA would round the rate to a 16-bit gradient's dtype first.
        scaled = [grad.to(wide) for grad in grads] if wide is not None else grads
        if decay:
            foreach_add_(scaled, params, alpha=decay)
        foreach_mul_(scaled, list(rates.unbind()))
        if wide is not None:
            foreach_copy_(grads, scaled)
