"""The CUDA kernels of batch norm, emulated, beside the reference in float64.

Outputs are full of NaN before a kernel runs. Where a test says nothing else, every call runs with
its threads in three orders, which must give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import cuda_emulator
import pytest
import torch
from _cases import POINTWISE
from _kernels import same_bits
from _launches import NO_ELEMENTS
from torch import Tensor

from fusedtrain.reference import ACTIVATIONS
from fusedtrain.reference import batch_norm as truth
from fusedtrain.reference.pointwise import IDENTITY, INDEX, Pointwise

pytestmark = pytest.mark.skipif(bool(cuda_emulator.why_not()), reason=cuda_emulator.why_not())

F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
DTYPES = (F32, F64, F16, BF16)

# In eps of the dtype, relative to max(|expected|, 1): one rounding of the output for 16 bits, and
# what float math is off by otherwise. Backward is given the output that forward has rounded.
ELEMENTS = {F32: 16.0, F64: 64.0, F16: 0.6, BF16: 0.6}
# In eps of the type that is computed in, relative to the sum of the magnitudes of all terms: what
# the formulas may be off by (eager torch's gelu_tanh in float64, the truth here, is by 40 eps).
SUMS = {F32: 8.0, F64: 64.0}
# In eps, relative to the numbers themselves, whose standard deviation is of their size.
STATISTICS = {F32: 4.0, F64: 16.0}


@dataclass(frozen=True)
class Case:
    """What one call of batch norm is made of."""

    shape: tuple[int, ...] = (3, 24, 5, 3)
    dtype: torch.dtype = F32
    layout: str = "channels_last"
    activation: str | None = "relu"
    residual: bool = True
    branch_scale: bool = True
    weight: bool = True
    bias: bool = True
    training: bool = True
    running: bool = True
    saves: bool = True  # what backward takes, where there is no residual: the output, or nothing
    momentum: float = 0.1
    offset: tuple[str, ...] = ()  # tensors that are not aligned to 16 bytes

    @property
    def wide(self) -> torch.dtype:
        return F64 if self.dtype is F64 else F32

    @property
    def pointwise(self) -> Pointwise:
        if self.activation is None:
            return Pointwise()
        parameters = (*ACTIVATIONS[self.activation].example, 0.0, 0.0)
        return Pointwise(INDEX[self.activation], parameters[0], parameters[1])


def laid_out(values: Tensor, case: Case, name: str) -> Tensor:
    values = values.to(case.dtype)
    if case.layout == "channels_last" and values.dim() == 4:
        values = values.contiguous(memory_format=torch.channels_last)
    if name in case.offset:
        memory = torch.empty(values.numel() + 1, dtype=values.dtype)
        return memory.as_strided(values.shape, values.stride(), 1).copy_(values)
    return values


class Call:
    """The tensors of a case, always the same ones."""

    def __init__(self, case: Case, x: Tensor | None = None) -> None:
        random = torch.Generator().manual_seed(1)
        samples, channels = case.shape[:2]

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=random, dtype=F64)

        def vector(there: bool, size: int, positive: bool = False) -> Tensor | None:
            values = normal(size).to(case.wide)
            return (values.square() + 0.5 if positive else values) if there else None

        values = normal(*case.shape) * 2 + 1 if x is None else x
        self.case = case
        self.input = laid_out(values, case, "input")
        residual = laid_out(normal(*case.shape), case, "residual")
        self.residual = residual if case.residual else None
        self.grad = laid_out(normal(*case.shape), case, "grad")
        self.branch_scale = vector(case.branch_scale, samples)
        self.weight = vector(case.weight, channels)
        self.bias = vector(case.bias, channels)
        self.running_mean = vector(case.running, channels)
        self.running_var = vector(case.running, channels, positive=True)

    def forward(self) -> tuple[Any, ...]:
        return (
            self.input, self.residual, self.branch_scale, self.weight, self.bias,
            self.running_mean, self.running_var, self.case.training, self.case.momentum, 1e-5,
            *self.case.pointwise,
        )  # fmt: skip

    def saved(self, output: Tensor) -> Tensor | None:
        pointwise = self.case.pointwise
        if pointwise.op == IDENTITY:
            return None
        if pointwise.saves_output:
            return output if self.case.residual or self.case.saves else None
        return self.residual

    def affine(self, mean: Tensor, invstd: Tensor) -> tuple[Any, ...]:
        return self.branch_scale, self.weight, self.bias, mean, invstd


def wide(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Copies, tensors in float64."""
    return tuple(
        (a.to(F64) if a.is_floating_point() else a).clone() if isinstance(a, Tensor) else a
        for a in arguments
    )


@pytest.fixture(scope="module")
def emulator() -> Iterator[cuda_emulator.Emulator]:
    emulator = cuda_emulator.load()
    yield emulator
    emulator.set_order("forward")


ORDERS = cuda_emulator.ORDERS
ANY = ("shuffled",)


def run(
    emulator: cuda_emulator.Emulator,
    name: str,
    arguments: tuple[Any, ...],
    orders: tuple[str, ...] = ORDERS,
) -> tuple[Tensor, ...]:
    """What an op returns, in every order. It may change arguments 5 and 6."""
    kept = [a.clone() if isinstance(a, Tensor) else a for a in arguments[5:7]]
    first: tuple[Any, ...] = ()
    for order in orders:
        for a, before in zip(arguments[5:7], kept, strict=True):
            if name == "batch_norm_act" and isinstance(a, Tensor):
                a.copy_(before)
        emulator.set_order(order)
        result: Any = emulator.call(name, *arguments)
        result = result if isinstance(result, tuple) else (result,)
        moved = tuple(a.clone() for a in arguments[5:7] if isinstance(a, Tensor))
        assert not first or same_bits(first, (*result, *moved)), f"{name} depends on the {order}"
        first = (*result, *moved)
    return result  # type: ignore[no-any-return]


def assert_close(actual: Tensor, expected: Tensor, eps: float, size: Tensor | float = 0.0) -> None:
    """Within `eps` of the dtype's, relative to `size`, or to the larger of |expected| and 1."""
    assert actual.shape == expected.shape
    if actual.numel() == 0:
        return
    scale = size if isinstance(size, Tensor) else expected.abs().clamp_min(1)
    equal = (actual.double() == expected) | (actual.isnan() & expected.isnan())
    error = torch.where(equal, 0.0, (actual.double() - expected).abs() / scale)
    worst = error.max().item() / torch.finfo(actual.dtype).eps
    assert worst <= eps, f"error of {worst:.2f} eps, allowed {eps}"


def sizes_of_sums(call: Call, mean: Tensor, invstd: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Of the terms of the two sums of backward, given the gradient of what is normalised."""
    x = call.input.double()
    normalised = (x - truth.per_channel(mean.double(), x)) * truth.per_channel(invstd.double(), x)
    return truth._over_channels(grad.abs()), truth._over_channels((grad * normalised).abs())


def check_forward(
    emulator: cuda_emulator.Emulator, call: Call, orders: tuple[str, ...] = ORDERS
) -> tuple[Tensor, Tensor, Tensor]:
    case = call.case
    arguments = call.forward()
    expected = wide(arguments)
    want, want_mean, want_invstd = truth.batch_norm_act(*expected)
    output, mean, invstd = run(emulator, "batch_norm_act", arguments, orders)
    assert output.dtype is case.dtype
    assert output.stride() == torch.empty_like(call.input).stride()
    limit = STATISTICS[case.wide]
    spread = torch.maximum(want_mean.abs(), 1 / want_invstd)
    assert_close(mean, want_mean, limit, spread)
    assert_close(invstd, want_invstd, limit, want_invstd)
    if case.running:
        assert_close(call.running_mean, expected[5], limit)  # type: ignore[arg-type]
        assert_close(call.running_var, expected[6], limit)  # type: ignore[arg-type]
    assert_close(output, want, ELEMENTS[case.dtype])
    return output, mean, invstd


def check_backward(
    emulator: cuda_emulator.Emulator,
    call: Call,
    output: Tensor,
    mean: Tensor,
    invstd: Tensor,
    orders: tuple[str, ...] = ORDERS,
) -> None:
    case, saved = call.case, call.saved(output)
    affine = call.affine(mean, invstd)
    arguments = (
        call.grad, call.input, saved, *affine, case.training, *case.pointwise, True,
        case.residual, True,
    )  # fmt: skip
    want = truth.batch_norm_act_backward(*wide(arguments))
    got = run(emulator, "batch_norm_act_backward", arguments, orders)
    limit = ELEMENTS[case.dtype]
    gradient = truth.batch_norm_act_backward_reduce(
        *wide((call.grad, call.input, saved, *affine, *case.pointwise, True))
    )[1]
    if call.branch_scale is not None:
        gradient = gradient * truth.per_sample(call.branch_scale.double(), gradient)
    sizes = sizes_of_sums(call, mean, invstd, gradient)
    size = want[0].abs().clamp_min(1)
    if case.residual and case.training:
        # It is made of the residual's gradient, which has been rounded by half an eps.
        scale = invstd.double() * (1.0 if call.weight is None else call.weight.double().abs())
        size = size + 0.5 / limit * (gradient * truth.per_channel(scale, gradient)).abs()
    assert_close(got[0], want[0], limit, size)
    assert_close(got[1], want[1], limit)
    assert_close(got[2], want[2], SUMS[case.wide], sizes[1].clamp_min(1e-30))
    assert_close(got[3], want[3], SUMS[case.wide], sizes[0].clamp_min(1e-30))


def check(emulator: cuda_emulator.Emulator, case: Case, orders: tuple[str, ...] = ORDERS) -> Call:
    call = Call(case)
    check_backward(emulator, call, *check_forward(emulator, call, orders), orders)
    return call


@pytest.mark.parametrize("layout", ["channels_last", "contiguous"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", [None, *POINTWISE], ids=str)
def test_every_formula(
    emulator: cuda_emulator.Emulator, activation: str | None, dtype: torch.dtype, layout: str
) -> None:
    """channels_last: 16 bytes at a time, by the kernels of one formula. Else element by element."""
    shape = (3, 24, 5, 3) if layout == "channels_last" else (5, 7, 3)
    case = Case(shape, dtype, layout, activation)
    check(emulator, case, ANY)
    # Without a residual, the output is computed again.
    check(emulator, replace(case, residual=False, saves=False, branch_scale=False), ANY)


@pytest.mark.parametrize("layout", ["channels_last", "contiguous"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("activation", [None, "relu", "mish"], ids=str)
def test_what_may_be_missing(
    emulator: cuda_emulator.Emulator, activation: str | None, dtype: torch.dtype, layout: str
) -> None:
    for there in product((False, True), repeat=5):
        residual, branch_scale, weight, bias, training = there
        case = Case(
            (2, 8, 8, 2), dtype, layout, activation, residual, branch_scale, weight, bias, training
        )
        check(emulator, case, ANY)


@pytest.mark.parametrize("layout", ["channels_last", "contiguous"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels", [1, 3, 5, 64, 257])
def test_shapes(
    emulator: cuda_emulator.Emulator, channels: int, dtype: torch.dtype, layout: str
) -> None:
    for inner, samples in ((1, 40), (2, 9), (7, 3), (49, 2), (1023, 2)):
        if channels * inner > 15000:  # a second of emulation
            continue
        shape = (samples, channels) if inner == 1 else (samples, channels, inner, 1)
        check(emulator, Case(shape, dtype, layout), ORDERS if channels < 64 else ANY)


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ((2, 3, 64, 32), "contiguous"),  # a line is a channel, 16 bytes at a time
        ((2, 3, 40, 25), "contiguous"),  # the same, with an end that fills half a warp
        ((1, 1, 8192), "contiguous"),
        ((16, 8, 7, 7), "contiguous"),  # rows of an odd length: wide where there are no sums
        ((300, 48), "contiguous"),  # 12 lines side by side: 8 and 4
        ((16, 8, 17, 5), "channels_last"),  # one line
    ],
    ids=str,
)
def test_walks(
    emulator: cuda_emulator.Emulator, shape: tuple[int, ...], layout: str, dtype: torch.dtype
) -> None:
    check(emulator, Case(shape, dtype, layout, "silu"))


@pytest.mark.parametrize("shape", [(4, 16, 8, 8), (3, 8, 48, 16)], ids=str)
@pytest.mark.parametrize("layout", ["channels_last", "contiguous"])
@pytest.mark.parametrize("offset", [("input",), ("residual",), ("grad",)], ids=str)
def test_alignment(
    emulator: cuda_emulator.Emulator, offset: tuple[str, ...], layout: str, shape: tuple[int, ...]
) -> None:
    for dtype, activation in ((F32, "mish"), (F16, "relu")):
        check(emulator, Case(shape, dtype, layout, activation, offset=offset), ANY)


def test_vectors_that_are_not_aligned(emulator: cuda_emulator.Emulator) -> None:
    """weight, bias and the rest begin 4 bytes after a multiple of 16."""
    call = Call(Case())
    for name in ("branch_scale", "weight", "bias", "running_mean", "running_var"):
        values = getattr(call, name)
        setattr(call, name, torch.empty(values.numel() + 1)[1:].copy_(values))
    output, mean, invstd = check_forward(emulator, call)
    mean, invstd = (torch.empty(25)[1:].copy_(t) for t in (mean, invstd))
    check_backward(emulator, call, output, mean, invstd)


# Statistics.


def statistics(
    emulator: cuda_emulator.Emulator, x: Tensor, orders: tuple[str, ...] = ORDERS
) -> tuple[Tensor, Tensor]:
    mean, variance = run(emulator, "batch_norm_stats", (x,), orders)
    assert mean.dtype == variance.dtype == F64
    return mean, variance


SPREADS = {
    "large mean": lambda x: x + 1e4,
    "larger mean": lambda x: x - 1e6,
    "first element far off": lambda x: x.clone().index_fill_(0, torch.tensor([0]), 1e5),
    "first rows far off": lambda x: torch.cat([torch.full_like(x[:8], -1e4), x[8:]]),
    "last element far off": lambda x: x.clone().index_fill_(0, torch.tensor([len(x) - 1]), 1e5),
    "constant": lambda x: x * 0 + 1234.5678,
    "tiny": lambda x: x * 1e-12,
    "huge": lambda x: x * 1e12,
}


@pytest.mark.parametrize("layout", ["channels_last", "contiguous"])
@pytest.mark.parametrize("spread", SPREADS)
def test_statistics_of_badly_placed_numbers(
    emulator: cuda_emulator.Emulator, spread: str, layout: str
) -> None:
    """float32: the variance within 1e-6 of itself, the mean within 1e-7 standard deviations.

    (At most 4e-7 and 2e-8 in five sets of numbers.)
    """
    values = SPREADS[spread](torch.randn(4096, 12, dtype=F64)).float()
    x = values.view(64, 64, 1, 12).permute(0, 3, 1, 2)
    x = x if layout == "channels_last" else x.contiguous()
    want, want_variance = truth.batch_norm_stats(x)
    mean, variance = statistics(emulator, x, ANY)
    error = (variance - want_variance).abs() / want_variance.clamp_min(1e-300)
    assert error.max().item() <= 1e-6 if spread != "constant" else bool((variance == 0).all())
    deviation = want_variance.sqrt().clamp_min(want.abs().max() * 1e-12)
    assert ((mean - want).abs() / deviation).max().item() <= 1e-7


@pytest.mark.parametrize("layout", ["channels_last", "contiguous"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_statistics_of_every_dtype(
    emulator: cuda_emulator.Emulator, dtype: torch.dtype, layout: str
) -> None:
    x = laid_out(
        torch.randn(8, 9, 24, 8, dtype=F64) * 3 + 100, Case(layout=layout, dtype=dtype), ""
    )
    want, want_variance = truth.batch_norm_stats(x)
    mean, variance = statistics(emulator, x)
    eps = torch.finfo(F64 if dtype is F64 else F32).eps
    torch.testing.assert_close(mean, want, rtol=4 * eps, atol=0)
    torch.testing.assert_close(
        variance, want_variance, rtol=(1e4 if dtype is F64 else 8) * eps, atol=0
    )


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")], ids=str)
@pytest.mark.parametrize("where", [0, 7, -1])
@pytest.mark.parametrize("layout", ["channels_last", "contiguous"])
def test_what_is_not_finite(
    emulator: cuda_emulator.Emulator, layout: str, where: int, bad: float
) -> None:
    """It spoils its channel as in torch (the mean is infinite, not nan), and no other one."""
    case = Case((4, 8, 10, 4), layout=layout, residual=False)
    x = torch.randn(case.shape, dtype=F64)
    flat = x[:, 3].reshape(-1)
    flat[where] = bad
    x[:, 3] = flat.view(4, 10, 4)
    call = Call(case, x)
    output, mean, invstd = check_forward(emulator, call)
    assert output[:, 3].isnan().all()
    assert int(output.isnan().sum()) == 160
    check_backward(emulator, call, output, mean, invstd)


def test_infinite_inputs_with_fixed_statistics(emulator: cuda_emulator.Emulator) -> None:
    case = Case(training=False, residual=False)
    call = Call(case)
    call.input[0, 0, 0] = float("inf")
    call.input[0, 1, 0] = float("-inf")
    output, mean, invstd = run(emulator, "batch_norm_act", call.forward())
    want = truth.batch_norm_act(*wide(call.forward()))[0]
    assert_close(output, want, ELEMENTS[F32])
    arguments = (
        call.grad, call.input, output, *call.affine(mean, invstd), False, *case.pointwise, True,
        False, False,
    )  # fmt: skip
    grad, *_ = run(emulator, "batch_norm_act_backward", arguments)
    assert grad.isfinite().all()
    assert_close(grad, truth.batch_norm_act_backward(*wide(arguments))[0], ELEMENTS[F32])


@pytest.mark.parametrize("momentum", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("dtype", [F64, BF16], ids=str)
def test_running_statistics(
    emulator: cuda_emulator.Emulator, dtype: torch.dtype, momentum: float
) -> None:
    case = Case(dtype=dtype, momentum=momentum)
    before, call = Call(case), Call(case)
    check_forward(emulator, call)
    assert call.running_mean is not None
    moved = not torch.equal(call.running_mean, before.running_mean)  # type: ignore[arg-type]
    assert moved == (momentum != 0)
    check_forward(emulator, Call(replace(case, running=False)))


def test_running_statistics_stay_in_eval_mode(emulator: cuda_emulator.Emulator) -> None:
    case = Case(training=False)
    call, before = Call(case), Call(case)
    _, mean, _ = check_forward(emulator, call)
    assert call.running_mean is not None
    assert torch.equal(call.running_mean, before.running_mean)  # type: ignore[arg-type]
    assert torch.equal(mean, call.running_mean)


def test_variance_is_never_negative(emulator: cuda_emulator.Emulator) -> None:
    for dtype, value in product(DTYPES, (0.0, 0.1, -3.3, 60000.0)):
        x = torch.full((33, 5, 2), value, dtype=dtype)
        mean, variance = statistics(emulator, x, ANY)
        assert bool((variance == 0).all())
        assert bool((mean == x.double()[0, 0, 0]).all())


# The ops that synchronised batch norm and frozen layers use.


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("activation", [None, "relu", "silu"], ids=str)
def test_the_parts_of_a_step(
    emulator: cuda_emulator.Emulator, activation: str | None, dtype: torch.dtype
) -> None:
    case = Case(activation=activation, dtype=dtype)
    call = Call(case)
    mean, variance = statistics(emulator, call.input)
    mean, invstd = mean.float(), (variance + 1e-5).rsqrt().float()
    affine, pointwise = call.affine(mean, invstd), tuple(case.pointwise)
    arguments = (call.input, call.residual, *affine, *pointwise)
    (output,) = run(emulator, "batch_norm_act_apply", arguments)
    assert_close(output, truth.batch_norm_act_apply(*wide(arguments)), ELEMENTS[dtype])

    saved = call.saved(output)
    for needs_residual in (False, True):
        arguments = (call.grad, call.input, saved, *affine, *pointwise, needs_residual)
        sums, grad_residual = run(emulator, "batch_norm_act_backward_reduce", arguments)
        want, want_residual = truth.batch_norm_act_backward_reduce(*wide(arguments))
        assert sums.dtype is F64
        torch.testing.assert_close(sums, want, rtol=1e-5, atol=1e-5)
        assert_close(grad_residual, want_residual, ELEMENTS[dtype])

        for averages in (None, want / 45):
            arguments = (
                call.grad, call.input, saved, *affine, averages, *pointwise, needs_residual,
            )  # fmt: skip
            got = run(emulator, "batch_norm_act_backward_apply", arguments)
            expected = truth.batch_norm_act_backward_apply(*wide(arguments))
            for ours, theirs in zip(got, expected, strict=True):
                assert_close(ours, theirs, ELEMENTS[dtype])


def compare_needed(
    got: tuple[Tensor, ...], want: tuple[Tensor, ...], needs: tuple[bool, bool, bool], eps: float
) -> None:
    """Gradients of input, residual, weight and bias: what nobody needs has no elements."""
    for ours, theirs, needed in zip(got, want, (*needs, needs[2]), strict=True):
        if needed:
            assert_close(ours, theirs, eps)
        else:
            assert ours.numel() == 0


@pytest.mark.parametrize("needs_residual", [False, True])
@pytest.mark.parametrize("layout", ["channels_last", "contiguous"])
@pytest.mark.parametrize("activation", [None, "relu"], ids=str)
def test_frozen_without_the_input(
    emulator: cuda_emulator.Emulator, activation: str | None, layout: str, needs_residual: bool
) -> None:
    case = Case(activation=activation, layout=layout, training=False)
    call = Call(case)
    output, mean, invstd = run(emulator, "batch_norm_act", call.forward())
    for needs_input in (False, True):
        arguments = (
            call.grad, None, call.saved(output), *call.affine(mean, invstd), False,
            *case.pointwise, needs_input, needs_residual, False,
        )  # fmt: skip
        got = run(emulator, "batch_norm_act_backward", arguments)
        want = truth.batch_norm_act_backward(*wide(arguments))
        compare_needed(got, want, (needs_input, needs_residual, False), ELEMENTS[F32])


def test_gradients_that_nobody_needs(emulator: cuda_emulator.Emulator) -> None:
    call = Call(Case())
    output, mean, invstd = run(emulator, "batch_norm_act", call.forward())
    for training, *needs in product((False, True), repeat=4):
        arguments = (
            call.grad, call.input, output, *call.affine(mean, invstd), training,
            *call.case.pointwise, *needs,
        )  # fmt: skip
        got = run(emulator, "batch_norm_act_backward", arguments, ANY)
        want = truth.batch_norm_act_backward(*wide(arguments))
        compare_needed(got, want, (*needs[:2], training or needs[2]), 64)


@pytest.mark.parametrize(
    "shape", [(0, 4, 3), (2, 4, 0), pytest.param((2, 0, 3), marks=NO_ELEMENTS)], ids=str
)
def test_no_elements(emulator: cuda_emulator.Emulator, shape: tuple[int, ...]) -> None:
    mean, variance = statistics(emulator, torch.empty(shape))
    assert not mean.any()
    assert not variance.any()
    call = Call(Case(shape, layout="contiguous"))
    before = Call(call.case)
    output, mean, invstd = run(emulator, "batch_norm_act", call.forward())
    assert output.shape == shape
    assert torch.equal(call.running_mean, before.running_mean)  # type: ignore[arg-type]
    arguments = (
        call.grad, call.input, output, *call.affine(mean, invstd), True, *call.case.pointwise, True,
        True, True,
    )  # fmt: skip
    grads = run(emulator, "batch_norm_act_backward", arguments)
    assert [g.shape for g in grads] == [shape, shape, shape[1:2], shape[1:2]]
    assert not grads[2].any()
    assert not grads[3].any()


def launches(emulator: cuda_emulator.Emulator, name: str, arguments: tuple[Any, ...]) -> int:
    before = emulator.c.emulator_launches()
    emulator.call(name, *arguments)
    return int(emulator.c.emulator_launches() - before)


def test_number_of_launches(emulator: cuda_emulator.Emulator) -> None:
    call = Call(Case())
    assert launches(emulator, "batch_norm_act", call.forward()) == 3
    assert launches(emulator, "batch_norm_act", Call(Case(training=False)).forward()) == 1
    output, mean, invstd = run(emulator, "batch_norm_act", call.forward())
    for training, expected in ((True, 3), (False, 2)):
        arguments = (
            call.grad, call.input, output, *call.affine(mean, invstd), training,
            *call.case.pointwise, True, True, True,
        )  # fmt: skip
        assert launches(emulator, "batch_norm_act_backward", arguments) == expected
