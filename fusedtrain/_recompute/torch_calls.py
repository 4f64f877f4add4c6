"""Recipes of torch's own functions: convolutions, products, norms, poolings, sums, concatenations.

`TorchCalls` is a torch.overrides.TorchFunctionMode: torch hands it each call of a function of torch
while it is entered, and nothing is patched. Only forwards that follow a memory plan enter it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .._calls import autocast_is_on, autocasts
from .._torch_private import backward_number, function_mode, function_modes

# Functions whose output follows from their arguments alone, as a tensor of its own.
_NAMES = (
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
    "linear", "bilinear", "matmul", "__matmul__", "mm", "bmm", "addmm", "baddbmm", "einsum",
    "scaled_dot_product_attention", "embedding",
    "layer_norm", "group_norm", "rms_norm", "local_response_norm", "normalize",
    "add", "__add__", "__radd__", "sub", "__sub__", "__rsub__", "rsub", "mul", "__mul__",
    "__rmul__", "div", "__truediv__", "__rtruediv__", "true_divide", "neg", "__neg__", "pow",
    "__pow__", "square", "sqrt", "rsqrt", "exp", "log", "sin", "cos", "abs", "clamp", "clip",
    "maximum", "minimum", "where", "masked_fill", "addcmul", "lerp",
    "relu", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish", "sigmoid",
    "tanh", "softplus", "softsign", "logsigmoid", "hardtanh", "hardsigmoid", "hardswish", "prelu",
    "glu", "softmax", "log_softmax",
    "max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d",
    "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "mean", "interpolate",
    "pad", "pixel_shuffle", "pixel_unshuffle", "fold", "unfold", "grid_sample",
    "cat", "concat", "stack", "contiguous", "reshape", "flatten", "clone", "repeat", "roll",
    "to", "float", "half", "bfloat16", "double", "dropout",
)  # fmt: skip
_OWNERS = (torch, torch.Tensor, F, torch.special)
RECOMPUTABLE = frozenset(
    function
    for name in _NAMES
    for owner in _OWNERS
    if callable(function := getattr(owner, name, None))
)
_DROPOUT = frozenset({F.dropout, torch.dropout})
_ATTENTION = F.scaled_dot_product_attention
# The choice of attention kernels, by torch.nn.attention.sdpa_kernel, for CPUs as well.
_KERNELS = (
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
)
# Autocast casts the arguments of these; a cast of an activation is a tensor that backward needs.
_CASTS = frozenset(
    getattr(owner, name)
    for name in (
        "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
        "linear", "matmul", "__matmul__", "bmm", "scaled_dot_product_attention",
    )
    for owner in _OWNERS
    if hasattr(owner, name)
)  # fmt: skip


class _Hole:
    """The place of a tensor among the arguments."""

    def __repr__(self) -> str:
        return "tensor"


_HOLE = _Hole()


class TorchCall:
    """A call of a function of torch, without its tensors."""

    __slots__ = (
        "_args", "_autocast", "_function", "_grads", "_kernels", "_kwargs", "_state", "geometry",
        "name",
    )  # fmt: skip

    def __init__(self, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self.name: str = function.__name__
        self._function = function
        self._args, self._kwargs = _without_tensors(args), _without_tensors(kwargs)
        self._autocast: Any = None
        self._state: Any = None  # of the generator, for a random function
        self._grads: tuple[bool, ...] = ()
        self._kernels: tuple[bool, ...] = ()
        self.geometry: Any = None  # of the tensor that the function makes and returns a view of

    def note_context(self, tensors: list[Tensor]) -> None:
        """Notes autocast, the generator, which tensors train (torch chooses kernels of products,
        attention and poolings by that), the choice of attention kernels: bits depend on these."""
        device = tensors[0].device
        self._grads = tuple(tensor.requires_grad for tensor in tensors)
        if any(autocasts(tensor) for tensor in tensors):
            self._autocast = torch.get_autocast_dtype(device.type)
        if self._function is _ATTENTION:
            self._kernels = tuple(enabled() for enabled, _ in _KERNELS)
        if self.is_random():
            self._state = _generator_state(device)

    def is_random(self) -> bool:
        if self._function is not _ATTENTION:
            return self._function in _DROPOUT
        share = self._args[4] if len(self._args) > 4 else self._kwargs.get("dropout_p", 0.0)
        return bool(share)

    def __call__(self, *tensors: Tensor) -> Tensor:
        device = tensors[0].device
        leaves = [t.detach().requires_grad_(g) for t, g in zip(tensors, self._grads)]
        dtype = self._autocast
        with ExitStack() as context:
            context.enter_context(torch.enable_grad())
            if dtype is not None:
                context.enter_context(torch.autocast(device.type, dtype, cache_enabled=False))
            elif autocast_is_on(device.type):
                context.enter_context(torch.autocast(device.type, enabled=False))
            if self._state is not None:
                context.callback(_set_generator_state, device, _generator_state(device))
                _set_generator_state(device, self._state)
            for (enabled, enable), wanted in zip(_KERNELS, self._kernels):
                if enabled() != wanted:
                    context.callback(enable, not wanted)
                    enable(wanted)
            values = iter(leaves)
            output = self._function(*_filled(self._args, values), **_filled(self._kwargs, values))
            output = output.detach()
        return output if self.geometry is None else output.as_strided(*self.geometry)


def _without_tensors(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _HOLE
    if type(value) in (tuple, list):
        return type(value)(map(_without_tensors, value))
    if type(value) is dict:
        return {key: _without_tensors(item) for key, item in value.items()}
    return value


def _filled(value: Any, tensors: Any) -> Any:
    if value is _HOLE:
        return next(tensors)
    if type(value) in (tuple, list):
        return type(value)(_filled(item, tensors) for item in value)
    if type(value) is dict:
        return {key: _filled(item, tensors) for key, item in value.items()}
    return value


def _tensors_of(value: Any, into: list[Tensor]) -> list[Tensor]:
    if isinstance(value, Tensor):
        into.append(value)
    elif type(value) in (tuple, list):
        for item in value:
            _tensors_of(item, into)
    elif type(value) is dict:
        for item in value.values():
            _tensors_of(item, into)
    return into


def _is_usual(tensor: Tensor) -> bool:
    kind = type(tensor)
    return (
        (kind is Tensor or kind is torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_inference()
    )


def _made(output: Any, tensors: list[Tensor]) -> Tensor | None:
    """The tensor that a call made, of which the output may be a view (that of a linear layer on
    three dimensions is one); None if the output is part of an argument, or nothing to recompute."""
    if type(output) is not Tensor or not output.requires_grad:
        return None
    made = output if output._base is None else output._base
    if made._version or any(t is made or t._base is made for t in tensors):
        return None
    return made


def _generator_state(device: torch.device) -> Tensor:
    if device.index is None:
        return torch.get_rng_state()
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def _set_generator_state(device: torch.device, state: Tensor) -> None:
    if device.index is None:
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


def planned() -> bool:
    """Whether a `TorchCalls` follows this thread, and no other mode."""
    return function_modes() == 1 and type(function_mode(0)) is TorchCalls


class TorchCalls(TorchFunctionMode):
    """Tags outputs of torch's functions for whoever `scope()` is: an object with `tag` and `wants`,
    or None."""

    def __init__(self, scope: Callable[[], Any]) -> None:
        super().__init__()
        self._scope = scope

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # Dynamo follows this method for what is compiled within, and finds the first line only.
        if torch.compiler.is_compiling() or func not in RECOMPUTABLE or "out" in kwargs:
            return func(*args, **kwargs)
        # Within backward a recipe calls, or a checkpoint, whose tensors nobody keeps.
        is_forward = torch.is_grad_enabled() and backward_number() == -1
        scope = self._scope() if is_forward else None
        if scope is None:
            return func(*args, **kwargs)
        tensors = _tensors_of((args, kwargs), [])
        max_norm = args[3] if len(args) > 3 else kwargs.get("max_norm")
        writes = func is F.embedding and max_norm is not None  # to the weight
        if writes or not tensors or not all(map(_is_usual, tensors)):
            return func(*args, **kwargs)
        if func in _CASTS:
            args, kwargs, tensors = self._cast(scope, args, kwargs, tensors)
        call = TorchCall(func, args, kwargs)
        if scope.wants(call):
            call.note_context(tensors)
        output = func(*args, **kwargs)
        made = _made(output, tensors)
        if made is not None:
            if made is not output:
                call.geometry = (made.shape, made.stride(), made.storage_offset())
            scope.tag(made, call, tensors)
        return output

    def _cast(self, scope: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        """The arguments, with casts of activations that autocast would make unseen."""
        if not any(t.grad_fn is not None and autocasts(t) for t in tensors):
            return args, kwargs, tensors
        dtype = torch.get_autocast_dtype(tensors[0].device.type)
        cast = []
        for tensor in tensors:
            if tensor.grad_fn is not None and autocasts(tensor) and tensor.dtype is not dtype:
                call = TorchCall(Tensor.to, (tensor, dtype), {})
                call.note_context([tensor])
                wide, tensor = tensor, tensor.to(dtype)
                scope.tag(tensor, call, [wide])
            cast.append(tensor)
        values = iter(cast)
        return *_filled((_without_tensors(args), _without_tensors(kwargs)), values), cast
