"""Statistics, ill-conditioned and special values of the batch norm kernels of every backend,
against eager torch in float64.

test_batch_norm_kernels.py has the formulas, the layouts and the options.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fusedtrain.reference import batch_norm as reference
from fusedtrain.reference.pointwise import INDEX, Pointwise
from helpers.activations import DTYPES
from helpers.backends import Kernels, placed, same_bits
from helpers.batch_norm import Case, check, forward, last
from helpers.launches import NO_ELEMENTS
from helpers.processes import by_capability

pytestmark = pytest.mark.usefixtures("memory_is_full_of_nan")

F32, F64, F16, BF16 = DTYPES


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("momentum", [0.0, 0.1, 1.0])
def test_running_statistics(ops: Kernels, momentum: float, dtype: torch.dtype) -> None:
    tensors = [last(3, 5, 7), torch.randn(2, 1), torch.randn(2, 3, 300)]
    at = DTYPES.index(dtype) + int(2 * momentum)
    for x in tensors[at % 3 :][:1] if ops.slow else tensors:
        case = Case(x, dtype, momentum=momentum, ops=ops)
        arguments = case.forward()
        _, mean, _ = ops("batch_norm_act", *arguments)
        case.check_running(*arguments[5:7], case.truth())
        if momentum == 0.0:
            assert torch.equal(arguments[5], case.running_mean)
            assert torch.equal(arguments[6], case.running_var)
        if momentum == 1.0:
            assert torch.equal(arguments[5], mean)
            # A difference from the old mean would be rounded to -1e30.
            again = case.forward()
            again[5].fill_(1e30)
            ops("batch_norm_act", *again)
            assert torch.equal(again[5], mean)
        without = list(case.forward())
        without[5] = without[6] = None
        assert same_bits(ops("batch_norm_act", *without), ops("batch_norm_act", *case.forward()))
        # In eval mode they stay, and what is returned does not move with them later.
        case.training = False
        arguments = case.forward()
        _, mean, invstd = ops("batch_norm_act", *arguments)
        assert torch.equal(arguments[5], case.running_mean)
        assert torch.equal(arguments[6], case.running_var)
        arguments[5].fill_(7)
        arguments[6].fill_(7)
        case.check_statistics(mean.cpu().double(), invstd.cpu().double(), case.truth())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ratio", [1e2, 1e4])
def test_mean_far_from_zero(ops: Kernels, ratio: float, dtype: torch.dtype) -> None:
    """A mean of `ratio` deviations. 16-bit inputs are coarse; the truth takes them as rounded."""
    for x in (torch.randn(4, 3, 500) + ratio, last(4, 3, 500) - ratio):
        case = Case(x, dtype, "silu", ops=ops)
        if dtype.itemsize == 2 and ratio == 1e4:
            case = Case(x + 64 * torch.randn(x.shape), dtype, "silu", ops=ops)
        truth = case.truth()
        outputs = forward(ops, case)
        case.check_forward(outputs, truth)
        case.check_backward(ops("batch_norm_act_backward", *case.backward(*outputs)), truth)


@pytest.mark.parametrize("dtype", [F32, F64, BF16], ids=str)
def test_first_element_an_outlier(ops: Kernels, dtype: torch.dtype) -> None:
    n = 500 if ops.slow else 4000
    for x in (torch.randn(2, 3, n), last(2, 3, n)):
        x[0, :, 0] = torch.tensor([1e4, -1e4, 1e2])
        case = Case(x, dtype, "silu", ops=ops)
        check(ops, case)


@pytest.mark.parametrize("dtype", [F32, F64, BF16], ids=str)
def test_outliers_where_the_mean_is_guessed(ops: Kernels, dtype: torch.dtype) -> None:
    """The CPU kernel looks at three elements of a channel (norm_guess in csrc/cpu/isa)
    and adds up distances from their median: it has to see that it was misled."""
    n = 500 if ops.slow else 4000
    for x in (torch.randn(2, 3, n), last(2, 3, n)):
        for probe in (0.29, 0.53, 0.83):
            at = int(probe * 2 * n)
            x[at // n, :, at % n] = torch.tensor([1e4, -1e4, 1e2])
        check(ops, Case(x, dtype, "silu", ops=ops))


def test_a_mean_far_larger_than_the_deviation(ops: Kernels) -> None:
    if ops.digits > 4:
        pytest.skip("not a case: this backend sums shifted data in float32")
    for mean in (1e3, -1e5, 3e6):
        for x in (torch.randn(4, 3, 500), last(4, 3, 500)):
            case = Case(x, F32, "identity", ops=ops)
            case.x.add_(mean)
            outputs = forward(ops, case)
            case.check_statistics(outputs[1], outputs[2], case.truth())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_constant_channels(ops: Kernels, dtype: torch.dtype) -> None:
    """Variance 0: the output is f(bias), the gradient finite."""
    values = torch.tensor([0.0, 1.0, -0.1, 300.0, 12345.0])
    for make in (torch.ones(4, 5, 33), torch.ones(4, 33, 5).mT):
        case = Case(make, dtype, "silu", eps=1e-5, ops=ops)
        case.x.copy_(values.view(5, 1).expand(case.x.shape))
        truth = case.truth()
        outputs = forward(ops, case)
        case.check_forward(outputs, truth)
        torch.testing.assert_close(
            outputs[2].cpu(), torch.full_like(outputs[2].cpu(), 1e-5**-0.5), rtol=2e-6, atol=0
        )
        case.check_backward(ops("batch_norm_act_backward", *case.backward(*outputs)), truth)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")], ids=str)
@pytest.mark.parametrize("at", [(0, 0), (1, 3), (2, 39)], ids=["first", "middle", "last"])
def test_what_is_not_finite_stays_in_its_channel(
    ops: Kernels, at: tuple[int, int], value: float
) -> None:
    cases = (F32, torch.randn(3, 5, 40)), (BF16, last(3, 8, 40)), (F64, last(3, 5, 40))
    for dtype, x in cases[at[0] :: 2] if ops.slow else cases:
        case = Case(x, dtype, "relu", residual=True, ops=ops)
        clean = case.forward()
        outputs = ops("batch_norm_act", *clean)
        gradients = ops("batch_norm_act_backward", *case.backward(*outputs))
        case.x[at[0], 2, at[1]] = value
        dirty = case.forward()
        dirty_outputs = ops("batch_norm_act", *dirty)
        dirty_gradients = ops("batch_norm_act_backward", *case.backward(*dirty_outputs))
        others = [0, 1, *range(3, x.size(1))]
        for a, b in zip((*outputs, *gradients), (*dirty_outputs, *dirty_gradients), strict=True):
            a, b = (t if t.dim() == 1 else t.transpose(0, 1) for t in (a, b))
            assert torch.equal(a[others], b[others])
        for a, b in zip(clean[5:7], dirty[5:7], strict=True):
            assert torch.equal(a[others], b[others])
            assert not b[2].isfinite()
        assert dirty_outputs[2][2].isnan()
        # An infinite mean stays one.
        assert dirty_outputs[1][2].isnan() if value != value else dirty_outputs[1][2] == value
        # As in torch: one such number spoils its whole channel.
        assert dirty_outputs[0][:, 2].isnan().all()
        assert dirty_gradients[0][:, 2].isnan().all()


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_a_dropped_sample_has_no_part(ops: Kernels, dtype: torch.dtype) -> None:
    """Its branch_scale is 0: its output is f(residual), and the sums leave out its gradient."""
    case = Case(last(4, 5, 6), dtype, "identity", residual=True, branch=True, ops=ops)
    outputs = forward(ops, case)
    assert torch.equal(outputs[0][0], case.residual[0])
    other = case.grad.clone()
    other[0] = 100.0
    first, second = (
        ops("batch_norm_act_backward", *case.backward(*outputs, grad=g)) for g in (case.grad, other)
    )
    assert same_bits((first[0], *first[2:]), (second[0], *second[2:]))
    assert torch.equal(second[1], other)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_the_same_bits_every_time(ops: Kernels, dtype: torch.dtype) -> None:
    if not ops.kernel:
        pytest.skip("not a case: torch's sums depend on the number of threads")
    tensors = [torch.randn(2, 2, 70_000), last(35, 96, 81), last(7, 1100, 36)]
    for x in (last(3, 20, 9),) if ops.slow else tensors:
        case = Case(x, dtype, "silu", branch=True, ops=ops)
        results = []
        before = torch.get_num_threads()
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            arguments = case.forward()
            outputs = ops("batch_norm_act", *arguments)
            gradients = ops("batch_norm_act_backward", *case.backward(*outputs))
            results.append((*outputs, *gradients, *arguments[5:7]))
        torch.set_num_threads(before)
        assert all(same_bits(results[0], other) for other in results[1:])


SPREADS: dict[str, Callable[[Tensor], Tensor]] = {
    "large mean": lambda x: x + 1e4,
    "larger mean": lambda x: x - 1e6,
    "first element far off": lambda x: x.clone().index_fill_(0, torch.tensor([0]), 1e5),
    "first rows far off": lambda x: torch.cat([torch.full_like(x[:8], -1e4), x[8:]]),
    "last element far off": lambda x: x.clone().index_fill_(0, torch.tensor([len(x) - 1]), 1e5),
    "tiny": lambda x: x * 1e-12,
    "huge": lambda x: x * 1e12,
}


@pytest.mark.parametrize("spread", SPREADS)
def test_statistics_of_badly_placed_numbers(ops: Kernels, spread: str) -> None:
    """float32: the variance within 1e-6 of itself, the mean within 1e-7 standard deviations.

    (On the GPU at most 4e-7 and 2e-8 in five sets of numbers.)
    """
    n = 16 if ops.slow else 64
    values = SPREADS[spread](torch.randn(n * n, 12, dtype=F64)).float()
    x = values.view(n, n, 1, 12).permute(0, 3, 1, 2)
    for placed_x in (x, x.contiguous()):
        want, want_variance = reference.batch_norm_stats(placed_x)
        statistics = ops("batch_norm_stats", placed(placed_x, ops.device))
        mean, variance = (t.cpu() for t in statistics)
        assert ((variance - want_variance).abs() <= 1e-6 * want_variance).all()
        deviation = want_variance.sqrt().clamp_min(want.abs().max() * 1e-12)
        assert ((mean - want).abs() <= 1e-7 * deviation).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_constants_have_no_variance(ops: Kernels, dtype: torch.dtype) -> None:
    for value in (0.0, 0.1, -3.3, 60000.0):
        x = torch.full((33, 5, 2), value, dtype=dtype, device=ops.device)
        mean, variance = ops("batch_norm_stats", x)
        assert not variance.any() or not ops.kernel
        assert torch.equal(mean, x[0, :, 0].double()) or not ops.kernel


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_infinite_input_of_fixed_statistics(ops: Kernels, dtype: torch.dtype) -> None:
    for name, x in (("relu", last(3, 8, 5)), ("softplus", torch.randn(3, 5, 7))):
        case = Case(x, dtype, name, training=False, ops=ops)
        for sample, value in enumerate((float("inf"), float("-inf"), float("nan"))):
            case.x[sample, 2, 3] = value
        wide = [t.double().cpu() if isinstance(t, Tensor) else t for t in case.forward()]
        outputs = forward(ops, case)
        want = reference.batch_norm_act(*wide)[0]
        rounding = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(
            outputs[0].double().cpu(), want, rtol=rounding, atol=rounding, equal_nan=True
        )
        gradients = ops("batch_norm_act_backward", *case.backward(*outputs, True, True, True))
        assert gradients[0].isfinite().sum() >= x.numel() - 1


def test_a_sum_without_what_lies_beyond_the_data(ops: Kernels) -> None:
    """A formula makes inf * 0 of the zeros beyond the data."""
    x = torch.full((3, 2, 5), 3e38, device=ops.device)
    mean, invstd = x[0, :, 0].contiguous(), torch.ones(2, device=ops.device)
    squared = Case(torch.randn(2, 2), F32, "relu_squared").formula
    sums, _ = ops(
        "batch_norm_act_backward_reduce", torch.ones_like(x), x, None, None, -invstd, None, mean,
        invstd, *squared, False,
    )  # fmt: skip
    assert torch.equal(sums, torch.zeros_like(sums))


def test_bounds_are_rounded_as_the_output(ops: Kernels) -> None:
    """As in the kernels of the activation alone: backward compares the saved output with them."""
    if not ops.kernel:
        pytest.skip("not a case: plain torch rounds nothing but the output")
    case = Case(torch.randn(3, 5, 7, 3), BF16, "hardtanh", residual=True, ops=ops)
    case.formula = Pointwise(INDEX["hardtanh"], -0.301, 0.301)
    output, mean, invstd = forward(ops, case)
    assert output.max().item() == torch.tensor(0.301).bfloat16().item() < 0.301
    flat = output.abs() == output.max()
    assert flat.any()
    gradient = ops("batch_norm_act_backward", *case.backward(output, mean, invstd))[1]
    assert torch.equal(gradient == 0, flat | (case.grad == 0))
    case.residual = None
    gradient = ops("batch_norm_act_backward", *case.backward(output, mean, invstd))[1]
    assert (gradient == 0).any()


@NO_ELEMENTS
@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 4, 0), (2, 0, 3)])
def test_no_elements(ops: Kernels, shape: tuple[int, ...]) -> None:
    x = torch.empty(shape, device=ops.device)
    mean, variance = ops("batch_norm_stats", x)
    assert mean.shape == variance.shape == shape[1:2]
    assert not mean.any()
    assert not variance.any()
    if not ops.kernel:  # plain torch divides by the number of elements
        return
    silu = Pointwise(INDEX["silu"])
    vectors = [torch.ones(shape[1], device=ops.device) for _ in range(2)]
    running = [torch.full_like(t, 0.5) for t in vectors]
    output, mean, invstd = ops(
        "batch_norm_act", x, None, None, *vectors, *running, True, 0.1, 1e-5, *silu
    )
    assert output.shape == shape
    assert all((t == 0.5).all() for t in running)
    gradients = ops(
        "batch_norm_act_backward", x, x, x, None, *vectors, mean, invstd, True, *silu, True, True,
        True,
    )  # fmt: skip
    assert [g.shape for g in gradients] == [shape, shape, shape[1:2], shape[1:2]]
    assert not gradients[2].any()
    assert not gradients[3].any()


CAPABILITIES = """
import torch
from helpers.batch_norm import Case, last
ops, results = torch.ops.fusedtrain, []
torch.manual_seed(0)
for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
    for x in (torch.randn(3, 7, 61), last(3, 7, 61), torch.randn(2, 3, 1100), last(3, 130, 5)):
        for name in ("silu", "softplus"):
            for residual in (False, True):
                case = Case(x, dtype, name, residual=residual, branch=residual)
                arguments = case.forward()
                outputs = ops.batch_norm_act(*arguments)
                gradients = ops.batch_norm_act_backward(*case.backward(*outputs))
                results.append((*outputs, *gradients, *arguments[5:7]))
torch.save(results, {path!r})
"""


@pytest.mark.slow
def test_cpu_capabilities_agree(tmp_path: Path) -> None:
    """The three units differ by roundings (FMA) only."""
    results = by_capability(CAPABILITIES, tmp_path)
    for capability in results.keys() - {"default"}:
        for ours, theirs in zip(results[capability], results["default"], strict=True):
            for a, b in zip(ours, theirs, strict=True):
                digits = 4 * torch.finfo(a.dtype).eps
                if a.numel():
                    size = b.abs().max().item()
                    torch.testing.assert_close(a, b, rtol=digits, atol=4 * digits * (1 + size))
