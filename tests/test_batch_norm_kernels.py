"""One table of cases for the batch norm kernels of every backend, against eager torch in float64:
numbers, layouts, options, the split ops, running statistics, ill-conditioned and special values.

tests/test_batch_norm.py has the function and the modules.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from _batch_norm_cases import FORMULAS, LAYOUTS, Case, close, last, wide_dtype
from _cases import DTYPES
from _kernels import BACKENDS, Kernels, placed, same_bits
from torch import Tensor

from fusedtrain.reference import FAMILIES

F32, F64, F16, BF16 = DTYPES
# Backward takes: nothing, the output, the input.
THREE = ("identity", "softplus", "silu")


@pytest.fixture(params=BACKENDS)
def ops(request: pytest.FixtureRequest) -> Kernels:
    kernels = BACKENDS[request.param]()
    if not all(map(kernels.has, FAMILIES["batch_norm"])):
        pytest.skip(f"{request.param} has no batch norm")
    return kernels


@pytest.fixture(autouse=True)
def _memory_is_full_of_nan() -> Iterator[None]:
    """What is not written is seen: memory that torch hands out is filled with NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


def forward(ops: Kernels, case: Case) -> tuple[Tensor, Tensor, Tensor]:
    return ops("batch_norm_act", *case.forward())


def check(ops: Kernels, case: Case, grad: Tensor | None = None) -> None:
    """Forward and backward, everything asked for; nothing but running statistics is written to."""
    given = [t for t in (case.x, case.residual, case.grad) if t is not None]
    kept = [t.clone() for t in given]
    truth = case.truth()
    arguments = case.forward()
    found = ops("batch_norm_act", *arguments)
    case.check_forward(found, truth)
    # What `fusedtrain.recompute` relies on.
    again = ops("batch_norm_act_apply", *arguments[:5], *found[1:], *arguments[-3:])
    assert same_bits(again, found[0])
    case.check_running(*arguments[5:7], truth)
    gradients = ops("batch_norm_act_backward", *case.backward(*found, grad=grad))
    case.check_backward(gradients, truth)
    assert all(map(torch.equal, given, kept))
    for t in (found[0], *gradients[:2]):
        assert t.dtype is case.dtype
        if ops.kernel and t.numel():
            assert t.stride() == torch.empty_like(case.x).stride()
    for t in (*found[1:], *gradients[2:]):
        assert t.dtype is wide_dtype(case.dtype)


@pytest.mark.parametrize("name", FORMULAS)
def test_every_activation(ops: Kernels, name: str) -> None:
    for i, dtype in enumerate(DTYPES):
        calls = [
            (torch.randn(3, 5, 7, 3), {}),
            (last(3, 5, 7, 3), {"residual": True, "branch": True}),
            (torch.randn(3, 5, 7, 3), {"residual": True, "training": False}),
            (last(3, 5, 7, 3), {"branch": True, "training": False}),
        ]
        for x, options in calls[i : i + 1] if ops.slow else calls:
            check(ops, Case(x, dtype, name, ops=ops, **options))


def of_layout(kind: str) -> list[tuple[torch.dtype, str, dict[str, Any]]]:
    """How a layout is called: every dtype and option in turn, large ones less often."""
    at = list(LAYOUTS).index(kind)
    options = [
        {"residual": True}, {"branch": True}, {}, {"residual": True, "branch": True},
        {"training": False}, {"training": False, "residual": True, "branch": True},
    ]  # fmt: skip
    names = ("silu", "relu", "identity", "softplus", "gelu", "leaky_relu")
    count = 2 if "70000" in kind else 6
    return [
        (DTYPES[(at + i) % 4], names[(at + 2 * i + i // 3) % 6], options[(i + at) % 6])
        for i in range(count)
    ]


@pytest.mark.parametrize("kind", LAYOUTS)
def test_every_layout(ops: Kernels, kind: str) -> None:
    x = LAYOUTS[kind]()
    if ops.slow and x.numel() > 20_000:
        pytest.skip("slow")
    calls = of_layout(kind)
    for dtype, name, options in calls[::3] if ops.slow else calls:
        check(ops, Case(LAYOUTS[kind](), dtype, name, ops=ops, **options))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradient_and_residual_in_another_layout(ops: Kernels, dtype: torch.dtype) -> None:
    for x in (torch.randn(3, 6, 5, 4), last(3, 6, 5, 4)):
        case = Case(x, dtype, "silu", residual=True, ops=ops)
        case.residual = case.residual.mT.contiguous().mT
        flat = placed(case.grad.cpu().mT.contiguous().mT, ops.device)
        check(ops, case, flat)
        gapped = torch.stack([case.grad, case.grad], -1)[..., 0]
        check(ops, case, gapped)
        # One value for a whole plane; a sum's gradient.
        case = Case(x, dtype, "identity", residual=True, ops=ops)
        case.grad = case.grad[..., :1, :1].expand(case.x.shape)
        check(ops, case)


def test_options(ops: Kernels) -> None:
    """Everything that may be left out, and every choice of gradients."""
    flags = list(itertools.product((False, True), repeat=5))
    for i, (weight, bias, residual, branch, training) in enumerate(flags):
        for name in (THREE[i % 3],) if ops.slow else THREE:
            options = {"weight": weight, "bias": bias, "residual": residual, "branch": branch}
            x = last(3, 5, 2) if i % 2 else torch.randn(3, 5, 2)
            case = Case(x, F32, name, training=training, ops=ops, **options)
            check(ops, case)
            found = forward(ops, case)
            full = ops("batch_norm_act_backward", *case.backward(*found))
            for needs in list(itertools.product((False, True), repeat=3))[i // 2 % 2 :: 2]:
                some = ops("batch_norm_act_backward", *case.backward(*found, *needs))
                sums = training or needs[2]
                for part, whole, needed in zip(some, full, (*needs[:2], sums, sums), strict=True):
                    if needed:
                        close(str(needs), part, whole, 1e-5 * (1 + whole.abs().cpu().double()))
                    else:
                        assert part.numel() == 0, needs


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["identity", "relu", "tanh"])
def test_backward_without_an_input(ops: Kernels, name: str, dtype: torch.dtype) -> None:
    """Fixed statistics and no gradient of weight and bias."""
    for residual, branch in ((False, False), (True, True)):
        case = Case(
            last(3, 5, 4), dtype, name, training=False, residual=residual, branch=branch,
            ops=ops,
        )  # fmt: skip
        output, mean, invstd = forward(ops, case)
        saved = None if name == "identity" else output
        truth = case.truth()
        found = ops(
            "batch_norm_act_backward", case.grad, None, saved, *case.shared(mean, invstd), False,
            *case.formula, True, True, False,
        )  # fmt: skip
        assert found[2].numel() == found[3].numel() == 0
        # Without a residual, too, the slope is that of a rounded output.
        case.check_backward(found, truth, slack=3.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", THREE)
def test_split_ops_equal_the_whole_ones(ops: Kernels, name: str, dtype: torch.dtype) -> None:
    for x, extra in ((last(3, 20, 9), True), (torch.randn(3, 5, 40), False)):
        case = Case(x, dtype, name, residual=extra, branch=extra, ops=ops)
        truth = case.truth()
        output, mean, invstd = forward(ops, case)
        average, variance = ops("batch_norm_stats", case.x)
        assert average.dtype is variance.dtype is F64
        case.check_statistics(average, (variance + case.eps).rsqrt(), truth)
        wide = mean.dtype
        assert torch.equal(average.to(wide), mean)
        again = ops(
            "batch_norm_act_apply", case.x, case.residual, *case.shared(mean, invstd), *case.formula
        )
        assert torch.equal(again, output)
        assert again.stride() == output.stride()

        whole = ops("batch_norm_act_backward", *case.backward(output, mean, invstd))
        saved = case.saved(output)
        shared = (case.grad, case.x, saved, *case.shared(mean, invstd))
        sums, grad_residual = ops("batch_norm_act_backward_reduce", *shared, *case.formula, True)
        assert sums.dtype is F64
        assert sums.shape == (2, x.size(1))
        assert torch.equal(sums[1].to(wide), whole[2])
        assert torch.equal(sums[0].to(wide), whole[3])
        averages = sums / (x.numel() / x.size(1))
        found = ops("batch_norm_act_backward_apply", *shared, averages, *case.formula, True)
        assert torch.equal(found[1], whole[1])
        assert torch.equal(found[1], grad_residual)
        case.check_backward((found[0], found[1], *sums.flip(0)), truth)
        for op, rest in (("reduce", ()), ("apply", (averages,))):
            less = ops(f"batch_norm_act_backward_{op}", *shared, *rest, *case.formula, False)
            assert less[1].numel() == 0
            first = sums if op == "reduce" else found[0]
            assert torch.equal(less[0], first)


def test_sums_of_half_a_batch_each(ops: Kernels) -> None:
    """As processes do it: averages of the whole batch in backward_apply of a part."""
    case = Case(torch.randn(6, 5, 4), F64, "silu", ops=ops)
    truth = case.truth()
    _, mean, invstd = forward(ops, case)
    halves = [(case.grad[:2], case.x[:2]), (case.grad[2:], case.x[2:])]
    shared = case.shared(mean, invstd)
    sums = [
        ops("batch_norm_act_backward_reduce", g, x, None, *shared, *case.formula, False)[0]
        for g, x in halves
    ]
    averages = (sums[0] + sums[1]) / 24
    parts = [
        ops("batch_norm_act_backward_apply", g, x, None, *shared, averages, *case.formula, False)[0]
        for g, x in halves
    ]
    none = case.x.new_empty(0)
    case.check_backward((torch.cat(parts), none, *(sums[0] + sums[1]).flip(0)), truth)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("momentum", [0.0, 0.1, 1.0])
def test_running_statistics(ops: Kernels, momentum: float, dtype: torch.dtype) -> None:
    for x in (last(3, 5, 7), torch.randn(2, 1), torch.randn(2, 3, 300)):
        case = Case(x, dtype, momentum=momentum, ops=ops)
        arguments = case.forward()
        _, mean, _ = ops("batch_norm_act", *arguments)
        case.check_running(*arguments[5:7], case.truth())
        if momentum == 0.0:
            assert torch.equal(arguments[5], case.running_mean)
            assert torch.equal(arguments[6], case.running_var)
        if momentum == 1.0:
            assert torch.equal(arguments[5], mean)
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
    """A mean of `ratio` deviations (16-bit numbers are then coarse, but what they are is exact)."""
    for x in (torch.randn(4, 3, 500) + ratio, last(4, 3, 500) - ratio):
        case = Case(x, dtype, "silu", ops=ops)
        if dtype.itemsize == 2 and ratio == 1e4:
            case = Case(x + 64 * torch.randn(x.shape), dtype, "silu", ops=ops)
        truth = case.truth()
        found = forward(ops, case)
        case.check_forward(found, truth)
        case.check_backward(ops("batch_norm_act_backward", *case.backward(*found)), truth)


@pytest.mark.parametrize("dtype", [F32, F64, BF16], ids=str)
def test_first_element_an_outlier(ops: Kernels, dtype: torch.dtype) -> None:
    for x in (torch.randn(2, 3, 4000), last(2, 3, 4000)):
        x[0, :, 0] = torch.tensor([1e4, -1e4, 1e2])
        case = Case(x, dtype, "silu", ops=ops)
        check(ops, case)


@pytest.mark.parametrize("dtype", [F32, F64, BF16], ids=str)
def test_outliers_where_the_mean_is_guessed(ops: Kernels, dtype: torch.dtype) -> None:
    """The CPU kernel looks at three elements of a channel (guess_means in csrc/cpu/batch_norm.cpp)
    and adds up distances from their median: it has to see that it was misled."""
    for x in (torch.randn(2, 3, 4000), last(2, 3, 4000)):
        for probe in (0.29, 0.53, 0.83):
            at = int(probe * 8000)
            x[at // 4000, :, at % 4000] = torch.tensor([1e4, -1e4, 1e2])
        check(ops, Case(x, dtype, "silu", ops=ops))


def test_a_mean_far_larger_than_the_deviation(ops: Kernels) -> None:
    if ops.digits > 4:
        pytest.skip("sums of shifted data in float32")
    for mean in (1e3, -1e5, 3e6):
        for x in (torch.randn(4, 3, 500), last(4, 3, 500)):
            case = Case(x, F32, "identity", ops=ops)
            case.x.add_(mean)
            found = forward(ops, case)
            case.check_statistics(found[1], found[2], case.truth())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_constant_channels(ops: Kernels, dtype: torch.dtype) -> None:
    """Variance 0: the output is f(bias), the gradient finite."""
    values = torch.tensor([0.0, 1.0, -0.1, 300.0, 12345.0])
    for make in (torch.ones(4, 5, 33), torch.ones(4, 33, 5).mT):
        case = Case(make, dtype, "silu", eps=1e-5, ops=ops)
        case.x.copy_(values.view(5, 1).expand(case.x.shape))
        truth = case.truth()
        found = forward(ops, case)
        case.check_forward(found, truth)
        torch.testing.assert_close(
            found[2].cpu(), torch.full_like(found[2].cpu(), 1e-5**-0.5), rtol=2e-6, atol=0
        )
        case.check_backward(ops("batch_norm_act_backward", *case.backward(*found)), truth)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")], ids=str)
def test_what_is_not_finite_stays_in_its_channel(ops: Kernels, value: float) -> None:
    for dtype, x in ((F32, torch.randn(3, 5, 40)), (BF16, last(3, 5, 40)), (F64, last(3, 5, 40))):
        case = Case(x, dtype, "relu", residual=True, ops=ops)
        clean = case.forward()
        found = ops("batch_norm_act", *clean)
        gradients = ops("batch_norm_act_backward", *case.backward(*found))
        case.x[1, 2, 3] = value
        dirty = case.forward()
        found_dirty = ops("batch_norm_act", *dirty)
        gradients_dirty = ops("batch_norm_act_backward", *case.backward(*found_dirty))
        others = [0, 1, 3, 4]
        for a, b in zip((*found, *gradients), (*found_dirty, *gradients_dirty), strict=True):
            a, b = (t if t.dim() == 1 else t.transpose(0, 1) for t in (a, b))
            assert torch.equal(a[others], b[others])
        for a, b in zip(clean[5:7], dirty[5:7], strict=True):
            assert torch.equal(a[others], b[others])
            assert not b[2].isfinite()
        # As in torch: a channel that has one is lost as a whole.
        assert found_dirty[0][:, 2].isnan().all()
        assert gradients_dirty[0][:, 2].isnan().all()


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_a_dropped_sample_has_no_part(ops: Kernels, dtype: torch.dtype) -> None:
    """Its branch_scale is 0: the output is f(residual), and its gradient is no term of the sums."""
    case = Case(last(4, 5, 6), dtype, "identity", residual=True, branch=True, ops=ops)
    found = forward(ops, case)
    assert torch.equal(found[0][0], case.residual[0])
    other = case.grad.clone()
    other[0] = 100.0
    first, second = (
        ops("batch_norm_act_backward", *case.backward(*found, grad=g)) for g in (case.grad, other)
    )
    assert same_bits((first[0], *first[2:]), (second[0], *second[2:]))
    assert torch.equal(second[1], other)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_the_same_bits_every_time(ops: Kernels, dtype: torch.dtype) -> None:
    if not ops.kernel:
        pytest.skip("torch's sums depend on the number of threads")
    tensors = [torch.randn(2, 2, 70_000), last(35, 96, 81), last(7, 1100, 36)]
    for x in (last(3, 20, 9),) if ops.slow else tensors:
        case = Case(x, dtype, "silu", branch=True, ops=ops)
        results = []
        before = torch.get_num_threads()
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            arguments = case.forward()
            found = ops("batch_norm_act", *arguments)
            gradients = ops("batch_norm_act_backward", *case.backward(*found))
            results.append((*found, *gradients, *arguments[5:7]))
        torch.set_num_threads(before)
        assert all(same_bits(results[0], other) for other in results[1:])


CAPABILITIES = """
import sys, torch
sys.path.insert(0, {tests!r})
from _batch_norm_cases import Case, last
ops, results = torch.ops.fusedtrain, []
torch.manual_seed(0)
for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
    for x in (torch.randn(3, 7, 61), last(3, 7, 61), torch.randn(2, 3, 1100), last(3, 130, 5)):
        for name in ("silu", "softplus"):
            for residual in (False, True):
                case = Case(x, dtype, name, residual=residual, branch=residual)
                arguments = case.forward()
                found = ops.batch_norm_act(*arguments)
                gradients = ops.batch_norm_act_backward(*case.backward(*found))
                results.append((*found, *gradients, *arguments[5:7]))
torch.save(results, {path!r})
"""


def test_cpu_capabilities_agree(tmp_path: Path) -> None:
    """The three units differ by roundings (FMA) only."""
    found: dict[str, Any] = {}
    here = Path(__file__).resolve().parent
    for capability in ("default", "avx2", "avx512"):
        path = tmp_path / capability
        env = os.environ | {
            "FUSEDTRAIN_CPU_CAPABILITY": capability, "PYTHONPATH": str(here.parent)
        }  # fmt: skip
        code = CAPABILITIES.format(tests=str(here), path=str(path))
        run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
        if run.returncode != 0:
            assert "this processor" in run.stderr, run.stderr
            continue
        found[capability] = torch.load(path)
    for capability in found.keys() - {"default"}:
        for ours, theirs in zip(found[capability], found["default"], strict=True):
            for a, b in zip(ours, theirs, strict=True):
                digits = 4 * torch.finfo(a.dtype).eps
                if a.numel():
                    size = b.abs().max().item()
                    torch.testing.assert_close(a, b, rtol=digits, atol=4 * digits * (1 + size))
