"""Defects of other fused optimizers (see test_optimizer_defects.py) where memory has strides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.optimizer_steps import (
    ALL,
    MENDED,
    assert_close,
    give_gradients,
)
from helpers.optimizers import make

# --- D4, D12, D14, D17, D20: strides
#
# Apex checks each tensor, but not that the lists agree, so mixed layouts permute the update (D12).
# DeepSpeed's CPU optimizers update a contiguous copy of the parameter and drop it (D14).
# bitsandbytes replaces channels_last parameters by contiguous ones (D17). FlashOptim raises (D20).


def channels_last(t: Tensor) -> Tensor:
    return t.contiguous(memory_format=torch.channels_last)


def channels_last_3d(t: Tensor) -> Tensor:
    return t.contiguous(memory_format=torch.channels_last_3d)


def contiguous(t: Tensor) -> Tensor:
    return t.contiguous().clone()


def transposed(t: Tensor) -> Tensor:
    return t.transpose(0, 1).contiguous().transpose(0, 1)


def reversed_dims(t: Tensor) -> Tensor:
    order = list(range(t.dim()))[::-1]
    return t.permute(order).contiguous().permute(order)


def sliced(t: Tensor) -> Tensor:
    """Every other column of a larger tensor: not dense."""
    larger = torch.full((*t.shape[:-1], 2 * t.shape[-1] + 1), 99.0, dtype=t.dtype)
    larger[..., 1::2] = t
    return larger[..., 1::2]


def offset(t: Tensor) -> Tensor:
    larger = torch.full((t.numel() + 3,), 99.0, dtype=t.dtype)
    larger[3:] = t.flatten()
    return larger[3:].view(t.shape)


IMAGE, VOLUME, MATRIX = (5, 6, 4, 3), (3, 4, 2, 3, 5), (37, 53)
LAYOUTS: dict[str, tuple[tuple[int, ...], Callable[..., Tensor], Callable[..., Tensor]]] = {
    "channels_last param": (IMAGE, channels_last, contiguous),
    "channels_last grad": (IMAGE, contiguous, channels_last),
    "both channels_last": (IMAGE, channels_last, channels_last),
    "reversed grad": (IMAGE, channels_last, reversed_dims),
    "channels_last_3d param": (VOLUME, channels_last_3d, contiguous),
    "channels_last_3d grad": (VOLUME, contiguous, channels_last_3d),
    "transposed weight": (MATRIX, transposed, contiguous),
    "transposed grad": (MATRIX, contiguous, transposed),
    "sliced param": (MATRIX, sliced, contiguous),
    "sliced grad": (MATRIX, contiguous, sliced),
    "sliced, transposed": (MATRIX, sliced, transposed),
    "both sliced": (MATRIX, sliced, sliced),
    "offset": (MATRIX, offset, offset),
    "sliced channels": (IMAGE, lambda t: sliced(channels_last(t)), channels_last),
}


def after_steps(optimizer: torch.optim.Optimizer, params: list[Tensor], grad: Any) -> list[Tensor]:
    """Parameters after three steps; gradients laid out by `grad`."""
    for seed in range(3):
        give_gradients(params, seed)
        for p in params:
            assert p.grad is not None
            p.grad = grad(p.grad)
        optimizer.step()
    return [p.detach() for p in params]


@pytest.mark.parametrize("which", ["SGD", "Adam"])
def test_d4_torch_ignores_strides(which: str) -> None:
    values = torch.randn(IMAGE)
    results = []
    for fused in (False, True):
        p = nn.Parameter(channels_last(values))
        optimizer = getattr(torch.optim, which)([p], lr=0.1, fused=fused)
        results += after_steps(optimizer, [p], contiguous)
    assert (results[0] - results[1]).abs().max() > 0.01, MENDED


@pytest.mark.parametrize("layout", LAYOUTS)
@ALL
def test_d4_d12_d14_d17_d20_any_strides(name: str, layout: str) -> None:
    """As in contiguous memory; parameters keep their memory and strides."""
    shape, lay_param, lay_grad = LAYOUTS[layout]
    values = torch.randn(shape)
    # A second one of another layout, in the same call.
    plain, mixed = ([nn.Parameter(v.clone()) for v in (values, -values)] for _ in range(2))
    mixed[0].data = lay_param(values)
    kept = [(p.data_ptr(), p.stride(), p.untyped_storage().data_ptr()) for p in mixed]
    start = [p.detach().clone() for p in mixed]
    want = after_steps(make(name, plain), list(plain), contiguous)
    optimizer = make(name, mixed)
    got = after_steps(optimizer, list(mixed), lay_grad)
    assert kept == [(p.data_ptr(), p.stride(), p.untyped_storage().data_ptr()) for p in mixed]
    for ours, theirs, first in zip(got, want, start, strict=True):
        assert_close(ours, theirs, 8)
        assert (ours - first).abs().max() > 1e-4  # it has moved
    for p in mixed:
        for key, value in optimizer.state[p].items():
            if value.shape == p.shape:
                assert value.stride() == torch.empty_like(p).stride(), key


def test_what_lies_beside_a_sliced_parameter_stays() -> None:
    base = torch.randn(8, 20)
    kept = base.clone()
    p = nn.Parameter(torch.empty(0))
    p.data = base[1:7, 2:18:2]
    optimizer = make("AdamW", [p], ema_decay=0.9)
    after_steps(optimizer, [p], contiguous)
    inside = torch.zeros_like(base, dtype=torch.bool)
    inside[1:7, 2:18:2] = True
    assert torch.equal(base[~inside], kept[~inside])
    assert (base[inside] != kept[inside]).all()


@ALL
def test_d12_states_of_another_layout(name: str) -> None:
    """A checkpoint of a contiguous model, loaded by one in channels_last."""
    values = torch.randn(IMAGE)
    p, q = nn.Parameter(values.clone()), nn.Parameter(channels_last(values))
    first = make(name, [p], ema_decay=0.9)
    after_steps(first, [p], contiguous)
    q.data.copy_(p)
    second = make(name, [q], ema_decay=0.9)
    second.load_state_dict(first.state_dict())
    for optimizer, x in ((first, p), (second, q)):
        after_steps(optimizer, [x], contiguous)
    assert_close(q.detach(), p.detach(), 8)
    assert_close(second.state[q]["ema"], first.state[p]["ema"], 8)
    assert q.is_contiguous(memory_format=torch.channels_last)
