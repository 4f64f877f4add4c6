"""Public functions of the pointwise chains; :mod:`fusedtrain.functional` has their names.

Where a kernel does not fit (other dtypes, mixed dtypes or devices, torch.compile, torch.func, other
shapes than are told), eager torch runs, with its results and its errors.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as torch_functional
from torch import Tensor
from torch.jit import is_scripting as _scripting  # type: ignore[attr-defined]
from torch.overrides import has_torch_function as _has_any

from . import _chains, _ops
from ._calls import fits
from ._graph.fx import handle as _handle
from .reference.pointwise import POINTWISE, Pointwise

_IDENTITY = Pointwise()


def _chosen(activation: str | None, parameters: dict[str, Any]) -> tuple[Pointwise | None, Any]:
    """The activation as the ops take it (None where no kernel is exact), and as a function."""
    found = _ops.activation_of(activation, parameters)
    if found is not None:
        return found, found.forward
    return None, _ops.as_function(str(activation), parameters)


# --- gated linear units ---


def _glu(
    activation: Pointwise, input: Tensor, value: Tensor | None, dim: int, gate_last: bool
) -> Tensor:
    if value is None:
        size = input.size(dim)
        if size % 2:
            raise RuntimeError(
                f"Halving dimension must be even, but dimension {dim} is size {size}"
            )
        if fits(input):
            return _chains.run_halves(input, dim % input.dim(), gate_last, activation)
        gate, value = _chains.halves(input, dim, gate_last)
    else:
        gate = input
        if fits(gate, value) and gate.shape == value.shape:
            return _chains.run_gated(gate, value, activation)
    return activation.forward(gate) * value


def _named(name: str, *values: float) -> Pointwise:
    found = _ops.pointwise(name, *values)
    assert found is not None
    return found


_SIGMOID, _SILU, _RELU = _named("sigmoid"), _named("silu"), _named("relu")
_GELU, _GELU_TANH = _named("gelu"), _named("gelu_tanh")


def glu(input: Tensor, dim: int = -1) -> Tensor:
    """``a * sigmoid(b)`` where a and b are the halves of `input` along `dim` (arXiv:1612.08083).

    The halves are read in place; saves the input. See :func:`torch.nn.functional.glu`.

    Raises:
        RuntimeError: a dimension of odd size.

    Example:
        >>> glu(torch.tensor([2.0, 3.0, 0.0, 100.0]))
        tensor([1., 3.])
    """
    if _scripting():
        return torch_functional.glu(input, dim)
    if _has_any((input,)):
        return _handle(glu, (input,), input, dim=dim)
    if not isinstance(input, Tensor) or input.dim() == 0 or not input.is_floating_point():
        return torch_functional.glu(input, dim)
    return _glu(_SIGMOID, input, None, dim, True)


def swiglu(
    input: Tensor, value: Tensor | None = None, dim: int = -1, gate_last: bool = False
) -> Tensor:
    """``silu(gate) * value`` (arXiv:2002.05202, section 2); saves both, and no product.

    Args:
        input: the gate, or gate and value packed along `dim`: the halves are read in place.
        value: of the gate's shape.
        dim: which dimension a packed input is halved along.
        gate_last: whether the second half is the gate.

    Raises:
        RuntimeError: a dimension of odd size.

    Example:
        >>> swiglu(torch.tensor([0.0, 100.0, 2.0, 3.0]))
        tensor([  0., 300.])
    """
    if _scripting():
        if value is None:
            first, second = input.chunk(2, dim)
            if gate_last:
                return torch_functional.silu(second) * first
            return torch_functional.silu(first) * second
        return torch_functional.silu(input) * value
    if _has_any((input, value)):
        return _handle(swiglu, (input, value), input, value, dim=dim, gate_last=gate_last)
    return _glu(_SILU, input, value, dim, gate_last)


def geglu(
    input: Tensor,
    value: Tensor | None = None,
    dim: int = -1,
    gate_last: bool = False,
    approximate: str = "none",
) -> Tensor:
    """``gelu(gate) * value`` (arXiv:2002.05202), arguments as of :func:`swiglu`.

    Args:
        approximate: "none" for the exact form, "tanh" for the other.

    Example:
        >>> geglu(torch.tensor([0.0, 100.0, 2.0, 3.0]))
        tensor([  0., 300.])
    """
    if _scripting():
        if value is None:
            first, second = input.chunk(2, dim)
            if gate_last:
                return torch_functional.gelu(second, approximate=approximate) * first
            return torch_functional.gelu(first, approximate=approximate) * second
        return torch_functional.gelu(input, approximate=approximate) * value
    if _has_any((input, value)):
        return _handle(
            geglu, (input, value), input, value, dim=dim, gate_last=gate_last,
            approximate=approximate,
        )  # fmt: skip
    if approximate not in ("none", "tanh"):
        raise RuntimeError("approximate argument must be either none or tanh.")
    return _glu(_GELU if approximate == "none" else _GELU_TANH, input, value, dim, gate_last)


def reglu(
    input: Tensor, value: Tensor | None = None, dim: int = -1, gate_last: bool = False
) -> Tensor:
    """``relu(gate) * value`` (arXiv:2002.05202), arguments as of :func:`swiglu`.

    Example:
        >>> reglu(torch.tensor([-1.0, 1.0, 2.0, 3.0]))
        tensor([0., 3.])
    """
    if _scripting():
        if value is None:
            first, second = input.chunk(2, dim)
            return torch.relu(second) * first if gate_last else torch.relu(first) * second
        return torch.relu(input) * value
    if _has_any((input, value)):
        return _handle(reglu, (input, value), input, value, dim=dim, gate_last=gate_last)
    return _glu(_RELU, input, value, dim, gate_last)


def bilinear_glu(
    input: Tensor, value: Tensor | None = None, dim: int = -1, gate_last: bool = False
) -> Tensor:
    """``gate * value`` (arXiv:2002.05202, "Bilinear"), arguments as of :func:`swiglu`.

    Example:
        >>> bilinear_glu(torch.tensor([-1.0, 1.0, 2.0, 3.0]))
        tensor([-2.,  3.])
    """
    if _scripting():
        if value is None:
            first, second = input.chunk(2, dim)
            return first * second
        return input * value
    if _has_any((input, value)):
        return _handle(bilinear_glu, (input, value), input, value, dim=dim, gate_last=gate_last)
    return _glu(_IDENTITY, input, value, dim, gate_last)


def gated(
    input: Tensor, gate: Tensor, activation: str | None = "sigmoid", **parameters: float
) -> Tensor:
    """``input * activation(gate)``: a gated linear unit where the shapes are equal, the gate of a
    squeeze-and-excitation block (arXiv:1709.01507) where `gate` is broadcast over space.

    Saves both arguments, and where it is broadcast, the small activation of the gate.

    Args:
        input: any shape; [N, C, ...] where the gate is broadcast.
        gate: of the input's shape, or [N, C, 1, ...]. Any other broadcast runs in eager torch.
        activation: the name of a function of :mod:`fusedtrain.functional`, or "identity".
        parameters: of the activation, as the function names them.

    Raises:
        ValueError: an unknown activation.
        TypeError: a parameter that the activation does not have.
        RuntimeError: shapes that cannot be broadcast.

    Example:
        >>> gated(torch.ones(1, 2, 1, 3), torch.tensor([0.0, 100.0]).view(1, 2, 1, 1)).flatten()
        tensor([0.5000, 0.5000, 0.5000, 1.0000, 1.0000, 1.0000])
    """
    if _has_any((input, gate)):
        return _handle(gated, (input, gate), input, gate, activation=activation, **parameters)
    found, function = _chosen(activation, parameters)
    if not fits(input, gate):
        return input * function(gate)
    if gate.shape == input.shape:
        if found is None:
            found, gate = _IDENTITY, function(gate)
        return _chains.run_gated(gate, input, found)
    if found is None or found.op < 0:
        opened = function(gate)
    else:
        row = POINTWISE[found.op]
        opened = _ops.KERNELS[row.name](gate, False, *(found.a, found.b)[: len(row.parameters)])
    if not _spreads(opened, input) or not fits(input, opened):
        return input * opened
    return _chains.run_scale(input, opened.reshape(input.shape[:2]), None, 1)


def _spreads(scale: Tensor, input: Tensor) -> bool:
    """Whether it is one value for each sample and channel, [N, C, 1, ...]."""
    return (
        scale.dim() == input.dim() >= 2
        and scale.shape[:2] == input.shape[:2]
        and scale.numel() == input.shape[0] * input.shape[1]
    )


# --- residual branches ---


def residual_add(
    residual: Tensor,
    input: Tensor,
    scale: Tensor | None = None,
    branch_scale: Tensor | None = None,
    dim: int = -1,
) -> Tensor:
    """``residual + input * scale * branch_scale``: layer scale (arXiv:2103.17239), stochastic depth
    (arXiv:1603.09382) and the addition in one pass.

    Saves the input where the scale is trained, else nothing of its size.

    Args:
        residual: of the input's shape.
        input: [N, ...], what the branch has computed.
        scale: one value for each channel (dimension `dim`); any shape of so many elements.
        branch_scale: [N], 0 for samples whose branch is dropped, else 1 or 1 / keep_prob. It gets
            no gradient.
        dim: of the channels.

    Raises:
        ValueError: `scale` has not one value a channel, or `branch_scale` not one a sample.
        IndexError: the input has no dimension `dim`.
        RuntimeError: shapes that cannot be added.

    Example:
        >>> residual_add(torch.ones(2, 2), torch.ones(2, 2), torch.tensor([1.0, 3.0]))
        tensor([[2., 4.],
                [2., 4.]])
    """
    tensors = (residual, input, scale, branch_scale)
    if _has_any(tensors):
        return _handle(residual_add, tensors, residual, input, scale, branch_scale, dim=dim)
    if scale is not None and not -input.dim() <= dim < input.dim():
        raise IndexError(f"dim: {dim} is not a dimension of an input of {input.dim()}")
    channel = dim % input.dim() if scale is not None else -1
    if scale is not None and scale.numel() != input.size(channel):
        raise ValueError(
            f"scale: expected one value for each of {input.size(channel)} channels, got shape "
            f"{tuple(scale.shape)}"
        )
    if branch_scale is not None and branch_scale.shape != input.shape[:1]:
        raise ValueError(
            f"branch_scale: expected one value for each of {input.shape[0]} samples, got shape "
            f"{tuple(branch_scale.shape)}"
        )
    if scale is None and branch_scale is None:
        return residual + input
    factors = None if scale is None else scale.reshape(1, -1)
    if branch_scale is not None:
        rows = branch_scale.detach().reshape(-1, 1)
        factors = rows if factors is None else factors * rows.to(factors.dtype)
    assert factors is not None
    factors = factors.to(input.dtype) if branch_scale is not None and scale is None else factors
    # Samples are told apart in dimension 0, which cannot be that of the channels, too.
    apart = factors.shape[0] != 1 and channel == 0
    # Their gradients would be as many as the input's: 1024 x 4096 took twice eager's time.
    many = factors.shape[0] > 1 and factors.requires_grad and factors.numel() * 16 > input.numel()
    if (
        apart
        or many
        or residual.shape != input.shape
        or input.dim() == 0
        or not fits(input, factors, residual)
    ):
        y = input
        if scale is not None:
            shape = [1] * input.dim()
            shape[channel] = -1
            y = y * scale.reshape(shape)
        if branch_scale is not None:
            y = y * branch_scale.detach().to(y.dtype).reshape([-1] + [1] * (input.dim() - 1))
        return residual + y
    return _chains.run_scale(input, factors, residual, channel)


# --- bias, activation, dropout ---


def _check_probability(p: float) -> None:
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")


def _check_bias(bias: Tensor, input: Tensor, dim: int) -> None:
    if not -input.dim() <= dim < input.dim():
        raise IndexError(f"dim: {dim} is not a dimension of an input of {input.dim()}")
    if bias.dim() != 1 or bias.numel() != input.size(dim):
        raise ValueError(
            f"bias: expected one value for each of {input.size(dim)} channels, got shape "
            f"{tuple(bias.shape)}"
        )


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Zeroes each element with probability `p`, and multiplies the others by ``1 / (1 - p)``.

    Saves 16 bytes: the mask is computed again in backward, from two random numbers that are drawn
    from the generator of the input's device (so it follows torch.manual_seed, but is not the mask
    that torch would draw). For the same numbers it is the same on every device and with every
    backend. Dropped elements are 0 also where the input is infinite or NaN. ``p=1`` and `inplace`
    are torch's own. See :func:`torch.nn.functional.dropout`.

    Raises:
        ValueError: `p` is not from 0 to 1.

    Example:
        >>> dropout(torch.ones(1000), 0.25).unique()
        tensor([0.0000, 1.3333])
    """
    if _scripting():
        return torch_functional.dropout(input, p, training, inplace)
    if _has_any((input,)):
        return _handle(dropout, (input,), input, p=p, training=training, inplace=inplace)
    _check_probability(p)
    if isinstance(input, Tensor) and (not training or p == 0.0):
        return input
    if not isinstance(input, Tensor) or inplace or p == 1.0 or not fits(input):
        return torch_functional.dropout(input, p, training, inplace)
    return _chains.run_bias_act(input, None, -1, _IDENTITY, p=p)


def bias_act_dropout(
    input: Tensor,
    bias: Tensor | None = None,
    activation: str | None = "gelu",
    p: float = 0.0,
    training: bool = True,
    dim: int = -1,
    **parameters: float,
) -> Tensor:
    """``dropout(activation(input + bias), p)`` in one pass.

    Saves the output where the derivative of the activation is a function of it, else the input, and
    16 bytes for the mask (see :func:`dropout`).

    Args:
        input: any shape.
        bias: one value for each index of dimension `dim`.
        activation: the name of a function of :mod:`fusedtrain.functional`, or "identity".
        p: probability of an element to become 0, in training.
        dim: of the bias.
        parameters: of the activation, as the function names them.

    Raises:
        ValueError: an unknown activation, a bias of another size, or `p` not from 0 to 1.
        TypeError: a parameter that the activation does not have.

    Example:
        >>> bias_act_dropout(torch.tensor([[1.0, -1.0]]), torch.tensor([1.0, -1.0]), "relu")
        tensor([[2., 0.]])
    """
    if _has_any((input, bias)):
        return _handle(
            bias_act_dropout, (input, bias), input, bias, activation=activation, p=p,
            training=training, dim=dim, **parameters,
        )  # fmt: skip
    found, function = _chosen(activation, parameters)
    _check_probability(p)
    if bias is not None:
        _check_bias(bias, input, dim)
    p = p if training else 0.0
    axis = dim % input.dim() if bias is not None else -1
    if found is not None and p < 1 and fits(input, bias):
        return _chains.run_bias_act(input, bias, axis, found, p=p)
    y = function(_chains.biased(input, bias, axis))
    return dropout(y, p, True) if p > 0 else y


# StyleGAN's names -> ours, and the gains that it gives them.
_STYLEGAN = {
    "linear": ("identity", 1.0),
    "relu": ("relu", math.sqrt(2)),
    "lrelu": ("leaky_relu", math.sqrt(2)),
    "tanh": ("tanh", 1.0),
    "sigmoid": ("sigmoid", 1.0),
    "elu": ("elu", 1.0),
    "selu": ("selu", 1.0),
    "softplus": ("softplus", 1.0),
    "swish": ("silu", math.sqrt(2)),
}


def bias_act(
    input: Tensor,
    bias: Tensor | None = None,
    dim: int = 1,
    act: str = "linear",
    alpha: float | None = None,
    gain: float | None = None,
    clamp: float | None = None,
) -> Tensor:
    """``clamp(gain * act(input + bias))``: StyleGAN's op (arXiv:2106.12423), with its arguments.

    Differentiable to any order. Saves one tensor: the output where the derivative of `act` is a
    function of it, else the input.

    Args:
        input: any shape and number of elements.
        bias: one value for each index of dimension `dim`.
        act: linear, relu, lrelu, tanh, sigmoid, elu, selu, softplus or swish.
        alpha: slope of lrelu, 0.2 if None.
        gain: sqrt(2) for relu, lrelu and swish if None, else 1.
        clamp: the result is limited to [-clamp, clamp]; None for no limit. The gradient is 0 where
            the limit is reached.

    Raises:
        ValueError: an unknown `act`, a bias of another size, or a negative clamp.

    Example:
        >>> bias_act(torch.tensor([[1.0, -5.0]]), torch.tensor([1.0, 0.0]), act="lrelu", gain=1)
        tensor([[ 2., -1.]])
    """
    if _has_any((input, bias)):
        return _handle(
            bias_act, (input, bias), input, bias, dim=dim, act=act, alpha=alpha, gain=gain,
            clamp=clamp,
        )  # fmt: skip
    if act not in _STYLEGAN:
        raise ValueError(f"act: {act!r} is none of {', '.join(_STYLEGAN)}")
    if clamp is not None and not clamp >= 0:
        raise ValueError(f"clamp: must be at least 0, not {clamp}")
    if bias is not None:
        _check_bias(bias, input, dim)
    name, standard = _STYLEGAN[act]
    parameters = {"negative_slope": 0.2 if alpha is None else alpha} if act == "lrelu" else {}
    found, function = _chosen(name, parameters)
    factor = standard if gain is None else gain
    bound = -1.0 if clamp is None else float(clamp)
    axis = dim % input.dim() if bias is not None else -1
    if found is not None and _chains.usable(factor, input.dtype) and fits(input, bias):
        return _chains.run_bias_act(input, bias, axis, found, factor, bound)
    y = function(_chains.biased(input, bias, axis)) * factor
    return y if clamp is None else y.clamp(-bound, bound)
