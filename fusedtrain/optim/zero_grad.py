"""Gradient zeroing in one call."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.autograd.graph import increment_version


def zero_grad(
    parameters: Tensor | Iterable[Tensor] | torch.optim.Optimizer, set_to_none: bool = True
) -> None:
    """Resets the gradients of parameters, or of an optimizer's parameters.

    There are three ways to reset gradients:

    - ``set_to_none=True`` (default, as in torch) drops gradients. This costs nothing, and the next
      backward writes its gradients instead of adding them.
    - ``set_to_none=False`` zeroes gradients in place, all in one call (one launch on a GPU). For
      memory that must not move: CUDA graphs, DDP's bucket views, the script's buffers.
    - ``gradient_writeback="zero"`` of fusedtrain's optimizers zeroes gradients in the sweep that
      updates the parameters. For static gradients with one optimizer step per backward pass.

    Args:
        parameters: tensors of any dtype, shape and strides, or an optimizer.
        set_to_none: see above.

    Example:
        >>> import torch, fusedtrain
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> weight.grad = torch.tensor([1.0, 2.0])
        >>> fusedtrain.zero_grad([weight], set_to_none=False)
        >>> weight.grad
        tensor([0., 0.])
    """
    if isinstance(parameters, Tensor):
        parameters = [parameters]
    elif isinstance(parameters, torch.optim.Optimizer):
        parameters = [p for group in parameters.param_groups for p in group["params"]]
    params = list(parameters)
    if set_to_none:
        for p in params:
            p.grad = None
        return
    plain: dict[torch.device, list[Tensor]] = {}
    with torch.no_grad():
        for p in params:
            grad = p.grad
            if grad is None:
                continue
            if grad.grad_fn is not None:
                grad.detach_()
            else:
                grad.requires_grad_(False)
            plain_one = type(grad) is Tensor and grad.layout is torch.strided
            if plain_one and not grad.is_inference() and not grad.is_neg():
                plain.setdefault(grad.device, []).append(grad)
            else:
                grad.zero_()
        for grads in plain.values():
            torch.ops.fusedtrain.zero_tensors(grads)
            increment_version(grads)
