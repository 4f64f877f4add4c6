"""The pointwise activations: their ops, and the road from a function to the op.

An op ``fusedtrain::mish(Tensor input) -> Tensor`` has two companions, ``mish_`` (in place) and
``mish_backward(Tensor grad, Tensor saved)``. The ops carry no autograd formula: ``Kernel`` puts an
``autograd.Function`` outside of them, which costs a tenth of ``register_autograd`` per call.
The dispatcher chooses the kernel: the C++ one of the device, else the plain-torch fallback.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.compiler import is_dynamo_compiling as _is_dynamo_compiling

from .. import _backends, _calls, _recompute
from .._calls import KERNEL_DTYPES, apply_of, takes
from ..reference import ACTIVATIONS, Activation
from ..reference.pointwise import INDEX, POINTWISE, Pointwise
from ._library import define, op

_cpp = _backends.autograd()
_LARGEST = {dtype: torch.finfo(dtype).max for dtype in KERNEL_DTYPES}


def _in_place(forward: Callable[..., Tensor]) -> Callable[..., None]:
    def run(input: Tensor, *args: Any) -> None:
        input.copy_(forward(input, *args))

    return run


def check_all_meta(name: str, *arguments: Any) -> None:
    """Raises RuntimeError where tensors with values are among those without."""
    for argument in arguments:
        if isinstance(argument, Tensor) and not argument.is_meta:
            raise RuntimeError(f"fusedtrain::{name}: meta and {argument.device} tensors are mixed")


def _define(row: Activation) -> None:
    def fake(input: Tensor, *_: Any) -> Tensor:
        check_all_meta(row.name, input)
        return torch.empty_like(input)

    def fake_backward(grad: Tensor, saved: Tensor, *_: Any) -> Tensor:
        check_all_meta(row.name, grad, saved)
        return torch.empty_like(saved)

    define(row.name, row.forward, fake)
    define(f"{row.name}_backward", row.backward, fake_backward)
    types = {**row.forward.__annotations__, "return": "None"}
    define(f"{row.name}_", _in_place(row.forward), lambda input, *_: None, ("input",), types)


def _check_inference(input: Tensor) -> None:
    """torch raises this too, but only after it has written."""
    inference = not torch.compiler.is_compiling() and input.is_inference()
    if inference and not torch.is_inference_mode_enabled():
        raise RuntimeError(
            "Inplace update to inference tensor outside InferenceMode is not allowed. You can make "
            "a clone to get a normal tensor before doing inplace update."
        )


class Kernel:
    """An activation with float parameters, ready to be called: ``kernel(input, inplace, *p)``."""

    def __init__(self, row: Activation) -> None:
        self.row = row
        self._forward = op(row.name)
        self._inplace = op(f"{row.name}_")
        self._valid = row.valid
        self._keeps_output = row.saves == "output" or row.backward_in_place is not None
        self._reference = row.forward
        function, function_inplace = _functions(row)
        self._apply, self._apply_inplace = apply_of(function), apply_of(function_inplace)
        self.call = self.in_python if _cpp is None else _in_cpp(row, self.in_python)

    def __call__(self, input: Tensor, inplace: bool, *parameters: float) -> Tensor:
        # Dynamo cannot see into C++.
        call = self.in_python if _is_dynamo_compiling() else self.call
        return call(input, inplace, *parameters)

    def in_python(self, input: Tensor, inplace: bool, *parameters: float) -> Tensor:
        if not takes(input) or (parameters and not self._exact(input.dtype, parameters)):
            return self._plain(input, inplace, *parameters)
        if inplace:
            return self._run_inplace(input, *parameters)
        if input.requires_grad and torch.is_grad_enabled():
            if torch.is_inference_mode_enabled() or input.is_inference():
                return self._plain(input, False, *parameters)
            return self._apply(input, *parameters)
        return self._forward(input, *parameters)

    def _exact(self, dtype: torch.dtype, parameters: tuple[float, ...]) -> bool:
        """Whether the kernel is right for these: numbers that the dtype holds, and `row.valid`.

        For all others eager torch runs, or raises what it raises.
        """
        largest = _LARGEST[dtype]
        for p in parameters:
            if (type(p) is not float and type(p) is not int) or not -largest <= p <= largest:
                return False
        return self._valid is None or self._valid(*parameters)

    def _plain(self, input: Tensor, inplace: bool, *parameters: float) -> Tensor:
        if not inplace or not isinstance(input, Tensor):
            return self._reference(input, *parameters)
        _check_inference(input)
        # A clone, since what the reference saves must survive the copy.
        result = self._reference(input.clone(), *parameters)
        if result.dtype != input.dtype:
            raise RuntimeError(
                f"{self.row.name}: result type {result.dtype} can't be cast to the desired output "
                f"type {input.dtype}"
            )
        return input.copy_(result)

    def _run_inplace(self, input: Tensor, *parameters: float) -> Tensor:
        _check_inference(input)
        if input.is_neg():
            return self._plain(input, True, *parameters)
        if torch.is_grad_enabled() and not input.is_inference():
            if input.requires_grad and input.is_leaf:
                raise RuntimeError(
                    "a leaf Variable that requires grad is being used in an in-place operation."
                )
            if input._is_view():
                # copy_ knows what autograd allows for views, and says so.
                return input.copy_(self(input.clone(), False, *parameters))
            if input.requires_grad:
                # The clone is made here, so that second derivatives reach the input through it.
                saved = None if self._keeps_output else input.clone()
                return self._apply_inplace(input, saved, *parameters)
        self._inplace(input, *parameters)
        if not input.is_inference():
            increment_version(input)
        return input


def _function(kernel: Kernel) -> Callable[..., Tensor]:
    """The fast way to call a kernel: `Kernel.__call__` and `*parameters` cost 0.2 us of an
    activation's 1.4 us."""

    def none(input: Tensor, inplace: bool) -> Tensor:
        if _is_dynamo_compiling():
            return kernel.in_python(input, inplace)
        return kernel.call(input, inplace)

    def one(input: Tensor, inplace: bool, a: float) -> Tensor:
        if _is_dynamo_compiling():
            return kernel.in_python(input, inplace, a)
        return kernel.call(input, inplace, a)

    def two(input: Tensor, inplace: bool, a: float, b: float) -> Tensor:
        if _is_dynamo_compiling():
            return kernel.in_python(input, inplace, a, b)
        return kernel.call(input, inplace, a, b)

    functions: tuple[Callable[..., Tensor], ...] = (none, one, two)
    return functions[len(kernel.row.parameters)]


def _in_cpp(row: Activation, in_python: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The activation as `_C_autograd` calls it; unusual calls go on to `in_python`."""
    assert _cpp is not None
    return _cpp.Activation(
        row.name, _class_name(row), len(row.parameters), row.saves == "output",
        row.backward_in_place is not None, row.backward, row.valid, in_python,
    )  # fmt: skip


def _class_name(row: Activation) -> str:
    return "".join(part.capitalize() for part in row.name.split("_"))


def function_of(
    row: Activation, forward: Callable[..., Any], backward: Callable[..., Any], suffix: str = ""
) -> type[torch.autograd.Function]:
    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(_class_name(row) + suffix, (torch.autograd.Function,), methods)


def _functions(
    row: Activation,
) -> tuple[type[torch.autograd.Function], type[torch.autograd.Function]]:
    """The autograd.Function of the activation, and the one that works in place."""
    forward_op = op(row.name)
    inplace_op = op(f"{row.name}_")
    backward_op = op(f"{row.name}_backward")
    saves_output = row.saves == "output"
    has_parameters = bool(row.parameters)
    reference_backward, from_output = row.backward, row.backward_in_place

    def forward(ctx: Any, input: Tensor, *parameters: float) -> Tensor:
        output: Tensor = forward_op(input, *parameters)
        ctx.save_for_backward(output if saves_output else input)
        if parameters:
            ctx.parameters = parameters
        scope = _recompute.scope()
        if scope is not None:
            scope.tag(output, forward_op, (input,), parameters, (input,) if saves_output else ())
        return output

    def forward_inplace(
        ctx: Any, input: Tensor, saved: Tensor | None, *parameters: float
    ) -> Tensor:
        inplace_op(input, *parameters)
        ctx.mark_dirty(input)
        ctx.save_for_backward(input if saved is None else saved)
        if parameters:
            ctx.parameters = parameters
        return input

    def backward(ctx: Any, grad: Tensor) -> Any:
        (saved,) = ctx.saved_tensors
        # Under create_graph the formula in torch operators is differentiated again.
        differentiable = torch.is_grad_enabled() or not takes(grad)
        formula = reference_backward if differentiable else backward_op
        if not has_parameters:
            return formula(grad, saved)
        return (formula(grad, saved, *ctx.parameters), *(None for _ in ctx.parameters))

    def backward_inplace(ctx: Any, grad: Tensor) -> Any:
        if from_output is not None:
            parameters = ctx.parameters if has_parameters else ()
            result = from_output(grad, *ctx.saved_tensors, *parameters)
            return (result, None, *(None for _ in parameters))
        gradients = backward(ctx, grad)
        grad_input, *rest = gradients if has_parameters else (gradients,)
        return (grad_input, None, *rest)

    function = function_of(row, forward, backward)
    return function, function_of(row, forward_inplace, backward_inplace, "Inplace")


_ROWS = [row for row in ACTIVATIONS.values() if not row.tensors]
for _row in _ROWS:
    _define(_row)
KERNELS = {row.name: Kernel(row) for row in _ROWS}
FUNCTIONS = {name: _function(kernel) for name, kernel in KERNELS.items()}


def activation_of(name: str | None, parameters: dict[str, Any]) -> Pointwise | None:
    """The activation as the ops take it; None where no kernel is exact for these parameters.

    Raises:
        ValueError: there is no such activation.
        TypeError: it has no such parameter.
    """
    if name is None or name == "identity":
        if parameters:
            raise TypeError(f"activation: identity has no parameter {min(parameters)!r}")
        return Pointwise()
    parameters = dict(parameters)
    if name == "gelu":
        approximate = parameters.pop("approximate", "none")
        if approximate not in ("none", "tanh"):
            raise RuntimeError("approximate argument must be either none or tanh.")
        name = "gelu" if approximate == "none" else "gelu_tanh"
    if name not in INDEX:
        raise ValueError(f"activation: {name!r} is none of identity, {', '.join(INDEX)}")
    row = POINTWISE[INDEX[name]]
    values = [
        parameters.pop(p, default) for p, default in zip(row.parameters, row.example, strict=True)
    ]
    if parameters:
        raise TypeError(f"activation: {name} has no parameter {min(parameters)!r}")
    return pointwise(name, *values)


def as_function(name: str, parameters: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    """The activation, with parameters for which :func:`activation_of` finds no exact kernel.

    The function raises what the public function of that name raises.
    """
    row = POINTWISE[INDEX[name]]
    values = [parameters.get(p, d) for p, d in zip(row.parameters, row.example, strict=True)]

    def function(input: Tensor) -> Tensor:
        if name == "softplus" and _calls.autocasts(input, "cuda"):
            input = input.float()  # as torch's
        return KERNELS[name](input, False, *values)

    return function


def chosen(activation: str | None, parameters: dict[str, Any]) -> tuple[Pointwise | None, Any]:
    """The activation in the form that ops take (None where no kernel is exact), and as a
    function."""
    return _chosen(activation, parameters) if parameters else _chosen_alone(activation)


def _chosen(activation: str | None, parameters: dict[str, Any]) -> tuple[Pointwise | None, Any]:
    fused = activation_of(activation, parameters)
    if fused is not None:
        return fused, fused.forward
    return None, as_function(str(activation), parameters)


@functools.cache
def _chosen_alone(activation: str | None) -> tuple[Pointwise | None, Any]:
    return _chosen(activation, {})


def pointwise(name: str, *values: float) -> Pointwise | None:
    """As :func:`activation_of`, by the name of the op and the values of all its parameters."""
    row = POINTWISE[INDEX[name]]
    for value in values:
        # The bound is that of float16.
        if (type(value) is not float and type(value) is not int) or not -65504 <= value <= 65504:
            return None
    if row.valid is not None and not row.valid(*values):
        return None
    return Pointwise(INDEX[name], *map(float, values))


# Results of `chosen` for a name alone, where the kernel is exact.
BY_NAME: dict[str | None, Pointwise | None] = {
    name: activation_of(name, {}) for name in (None, "identity", *INDEX)
}
