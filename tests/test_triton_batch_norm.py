"""Batch norm in Triton, interpreted (or on a GPU), against the reference in float64: formulas,
layouts, cuts, special values, launches; and, compiled for every target, 16-byte accesses without
spills.

Compilation has processes of its own, for the reason that tests/test_triton.py gives.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from _cases import DTYPES, assert_close
from _kernels import BACKENDS, HAS_GPU, written_by
from _placed import call_placed, placed
from _triton_interpreter import ORDERS, programs_in
from test_triton import TARGETS, VIEWS, check_code, compile_for, fake_driver, run
from torch import Tensor

from fusedtrain.reference import batch_norm as reference
from fusedtrain.reference.pointwise import IDENTITY, INDEX, POINTWISE, Pointwise

pytest.importorskip("triton", reason="triton is not installed")

FORMULAS: dict[str, Pointwise] = {"identity": Pointwise()} | {
    row.name: Pointwise(i, *row.example) for i, row in enumerate(POINTWISE)
}
RELU, SILU, SOFTPLUS = FORMULAS["relu"], FORMULAS["silu"], FORMULAS["softplus"]
# What the options are tried with: nothing saved or given back, the output, the input.
THREE = {name: FORMULAS[name] for name in ("identity", "softplus", "silu")}


def contiguous(*shape: int) -> Tensor:
    return torch.randn(shape)


def last(*shape: int) -> Tensor:
    order = [0, *range(2, len(shape)), 1]
    back = [0, len(shape) - 1, *range(1, len(shape) - 1)]
    return torch.randn([shape[d] for d in order]).permute(back)


# Rows that start on 16 bytes or do not; a tile's width of columns and more; short and long planes.
SHAPES: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: contiguous(3, 5, 7, 3),
    "planes": lambda: contiguous(2, 3, 272),
    "channels_last": lambda: last(3, 5, 3, 2),
    "many channels": lambda: last(2, 144, 2, 2),
}


@pytest.fixture
def ops() -> Callable[..., Any]:
    """Calls an op on the device and brings everything back, what was written in place too."""
    kernels = BACKENDS["triton"]()

    def call(name: str, *arguments: Any) -> Any:
        result = call_placed(
            functools.partial(kernels, name), kernels.device, arguments, written_by(name)
        )
        return tuple(t.cpu() for t in result) if isinstance(result, tuple) else result.cpu()

    return call


def wide(t: Any) -> Any:
    return t.double() if isinstance(t, Tensor) else t


class Case:
    """Tensors of a call: numbers of both signs, weights of both signs and zero."""

    def __init__(
        self,
        x: Tensor,
        dtype: torch.dtype = torch.float32,
        activation: Pointwise = RELU,
        *,
        residual: bool = False,
        branch: bool = False,
        affine: bool = True,
    ) -> None:
        def like(t: Tensor) -> Tensor:
            return torch.empty_like(t).copy_(torch.randn(t.shape))

        self.dtype, self.activation = dtype, activation
        self.vector = torch.float64 if dtype is torch.float64 else torch.float32
        channels = x.size(1)
        # Means apart; the spread is what activations bend in.
        spread = torch.arange(channels).view(-1, *[1] * (x.dim() - 2)) % 5
        self.x = (x * 2 + spread).to(dtype)
        self.grad = like(x).to(dtype)
        self.residual = (like(x) * 2).to(dtype) if residual else None
        self.branch = None
        if branch:
            self.branch = (torch.arange(x.size(0)) % 3 * 0.75).to(self.vector)
        self.weight = self.bias = None
        if affine:
            self.weight = (torch.randn(channels) * 1.5).to(self.vector)
            self.weight[1 % channels] = 0
            self.bias = torch.randn(channels, dtype=self.vector)
        self.running_mean = torch.randn(channels, dtype=self.vector)
        self.running_var = torch.rand(channels, dtype=self.vector) + 0.5

    def forward(self, training: bool = True) -> tuple[Any, ...]:
        return (
            self.x, self.residual, self.branch, self.weight, self.bias, self.running_mean.clone(),
            self.running_var.clone(), training, 0.3, 1e-5, *self.activation,
        )  # fmt: skip

    def shared(self, mean: Tensor, invstd: Tensor) -> tuple[Any, ...]:
        return self.branch, self.weight, self.bias, mean, invstd

    def saved(self, output: Tensor) -> Tensor | None:
        if self.activation.op == IDENTITY or self.residual is None:
            return None
        return output if self.activation.saves_output else self.residual


def close(actual: Tensor, expected: Tensor, scale: float = 2.0) -> None:
    """Within twice the tolerance of an activation: what it is applied to was rounded before."""
    assert_close(actual, expected, scale)


def sums_close(actual: Tensor, expected: Tensor, size: Tensor, dtype: torch.dtype) -> None:
    """Sums of many terms, whose absolute values add up to `size`."""
    eps = torch.finfo(torch.float64 if dtype is torch.float64 else torch.float32).eps
    assert ((actual.double() - expected).abs() <= 8 * eps * size + 1e-300).all()


def check(ops: Callable[..., Any], case: Case, training: bool = True) -> None:
    """Forward and backward, everything asked for."""
    arguments = case.forward(training)
    expected_arguments = tuple(map(wide, arguments))
    output, mean, invstd = ops("batch_norm_act", *arguments)
    expected = reference.batch_norm_act(*expected_arguments)
    close(output, expected[0])
    for ours, theirs in zip(
        (mean, invstd, *arguments[5:7]), (*expected[1:], *expected_arguments[5:7])
    ):
        assert ours.dtype is case.vector
        close(ours, theirs, 1)
    if case.branch is None:
        assert output.stride() == torch.empty_like(case.x).stride()

    last = (training, *case.activation, True, True, True)
    arguments = (case.grad, case.x, case.saved(output), *case.shared(mean, invstd), *last)
    found = ops("batch_norm_act_backward", *arguments)
    arguments = tuple(map(wide, arguments))
    expected_gradients = reference.batch_norm_act_backward(*arguments)
    for ours, theirs in zip(found[:2], expected_gradients[:2]):
        assert ours.dtype is case.dtype
        close(ours, theirs)
    d = expected_gradients[1]  # of the residual
    # A slope near 0 is off by eps, too: what is summed up, by eps of the gradient.
    size = d.abs() + wide(case.grad).abs()
    if case.branch is not None:
        size = size * reference.per_sample(wide(case.branch), d)
    normalised = (wide(case.x) - reference.per_channel(wide(mean), d)) * reference.per_channel(
        wide(invstd), d
    )
    for ours, theirs, terms in zip(
        found[2:], expected_gradients[2:], (size * normalised.abs(), size)
    ):
        assert ours.dtype is case.vector
        sums_close(ours, theirs, reference._over_channels(terms), case.dtype)


# --- numbers


@pytest.mark.parametrize("shape", ["contiguous", "planes", "channels_last"])
@pytest.mark.parametrize("name", FORMULAS)
def test_formulas(ops: Any, name: str, shape: str) -> None:
    """Of the input and of the output; saved, or computed again."""
    residual = shape in ("planes", "channels_last")
    check(ops, Case(SHAPES[shape](), activation=FORMULAS[name], residual=residual))


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("options", ["", "r", "b", "a", "rb", "rba"])
@pytest.mark.parametrize("name", THREE)
@pytest.mark.parametrize("shape", ["contiguous", "channels_last"])
def test_options(ops: Any, shape: str, name: str, options: str, training: bool) -> None:
    case = Case(
        SHAPES[shape](), activation=THREE[name], residual="r" in options, branch="b" in options,
        affine="a" in options,
    )  # fmt: skip
    check(ops, case, training)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", THREE)
@pytest.mark.parametrize("shape", ["planes", "many channels"])
def test_dtypes(ops: Any, shape: str, name: str, dtype: torch.dtype) -> None:
    check(ops, Case(SHAPES[shape](), dtype, THREE[name], residual=True, branch=True))


def test_weight_or_bias_alone(ops: Any) -> None:
    for kept in ("weight", "bias"):
        case = Case(SHAPES["contiguous"](), activation=SILU)
        setattr(case, "bias" if kept == "weight" else "weight", None)
        check(ops, case)


def test_rounded_parameters(ops: Any) -> None:
    """As in the kernels of the activation alone: backward compares the saved output with them."""
    case = Case(
        SHAPES["contiguous"](), torch.bfloat16, Pointwise(INDEX["hardtanh"], -0.301, 0.301),
        residual=True,
    )  # fmt: skip
    output, mean, invstd = ops("batch_norm_act", *case.forward())
    assert output.max().item() == torch.tensor(0.301).bfloat16().item() < 0.301
    flat = output.abs() == output.max()
    assert flat.any()
    arguments = (*case.shared(mean, invstd), True, *case.activation, True, True, True)
    for saved in (output, None):
        case.residual = saved
        gradient = ops("batch_norm_act_backward", case.grad, case.x, saved, *arguments)[1]
        if saved is not None:
            assert torch.equal(gradient == 0, flat | (case.grad == 0))
        assert (gradient == 0).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", ["planes", "channels_last", "contiguous"])
def test_large_mean(ops: Any, shape: str, dtype: torch.dtype) -> None:
    """A mean of 1e4 deviations (16 bits: of 30, more would be one number in a channel)."""
    ratio = 30 if dtype.itemsize == 2 else 1e4
    x = (SHAPES[shape]() + ratio).to(dtype)
    mean, variance = ops("batch_norm_stats", x)
    expected_mean, expected = reference.batch_norm_stats(x)
    assert mean.dtype is variance.dtype is torch.float64
    limit = 1e-12 * ratio if dtype is torch.float64 else 1e-6
    deviation = expected.sqrt().clamp_min(1e-3)
    assert ((mean - expected_mean).abs() <= limit * deviation).all()
    assert ((variance - expected).abs() <= limit * expected).all()


@pytest.mark.parametrize("at", [0, 1, 99])
def test_outlier(ops: Any, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it lies, it does not take the others' variance with it."""
    many_steps(monkeypatch)
    for inner in (1, 50):
        x = torch.randn(100, 2, inner)
        x[at, :, -1] = 1e6
        x[:, 1] -= 1e6
        variance = ops("batch_norm_stats", x)[1]
        torch.testing.assert_close(variance, reference.batch_norm_stats(x)[1], rtol=1e-6, atol=0)


@pytest.mark.parametrize("value", [0.0, 0.1, -1e4 / 3])
def test_constant(ops: Any, value: float) -> None:
    mean, variance = ops("batch_norm_stats", torch.full((7, 3, 5), value))
    exact = torch.tensor(value).double()
    assert ((variance >= 0) & (variance <= (exact * 1e-7) ** 2)).all()
    torch.testing.assert_close(mean, exact.expand(3), rtol=1e-12, atol=0)


@pytest.mark.parametrize("shape", ["planes", "channels_last"])
def test_special_values(ops: Any, shape: str) -> None:
    """An infinity or a NaN is its channel's, in statistics and results, as in the reference."""
    inf, nan = float("inf"), float("nan")
    for values in ([inf], [-inf], [inf, -inf], [nan]):
        for training in (True, False):
            case = Case(SHAPES[shape](), activation=SOFTPLUS)
            for sample, value in enumerate(values):
                case.x[sample, 1].fill_(value)
            arguments = case.forward(training)
            output, mean, invstd = ops("batch_norm_act", *arguments)
            expected_arguments = tuple(map(wide, arguments[:5])) + case.forward(training)[5:]
            expected_arguments = tuple(map(wide, expected_arguments))
            expected = reference.batch_norm_act(*expected_arguments)
            for ours, theirs in (
                *zip((output, mean, invstd), expected),
                *zip(arguments[5:7], expected_arguments[5:7]),
            ):
                torch.testing.assert_close(
                    ours.double(), theirs, rtol=1e-5, atol=1e-5, equal_nan=True
                )
            gradients = ops(
                "batch_norm_act_backward", case.grad, case.x, None, *case.shared(mean, invstd),
                training, *SOFTPLUS, True, True, True,
            )  # fmt: skip
            assert all(g.select(min(1, g.dim() - 1), 0).isfinite().all() for g in gradients)


def test_padding(ops: Any) -> None:
    """What a formula makes of the zeros beyond the data, here inf * 0, is in no sum."""
    x = torch.full((3, 2, 5), 3e38)
    mean, invstd, weight = x[0, :, 0], torch.ones(2), -torch.ones(2)
    sums, _ = ops(
        "batch_norm_act_backward_reduce", torch.ones_like(x), x, None, None, weight, None, mean,
        invstd, *FORMULAS["relu_squared"], False,
    )  # fmt: skip
    assert torch.equal(sums, torch.zeros_like(sums))


# --- layouts and cuts

LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "2-d": lambda: contiguous(7, 3),
    "transposed": lambda: contiguous(3, 7).t(),
    "channels outermost": lambda: contiguous(3, 4, 5).transpose(0, 1),
    "samples innermost": lambda: contiguous(3, 5, 4).permute(2, 0, 1),
    "channels_last_3d": lambda: last(2, 3, 2, 3, 2),
    "channels between": lambda: contiguous(2, 4, 3, 5).transpose(1, 2),
    "sliced": lambda: contiguous(9, 8, 5)[1:7, 2:7, ::2],
    "sliced samples": lambda: contiguous(8, 3, 5)[::2],
    # The stride of a sample is its size, and yet channels are outermost.
    "samples within channels": lambda: contiguous(216).as_strided((2, 3, 4), (12, 100, 1)),
    "expanded": lambda: contiguous(4, 1, 5).expand(4, 3, 5),
    "offset": lambda: contiguous(1 + 2 * 8 * 6)[1:].view(2, 8, 6),
    "one channel": lambda: contiguous(4, 1, 5),
    "one channel, samples innermost": lambda: contiguous(1, 5, 4).permute(2, 0, 1),
    "one sample": lambda: contiguous(1, 3, 5),
    "size-1 dims": lambda: contiguous(4, 3, 1, 1),
}  # fmt: skip


@pytest.mark.parametrize("branch", [False, True], ids=["", "branch_scale"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(ops: Any, layout: str, branch: bool) -> None:
    case = Case(LAYOUTS[layout](), activation=SILU, residual=True, branch=branch)
    # Arithmetic has made them dense.
    case.x = LAYOUTS[layout]()
    case.residual = torch.randn(case.x.shape)
    check(ops, case)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_placing_keeps_the_layout(layout: str) -> None:
    """What these tests give a kernel on a GPU, where ``x.to(device)`` is dense and aligned."""
    t = LAYOUTS[layout]()
    copy = placed(t, "cpu")
    assert torch.equal(copy, t)
    assert (copy.stride(), copy.storage_offset()) == (t.stride(), t.storage_offset())
    assert copy.untyped_storage().data_ptr() != t.untyped_storage().data_ptr()
    assert copy.untyped_storage().nbytes() == t.untyped_storage().nbytes()
    assert copy.data_ptr() % 16 == t.data_ptr() % 16


def many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    from fusedtrain.triton import _batch_norm_calls, _layout

    monkeypatch.setattr(_layout, "_PROGRAMS", 2)
    monkeypatch.setattr(_batch_norm_calls, "_cut", _batch_norm_calls._cut.__wrapped__)


@pytest.mark.parametrize("view", [*VIEWS.values(), (1000, 3, 1), (3, 2, 1), (2, 2, 300)], ids=str)
def test_every_cut(ops: Any, view: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns and planes, several steps a program; the same bits in every order of programs."""
    many_steps(monkeypatch)
    case = Case(torch.randn(view), residual=True, branch=True, activation=SILU)
    check(ops, case)
    results = []
    for order in ["forward"] * 2 if HAS_GPU else ORDERS:
        if HAS_GPU:
            results.append(both(ops, case))
        else:
            with programs_in(order):
                results.append(both(ops, case))
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


def both(ops: Any, case: Case) -> tuple[Tensor, ...]:
    arguments = case.forward()
    output, mean, invstd = ops("batch_norm_act", *arguments)
    last = (*case.shared(mean, invstd), True, *case.activation, True, True, True)
    gradients = ops("batch_norm_act_backward", case.grad, case.x, case.saved(output), *last)
    return output, mean, invstd, *arguments[5:7], *gradients


def test_wide_numbers(ops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and columns counted with 64 bits."""
    import triton.language as tl

    from fusedtrain.triton import _batch_norm_calls

    monkeypatch.setattr(_batch_norm_calls, "index_of", lambda _: tl.int64)
    monkeypatch.setattr(_batch_norm_calls, "_cut", _batch_norm_calls._cut.__wrapped__)
    for shape in SHAPES.values():
        check(ops, Case(shape(), activation=SILU, residual=True, branch=True))


# --- the ops


@pytest.mark.parametrize("shape", ["planes", "channels_last"])
@pytest.mark.parametrize("name", THREE)
def test_halves(ops: Any, name: str, shape: str) -> None:
    """What a synchronised batch norm calls is what the whole ops do, to the bit."""
    case = Case(SHAPES[shape](), activation=THREE[name], residual=True, branch=True)
    output, mean, invstd, _, _, *gradients = both(ops, case)
    found, variance = ops("batch_norm_stats", case.x)
    assert torch.equal(found.float(), mean)
    close(reference.inverse_deviation(variance, 1e-5).float(), invstd.double(), 0.25)
    shared = case.shared(mean, invstd)
    again = ops("batch_norm_act_apply", case.x, case.residual, *shared, *case.activation)
    assert torch.equal(again, output)
    first = (case.grad, case.x, case.saved(output), *shared)
    sums, grad_residual = ops("batch_norm_act_backward_reduce", *first, *case.activation, True)
    count = case.x.numel() // case.x.size(1)
    assert sums.dtype is torch.float64
    assert torch.equal(sums.float(), torch.stack([gradients[3], gradients[2]]))
    for needs_residual in (True, False):
        grad_input, same = ops(
            "batch_norm_act_backward_apply", *first, sums / count, *case.activation, needs_residual
        )
        assert torch.equal(grad_input, gradients[0])
        if needs_residual:
            assert torch.equal(same, grad_residual)
        else:
            assert same.numel() == 0
    assert torch.equal(grad_residual, gradients[1])
    assert ops("batch_norm_act_backward_reduce", *first, *case.activation, False)[1].numel() == 0


def test_fixed_statistics_without_input(ops: Any) -> None:
    """What autograd keeps for them: nothing, or the output."""
    for name in ("identity", "softplus"):
        case = Case(SHAPES["channels_last"](), activation=FORMULAS[name], branch=True)
        output, mean, invstd = ops("batch_norm_act", *case.forward(False))
        saved = None if name == "identity" else output
        last = (*case.shared(mean, invstd), False, *case.activation, True, True, False)
        arguments = (case.grad, None, saved, *last)
        found = ops("batch_norm_act_backward", *arguments)
        expected = reference.batch_norm_act_backward(*map(wide, arguments))
        close(found[0], expected[0])
        close(found[1], expected[1])
        assert found[2].numel() == found[3].numel() == 0
    with pytest.raises(RuntimeError, match="needs the input"):
        ops("batch_norm_act_backward", case.grad, None, None, *last)


@pytest.mark.parametrize("training", [True, False])
def test_only_what_is_asked_for(ops: Any, training: bool) -> None:
    case = Case(SHAPES["contiguous"](), residual=True)
    output, mean, invstd = ops("batch_norm_act", *case.forward(training))
    first = (case.grad, case.x, output, *case.shared(mean, invstd), training, *RELU)
    everything = ops("batch_norm_act_backward", *first, True, True, True)
    for number in range(8):
        wanted = [bool(number & 1), bool(number & 2), bool(number & 4)]
        found = ops("batch_norm_act_backward", *first, *wanted)
        given = [*wanted[:2], *[training or wanted[2]] * 2]
        for ours, whole, asked in zip(found, everything, given):
            assert torch.equal(ours, whole) if asked else ours.numel() == 0


def test_eval_copies(ops: Any) -> None:
    case = Case(SHAPES["contiguous"]())
    arguments = case.forward(False)
    _, mean, _ = ops("batch_norm_act", *arguments)
    assert torch.equal(mean, case.running_mean)
    assert torch.equal(arguments[5], case.running_mean)
    assert torch.equal(arguments[6], case.running_var)
    assert mean.data_ptr() != arguments[5].data_ptr()


@pytest.mark.parametrize("momentum", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_momentum(ops: Any, momentum: float) -> None:
    case = Case(SHAPES["contiguous"]())
    ours, theirs = list(case.forward()), list(case.forward())
    ours[8] = theirs[8] = momentum
    if momentum == 1:
        for arguments in (ours, theirs):
            arguments[5].fill_(1e30)  # a difference from it is rounded to -1e30
    ops("batch_norm_act", *ours)
    reference.batch_norm_act(*theirs)
    for i in (5, 6):
        close(ours[i], theirs[i].double(), 0.25)
    without = list(case.forward())
    without[5] = without[6] = None
    assert torch.equal(ops("batch_norm_act", *without)[0], ops("batch_norm_act", *ours)[0])


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 3, 0), (2, 0, 4)], ids=str)
def test_empty(ops: Any, shape: tuple[int, ...]) -> None:
    case = Case(torch.empty(shape), activation=SILU, branch=True) if shape[1] else None
    if case is None:
        assert ops("batch_norm_stats", torch.empty(shape))[0].shape == (0,)
        return
    before = case.forward()
    output, mean, invstd = ops("batch_norm_act", *before)
    assert output.shape == shape
    assert torch.equal(before[5], case.running_mean)
    last = (*case.shared(mean, invstd), True, *SILU, True, True, True)
    found = ops("batch_norm_act_backward", case.grad, case.x, None, *last)
    assert found[0].shape == found[1].shape == shape
    assert not found[2].any()
    assert not found[3].any()


def test_errors(ops: Any) -> None:
    """Before anything is written."""
    case = Case(SHAPES["contiguous"](), residual=True, branch=True)
    good = case.forward()
    bad = {
        "float32, float64, float16 or bfloat16": (0, case.x.int()),
        "2 dimensions": (0, torch.randn(5)),
        "same shape": (1, torch.randn(2, 5, 7, 3)),
        "same dtype": (1, case.x.half()),
        "branch_scale must have 3 elements": (2, torch.ones(4)),
        "weight must have 5 elements": (3, torch.ones(4)),
        "bias must be float32": (4, torch.ones(5).double()),
        "must be contiguous": (5, torch.zeros(10)[::2]),
        "running_mean and running_var": (6, None),
        "no such activation": (10, len(POINTWISE)),
    }
    for message, (at, value) in bad.items():
        arguments = list(good)
        arguments[at] = value
        with pytest.raises(RuntimeError, match=message):
            ops("batch_norm_act", *arguments)
    one = Case(torch.randn(1, 3), activation=RELU).forward()
    with pytest.raises(RuntimeError, match="one value a channel"):
        ops("batch_norm_act", *one)
    for i in (5, 6):
        assert torch.equal(good[i], case.forward()[i])


def test_registered(tmp_path: Path) -> None:
    """The public function, its gradients, on kernels that the dispatcher found."""
    code = """
import os, sys
os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, "tests")
import torch, fusedtrain.triton, fusedtrain.functional as F
from fusedtrain.triton import launch
from _triton_interpreter import round_to_nearest
round_to_nearest()
library = torch.library.Library("fusedtrain", "IMPL")
fusedtrain.triton.register(library, "CPU")
launches = []
call = launch.Launcher.__call__
launch.Launcher.__call__ = lambda self, *a: (launches.append(self), call(self, *a))[1]
x = torch.randn(3, 4, 5, requires_grad=True)
running = torch.zeros(4), torch.ones(4)
y = F.batch_norm_act(x, *running, training=True, activation="silu")
assert len(launches) == 3, launches
g = torch.randn_like(y)
ours = torch.autograd.grad(y, x, g)[0]
assert len(launches) == 6, launches
expected = torch.nn.functional.silu(torch.nn.functional.batch_norm(x, None, None, training=True))
torch.testing.assert_close(y, expected)
torch.testing.assert_close(ours, torch.autograd.grad(expected, x, g)[0])
assert running[0].any()
"""
    code = code.replace('"tests"', repr(str(Path(__file__).parent)))
    run("-W", "ignore", "-c", code)


@pytest.mark.parametrize("target", TARGETS)
def test_code(target: str, tmp_path: Path) -> None:
    run(__file__, target, TRITON_CACHE_DIR=str(tmp_path))


def test_launches(tmp_path: Path) -> None:
    run(__file__, "launches", TRITON_CACHE_DIR=str(tmp_path))


# --- in processes of their own ---


def check_target(target: str) -> None:
    from fusedtrain.triton import _batch_norm_calls as c
    from fusedtrain.triton import _batch_norm_kernels as k
    from fusedtrain.triton import _layout
    from fusedtrain.triton.formulas import formula_of

    last, planes = c._View(32 * 784, 64, 1, 784), c._View(32, 64, 784, 1)
    # What is saved: the output, computed again, the input (many registers).
    for dtype, view, name, saved in (
        (torch.bfloat16, last, "relu", k.SAVED_OUTPUT),
        (torch.float32, planes, "gelu", k.SAVED_RESIDUAL),
        (torch.float16, planes, "softplus", k.SAVED_NOTHING),
        (torch.float64, last, "identity", k.SAVED_NOTHING),
    ):
        vector = torch.float64 if dtype is torch.float64 else torch.float32
        names = ("branch", "weight", "bias", "mean", "invstd", "shares")
        others = {f"{n}_ptr": vector for n in names} | {"averages_ptr": torch.float64}
        block = _layout.BACKWARD_BLOCK[dtype.itemsize]
        summed, cut = c._cut(view, block, True), c._cut(view, block, False)
        whole = c._cut(view, _layout.FORWARD_BLOCK[dtype.itemsize], False)
        op = FORMULAS[name].op
        forward, backward, by_output, stored = formula_of(op, dtype)
        again = forward if by_output else None
        residual = saved.value != 0
        flags = (residual, True, True)

        def compiled(kernel: Any, *constants: Any) -> Any:
            return compile_for(target, kernel, dtype, *constants, **others)  # noqa: B023

        normalise = compiled(k.normalise_kernel, forward, stored, residual, *flags, *whole.tile)
        check_code(normalise, 2)
        check_code(compiled(k.restore_kernel, True, True, *whole.tile), 1)
        formula = (again, backward, stored, saved.value, *flags)
        reduce = (*formula, True, summed.steps, *summed.tile)
        check_code(compiled(k.reduce_kernel, *reduce), 4)
        check_code(compiled(k.apply_kernel, *formula, False, True, True, *cut.tile), 4)
        others["shares_ptr"] = torch.float64
        check_reads(compiled(k.stats_kernel, summed.steps, *summed.tile))
    sides = summed.merging[1:]
    for dtype in (torch.float32, torch.float64):
        vectors: dict[str, torch.dtype] = {"shares_ptr": dtype, "sums_ptr": torch.float64}
        compile_for(target, k.finish_kernel, dtype, True, *sides, **vectors)
        vectors = {"shares_ptr": torch.float64}
        compile_for(target, k.merge_kernel, dtype, True, True, *sides, **vectors)
        compile_for(target, k.invert_kernel, dtype, 64)


def check_reads(compiled: Any) -> None:
    """As check_code, of a kernel that writes a few numbers."""
    if "ptx" in compiled.asm:
        assert ".v4.b32" in compiled.asm["ptx"] or ".v2.b64" in compiled.asm["ptx"]
        assert ".local" not in compiled.asm["ptx"]
    else:
        assert "load_dwordx4" in compiled.asm["amdgcn"]


def check_launches() -> None:
    """Three launches forward, three backward, two in eval, one to restore; one compilation for all
    sizes."""
    driver = fake_driver()
    from fusedtrain.triton import OPS
    from fusedtrain.triton import _batch_norm_calls as c

    def channels_last(samples: int) -> Tensor:
        return torch.empty(samples, 16, 16, 64).permute(0, 3, 1, 2)

    vectors = [torch.empty(64) for _ in range(4)]
    for samples, momentum in ((2, 0.1), (3, 0.0), (5, 1.0)):
        x = channels_last(samples)
        statistics = (*vectors, True, momentum, 1e-5)
        before = len(driver.launched)
        y, mean, invstd = OPS["batch_norm_act"](x, None, None, *statistics, *RELU)
        assert y.stride() == x.stride()
        assert len(driver.launched) == before + 3
        shared = (None, *vectors[:2], mean, invstd, True, *RELU, True, False, True)
        OPS["batch_norm_act_backward"](x, x, None, *shared)
        assert len(driver.launched) == before + 6
    launchers = [v for n, v in vars(c).items() if n.startswith("_launch_")]
    assert sum(len(launcher._compiled) for launcher in launchers) == 6
    OPS["batch_norm_act"](x, x, None, *vectors, False, 0.1, 1e-5, *RELU)
    assert len(driver.launched) == before + 8
    OPS["batch_norm_stats"](x)
    assert len(driver.launched) == before + 10
    OPS["batch_norm_act_"](x, *vectors, True, 0.1, 1e-5, *RELU)
    OPS["batch_norm_act_restore"](x, *vectors, 1.0)
    before += 4
    assert len(driver.launched) == before + 10
    empty = torch.empty(0, 64, 2)
    OPS["batch_norm_act"](empty, None, None, *vectors, True, 0.1, 1e-5, *RELU)
    OPS["batch_norm_act_backward"](empty, empty, None, *shared)
    assert len(driver.launched) == before + 10


if __name__ == "__main__":
    check_launches() if sys.argv[1] == "launches" else check_target(sys.argv[1])
