"""How the emulated CUDA kernels of batch norm walk: whole vectors over planes of odd lengths, every
kind of tail, the passes over each tensor, and eval mode in one launch.

test_batch_norm_kernels.py has the numbers of every formula, dtype and option.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import cuda_emulator
from fusedtrain.reference import batch_norm as reference
from fusedtrain.reference.pointwise import Pointwise
from helpers.activations import DTYPES
from helpers.backends import same_bits
from helpers.batch_norm import Case, check, forward
from helpers.emulated import EmulatedOnce, launches, misaligned

pytestmark = pytest.mark.skipif(bool(cuda_emulator.why_not()), reason=cuda_emulator.why_not())


F32, F64, F16, BF16 = DTYPES


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


def whole(
    emulator: EmulatedOnce,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    activation: str = "relu",
    **options: Any,
) -> Case:
    """A contiguous case with a residual and branch scales."""
    options = {"residual": True, "branch": True, **options}
    return Case(apart(shape), dtype, activation, **options, ops=emulator)


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


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
@pytest.mark.parametrize("shape", PLANES, ids=str)
def test_planes(emulator: EmulatedOnce, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if dtype is F32 and shape[0] < 20:
        emulator.orders = cuda_emulator.ORDERS
    if dtype is F16 and list(PLANES).index(shape) % 2:
        dtype = BF16
    check(emulator, whole(emulator, shape, dtype, "silu" if dtype is F32 else "relu"))
    emulator.orders = EmulatedOnce.orders
    check(emulator, whole(emulator, shape, dtype, training=False))


@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
@pytest.mark.parametrize("shape", PLANES, ids=str)
def test_width_of_loads(emulator: EmulatedOnce, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """In 16 bits, planes of 14x14 and 7x7 were loaded 2 bytes at a time by both sums."""
    case = whole(emulator, shape, dtype)
    width = 16 if PLANES[shape][dtype is F32] else dtype.itemsize
    control = emulator.emulator
    emulator("batch_norm_stats", case.x)
    loaded, _, loads, _ = control.moved(case.x)
    assert loaded == width * loads
    output, mean, invstd = forward(emulator, case)
    shared = case.shared(mean, invstd)
    sums = emulator(
        "batch_norm_act_backward_reduce", case.grad, case.x, output, *shared, *case.formula, True
    )
    for t in (case.grad, case.x, output):
        loaded, _, loads, _ = control.moved(t)
        assert loaded == width * loads == t.numel() * t.itemsize
    _, stored, _, stores = control.moved(sums[1])
    assert stored == width * stores


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("shape", [(8, 64, 14, 14), (16, 64, 7, 7), (8, 64, 8, 8)], ids=str)
def test_shares_are_small(emulator: EmulatedOnce, shape: tuple[int, ...], layout: str) -> None:
    """Blocks leave one share of a channel each. Of columns they would be 16 bytes for each place of
    a plane: as much as 8 rows in 16 bits."""
    x = torch.randn(shape).to(F16)
    if layout == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last)
    emulator("batch_norm_stats", x)
    _, stored, _, _ = emulator.emulator.moved()
    assert stored < 0.1 * x.numel() * x.itemsize


@pytest.mark.parametrize("name", ["x", "residual", "grad"])
def test_planes_that_are_not_aligned(emulator: EmulatedOnce, name: str) -> None:
    for shape in ((8, 8, 14, 14), (11, 8, 7, 7)):
        case = whole(emulator, shape, F16)
        setattr(case, name, misaligned(getattr(case, name)))
        check(emulator, case)


# 16 parts of the lines, so that there is one group, and a thread has more vectors than a batch:
# samples of which the last batches have every number of vectors.
@pytest.mark.parametrize(
    ("samples", "channels", "dtype", "offset"),
    [
        (8 * 5 + 3, 2048, F32, False),  # 5 or 6 vectors, in batches of 4 and 2
        (8 * 7 + 1, 2048, F32, False),  # 7 or 8
        (8 * 17 + 3, 512, BF16, True),  # 17 or 18 elements, in batches of 16 and 8
        (8 * 9 + 5, 512, F64, False),  # 9 or 10, in batches of 16, 8 and 4
    ],
    ids=str,
)
def test_tails_of_batches(
    emulator: EmulatedOnce,
    samples: int,
    channels: int,
    dtype: torch.dtype,
    offset: bool,
) -> None:
    emulator.digits = 4.0  # a thread adds up whole columns
    case = whole(emulator, (samples, channels), dtype, "silu")
    if offset:
        case.x = misaligned(case.x)
    check(emulator, case)
    vectors = restorable(case)
    restored = emulator("batch_norm_act_restore", case.x, None, None, *vectors, 1.0)
    mean, invstd = (t.double() for t in vectors)
    want = case.x.double() / invstd + mean
    torch.testing.assert_close(restored.double(), want, rtol=1e-2, atol=1e-2)


def restorable(case: Case) -> tuple[Tensor, Tensor]:
    values = (torch.arange(case.x.size(1)) % 5).to(case.running_mean.dtype)
    return values, 1 + values / 4


@pytest.mark.parametrize("bad", [float("inf"), float("nan")], ids=str)
@pytest.mark.parametrize("place", [(0, 0, 0), (7, 6, 6), (3, 2, 5)], ids=str)
def test_what_is_not_finite_stays_in_its_plane(
    emulator: EmulatedOnce, place: tuple[int, int, int], bad: float
) -> None:
    """Vectors have elements of two channels."""
    emulator.orders = cuda_emulator.ORDERS
    case = whole(emulator, (8, 8, 7, 7), F16, residual=False)
    clean = forward(emulator, case)
    gradients = emulator("batch_norm_act_backward", *case.backward(*clean))
    sample, row, column = place
    case.x[sample, 3, row, column] = bad
    dirty = forward(emulator, case)
    assert dirty[0][:, 3].isnan().all()
    others = [0, 1, 2, 4, 5, 6, 7]
    dirty_gradients = emulator("batch_norm_act_backward", *case.backward(*dirty))
    for a, b in ((clean[0], dirty[0]), (gradients[0], dirty_gradients[0])):
        assert torch.equal(a[:, others], b[:, others])
    for a, b in ((clean[2], dirty[2]), *zip(gradients[2:], dirty_gradients[2:], strict=True)):
        assert torch.equal(a[others], b[others])


@pytest.mark.parametrize("shape", [(64, 8, 7, 7), (16, 8, 14, 14)], ids=str)
@pytest.mark.parametrize("where", [0, -1])
def test_outliers_of_columns(emulator: EmulatedOnce, shape: tuple[int, ...], where: int) -> None:
    """Columns share the number that their sums are shifted by, and an outlier is in one of them."""
    for spread in (0.0, 1e4, -1e6):
        x = (torch.randn(shape, dtype=F64) + spread).float()
        x[where, :, where, where] = 1e5
        want, want_variance = reference.batch_norm_stats(x)
        mean, variance = emulator("batch_norm_stats", x)
        assert ((variance - want_variance).abs() / want_variance).max().item() <= 1e-6
        assert ((mean - want).abs() / want_variance.sqrt()).max().item() <= 1e-7
        _, mean, invstd = emulator("batch_norm_act", x, *[None] * 6, True, 0.1, 0.0, *Pointwise())
        rounding = torch.finfo(F32).eps
        torch.testing.assert_close(invstd.double(), want_variance.rsqrt(), rtol=1e-6, atol=0)
        assert ((mean - want).abs() <= rounding * want.abs() + 1e-7 * want_variance.sqrt()).all()


def test_one_element(emulator: EmulatedOnce) -> None:
    case = Case(torch.randn(1, 1), F32, "silu", residual=True, training=False, ops=emulator)
    x, residual, _, weight, bias, *_, eps = case.forward()[:10]
    call = (x, residual, None, weight, bias, None, None, True, 0.1, eps, *case.formula)
    output, mean, _ = emulator("batch_norm_act", *call)
    assert mean.equal(x[0])
    torch.testing.assert_close(output, torch.nn.functional.silu(bias + residual), rtol=1e-6, atol=0)
    vectors = (torch.tensor([3.0]), torch.tensor([0.5]))
    restored = emulator("batch_norm_act_restore", x, None, None, *vectors, 1.0)
    assert restored.equal(x * 2 + 3)


def test_fixed_statistics_and_nothing_saved(emulator: EmulatedOnce) -> None:
    """Without sums and without the output the gradient needs the input: relu's, the first formula
    of the table, too."""
    case = whole(emulator, (5, 3, 4, 4), F32, residual=False, training=False)
    output, mean, invstd = forward(emulator, case)
    assert case.saved(output) is None
    assert case.formula.op == 0
    gradients = emulator(
        "batch_norm_act_backward", *case.backward(output, mean, invstd, True, False, False)
    )
    case.check_backward(gradients, case.truth())


# Passes: what each call moves, in tensors.


def passes(*tensors: Tensor | None) -> list[tuple[float, float]]:
    """Loads and stores of each tensor by the last call, in tensors of its size."""
    counts = []
    for t in tensors:
        assert t is not None
        loaded, stored, _, _ = cuda_emulator.load().moved(t)
        counts.append((loaded / t.numel() / t.itemsize, stored / t.numel() / t.itemsize))
    return counts


# Walks along columns and planes, in vectors and in elements.
SHAPES = [((8, 8, 7, 7), F16), ((2, 3, 32, 16), F32), ((5, 3, 7, 7), BF16)]


@pytest.mark.parametrize(("shape", "dtype"), SHAPES, ids=str)
@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_passes_of_backward(
    emulator: EmulatedOnce, activation: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """With a residual, the second kernel takes the residual's gradient, which the first one has
    written, in the place of `grad` and of what was saved: 7 passes, which were 8. In one launch
    nothing is read twice: 5."""
    is_one = emulator.whole and shape[0] != 5  # vectors of one element
    for residual in (True, False):
        case = whole(emulator, shape, dtype, activation, residual=residual)
        output, mean, invstd = forward(emulator, case)
        call = case.backward(output, mean, invstd, True, residual, True)
        gradients = emulator("batch_norm_act_backward", *call)
        if residual:
            tensors = (case.grad, case.x, case.saved(output), gradients[1], gradients[0])
            more = 0 if is_one else 1
            assert passes(*tensors) == [(1, 0), (1 + more, 0), (1, 0), (more, 1), (0, 1)]
        else:
            each = (1, 0) if is_one else (2, 0)
            assert passes(case.grad, case.x, gradients[0]) == [each, each, (0, 1)]


@pytest.mark.parametrize(("shape", "dtype"), SHAPES, ids=str)
def test_passes_of_backward_with_fixed_statistics(
    emulator: EmulatedOnce, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """No gradient depends on a sum then: one kernel reads everything once."""
    case = whole(emulator, shape, dtype, training=False)
    output, mean, invstd = forward(emulator, case)
    for residual in (True, False):
        call = case.backward(output, mean, invstd, True, residual, True)
        gradients = emulator("batch_norm_act_backward", *call)
        assert passes(case.grad, case.x, output) == [(1, 0)] * 3
        written = gradients[: 1 + residual]
        assert passes(*written) == [(0, 1)] * len(written)
    # Nothing is left of the input, where a norm without activation needs no sum.
    gradients = emulator(
        "batch_norm_act_backward", case.grad, case.x, None, *case.shared(mean, invstd), False,
        *Pointwise(), True, False, False,
    )  # fmt: skip
    assert passes(case.grad, case.x, gradients[0]) == [(1, 0), (0, 0), (0, 1)]


@pytest.mark.parametrize(("shape", "dtype"), SHAPES, ids=str)
def test_passes_of_forward(
    emulator: EmulatedOnce, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    for training in (True, False):
        case = whole(emulator, shape, dtype, training=training)
        output, _, _ = forward(emulator, case)
        x, *others = passes(case.x, case.residual, output)
        assert others == [(1, 0), (0, 1)]
        # The sums' first vectors are loaded again, which a cache has: all there are, in these small
        # tensors.
        assert x[1] == 0
        once = not training or (emulator.whole and shape[0] != 5)
        assert x[0] == 1 if once else 2 < x[0] <= 3


# Eval mode: mean and invstd are made where they are used.


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((8, 8, 7, 7), F16), ((300, 8, 7, 7), F64), ((8, 5, 7, 7), F16), ((2, 3, 16, 16), F32),
        ((3, 257, 2, 1), F64), ((70, 48), F32), ((70, 48), F16), ((8, 8, 7, 7), F32),
    ],
    ids=str,
)  # fmt: skip
def test_eval_mode_is_one_launch(
    emulator: EmulatedOnce, shape: tuple[int, ...], dtype: torch.dtype, layout: str
) -> None:
    """Every channel's mean and invstd are returned, once; the output is what they give."""
    x = apart(shape)
    if layout == "channels_last" and len(shape) == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    case = Case(x, dtype, residual=True, branch=True, training=False, ops=emulator)
    assert launches("batch_norm_act", case.forward()) == 1
    output, mean, invstd = forward(emulator, case)
    assert same_bits(mean, case.running_mean)
    for t in (mean, invstd):
        size = t.itemsize
        assert emulator.emulator.moved(t) == (0, shape[1] * size, 0, shape[1])
    want = (case.running_var.double() + case.eps).rsqrt()
    rounding = torch.finfo(invstd.dtype).eps / 1.8
    torch.testing.assert_close(invstd.double(), want, rtol=rounding, atol=0)
    again = (case.x, case.residual, *case.shared(mean, invstd), *case.formula)
    assert same_bits(emulator("batch_norm_act_apply", *again), output)


@pytest.mark.parametrize("eps", [0.0, 1e-30, 1e-5, 1e-3, 0.1, 1e5])
def test_inverse_deviation(emulator: EmulatedOnce, eps: float) -> None:
    """Rounded as if in double, which it was, over all of float32."""
    random = torch.Generator().manual_seed(3)
    variance = 10 ** (torch.rand(2000, generator=random, dtype=F64) * 70 - 35)
    variance = torch.cat([variance.float(), torch.tensor([0.0, float("inf"), float("nan"), 1.0])])
    x = torch.ones(1, len(variance))
    vectors = (torch.ones_like(variance), torch.zeros_like(variance))
    arguments = (x, None, None, *vectors, vectors[1], variance, False, 0.1, eps, *Pointwise())
    output, _, invstd = emulator("batch_norm_act", *arguments)
    want = 1 / (variance.double() + eps).sqrt()
    special = ~want.isfinite() | (want == 0)
    assert same_bits(invstd[special], want[special].float())
    error = ((invstd.double() - want) / want)[~special].abs().max().item()
    assert error <= 0.5001 * torch.finfo(F32).eps
    assert same_bits(output[0], invstd)


def test_eval_mode_in_place(emulator: EmulatedOnce) -> None:
    case = whole(
        emulator, (8, 8, 7, 7), F16, "leaky_relu", residual=False, branch=False, training=False
    )
    want, _, _ = forward(emulator, case)
    arguments = (case.x, *case.forward()[3:])
    assert launches("batch_norm_act_", arguments) == 1
    assert same_bits(case.x, want)
