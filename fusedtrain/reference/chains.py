"""Pointwise chains in plain torch: the truth of ops/gated.py, scale_add.py, bias_act.py.

    gated       y = f(gate) value                   GLU family, arXiv:1612.08083, arXiv:2002.05202
    scale_add   y = x scale + residual              squeeze-excite gate, arXiv:1709.01507; layer
                                                    scale, arXiv:2103.17239; stochastic depth
    bias_act    y = drop(clamp(gain f(x + bias)))   StyleGAN's op, arXiv:2106.12423; dropout

Math of 16-bit tensors is in float32, rounded once. What is dropped is told by Philox 4x32-10
(Salmon et al., SC 2011): element i in memory by word i of the stream of two 64-bit numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .dtypes import widened
from .pointwise import Pointwise


def _as(t: Tensor, model: Tensor) -> Tensor:
    """In the dtype and strides of the model; differentiable."""
    return torch.empty_like(model).copy_(t)


def gated(gate: Tensor, value: Tensor, activation: int, a: float, b: float) -> Tensor:
    opened = Pointwise(activation, a, b).forward(widened(gate))
    return _as(opened * widened(value), value)


def gated_gradients(
    grad: Tensor, gate: Tensor, value: Tensor, activation: int, a: float, b: float
) -> tuple[Tensor, Tensor]:
    """Of gate and value."""
    f, g = Pointwise(activation, a, b), widened(grad)
    opened = f.forward(widened(gate))
    saved = opened if f.saves_output else widened(gate)
    grad_gate = f.backward(g * widened(value), saved)
    return grad_gate.to(gate.dtype), (g * opened).to(value.dtype)


def gated_backward(
    grad: Tensor, gate: Tensor, value: Tensor, grad_gate: Tensor, grad_value: Tensor,
    activation: int, a: float, b: float,
) -> None:  # fmt: skip
    for out, found in zip(
        (grad_gate, grad_value), gated_gradients(grad, gate, value, activation, a, b), strict=True
    ):
        out.copy_(found)


def spread(scale: Tensor, input: Tensor, dim: int) -> Tensor:
    """[samples, channels] so that it broadcasts over the input."""
    shape = [1] * input.dim()
    if shape:
        shape[0] = scale.shape[0]
    if dim >= 0:
        shape[dim] = scale.shape[1]
    return scale.reshape(shape)


def _sums(t: Tensor, samples: int, dim: int) -> Tensor:
    """One value a sample and channel, [samples, channels]."""
    channels = t.shape[dim] if dim >= 0 else 1
    kept = {0} if samples != 1 else set()
    kept |= {dim} if dim >= 0 else set()
    over = [d for d in range(t.dim()) if d not in kept]
    return (t.sum(over) if over else t).reshape(samples, channels)


def scale_add(input: Tensor, scale: Tensor, residual: Tensor | None, dim: int) -> Tensor:
    y = widened(input) * spread(widened(scale), input, dim)
    if residual is not None:
        y = y + widened(residual)
    return _as(y, input)


def scale_add_backward(
    grad: Tensor, input: Tensor | None, scale: Tensor, dim: int, needs_input: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of input and scale, the second in the dtype that is computed in."""
    g = widened(grad)
    grad_input, grad_scale = grad.new_empty(0), g.new_empty(0)
    if needs_input:
        model = grad if input is None else input
        grad_input = _as(g * spread(widened(scale), grad, dim), model)
    if input is not None:
        products = (g * widened(input)).double()
        grad_scale = _sums(products, scale.shape[0], dim).to(g.dtype)
    return grad_input, grad_scale


_MASK = 0xFFFFFFFF


def philox(seed: Tensor, count: int) -> Tensor:
    """The first words of a seed's stream, int64 numbers from 0 to 2^32 - 1."""
    block = torch.arange((count + 3) // 4, device=seed.device)
    key, high = seed.unbind()
    c0, c1 = block & _MASK, block >> 32
    c2, c3 = (high & _MASK).expand_as(block), ((high >> 32) & _MASK).expand_as(block)
    k0, k1 = key & _MASK, (key >> 32) & _MASK
    for _ in range(10):
        # Wraps around as unsigned products do: bits are what counts.
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (
            ((b >> 32) & _MASK) ^ c1 ^ k0, b & _MASK, ((a >> 32) & _MASK) ^ c3 ^ k1, a & _MASK,
        )  # fmt: skip
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return torch.stack((c0, c1, c2, c3), 1).flatten()[:count]


def keep_mask(seed: Tensor, p: float, model: Tensor) -> Tensor:
    """Which elements of a tensor like the model (in its strides) are not dropped."""
    words = philox(seed, model.numel())
    mask = torch.empty_like(model, dtype=torch.bool)
    flat = mask.as_strided((mask.numel(),), (1,))
    flat.copy_(words >= int(p * 4294967296.0))
    return mask


def _biased(input: Tensor, bias: Tensor | None, dim: int) -> Tensor:
    z = widened(input)
    return z if bias is None else z + spread(widened(bias)[None], input, dim)


def bias_act(
    input: Tensor, bias: Tensor | None, seed: Tensor | None, dim: int,
    activation: int, a: float, b: float, gain: float, clamp: float, p: float,
) -> Tensor:  # fmt: skip
    y = Pointwise(activation, a, b).forward(_biased(input, bias, dim)) * gain
    if clamp >= 0:
        y = y.clamp(-clamp, clamp)
    if seed is not None and p > 0:
        y = torch.where(keep_mask(seed, p, input), y * (1 / (1 - p)), 0.0)
    return _as(y, input)


def bias_act_gradient(
    grad: Tensor, saved: Tensor, bias: Tensor | None, seed: Tensor | None, dim: int,
    activation: int, a: float, b: float, gain: float, clamp: float, p: float,
) -> Tensor:  # fmt: skip
    """Of the input; `saved` is the output where the activation `saves_output`, else the input."""
    f, drops = Pointwise(activation, a, b), seed is not None and p > 0
    keep = 1 / (1 - p) if drops else 1.0
    g = widened(grad) * (gain * keep)
    if drops:
        assert seed is not None
        g = torch.where(keep_mask(seed, p, saved), g, 0.0)
    if f.saves_output:
        s = widened(saved)
        if clamp >= 0:
            g = torch.where(s.abs() < clamp * keep, g, 0.0)
        s = s / (gain * keep)
    else:
        s = _biased(saved, bias, dim)
        if clamp >= 0:
            g = torch.where(f.forward(s).abs() < clamp / abs(gain), g, 0.0)
    return f.backward(g, s)


def bias_act_backward(
    grad: Tensor, saved: Tensor, bias: Tensor | None, seed: Tensor | None, dim: int,
    activation: int, a: float, b: float, gain: float, clamp: float, p: float, needs_bias: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of input and bias, the second in the dtype that is computed in."""
    g = bias_act_gradient(grad, saved, bias, seed, dim, activation, a, b, gain, clamp, p)
    sums = g.new_empty(0)
    if needs_bias:
        sums = _sums(g.double(), 1, dim).to(g.dtype)
    return _as(g, saved), sums
