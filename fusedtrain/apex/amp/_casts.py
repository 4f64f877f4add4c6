"""How `initialize` changes a model: its dtypes, casts of inputs and outputs, float32 checkpoints.

Casts and checkpoints are hooks, which replicas and pickles of the model keep; copies keep only the
casts. The dtype conversions are public in `fusedtrain.apex.fp16_utils`.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..._torch_private import BatchNormBase
from ._masters import HALF_DTYPES, full_precision, load_full_precision


def convert_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Converts the parameters and buffers of a module, but not of its submodules.

    In place: a parameter stays the same object, so whatever shares it sees the new dtype.
    Gradients are converted too. Integer and complex tensors stay as they are.

    Args:
        module: any module.
        dtype: a floating dtype.

    Raises:
        TypeError: for a dtype that is not floating.

    Example:
        >>> layer = nn.Linear(2, 1)
        >>> convert_module(layer, torch.float16)
        >>> layer.weight.dtype
        torch.float16
    """
    _check_floating(dtype)
    for param in module.parameters(recurse=False):
        grad = param.grad
        if param.is_floating_point():
            param.data = param.data.to(dtype)
        if grad is not None and grad.is_floating_point():
            grad.data = grad.data.to(dtype)
    for buffer in module.buffers(recurse=False):
        if buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)


def convert_network(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Converts parameters and buffers of a network, in place, except batch norms with weights.

    Such batch norms (see `fp16_utils.BN_convert_float`) keep their dtype. Recurrent layers' weights
    are made contiguous again, for cuDNN.

    Args:
        network: any module; `convert_module` converts each of its modules.
        dtype: a floating dtype.

    Returns:
        The same network.

    Raises:
        TypeError: for a dtype that is not floating.

    Example:
        >>> model = convert_network(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), torch.half)
        >>> model[0].weight.dtype, model[1].weight.dtype
        (torch.float16, torch.float32)
    """
    _check_floating(dtype)
    for module in network.modules():
        if is_affine_norm(module):
            continue
        convert_module(module, dtype)
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
    return network


def is_affine_norm(module: nn.Module) -> bool:
    """Whether a module is a batch norm with a weight and a bias."""
    return isinstance(module, BatchNormBase) and module.affine


def _check_floating(dtype: torch.dtype) -> None:
    if not dtype.is_floating_point:
        raise TypeError(f"dtype must be a floating dtype, got {dtype}")


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Casts floating-point tensors to `dtype`, also inside containers.

    Containers are lists, tuples (named ones too), mappings, dataclasses and objects with a method
    ``to``, which is called with the dtype. Everything else stays as it is.
    """
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, (nn.Module, type, str, bytes)):
        return value
    if hasattr(value, "to"):
        return value.to(dtype)
    if isinstance(value, Mapping):
        return _cast_mapping(value, dtype)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(cast(v, dtype) for v in value))
    if isinstance(value, (list, tuple)):
        return type(value)(cast(v, dtype) for v in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [f.name for f in dataclasses.fields(value) if f.init]
        return dataclasses.replace(value, **{f: cast(getattr(value, f), dtype) for f in fields})
    return value


def _cast_mapping(value: Mapping[Any, Any], dtype: torch.dtype) -> Any:
    changed = {key: cast(item, dtype) for key, item in value.items()}
    if type(value) is dict or not hasattr(value, "__setitem__"):
        return changed
    result: Any = copy.copy(value)
    for key, item in changed.items():
        result[key] = item
    return result


def _cast_inputs(
    dtype: torch.dtype, module: nn.Module, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    return cast(args, dtype), cast(kwargs, dtype)


def _cast_outputs(dtype: torch.dtype, module: nn.Module, args: Any, output: Any) -> Any:
    return cast(output, dtype)


def cast_model(model: nn.Module, inputs: torch.dtype | None, outputs: torch.dtype | None) -> None:
    """Makes a model cast its inputs and outputs; replaces casts of an earlier call."""
    ours = (_cast_inputs, _cast_outputs)
    for hooks in (model._forward_pre_hooks, model._forward_hooks):
        for number, hook in list(hooks.items()):
            if isinstance(hook, partial) and hook.func in ours:
                del hooks[number]
                model._forward_pre_hooks_with_kwargs.pop(number, None)
    if inputs is not None:
        hook = partial(_cast_inputs, inputs)
        model.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
    if outputs is not None:
        model.register_forward_hook(partial(_cast_outputs, outputs))


def save_in_float32(model: nn.Module) -> None:
    """Makes a 16-bit model's state dicts float32, with the master weights' precision."""
    for module in model.modules():
        if not any(isinstance(hook, _Widening) for hook in module._state_dict_hooks.values()):
            module.register_state_dict_post_hook(_Widening())
            module.register_load_state_dict_pre_hook(_load_masters)


def _own_tensors(module: nn.Module, prefix: str) -> dict[str, Tensor]:
    named = {**module._parameters, **module._buffers}
    return {
        prefix + name: t for name, t in named.items() if t is not None and t.dtype in HALF_DTYPES
    }


class _Widening:
    """Puts float32 values into a state_dict.

    A copy of the model loses this hook, as it has no masters. A moving average of a model (timm's
    ModelEma) is such a copy, and is updated by writing into its state_dict's tensors.
    """

    def __call__(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any
    ) -> None:
        for key, tensor in _own_tensors(module, prefix).items():
            saved = state_dict.get(key)
            if isinstance(saved, Tensor) and saved.dtype in HALF_DTYPES:
                state_dict[key] = full_precision(tensor)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _as_it_is


def _as_it_is(module: nn.Module, state_dict: Any, prefix: str, local_metadata: Any) -> None:
    pass


def _load_masters(module: nn.Module, state_dict: dict[str, Any], prefix: str, *unused: Any) -> None:
    for key, tensor in _own_tensors(module, prefix).items():
        load_full_precision(tensor, state_dict.get(key))
