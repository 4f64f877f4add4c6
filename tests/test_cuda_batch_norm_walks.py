"""How the emulated CUDA kernels of batch norm walk: whole vectors over planes of odd lengths, every
kind of tail, the passes over each tensor, and eval mode in one launch.

tests/test_cuda_batch_norm.py has the numbers of every formula, dtype and option.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cuda_emulator
import pytest
import torch
from _kernels import same_bits
from test_cuda_batch_norm import (
    ANY,
    BF16,
    F16,
    F32,
    F64,
    ORDERS,
    Call,
    Case,
    check_backward,
    check_forward,
    laid_out,
    launches,
    run,
    statistics,
)
from torch import Tensor

from fusedtrain.reference import batch_norm as truth
from fusedtrain.reference.pointwise import Pointwise

pytestmark = pytest.mark.skipif(bool(cuda_emulator.why_not()), reason=cuda_emulator.why_not())


@pytest.fixture(scope="module")
def emulator() -> Iterator[cuda_emulator.Emulator]:
    emulator = cuda_emulator.load()
    yield emulator
    emulator.set_order("forward")


def apart(shape: tuple[int, ...]) -> Tensor:
    """Channels, places and samples that differ in mean and deviation: a number that is added to a
    neighbour's sum, or counted twice, shows."""
    x = torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(2))
    samples, channels, places = shape[0], shape[1], x[0, 0].numel()
    channel = torch.arange(channels, dtype=F64).view(1, -1, 1)
    place = torch.arange(places, dtype=F64).view(1, 1, -1) / places
    sample = torch.arange(samples, dtype=F64).view(-1, 1, 1) / samples
    x = x.view(samples, channels, -1) * (1 + channel % 3) + (channel * 3) % 7 - 3
    return (x + place - sample).view(shape)


def check(emulator: cuda_emulator.Emulator, case: Case, orders: tuple[str, ...] = ORDERS) -> Call:
    call = Call(case, apart(case.shape))
    check_backward(emulator, call, *check_forward(emulator, call, orders), orders)
    return call


# Whether sums go 16 bytes at a time in 16 bits, and in float32.
PLANES = {
    (8, 8, 14, 14): (True, True),
    (11, 16, 7, 7): (True, True),
    (8, 24, 7, 7): (True, True),  # 3 blocks side by side; channels begin in the middle of vectors
    (300, 8, 7, 7): (True, True),  # three groups, the last one shorter
    (9, 8, 3, 3): (True, True),
    (9, 8, 5, 15): (True, True),
    (9, 8, 2, 1): (True, True),  # a vector has lanes of four channels
    (10, 4, 14, 14): (True, True),
    (8, 4, 7, 7): (False, True),  # 196 elements a row: 8 do not divide them, 4 do
    (9, 12, 7, 14): (True, True),
    (8, 5, 7, 7): (False, False),
    (8, 3, 9, 9): (False, False),
    (7, 8, 7, 7): (False, False),  # few rows
    (1, 8, 7, 7): (False, False),
    (2, 3, 8, 8): (True, True),  # whole vectors a plane
    (3, 2, 16, 18): (True, True),
}


@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
@pytest.mark.parametrize("shape", PLANES, ids=str)
def test_planes(
    emulator: cuda_emulator.Emulator, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    case = Case(shape, dtype, "contiguous", "silu" if dtype is F32 else "relu")
    orders = ORDERS if case.shape[0] < 20 else ANY
    check(emulator, case, orders)
    check(emulator, Case(shape, dtype, "contiguous", training=False), ANY)


@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
@pytest.mark.parametrize("shape", PLANES, ids=str)
def test_width_of_loads(
    emulator: cuda_emulator.Emulator, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """In 16 bits, planes of 14x14 and 7x7 were loaded 2 bytes at a time by both sums."""
    call = Call(Case(shape, dtype, "contiguous"))
    wide = PLANES[shape][dtype is F32]
    width = 16 if wide else dtype.itemsize
    emulator.call("batch_norm_stats", call.input)
    loaded, _, loads, _ = emulator.moved(call.input)
    assert loaded == width * loads
    output, mean, invstd = run(emulator, "batch_norm_act", call.forward(), ANY)
    arguments = (
        call.grad, call.input, output, *call.affine(mean, invstd), *call.case.pointwise, True,
    )  # fmt: skip
    sums: Any = emulator.call("batch_norm_act_backward_reduce", *arguments)
    for t in (call.grad, call.input, output):
        loaded, _, loads, _ = emulator.moved(t)
        assert loaded == width * loads == t.numel() * t.itemsize
    _, stored, _, stores = emulator.moved(sums[1])
    assert stored == width * stores


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("shape", [(8, 64, 14, 14), (16, 64, 7, 7), (8, 64, 8, 8)], ids=str)
def test_shares_are_small(
    emulator: cuda_emulator.Emulator, shape: tuple[int, ...], layout: str
) -> None:
    """Blocks leave one share of a channel each. Of columns they would be 16 bytes for each place of
    a plane: as much as 8 rows in 16 bits."""
    x = laid_out(torch.randn(shape, dtype=F64), Case(shape, F16, layout), "")
    emulator.call("batch_norm_stats", x)
    _, stored, _, _ = emulator.moved()
    assert stored < 0.1 * x.numel() * x.itemsize


@pytest.mark.parametrize("offset", [("input",), ("residual",), ("grad",)], ids=str)
def test_planes_that_are_not_aligned(
    emulator: cuda_emulator.Emulator, offset: tuple[str, ...]
) -> None:
    for shape in ((8, 8, 14, 14), (11, 8, 7, 7)):
        check(emulator, Case(shape, F16, "contiguous", offset=offset), ANY)


# 16 parts of the lines, so that there is one group, and a thread has more vectors than a batch:
# samples of which the last batches have every number of vectors.
@pytest.mark.parametrize(
    ("samples", "channels", "dtype", "offset"),
    [
        (8 * 5 + 3, 2048, F32, ()),  # 5 or 6 vectors, in batches of 4 and 2
        (8 * 7 + 1, 2048, F32, ()),  # 7 or 8
        (8 * 17 + 3, 512, BF16, ("input",)),  # 17 or 18 elements, in batches of 16 and 8
        (8 * 9 + 5, 512, F64, ()),  # 9 or 10, in batches of 16, 8 and 4
    ],
    ids=str,
)
def test_tails_of_batches(
    emulator: cuda_emulator.Emulator,
    samples: int,
    channels: int,
    dtype: torch.dtype,
    offset: tuple[str, ...],
) -> None:
    case = Case((samples, channels), dtype, "contiguous", "silu", offset=offset)
    call = check(emulator, case, ANY)
    restored = run(
        emulator, "batch_norm_act_restore", (call.input, None, None, *restorable(call), 1.0), ANY
    )[0]
    mean, invstd = (t.double() for t in restorable(call))
    want = call.input.double() / invstd + mean
    torch.testing.assert_close(restored.double(), want, rtol=1e-2, atol=1e-2)


def restorable(call: Call) -> tuple[Tensor, Tensor]:
    channels = call.case.shape[1]
    values = torch.arange(channels, dtype=call.case.wide) % 5
    return values, 1 + values / 4


@pytest.mark.parametrize("bad", [float("inf"), float("nan")], ids=str)
@pytest.mark.parametrize("place", [(0, 0, 0), (7, 6, 6), (3, 2, 5)], ids=str)
def test_what_is_not_finite_stays_in_its_plane(
    emulator: cuda_emulator.Emulator, place: tuple[int, int, int], bad: float
) -> None:
    """Vectors have elements of two channels."""
    case = Case((8, 8, 7, 7), F16, "contiguous", residual=False)
    x = apart(case.shape)
    sample, row, column = place
    x[sample, 3, row, column] = bad
    call = Call(case, x)
    output, mean, invstd = check_forward(emulator, call)
    assert output[:, 3].isnan().all()
    assert int(output.isnan().sum()) == 8 * 49
    check_backward(emulator, call, output, mean, invstd)


@pytest.mark.parametrize("shape", [(64, 8, 7, 7), (16, 8, 14, 14)], ids=str)
@pytest.mark.parametrize("where", [0, -1])
def test_statistics_of_badly_placed_numbers(
    emulator: cuda_emulator.Emulator, shape: tuple[int, ...], where: int
) -> None:
    """Columns share the number that their sums are shifted by, and an outlier is in one of them."""
    for spread in (0.0, 1e4, -1e6):
        x = (torch.randn(shape, dtype=F64) + spread).float()
        x[where, :, where, where] = 1e5
        want, want_variance = truth.batch_norm_stats(x)
        mean, variance = statistics(emulator, x, ANY)
        assert ((variance - want_variance).abs() / want_variance).max().item() <= 1e-6
        assert ((mean - want).abs() / want_variance.sqrt()).max().item() <= 1e-7


def test_one_element(emulator: cuda_emulator.Emulator) -> None:
    for training in (True, False):
        case = Case((1, 1), F32, "contiguous", "silu", running=not training, training=training)
        call = check(emulator, case, ANY)
    vectors = (torch.tensor([3.0]), torch.tensor([0.5]))
    restored = run(emulator, "batch_norm_act_restore", (call.input, None, None, *vectors, 1.0), ANY)
    assert restored[0].equal(call.input * 2 + 3)


def test_fixed_statistics_and_nothing_saved(emulator: cuda_emulator.Emulator) -> None:
    """Without sums and without the output the gradient needs the input: relu's, the first formula
    of the table, too."""
    case = Case((5, 3, 4, 4), F32, "contiguous", residual=False, training=False, saves=False)
    call = Call(case)
    output, mean, invstd = run(emulator, "batch_norm_act", call.forward(), ANY)
    assert call.saved(output) is None
    arguments = (
        call.grad, call.input, None, *call.affine(mean, invstd), False, *case.pointwise, True,
        False, False,
    )  # fmt: skip
    found = run(emulator, "batch_norm_act_backward", arguments, ANY)[0]
    torch.testing.assert_close(found, truth.batch_norm_act_backward(*arguments)[0])
    assert case.pointwise.op == 0


# Passes: what each call moves, in tensors.


def passes(emulator: cuda_emulator.Emulator, *tensors: Tensor | None) -> list[tuple[float, float]]:
    """Loads and stores of each tensor by the last call, in tensors of its size."""
    found = []
    for t in tensors:
        assert t is not None
        loaded, stored, _, _ = emulator.moved(t)
        found.append((loaded / t.numel() / t.itemsize, stored / t.numel() / t.itemsize))
    return found


# By column and by plane, in vectors and in elements.
SHAPES = [((8, 8, 7, 7), F16), ((2, 3, 32, 16), F32), ((5, 3, 7, 7), BF16)]


@pytest.mark.parametrize(("shape", "dtype"), SHAPES, ids=str)
@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_passes_of_backward(
    emulator: cuda_emulator.Emulator, activation: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """With a residual, the second kernel takes the residual's gradient, which the first one has
    written, in the place of `grad` and of what was saved: 7 passes, which were 8."""
    for residual in (True, False):
        case = Case(shape, dtype, "contiguous", activation, residual, saves=False)
        call = Call(case)
        output, mean, invstd = run(emulator, "batch_norm_act", call.forward(), ANY)
        saved = call.saved(output)
        arguments = (
            call.grad, call.input, saved, *call.affine(mean, invstd), True, *case.pointwise, True,
            residual, True,
        )  # fmt: skip
        found: Any = emulator.call("batch_norm_act_backward", *arguments)
        if residual:
            tensors = (call.grad, call.input, saved, found[1], found[0])
            assert passes(emulator, *tensors) == [(1, 0), (2, 0), (1, 0), (1, 1), (0, 1)]
        else:
            tensors = (call.grad, call.input, found[0])
            assert passes(emulator, *tensors) == [(2, 0), (2, 0), (0, 1)]


@pytest.mark.parametrize(("shape", "dtype"), SHAPES, ids=str)
def test_passes_of_backward_with_fixed_statistics(
    emulator: cuda_emulator.Emulator, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """No gradient depends on a sum then: one kernel reads everything once."""
    case = Case(shape, dtype, "contiguous", training=False)
    call = Call(case)
    output, mean, invstd = run(emulator, "batch_norm_act", call.forward(), ANY)
    for residual in (True, False):
        arguments = (
            call.grad, call.input, output, *call.affine(mean, invstd), False, *case.pointwise,
            True, residual, True,
        )  # fmt: skip
        found: Any = emulator.call("batch_norm_act_backward", *arguments)
        assert passes(emulator, call.grad, call.input, output) == [(1, 0)] * 3
        written = found[: 1 + residual]
        assert passes(emulator, *written) == [(0, 1)] * len(written)
    # Nothing is left of the input, where a norm without activation needs no sum.
    arguments = (
        call.grad, call.input, None, *call.affine(mean, invstd), False, *Pointwise(), True,
        False, False,
    )  # fmt: skip
    found = emulator.call("batch_norm_act_backward", *arguments)
    assert passes(emulator, call.grad, call.input, found[0]) == [(1, 0), (0, 0), (0, 1)]


@pytest.mark.parametrize(("shape", "dtype"), SHAPES, ids=str)
def test_passes_of_forward(
    emulator: cuda_emulator.Emulator, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    for training in (True, False):
        call = Call(Case(shape, dtype, "contiguous", training=training))
        found: Any = emulator.call("batch_norm_act", *call.forward())
        x, *others = passes(emulator, call.input, call.residual, found[0])
        assert others == [(1, 0), (0, 1)]
        # The sums' first vectors are loaded again, which a cache has: all there are, in these small
        # tensors.
        assert x[1] == 0
        assert 2 < x[0] <= 3 if training else x[0] == 1


# Eval mode: mean and invstd are made where they are used.


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [F16, F32, F64], ids=str)
@pytest.mark.parametrize(
    "shape",
    [(8, 8, 7, 7), (300, 8, 7, 7), (8, 5, 7, 7), (2, 3, 16, 16), (3, 257, 2, 1), (70, 48)],
    ids=str,
)
def test_eval_mode_is_one_launch(
    emulator: cuda_emulator.Emulator, shape: tuple[int, ...], dtype: torch.dtype, layout: str
) -> None:
    """Every channel's mean and invstd are returned, once; the output is what they give."""
    case = Case(shape, dtype, layout, training=False)
    call = Call(case)
    assert launches(emulator, "batch_norm_act", call.forward()) == 1
    output, mean, invstd = run(emulator, "batch_norm_act", call.forward(), ANY)
    assert same_bits(mean, call.running_mean)
    assert call.running_var is not None
    want = (call.running_var.double() + 1e-5).rsqrt()
    torch.testing.assert_close(invstd.double(), want, rtol=torch.finfo(case.wide).eps / 1.8, atol=0)
    again = (call.input, call.residual, *call.affine(mean, invstd), *case.pointwise)
    assert same_bits(run(emulator, "batch_norm_act_apply", again, ANY)[0], output)
    emulator.call("batch_norm_act", *call.forward())
    found: Any = emulator.call("batch_norm_act", *call.forward())
    size = case.wide.itemsize
    for t in found[1:]:
        assert emulator.moved(t) == (0, shape[1] * size, 0, shape[1])


@pytest.mark.parametrize("eps", [0.0, 1e-30, 1e-5, 1e-3, 0.1, 1e5])
def test_inverse_deviation(emulator: cuda_emulator.Emulator, eps: float) -> None:
    """Rounded as if in double, which it was, over all of float32."""
    random = torch.Generator().manual_seed(3)
    variance = 10 ** (torch.rand(2000, generator=random, dtype=F64) * 70 - 35)
    variance = torch.cat([variance.float(), torch.tensor([0.0, float("inf"), float("nan"), 1.0])])
    x = torch.ones(1, len(variance))
    vectors = (torch.ones_like(variance), torch.zeros_like(variance))
    arguments = (x, None, None, *vectors, vectors[1], variance, False, 0.1, eps, *Pointwise())
    output, _, invstd = run(emulator, "batch_norm_act", arguments, ANY)
    want = 1 / (variance.double() + eps).sqrt()
    special = ~want.isfinite() | (want == 0)
    assert same_bits(invstd[special], want[special].float())
    error = ((invstd.double() - want) / want)[~special].abs().max().item()
    assert error <= 0.5001 * torch.finfo(F32).eps
    assert same_bits(output[0], invstd)


def test_eval_mode_in_place(emulator: cuda_emulator.Emulator) -> None:
    call = Call(Case((8, 8, 7, 7), F16, "contiguous", "leaky_relu", False, False, training=False))
    want = run(emulator, "batch_norm_act", call.forward(), ANY)
    arguments = (call.input, *call.forward()[3:])
    assert launches(emulator, "batch_norm_act_", arguments) == 1
    assert same_bits(call.input, want[0])
