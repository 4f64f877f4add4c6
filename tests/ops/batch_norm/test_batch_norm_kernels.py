"""One table of cases for the batch norm kernels of every backend, against eager torch in float64:
numbers, layouts, options, the split ops, running statistics, ill-conditioned and special values.

The function and the modules have files of their own beside this one.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from helpers.activations import DTYPES
from helpers.backends import Kernels, placed
from helpers.batch_norm import FORMULAS, LAYOUTS, Case, check, close, forward, last

pytestmark = pytest.mark.usefixtures("memory_is_full_of_nan")

F32, F64, F16, BF16 = DTYPES
# Backward takes: nothing, the output, the input.
THREE = ("identity", "softplus", "silu")


@pytest.mark.parametrize("name", FORMULAS)
def test_every_activation(ops: Kernels, name: str) -> None:
    """Element by element, and 16 bytes at a time."""
    for i, dtype in enumerate(DTYPES):
        calls = [
            (torch.randn(3, 5, 7, 3), {}),
            (last(3, 24, 5, 3), {"residual": True, "branch": True}),
            (torch.randn(3, 5, 7, 3), {"residual": True, "training": False}),
            (last(3, 24, 5, 3), {"branch": True, "training": False}),
        ]
        # Eager torch's gelu_tanh is off by more than a kernel in some of the combinations.
        at = (i + list(FORMULAS).index(name)) % 4 if ops.kernel else i
        for x, options in calls[at : at + 1] if ops.slow else calls:
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
        pytest.skip("slow where it is emulated or interpreted: needs a GPU")
    calls = of_layout(kind)
    if ops.slow:
        calls = calls[::6] if x.numel() > 2_000 else calls[::3]
    for dtype, name, options in calls:
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
    """With and without each optional argument, and with every choice of gradients."""
    flags = list(itertools.product((False, True), repeat=5))
    for i, (weight, bias, residual, branch, training) in enumerate(flags):
        for name in (THREE[i % 3],) if ops.slow else THREE:
            options = {"weight": weight, "bias": bias, "residual": residual, "branch": branch}
            shapes = [torch.randn(3, 5, 2), last(2, 8, 3), torch.randn(2, 3, 16), last(3, 5, 2)]
            x = shapes[(i + i // 2) % 4]
            case = Case(x, F32, name, training=training, ops=ops, **options)
            check(ops, case)
            outputs = forward(ops, case)
            full = ops("batch_norm_act_backward", *case.backward(*outputs))
            choices = list(itertools.product((False, True), repeat=3))
            chosen = [(3 * i + i // 8) % 8] if ops.slow else range(i // 2 % 2, 8, 2)
            for needs in (choices[number] for number in chosen):
                some = ops("batch_norm_act_backward", *case.backward(*outputs, *needs))
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
    for x, more in ((last(3, 5, 4), False), (torch.randn(3, 5, 8), True)):
        case = Case(x, dtype, name, training=False, residual=more, branch=more, ops=ops)
        output, mean, invstd = forward(ops, case)
        saved = None if name == "identity" else output
        truth = case.truth()
        rest = (*case.shared(mean, invstd), False, *case.formula, True, True)
        gradients = ops("batch_norm_act_backward", case.grad, None, saved, *rest, False)
        assert gradients[2].numel() == gradients[3].numel() == 0
        # Without a residual, too, the slope is that of a rounded output.
        case.check_backward(gradients, truth, slack=3.0)
        if ops.kernel and name != "identity":
            with pytest.raises(RuntimeError, match="needs the input"):
                ops("batch_norm_act_backward", case.grad, None, None, *rest, False)


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
        # CUDA: one launch of the whole op adds up in another order than two of the parts.
        rounding = 4 * torch.finfo(wide).eps
        exact = {"rtol": 0.0, "atol": 0.0} if ops.device == "cpu" and ops.counter is None else {
            "rtol": rounding, "atol": rounding * x.numel() / x.size(1)
        }  # fmt: skip
        torch.testing.assert_close(average.to(wide), mean, **exact)
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
        torch.testing.assert_close(sums[1].to(wide), whole[2], **exact)
        torch.testing.assert_close(sums[0].to(wide), whole[3], **exact)
        averages = sums / (x.numel() / x.size(1))
        applied = ops("batch_norm_act_backward_apply", *shared, averages, *case.formula, True)
        assert torch.equal(applied[1], whole[1])
        assert torch.equal(applied[1], grad_residual)
        case.check_backward((applied[0], applied[1], *sums.flip(0)), truth)
        # Without averages: the gradient of fixed statistics.
        (fixed, _) = ops("batch_norm_act_backward_apply", *shared, None, *case.formula, True)
        whole = ops(
            "batch_norm_act_backward", case.grad, case.x, saved, *case.shared(mean, invstd), False,
            *case.formula, True, True, True,
        )  # fmt: skip
        # The CPU continues with the rounded gradient of the residual.
        rounding = 2 * torch.finfo(dtype).eps
        torch.testing.assert_close(fixed, whole[0], rtol=rounding, atol=rounding)
        for op, rest in (("reduce", ()), ("apply", (averages,))):
            less = ops(f"batch_norm_act_backward_{op}", *shared, *rest, *case.formula, False)
            assert less[1].numel() == 0
            first = sums if op == "reduce" else applied[0]
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
