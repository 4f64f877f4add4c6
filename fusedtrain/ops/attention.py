"""Attention whose dropout keeps 16 bytes, of torch's matrix products and our dropout.

Torch's own attention on a CPU keeps four tensors of the size of the scores where it drops, and in
16 bits its backward is slow: forward and backward of [8, 6, 128, 64] in bfloat16 took 24 ms, and 11
here (8 with kept weights; one thread of an AMD EPYC with AVX-512, torch 2.13.0, 2026-11-29).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as torch_functional
from torch import Tensor
from torch.jit import is_scripting as _scripting  # type: ignore[attr-defined]
from torch.nn import Parameter
from torch.nn.attention import SDPBackend
from torch.overrides import has_torch_function as _has_any

from .. import _recompute
from .._calls import apply_of, autocasts, fits, is_plain, needs_grad, plain_backward
from .._graph.fx import handle as _handle
from .._torch_private import attention_kernel, mkldnn_takes, softmax_backward
from ..reference.dtypes import wide_of
from ..reference.pointwise import Pointwise
from ._library import op
from .bias_act import new_seed

__all__ = ["scaled_dot_product_attention"]

_bias_act = op("bias_act")
# Types of device on which ours is faster; on GPUs torch's kernels drop within attention.
_FASTER = frozenset({"cpu"})
# Without dropout: the most queries and keys. Of [4, 6, 256, 64] in bfloat16 ours takes 20.0 ms and
# torch's 26.1; of [1, 6, 1024, 64] 124 and 75.
_LONGEST = 256
# Torch's kernel that rounds the gradient of 16-bit weights, as ours does. Its plain formula has
# float32, in which nearly equal numbers of a peaked softmax cancel: of [2, 4, 64, 32] in bfloat16
# the query's gradient was 0.2 % off, of rounded ones 3 %.
_FLASH = SDPBackend.FLASH_ATTENTION.value

# scale, is_causal, dropout_p
Settings = tuple[float, bool, float]


def _dropped(input: Tensor, seed: Tensor, p: float) -> Tensor:
    output: Tensor = _bias_act(input.contiguous(), None, seed, None, -1, *Pointwise(), 1.0, -1.0, p)
    return output


def _product_dtype(input: Tensor) -> torch.dtype:
    """That of the matrix products of weights: 16 bits where the CPU multiplies them."""
    narrow = input.itemsize == 2 and mkldnn_takes(input.dtype)
    return input.dtype if narrow else wide_of(input)


def _weights(
    query: Tensor, key: Tensor, mask: Tensor | None, scale: float, is_causal: bool
) -> Tensor:
    """The softmax of the scores; scores of 16 bits in float32, as torch's kernels have them."""
    dtype = wide_of(query)
    scores = (query.to(dtype) * scale) @ key.to(dtype).transpose(-2, -1)
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    elif mask is not None:
        if mask.dtype is torch.bool:
            scores = scores.masked_fill(~mask, -math.inf)
        else:
            scores = scores + mask.to(dtype)
    if mask is None:
        return torch.softmax(scores, -1)
    sees_none = (
        scores.detach().amax(-1, keepdim=True) == -math.inf
    )  # such queries have the output 0
    return torch.softmax(scores.masked_fill(sees_none, 0.0), -1).masked_fill(sees_none, 0.0)


class Attention(torch.autograd.Function):
    """Saves its inputs; with dropout, which torch keeps more for, the weights, too."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, settings: Settings
    ) -> Tensor:
        scale, is_causal, p = settings
        dtype = _product_dtype(query)
        with torch.autocast(query.device.type, enabled=False):
            weights = _weights(query, key, mask, scale, is_causal).to(dtype)
            seed = new_seed(query) if p > 0 else None
            dropped = weights if seed is None else _dropped(weights, seed, p)
            output = dropped @ value.to(dtype)
        keeps = seed is not None and _recompute.scope() is None
        ctx.save_for_backward(query, key, value, mask, seed, weights if keeps else None)
        ctx.settings = settings
        return output.to(value.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        query, key, value, mask, seed, weights = ctx.saved_tensors
        scale, is_causal, p = ctx.settings
        with torch.autocast(query.device.type, enabled=False):
            if plain_backward(grad):
                return *_differentiable(ctx, grad, query, key, value, mask, seed), None
            dtype = _product_dtype(query)
            if weights is None:
                weights = _weights(query, key, mask, scale, is_causal).to(dtype)
            grad, value = grad.to(dtype), value.to(dtype)
            of_value = of_query = of_key = of_mask = None
            if ctx.needs_input_grad[2]:
                dropped = weights if seed is None else _dropped(weights, seed, p)
                of_value = (dropped.transpose(-2, -1) @ grad).to(query.dtype)
            of_weights = grad @ value.transpose(-2, -1)
            if seed is not None:
                of_weights = _dropped(of_weights, seed, p)
            of_scores = softmax_backward(of_weights, weights, -1, dtype)
            if ctx.needs_input_grad[3]:
                assert mask is not None
                of_mask = of_scores.sum_to_size(mask.shape).to(mask.dtype)
            if ctx.needs_input_grad[0]:
                of_query = ((of_scores @ key.to(dtype)) * scale).to(query.dtype)
            if ctx.needs_input_grad[1]:
                of_key = ((of_scores.transpose(-2, -1) @ query.to(dtype)) * scale).to(query.dtype)
        return of_query, of_key, of_value, of_mask, None


def _differentiable(ctx: Any, grad: Tensor, *saved: Any) -> list[Tensor | None]:
    """Gradients that can be differentiated, in plain torch."""
    query, key, value, mask, seed = saved
    scale, is_causal, p = ctx.settings
    with torch.enable_grad():
        # Tensors of their own: the same one may be query and key, or one be made of another.
        inputs: list[Any] = [None if t is None else t.view_as(t) for t in (query, key, value, mask)]
        query, key, value, mask = inputs
        wanted = [t for t, needed in zip(inputs, ctx.needs_input_grad) if needed]
        weights = _weights(query, key, mask, scale, is_causal)
        if seed is not None:
            weights = weights * _dropped(torch.ones_like(weights, requires_grad=False), seed, p)
        output = (weights @ value.to(weights.dtype)).to(value.dtype)
        gradients = iter(torch.autograd.grad(output, wanted, grad, create_graph=True))
    return [next(gradients) if needed else None for needed in ctx.needs_input_grad[:4]]


_apply = apply_of(Attention)


def is_faster(device_type: str) -> bool:
    """Whether ours may be faster on such a device."""
    return device_type in _FASTER


def _gains(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, p: float) -> bool:
    """Whether ours is faster, if it takes the tensors."""
    if not (is_faster(query.device.type) and 0.0 <= p < 1.0):
        return False
    if not (query.dim() == key.dim() == value.dim() > 2):
        return False
    if p > 0:
        return True
    narrow = query.itemsize == 2 and mkldnn_takes(query.dtype)
    longest = max(query.shape[-2], key.shape[-2])
    return narrow and longest <= _LONGEST and needs_grad(query, key, value, mask)


def _takes(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool) -> bool:
    """Whether ours takes the tensors."""
    if not (fits(query, key, value) and query.numel() and value.numel()):
        return False
    queries, keys = query.shape[-2], key.shape[-2]
    if not (
        query.shape[:-2] == key.shape[:-2] == value.shape[:-2]
        and query.shape[-1] == key.shape[-1]
        and value.shape[-2] == keys > 0
    ):
        return False
    if mask is not None:
        kind, shape = mask.dtype, (*query.shape[:-2], queries, keys)
        fitting = (kind is torch.bool or is_plain(mask)) and mask.device == query.device
        sizes = zip(reversed(mask.shape), reversed(shape))
        if is_causal or not fitting or kind not in (torch.bool, query.dtype):
            return False
        if not 2 <= mask.dim() <= query.dim():
            return False
        if any(size not in (1, whole) for size, whole in sizes):
            return False
    return True


def _in_autocast(*tensors: Any) -> list[Any]:
    """As autocast hands them to torch's function."""
    dtype = torch.get_autocast_dtype(tensors[0].device.type)
    return [t.to(dtype) if isinstance(t, Tensor) and autocasts(t) else t for t in tensors]


def _laid_out(output: Tensor, query: Tensor) -> Tensor:
    """The output in the layout of torch's flash kernel: that of ``empty_like(query)``."""
    if query.is_contiguous():
        return output
    like = torch.empty_like(query, device="meta")
    order = sorted(range(4), key=like.stride, reverse=True)
    places = [order.index(d) for d in range(4)]
    return output.permute(order).contiguous().permute(places)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``dropout(softmax(scale * query @ key.T + attn_mask)) @ value`` (arXiv:1706.03762).

    As :func:`torch.nn.functional.scaled_dot_product_attention`: same arguments, errors, layouts and
    dtypes under autocast. Ours runs on a CPU, with dropout, or in 16 bits in the place of torch's
    flash kernel, with at most 256 queries and keys whose gradients are asked for. Elsewhere torch's
    runs, with its random numbers.

    Scores and their softmax are in float32 (float64 for float64). With dropout the softmax is
    saved, in the input's dtype, and 16 bytes for the mask (see :func:`dropout`). Within
    :class:`fusedtrain.recompute`, and without dropout, the inputs alone are.

    Args:
        query: [..., L, E], key: [..., S, E], value: [..., S, F].
        attn_mask: [..., L, S] or one that broadcasts to it: True where a query sees a key, or
            added to the scores, in the query's dtype.
        dropout_p: probability of a weight to become 0, whether or not in training.
        is_causal: a query sees the keys up to its own place.
        scale: 1 / sqrt(E) if None.
        enable_gqa: heads of key and value (dimension -3) serve several of the query.

    Example:
        >>> q, k = torch.ones(1, 2, 1, 4), torch.ones(1, 2, 3, 4)
        >>> scaled_dot_product_attention(q, k, torch.eye(3).expand(1, 2, 3, 3)).shape
        torch.Size([1, 2, 1, 3])
    """
    if _scripting():
        return torch_functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    tensors = (query, key, value, attn_mask)
    if _has_any(tensors):
        if any(isinstance(t, Tensor) and type(t) not in (Tensor, Parameter) for t in tensors):
            return torch_functional.scaled_dot_product_attention(  # which their class knows
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale,
                enable_gqa=enable_gqa,
            )  # fmt: skip
        return _handle(
            scaled_dot_product_attention, tensors, query, key, value, attn_mask=attn_mask,
            dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa,
        )  # fmt: skip
    q, k, v, mask = _in_autocast(*tensors) if autocasts(query) else tensors
    gains = all(isinstance(t, Tensor) for t in (q, k, v)) and _gains(q, k, v, mask, dropout_p)
    if gains and enable_gqa:
        heads = q.shape[-3]
        if k.shape[-3] == v.shape[-3] and k.shape[-3] and heads % k.shape[-3] == 0:
            k, v = (t.repeat_interleave(heads // t.shape[-3], -3) for t in (k, v))
    takes = gains and _takes(q, k, v, mask, is_causal)
    if not (takes and (dropout_p > 0 or attention_kernel(q, k, v, mask, 0.0, is_causal) == _FLASH)):
        return torch_functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    output: Tensor = _apply(q, k, v, mask, (factor, is_causal, dropout_p))
    return output if dropout_p > 0.0 else _laid_out(output, q)
