"""Float32 copies of a model's parameters: the optimizer updates them, the model gets them back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ._gradients import copy_all, refuse_sparse

clip_grad_norm = nn.utils.clip_grad_norm_


def prep_param_lists(
    model: nn.Module, flat_master: bool = False
) -> tuple[list[nn.Parameter], list[Tensor]]:
    """Makes float32 master copies of the parameters of a model that require gradients.

    From "Training Neural Networks with Mixed Precision: Real Examples" (GTC 2018, S81012).

    Args:
        model: its parameters may have several dtypes, also float32; each parameter is copied.
        flat_master: one flat tensor holds all copies, one after the other, and has a gradient of
            zeros. An optimizer with a scale per tensor (LARS, LAMB) takes it for one layer.

    Returns:
        The model's parameters, and a list of their master copies [same shapes and strides] or of
        the flat `torch.nn.Parameter`.

    Raises:
        TypeError: for complex parameters; with `flat_master` also for parameters of two dtypes
            (such as float32 batch norms in a float16 network).
        RuntimeError: with `flat_master`, for parameters on two devices.
        ValueError: with `flat_master`, for a model without parameters that require gradients.

    Example:
        >>> model_params, master_params = prep_param_lists(nn.Linear(2, 1).half())
        >>> [p.dtype for p in model_params], [p.dtype for p in master_params]
        ([torch.float16, torch.float16], [torch.float32, torch.float32])
        >>> prep_param_lists(nn.Linear(2, 1).half(), flat_master=True)[1][0].shape
        torch.Size([3])
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    for name, p in named:
        if p.is_complex():
            raise TypeError(f"{name}: a {p.dtype} parameter can have no float32 master copy")
    model_params = [p for _, p in named]
    if not flat_master:
        return model_params, [
            p.detach().to(torch.float32, copy=True).requires_grad_() for p in model_params
        ]
    _check_alike(named)
    size = sum(p.numel() for p in model_params)
    values = torch.empty(size, dtype=torch.float32, device=model_params[0].device)
    copy_all(_pieces(values, model_params), model_params)
    master = nn.Parameter(values)
    master.grad = torch.zeros_like(values)
    return model_params, [master]


@torch.no_grad()
def model_grads_to_master_grads(
    model_params: Iterable[Tensor], master_params: Iterable[Tensor], flat_master: bool = False
) -> None:
    """Copies the gradients of a model's parameters to their master copies, in the masters' dtype.

    If a parameter has no gradient, its master gets none, or zeros in a flat master. The gradients
    stay scaled.

    Args:
        model_params, master_params: the results of `prep_param_lists`.
        flat_master: the same as for `prep_param_lists`.

    Raises:
        ValueError: for lists that do not fit together or do not fit `flat_master`.
        RuntimeError: for sparse gradients.

    Example:
        >>> model_params, master_params = prep_param_lists(nn.Linear(2, 1).half())
        >>> model_params[0].grad = torch.ones(1, 2).half()
        >>> model_grads_to_master_grads(model_params, master_params)
        >>> master_params[0].grad, master_params[1].grad
        (tensor([[1., 1.]]), None)
    """
    models, masters = list(model_params), list(master_params)
    _check_fit(models, masters, flat_master)
    refuse_sparse(models, "model_params")
    if flat_master:
        (master,) = masters
        if master.grad is None:  # after zero_grad(), which drops gradients
            master.grad = torch.empty_like(master)
        if any(p.grad is None for p in models):
            master.grad.zero_()
        pieces = _pieces(master.grad, models)
        pairs = [(piece, p.grad) for piece, p in zip(pieces, models) if p.grad is not None]
    else:
        pairs = []
        for master, p in zip(masters, models):
            if p.grad is None:
                master.grad = None
                continue
            if master.grad is None:
                master.grad = torch.empty_like(master)
            pairs.append((master.grad, p.grad))
    copy_all([target for target, _ in pairs], [grad for _, grad in pairs])


def master_params_to_model_params(
    model_params: Iterable[Tensor], master_params: Iterable[Tensor], flat_master: bool = False
) -> None:
    """Copies master copies back to a model's parameters, rounded to the parameters' dtype.

    Args:
        model_params, master_params: the results of `prep_param_lists`.
        flat_master: the same as for `prep_param_lists`.

    Raises:
        ValueError: for lists that do not fit together or do not fit `flat_master`.

    Example:
        >>> model_params, master_params = prep_param_lists(nn.Linear(1, 1).half())
        >>> _ = torch.nn.init.constant_(master_params[0], 0.1)
        >>> master_params_to_model_params(model_params, master_params)
        >>> model_params[0].item()
        0.0999755859375
    """
    models, masters = list(model_params), list(master_params)
    _check_fit(models, masters, flat_master)
    if flat_master:
        masters = _pieces(masters[0].detach(), models)
    copy_all(models, masters)


def to_python_float(t: Any) -> Any:
    """The number in a tensor of one element, or the first of a sequence.

    Args:
        t: a tensor or another object with ``item``; a list or tuple.

    Example:
        >>> to_python_float(torch.tensor(0.5)), to_python_float([0.5])
        (0.5, 0.5)
    """
    return t.item() if hasattr(t, "item") else t[0]


def _pieces(flat: Tensor, like: list[Any]) -> list[Tensor]:
    """The parts of a flat tensor in the shapes of other tensors."""
    parts = flat.split([p.numel() for p in like])
    return [part.view(p.shape) for part, p in zip(parts, like, strict=True)]


def _check_alike(named: list[tuple[str, nn.Parameter]]) -> None:
    if not named:
        raise ValueError("flat_master: no parameter of the model requires gradients")
    first_name, first = named[0]
    for name, p in named[1:]:
        if p.dtype != first.dtype:
            raise TypeError(
                f"flat_master needs parameters of one dtype: {first_name} is {first.dtype}, "
                f"{name} is {p.dtype}. Use flat_master=False"
            )
        if p.device != first.device:
            raise RuntimeError(
                f"flat_master needs parameters on one device: {first_name} is on {first.device}, "
                f"{name} on {p.device}. Use flat_master=False"
            )


def _check_fit(models: list[Tensor], masters: list[Tensor], flat_master: bool) -> None:
    if flat_master:
        size = sum(p.numel() for p in models)
        if [master.shape for master in masters] != [(size,)]:
            raise ValueError(
                f"master_params: flat_master=True needs a list of one tensor of shape ({size},), "
                f"got {len(masters)} of shapes {[tuple(m.shape) for m in masters[:3]]}"
            )
        return
    if len(models) != len(masters):
        raise ValueError(
            f"master_params: {len(masters)} tensors for {len(models)} in model_params. "
            "For one flat tensor give flat_master=True"
        )
    for index, (p, master) in enumerate(zip(models, masters)):
        if p.shape != master.shape:
            raise ValueError(
                f"master_params[{index}] is of shape {tuple(master.shape)}, "
                f"model_params[{index}] of {tuple(p.shape)}. "
                "For one flat tensor give flat_master=True"
            )
