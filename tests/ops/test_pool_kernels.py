"""The kernels of max pooling, of every backend, against torch's own, bit for bit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as T
from torch import Tensor

import fusedtrain
from fusedtrain.ops.pool import _bits_of
from fusedtrain.reference.bits import pack, packed_bytes, unpack
from fusedtrain.reference.pool import max_pool2d_indices
from helpers import ROOT
from helpers.activations import DTYPES
from helpers.backends import Kernels
from helpers.launches import parameters
from helpers.processes import run_python

pytestmark = pytest.mark.usefixtures("memory_is_full_of_nan")

# kernel_size, stride, padding, ceil_mode
WINDOWS: dict[str, tuple[Any, Any, Any, bool]] = {
    "2 x 2": ((2, 2), (2, 2), (0, 0), False),
    "of ResNet": ((3, 3), (2, 2), (1, 1), False),
    "of SqueezeNet": ((3, 3), (2, 2), (0, 0), True),
    "of Inception": ((3, 3), (2, 2), (0, 0), False),
    "stride 1": ((3, 3), (1, 1), (1, 1), False),
    "stride 3, ceil": ((3, 2), (3, 3), (1, 0), True),
    "two elements": ((1, 2), (3, 1), (0, 0), False),
    "one element": ((1, 1), (2, 1), (0, 0), False),
    "ceil": ((5, 3), (2, 2), (2, 1), True),
    "gaps": ((2, 3), (5, 7), (1, 1), False),
    "256 elements": ((16, 16), (7, 3), (8, 8), False),
    "64-bit indices": ((2, 3), (2**29, 1), (1, 1), False),
    "one column": ((3, 2), (1, 2**30), (1, 1), True),
    "a row of 256": ((1, 256), (1, 9), (0, 128), False),
}
SHAPES = {
    "small": (2, 3, 8, 8),
    "odd": (2, 5, 7, 9),
    "many channels": (2, 70, 6, 5),
    "long rows": (1, 2, 3, 300),
    "wide": (2, 3, 9, 70),
    "high": (1, 1, 300, 3),
    "one pixel": (2, 8, 1, 1),
    "no batch": (4, 9, 9),
    "empty": (0, 3, 4, 4),
    "large": (2, 40, 40, 33),
}


@pytest.fixture
def ops(ops: Kernels, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    if ops.counter == "triton" and ops.slow:
        from fusedtrain.triton import pool

        # The interpreter takes as long for one lane.
        monkeypatch.setattr(pool, "_BLOCK", 1024)
    return ops


def numbers(shape: tuple[int, ...], dtype: torch.dtype, last: bool = False) -> Tensor:
    """With ties, and everything that compares in its own way."""
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0])
    drawn = special[torch.randint(0, 4, shape)]
    x = torch.where(torch.rand(shape) < 0.15, drawn, torch.randint(-2, 3, shape).float())
    x = x.to(dtype)
    return x.contiguous(memory_format=torch.channels_last) if last else x


def same(result: Tensor, want: Tensor) -> None:
    """The same numbers, signs of zeros included; one NaN is as good as another."""
    result = result.cpu()
    assert result.dtype == want.dtype
    assert result.isnan().equal(want.isnan())
    a, b = result.nan_to_num(7.0), want.nan_to_num(7.0)
    assert a.equal(b)
    assert a.signbit().equal(b.signbit())


def check(ops: Kernels, x: Tensor, window: tuple[Any, Any, Any, bool], last: bool) -> None:
    *sizes, ceil = window
    bits = _bits_of(sizes[0])
    leaf = x.detach().double().requires_grad_()
    want, index = T.max_pool2d(leaf, *sizes, 1, ceil, True)
    grad = torch.randn(want.shape).to(x.dtype)
    y, codes = ops("max_pool2d", x.to(ops.device), *sizes, ceil, bits, last)
    same(y, want.detach().to(x.dtype))
    form = torch.channels_last if last else torch.contiguous_format
    assert y.is_contiguous(memory_format=form)
    assert codes.dtype is torch.uint8
    assert codes.shape == (packed_bytes(y.numel(), bits),)
    arguments = (list(y.shape), x.size(-1), *sizes, bits, last)
    assert max_pool2d_indices(codes.cpu(), *arguments).equal(index)
    # Zeros fill up the last block.
    places = unpack(codes.cpu(), bits, y.numel())
    assert pack(places, bits).equal(codes.cpu())
    none = ops("max_pool2d", x.to(ops.device), *sizes, ceil, 0, last)
    same(none[0], y.cpu())
    assert none[1].numel() == 0
    # Sums of float32 and float64 stay in their dtype, in torch's order.
    leaf = x.detach().to(torch.promote_types(x.dtype, torch.float32)).requires_grad_()
    T.max_pool2d(leaf, *sizes, 1, ceil).backward(grad.to(leaf.dtype))
    for g in (grad, grad.mT.contiguous().mT):
        gradient = ops(
            "max_pool2d_backward", g.to(ops.device), codes, *x.shape[-2:], *sizes, bits, last
        )
        assert gradient.shape == x.shape
        assert gradient.is_contiguous(memory_format=form)
        assert leaf.grad is not None
        same(gradient, leaf.grad.to(x.dtype))


def fits(shape: tuple[int, ...], window: tuple[Any, Any, Any, bool]) -> bool:
    try:
        T.max_pool2d(torch.zeros(shape), *window[:3], 1, window[3])
    except RuntimeError:
        return False
    return True


def among_few(window: str, kind: str, last: bool) -> bool:
    """Each window with half of the shapes in each layout; 256 elements with one shape in one."""
    if "256" in window:
        return (kind, last) == (("odd", True) if "row" in window else ("long rows", False))
    turn = list(WINDOWS).index(window) + list(SHAPES).index(kind)
    return kind != "large" and turn % 2 == last


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("kind", parameters(SHAPES, "empty"))
@pytest.mark.parametrize("window", WINDOWS)
def test_every_window(ops: Kernels, window: str, kind: str, last: bool) -> None:
    shape = SHAPES[kind]
    if (last and len(shape) == 3) or not fits(shape, WINDOWS[window]):
        pytest.skip("not a case: the window does not fit the shape")
    if ops.slow and not among_few(window, kind, last):
        pytest.skip("slow where it is emulated or interpreted: needs a GPU")
    for i, dtype in enumerate(DTYPES):
        if (ops.slow or kind == "large") and i != (len(kind) + len(window)) % 4:
            continue
        check(ops, numbers(shape, dtype, last), WINDOWS[window], last)


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding"),
    [
        ((2, 3), (2, 2), (1, 1)), ((3, 2), (2, 2), (1, 1)), ((3, 3), (1, 2), (1, 1)),
        ((3, 3), (2, 1), (1, 1)), ((3, 3), (2, 2), (0, 1)), ((3, 3), (2, 2), (1, 0)),
    ],
)  # fmt: skip
def test_nearly_a_usual_window(
    ops: Kernels, kernel: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int],
    last: bool,
) -> None:  # fmt: skip
    """One number differs from a window that has a kernel of its own."""
    x = numbers((2, 4, 5, 8) if last else (2, 2, 5, 8), torch.float32, last)
    check(ops, x, (kernel, stride, padding, False), last)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [float("nan"), -float("inf"), float("inf"), -0.0, 1.0])
def test_all_equal(ops: Kernels, value: float, dtype: torch.dtype) -> None:
    """The first element that is not padding; of NaN the last."""
    windows: tuple[str, ...] = ("2 x 2", "of ResNet", "ceil")
    if ops.slow:  # where nothing is above -inf, the place is that of the corner in the padding
        windows = windows[2 if value == -float("inf") else DTYPES.index(dtype) % 3 :][:1]
    for window in windows:
        for last in (False, True):
            x = torch.full((1, 3, 6, 5), value, dtype=dtype)
            check(
                ops, x.to(memory_format=torch.channels_last) if last else x, WINDOWS[window], last
            )


def test_one_input(ops: Kernels) -> None:
    check(ops, numbers((1, 1, 1, 1), torch.float32), WINDOWS["of ResNet"], False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides(ops: Kernels, dtype: torch.dtype) -> None:
    wide = numbers((2, 6, 9, 14), dtype)
    for x in (
        wide[:, ::2, 1:, 2:11],
        numbers((3, 7, 6, 8), dtype).permute(1, 0, 3, 2),
        numbers((1, 3, 1, 8), dtype).expand(2, 3, 7, 8),
        numbers((1030,), dtype)[3 : 3 + 2 * 3 * 7 * 8].view(2, 3, 7, 8),
    ):
        for last in (False, True):
            check(ops, x, WINDOWS["of ResNet"], last)
    x = numbers((2, 6, 8, 9), dtype, True)[:, 1:5]
    check(ops, x, WINDOWS["2 x 2"], True)


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_every_instruction_set(capability: str) -> None:
    """Instruction sets that this process does not use: a third of the cases."""
    if f"({capability})" in str(fusedtrain.backend_info()):
        pytest.skip("not a case: all other tests run this instruction set")
    environment = {**os.environ, "FUSEDTRAIN_CPU_CAPABILITY": capability}
    environment["PYTHONPATH"] = str(ROOT / "tools")
    file = Path(__file__)
    code = "import fusedtrain"
    run = run_python("-c", code, env=environment)
    if "this processor" in run.stderr:
        pytest.skip(run.stderr.splitlines()[-1])
    tests = ["-k", "cpu and (every_window or all_equal)", "-q", "-p", "no:cacheprovider"]
    tests += ["-p", "_every_nth", "--every", "3"]
    run = run_python("-m", "pytest", file, *tests, env=environment, cwd=ROOT)
    assert run.returncode == 0, run.stdout[-3000:]
    assert " passed" in run.stdout


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", ["2 x 2", "of ResNet", "stride 1", "ceil", "stride 3, ceil"])
def test_channel_vectors(ops: Kernels, window: str, dtype: torch.dtype) -> None:
    """Channels that are whole vectors of 16 bytes, and not; blocks of codes end anywhere."""
    shapes = ((2, 16, 7, 9), (1, 8, 6, 5), (3, 24, 5, 6), (1, 12, 7, 7))
    for shape in shapes[DTYPES.index(dtype) % 2 :: 2] if ops.slow else shapes:
        check(ops, numbers(shape, dtype, True), WINDOWS[window], True)


@pytest.mark.slow
@pytest.mark.parametrize("window", ["2 x 2", "of ResNet", "stride 1", "gaps"])
def test_many_blocks(ops: Kernels, window: str) -> None:
    """More inputs and outputs than a block of threads has, in either layout."""
    for i, shape in enumerate(((1, 2, 63, 65), (2, 16, 17, 19))):
        for last in (False, True):
            check(ops, numbers(shape, DTYPES[(i + last) % 4], last), WINDOWS[window], last)


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize(("window", "bits"), [("2 x 2", 4), ("2 x 2", 8), ("of ResNet", 8)])
def test_more_bits_than_the_window_needs(ops: Kernels, window: str, bits: int, last: bool) -> None:
    x = numbers((2, 16, 6, 7), torch.float16, last).to(ops.device)
    *sizes, ceil = WINDOWS[window]
    y, codes = ops("max_pool2d", x, *sizes, ceil, _bits_of(sizes[0]), last)
    wide_y, wide_codes = ops("max_pool2d", x, *sizes, ceil, bits, last)
    same(wide_y, y.cpu())
    few = unpack(codes.cpu(), _bits_of(sizes[0]), y.numel())
    assert unpack(wide_codes.cpu(), bits, y.numel()).equal(few)
    grad = torch.randn(y.shape, dtype=torch.float16).to(ops.device)
    gradients = [
        ops("max_pool2d_backward", grad, c, 6, 7, *sizes, b, last)
        for c, b in ((codes, _bits_of(sizes[0])), (wide_codes, bits))
    ]
    same(gradients[1], gradients[0].cpu())


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("window", ["2 x 2", "of ResNet"])
def test_slices_of_memory(ops: Kernels, window: str, last: bool) -> None:
    """Inputs, gradients and codes that begin anywhere in a buffer."""
    *sizes, ceil = WINDOWS[window]
    bits = _bits_of(sizes[0])
    form = torch.channels_last if last else torch.contiguous_format

    def moved(t: Tensor, by: int) -> Tensor:
        buffer = torch.empty(t.numel() + by, dtype=t.dtype, device=t.device)
        return buffer[by:].as_strided(t.shape, t.stride()).copy_(t)

    for dtype in DTYPES[::2]:
        x = numbers((2, 16, 6, 7), dtype, last).to(ops.device)
        y, codes = ops("max_pool2d", x, *sizes, ceil, bits, last)
        grad = torch.randn(y.shape).to(ops.device, dtype).contiguous(memory_format=form)
        want = ops("max_pool2d_backward", grad, codes, 6, 7, *sizes, bits, last)
        assert want.any()
        z, again = ops("max_pool2d", moved(x, 1), *sizes, ceil, bits, last)
        same(z, y.cpu())
        assert again.equal(codes)
        for g, c in ((moved(grad, 1), codes), (grad, moved(codes, 1)), (grad, moved(codes, 4))):
            same(ops("max_pool2d_backward", g, c, 6, 7, *sizes, bits, last), want.cpu())
