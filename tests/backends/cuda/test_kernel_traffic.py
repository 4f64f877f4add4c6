"""The CUDA kernels read and write no tensor more often than tools/_traffic.py says, in vectors.

The emulator counts the bytes of each access to a tensor; those of channels, which are small and
stay in the caches, are left out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import cuda_emulator
import fusedtrain
from helpers import ROOT
from helpers.batch_norm import Case as BatchNormCase
from helpers.optimizer_cases import Case as StepCase, Spec

sys.path.append(str(ROOT / "tools"))
from _traffic import TRAFFIC

HALF = torch.float16

# For the first element of each thread, which the statistics read twice, and for blocks' shares.
ALLOWED = 1.07
Call = tuple[str, tuple[Any, ...], int]  # op, arguments, bytes of a tensor
Layout = Callable[[], Tensor]


def last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


# Inputs of a kernel of tensors with channels: each layout has a walk of its own. There are so
# many elements that each thread of the emulator's two multiprocessors has 16 vectors or more.
LAYOUTS: dict[str, Layout] = {
    "16 x 16": lambda: torch.randn(128, 16, 16, 16),
    "channels_last": lambda: last(torch.randn(128, 16, 16, 16)),
    "14 x 14": lambda: torch.randn(40, 64, 14, 14),
    "7 x 7": lambda: torch.randn(80, 128, 7, 7),
}


# Inputs with channels that fit a block's shared memory.
SMALL_LAYOUTS: dict[str, Layout] = {
    "16 x 16": lambda: torch.randn(28, 16, 16, 16),
    "channels_last": lambda: last(torch.randn(2, 64, 15, 15)),
    "14 x 14": lambda: torch.randn(18, 64, 14, 14),
    "7 x 7": lambda: torch.randn(18, 128, 7, 7),
}


def half(x: Tensor) -> Tensor:
    return x.to(HALF)


def pointwise(backward: bool) -> Call:
    x = half(torch.randn(1 << 16))
    return ("silu_backward", (x, x), x.nbytes) if backward else ("silu", (x,), x.nbytes)


def channelwise(x: Tensor, backward: bool) -> Call:
    x, weight = half(x), half(torch.rand(x.size(1)))
    name, more = ("prelu_backward", (x,)) if backward else ("prelu", ())
    return name, (*more, x, weight), x.nbytes


def batch_norm(x: Tensor, kind: str) -> Call:
    case = BatchNormCase(x, HALF, "relu", residual="residual" in kind, training="eval" not in kind)
    arguments = case.forward()
    if "backward" not in kind:
        return "batch_norm_act", arguments, case.x.nbytes
    mean, invstd = (torch.rand(x.size(1)) + 0.5 for _ in range(2))
    needs = (True, "residual" in kind, True)
    return "batch_norm_act_backward", case.backward(case.x, mean, invstd, *needs), case.x.nbytes


def restore(x: Tensor) -> Call:
    vectors = (torch.rand(x.size(1)) + 0.5 for _ in range(4))
    return "batch_norm_act_restore", (half(x), *vectors, 0.1), x.numel() * 2


def group_norm(backward: bool) -> Call:
    """Large planes: channels_last has launches for each sample."""
    x, vectors = half(torch.randn(2, 16, 128, 128)), torch.rand(4, 2, 16) + 0.5
    norm = (x, 4, half(torch.rand(x.size(1))), *(None,) * 3)
    silu = (list(fusedtrain.reference.ACTIVATIONS).index("silu"), 0.0, 0.0)
    if not backward:
        return "group_norm_act", (*norm, 1e-5, *silu), x.nbytes
    needs = (True, True, False, False, False)
    return "group_norm_act_backward", (x.clone(), *norm, vectors, *silu, *needs), x.nbytes


def gated(backward: bool) -> Call:
    silu = list(fusedtrain.reference.ACTIVATIONS).index("silu")
    gate, value, grad = (half(torch.randn(64, 512)) for _ in range(3))
    more = (silu, 0.0, 0.0)
    if not backward:
        return "gated", (gate, value, *more), gate.nbytes
    out = (torch.empty_like(gate), torch.empty_like(gate))
    return "gated_backward", (grad, gate, value, *out, *more), gate.nbytes


def scale_add(x: Tensor, backward: bool) -> Call:
    x, scale = half(x), half(torch.rand(x.shape[:2]))
    if backward:
        return "scale_add_backward", (x, x.clone(), scale, 1, True), x.nbytes
    return "scale_add", (x, scale, None, 1), x.nbytes


def row_norm(backward: bool) -> Call:
    x, weight, bias = half(torch.randn(256, 512)), half(torch.rand(512)), half(torch.rand(512))
    if not backward:
        return "row_norm", (x, None, weight, bias, 1, 1, 1e-5, True), x.nbytes
    statistics = (torch.zeros(256, 1), torch.ones(256, 1))
    more = (None, x.clone(), weight, *statistics, 1, 1, True, True)
    return "row_norm_backward", (x, *more), x.nbytes


def bias_act(x: Tensor, backward: bool) -> Call:
    silu = list(fusedtrain.reference.ACTIVATIONS).index("silu")
    x, bias = half(x), half(torch.rand(x.size(1)))
    more = (1, silu, 0.0, 0.0, 1.0, -1.0, 0.0)
    if backward:
        return "bias_act_backward", (x, x.clone(), bias, None, *more, True), x.nbytes
    return "bias_act", (x, bias, None, None, *more), x.nbytes


def few_bit(backward: bool) -> Call:
    gelu = list(fusedtrain.reference.ACTIVATIONS).index("gelu")
    x = half(torch.randn(1 << 16))
    if backward:
        codes = torch.randint(0, 256, (1 << 14,), dtype=torch.uint8)
        return "few_bit_backward", (x, codes, gelu, 2), x.nbytes
    return "few_bit", (x, gelu, 2), x.nbytes


def max_pool(x: Tensor, backward: bool) -> Call:
    x, window = half(x), ([2, 2], [2, 2], [0, 0])
    is_last = x.is_contiguous(memory_format=torch.channels_last)
    forward = (x, *window, False, 2, is_last)
    if not backward:
        return "max_pool2d", forward, x.nbytes
    y, codes = torch.ops.fusedtrain.max_pool2d(*forward)
    return "max_pool2d_backward", (y, codes, *x.shape[2:], *window, 2, is_last), x.nbytes


def depthwise(x: Tensor, backward: bool) -> Call:
    x, weight = half(x), half(torch.randn(x.size(1), 1, 3, 3))
    is_last = x.is_contiguous(memory_format=torch.channels_last)
    ones = [1, 1]
    if backward:
        more = (ones, ones, ones, is_last, True, True, True)
        return "depthwise_conv_backward", (x.clone(), x, weight, *more), x.nbytes
    return "depthwise_conv", (x, weight, None, ones, ones, ones, ones, is_last), x.nbytes


def images(x: Tensor) -> Call:
    pixels = (x[:, :3].abs() * 80).to(torch.uint8).contiguous()
    format = torch.contiguous_format
    return "normalize_images", (pixels, torch.rand(3, 3), HALF, format), 2 * pixels.numel()


def fold() -> Call:
    weight = torch.randn(32, 64, 3, 3)
    vectors = (torch.rand(32) for _ in range(5))
    return "fold_weight", (weight, *vectors, 1e-5, False, 1), weight.nbytes


def step(
    rule: str, states: list[int], state_dtype: torch.dtype | None = None, **options: float
) -> Call:
    specs = [Spec((1 << n,), states=states, state_dtype=state_dtype) for n in (15, 14)]
    case = StepCase(rule, specs, [{"momentum": 0.9} if rule == "sgd" else {}], **options)
    return "optimizer_step", (*case.arguments(), None, None), 6 << 15


def everywhere(call: Callable[..., Call], *more: Any) -> dict[str, Callable[[], Call]]:
    table = SMALL_LAYOUTS if "whole" in str(more) else LAYOUTS

    def with_layout(make: Layout) -> Callable[[], Call]:
        return lambda: call(make(), *more)

    # A window of 2 leaves out the last row and column of 7.
    layouts = list(LAYOUTS)[:3] if call is max_pool else LAYOUTS
    return {name: with_layout(table[name]) for name in layouts}


NORMS = [name.removeprefix("batch_norm ") for name in TRAFFIC if name.startswith("batch_norm ")]
CALLS: dict[str, dict[str, Callable[[], Call]]] = {
    "pointwise forward": {"": lambda: pointwise(False)},
    "pointwise backward": {"": lambda: pointwise(True)},
    "channelwise forward": everywhere(channelwise, False),
    "channelwise backward": everywhere(channelwise, True),
    **{f"batch_norm {kind}": everywhere(batch_norm, kind) for kind in NORMS if kind != "restore"},
    "batch_norm restore": everywhere(restore),
    "group_norm forward": {"": lambda: group_norm(False)},
    "group_norm backward": {"": lambda: group_norm(True)},
    "gated forward": {"": lambda: gated(False)},
    "gated backward": {"": lambda: gated(True)},
    "row_norm forward": {"": lambda: row_norm(False)},
    "row_norm backward": {"": lambda: row_norm(True)},
    "scale_add forward": everywhere(scale_add, False),
    "scale_add backward": everywhere(scale_add, True),
    "bias_act forward": everywhere(bias_act, False),
    "bias_act backward": everywhere(bias_act, True),
    "few_bit forward": {"": lambda: few_bit(False)},
    "few_bit backward": {"": lambda: few_bit(True)},
    "max_pool2d forward": everywhere(max_pool, False),
    "max_pool2d backward": everywhere(max_pool, True),
    "depthwise_conv forward": everywhere(depthwise, False),
    "depthwise_conv backward": everywhere(depthwise, True),
    "normalize_images": everywhere(images),
    "fold_weight": {"": fold},
    "optimizer_step, SGD with momentum": {"": lambda: step("sgd", [0], measures=0)},
    "optimizer_step, Adam, measured": {"": lambda: step("adam", [0, 1], max_norm=1.0, measures=3)},
    "optimizer_step, Adam in codes": {"": lambda: step("adam", [0, 1], torch.int8, measures=0)},
}


# Bytes of an access, on average, where vectors of 16 are not to be had: planes whose length is no
# multiple of 8, windows, kernels, codes, bytes of pixels.
_ODD = ("14 x 14", "7 x 7")
_BY_CHANNEL = ("channelwise", "scale_add", "bias_act")
NARROW: dict[tuple[str, str], float] = {
    **{(f"{op} {way}", layout): 2.0
       for op in _BY_CHANNEL for way in ("forward", "backward") for layout in _ODD},
    ("row_norm backward", ""): 13.5,  # statistics
    ("few_bit forward", ""): 15.0,
    ("few_bit backward", ""): 15.0,
    **{(f"max_pool2d {way}", layout): 1.6
       for way in ("forward", "backward") for layout in ("16 x 16", "14 x 14")},
    ("max_pool2d backward", "16 x 16"): 4.0,
    ("max_pool2d backward", "channels_last"): 14.0,
    **{(f"depthwise_conv {way}", layout): 2.0
       for way in ("forward", "backward") for layout in LAYOUTS if layout != "channels_last"},
    ("normalize_images", "16 x 16"): 12.0,
    ("normalize_images", "channels_last"): 12.0,
    **{("normalize_images", layout): 1.5 for layout in _ODD},
    ("fold_weight", ""): 4.0,
    ("optimizer_step, Adam in codes", ""): 9.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def emulator() -> cuda_emulator.Emulator:
    if reason := cuda_emulator.why_not():
        pytest.skip(reason)
    if cuda_emulator.SANITIZED:
        pytest.skip("not a case: the sanitizers' build sees no accesses")
    return cuda_emulator.load()


def test_every_entry_is_measured() -> None:
    assert list(CALLS) == list(TRAFFIC)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"), [(name, layout) for name, calls in CALLS.items() for layout in calls]
)
def test_passes_and_launches(emulator: cuda_emulator.Emulator, name: str, layout: str) -> None:
    op, arguments, size = CALLS[name][layout]()
    before = emulator.launches()
    emulator.set_device(0 if "whole" in name else 1)
    emulator.call(op, *arguments)
    emulator.set_device(0)
    read, written, accesses = emulator.traffic(size // 40)
    entry = TRAFFIC[name]
    passes = (read + written) / size
    assert emulator.launches() - before <= entry.launches
    assert passes <= entry.passes * ALLOWED, f"{read / size:.3f} read, {written / size:.3f} written"
    assert (read + written) / accesses >= NARROW.get((name, layout), 15.5)
    # Nothing is counted twice or missed by the counter itself.
    assert passes >= entry.least * 0.98
    assert entry.passes >= entry.least
