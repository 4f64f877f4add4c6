"""Recipes of torch's own functions: convolutions, products, norms, poolings, sums, concatenations.

`TorchCalls` is a torch.overrides.TorchFunctionMode: torch hands it each call of a function of torch
while it is entered, and nothing is patched. Only forwards that follow a memory plan enter it, or
that are recorded for one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .._calls import autocast_is_on, autocasts
from .._torch_private import (
    backward_number,
    function_mode,
    function_modes,
    without_torch_function,
)
from .plan import MemoryPlan, op_name
from .recipes import Observer, Saved, Scope, Use, scope, tagged

# Recipes in a row: a chain is computed by recursion, three Python frames a recipe of 1000.
LONGEST_PLANNED = 100
# A copy of so small a part of the output costs next to nothing: a bias, a mask, an embedding.
_SMALL = 1 / 8

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


_TENSOR = object()  # the place of a tensor among the arguments


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """Arguments of a call, in which the function has replaced tensors and their places."""
    if value is _TENSOR or isinstance(value, Tensor):
        return function(value)
    if type(value) in (tuple, list):
        return type(value)([_mapped(item, function) for item in value])
    if type(value) is dict:
        return {key: _mapped(item, function) for key, item in value.items()}
    return value


class TorchCall:
    """A call of a function of torch, without its tensors. `arguments`: positional and named ones,
    `_TENSOR` in the place of tensors."""

    __slots__ = (
        "_arguments", "_autocast", "_function", "_grads", "_kernels", "_state", "geometry", "name",
    )  # fmt: skip

    def __init__(self, function: Callable[..., Any], arguments: Any) -> None:
        self.name: str = function.__name__
        self._function, self._arguments = function, arguments
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

    def arguments(self, tensors: list[Tensor]) -> Any:
        """Positional and named arguments, with these tensors."""
        values = iter(tensors)
        return _mapped(self._arguments, lambda _: next(values))

    def is_random(self) -> bool:
        if self._function is not _ATTENTION:
            return self._function in _DROPOUT
        args, kwargs = self._arguments
        return bool(args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0))

    def __call__(self, *tensors: Tensor) -> Tensor:
        device = tensors[0].device
        inputs = [t.detach().requires_grad_(g) for t, g in zip(tensors, self._grads)]
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
            args, kwargs = self.arguments(inputs)
            output = self._function(*args, **kwargs).detach()
        return output if self.geometry is None else output.as_strided(*self.geometry)


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


class TorchScope(Scope):
    """A scope that is handed calls of torch's functions, too."""

    longest = LONGEST_PLANNED
    sees_torch = True

    def __enter__(self) -> None:
        super().__enter__()
        self._calls = TorchCalls()
        self._calls.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._calls.__exit__(*error)
        super().__exit__(*error)

    def wants(self, function: Callable[..., Any]) -> bool:
        """Whether the output of the call that is about to run may be recomputed."""
        raise NotImplementedError

    def lasting(
        self, call: Callable[..., Any], tensors: Sequence[Tensor | None], output: Tensor
    ) -> Sequence[Tensor | None] | None:
        """The inputs of a call, for a recipe. Autograd watches those that it has saved, and raises
        if they are modified. Modifying other inputs of torch's functions is no mistake: small ones
        are copied; None if there is a large one, such as a buffer that is added."""
        if type(call) is not TorchCall:
            return tensors
        kept: list[Tensor | None] = []
        for t in tensors:
            watched = t is None or t.grad_fn is not None or t.data_ptr() in self._plain
            if t is not None and not watched and tagged(t) is None:
                if t.nbytes <= _SMALL * output.nbytes:
                    t = t.detach().clone()
                elif not t.requires_grad:
                    return None
            kept.append(t)
        return kept


class TorchCalls(TorchFunctionMode):
    """Tags outputs of torch's functions for the scope."""

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # Dynamo follows this method for what is compiled within, and finds the first line only.
        if torch.compiler.is_compiling() or func not in RECOMPUTABLE or "out" in kwargs:
            return func(*args, **kwargs)
        # Within backward a recipe calls, or a checkpoint, whose tensors nobody keeps.
        is_forward = torch.is_grad_enabled() and backward_number() == -1
        current = scope() if is_forward else None
        if not isinstance(current, TorchScope):
            return func(*args, **kwargs)
        tensors: list[Tensor] = []

        def take(tensor: Tensor) -> object:
            tensors.append(tensor)
            return _TENSOR

        call = TorchCall(func, _mapped((args, kwargs), take))
        max_norm = args[3] if len(args) > 3 else kwargs.get("max_norm")
        writes = func is F.embedding and max_norm is not None  # to the weight
        if writes or not tensors or not all(map(_is_usual, tensors)):
            return func(*args, **kwargs)
        if func in _CASTS and autocast_is_on(tensors[0].device.type):
            tensors = [_cast(current, tensor) for tensor in tensors]
            args, kwargs = call.arguments(tensors)
        if current.wants(call):
            call.note_context(tensors)
        output = func(*args, **kwargs)
        made = _made(output, tensors)
        if made is not None:
            if made is not output:
                call.geometry = (made.shape, made.stride(), made.storage_offset())
            current.tag(made, call, tensors)
        return output


def _cast(current: TorchScope, tensor: Tensor) -> Tensor:
    """The tensor; an activation with the cast that autocast would make unseen."""
    dtype = torch.get_autocast_dtype(tensor.device.type)
    if tensor.grad_fn is None or not autocasts(tensor) or tensor.dtype is dtype:
        return tensor
    call = TorchCall(Tensor.to, ((_TENSOR, dtype), {}))
    call.note_context([tensor])
    cast = tensor.to(dtype)
    current.tag(cast, call, [tensor])
    return cast


class Planned(TorchScope):
    """Follows the plan's steps in the order of the forward.

    Whatever this forward does, its gradients are right: a recipe is exact whoever asks for it. A
    call that the plan does not know only ends the plan for this forward: everything is kept then.
    """

    def __init__(self, plan: MemoryPlan, observer: Observer | None = None) -> None:
        super().__init__(observer)
        self._steps = plan.steps
        self._next = 0

    def wants(self, function: Callable[..., Any]) -> bool:
        place = self._place(op_name(function))
        return place >= 0 and self._steps[place].recompute

    def _place(self, name: str) -> int:
        """The number of the plan's next step, if it is of this function, else -1. In eval mode a
        dropout returns its input, and has no step."""
        steps, place = self._steps, self._next
        while place < len(steps) and steps[place].op == "dropout" != name:
            place += 1
        return place if place < len(steps) and steps[place].op == name else -1

    def tag(
        self,
        output: Tensor,
        function: Callable[..., Tensor],
        tensors: Sequence[Tensor | None],
        constants: tuple[Any, ...] = (),
        dropped: Sequence[Tensor | None] = (),
    ) -> None:
        place = self._place(op_name(function))
        if place < 0:
            self._depart(function)
            return
        self._next = place + 1
        if not self._steps[place].recompute:
            return
        with without_torch_function():
            kept = self.lasting(function, tensors, output)
            if kept is not None:
                super().tag(output, function, kept, constants)

    def pack(self, tensor: Tensor) -> Saved | Use:
        # TorchCalls would be handed each attribute that this asks for, in 7 us.
        with without_torch_function():
            return super().pack(tensor)

    def _depart(self, function: Callable[..., Any]) -> None:
        if self._steps:
            expected = self._steps[self._next].op if self._next < len(self._steps) else "its end"
            warnings.warn(
                f"the memory plan expects {expected} as step {self._next} of the forward, which "
                f"calls {op_name(function)}: the rest of this forward keeps its outputs. Plan once "
                "more with fusedtrain.plan_memory for a forward like this one",
                stacklevel=4 if isinstance(function, TorchCall) else 3,
            )
            self._steps = []
