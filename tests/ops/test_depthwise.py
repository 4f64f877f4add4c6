"""depthwise_conv1d, 2d, 3d and their modules: torch's numbers, layouts and errors, gradients of any
order, everything around them.

test_depthwise_kernels.py has the kernels.
"""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as T
from torch import Tensor, nn

import fusedtrain.functional as F
from fusedtrain import nn as fused
from fusedtrain.ops import depthwise as _depthwise, depthwise_autograd
from helpers.activations import DTYPES
from helpers.autograd_routes import by_both


@pytest.fixture(autouse=True)
def _kernels_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not torch's kernels where these are faster; test_the_rule has that."""
    monkeypatch.setattr(_depthwise, "_EVERYWHERE", True)


OURS = {1: F.depthwise_conv1d, 2: F.depthwise_conv2d, 3: F.depthwise_conv3d}
TORCHS = {1: T.conv1d, 2: T.conv2d, 3: T.conv3d}
CLASSES = {1: fused.DepthwiseConv1d, 2: fused.DepthwiseConv2d, 3: fused.DepthwiseConv3d}

# Shape of the input, of the kernel, multiplier, and the arguments behind the bias.
Call = tuple[tuple[int, ...], tuple[int, ...], int, dict[str, Any]]
CALLS: dict[str, Call] = {
    "3x3": ((2, 20, 9, 10), (3, 3), 1, {"padding": 1}),
    "5x5 by 2": ((2, 3, 11, 12), (5, 5), 1, {"stride": 2, "padding": 2}),
    "7x7": ((1, 5, 9, 8), (7, 7), 1, {"padding": [3]}),
    "pairs": ((2, 4, 9, 12), (2, 4), 2, {"stride": (1, 3), "padding": (0, 2), "dilation": (2, 1)}),
    "same": ((2, 4, 5, 6), (4, 3), 1, {"padding": "same"}),
    "valid": ((2, 4, 7, 6), (3, 2), 3, {"padding": "valid"}),
    "one sample": ((6, 7, 8), (3, 3), 1, {"padding": 1}),
    "1-d": ((2, 6, 40), (31,), 1, {"padding": 15}),
    "3-d": ((2, 5, 4, 6, 7), (3, 3, 3), 1, {"stride": (1, 2, 2), "padding": 1}),
}


def arguments(name: str, dtype: torch.dtype = torch.float32, last: bool = False) -> list[Tensor]:
    shape, kernel, multiplier, _ = CALLS[name]
    channels = shape[-len(kernel) - 1]
    generator = torch.Generator().manual_seed(3)
    shapes = (shape, (channels * multiplier, 1, *kernel), (channels * multiplier,))
    made = [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]
    if last and made[0].dim() > 3:
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        made[0] = made[0].contiguous(memory_format=formats[made[0].dim()])
    return [t.requires_grad_() for t in made]


def both(name: str, *tensors: Tensor) -> tuple[Tensor, Tensor]:
    _, kernel, _, rest = CALLS[name]
    dims = len(kernel)
    groups = tensors[0].size(-dims - 1)
    return OURS[dims](*tensors, **rest), TORCHS[dims](*tensors, **rest, groups=groups)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_is_torchs(name: str, dtype: torch.dtype, last: bool) -> None:
    tensors = arguments(name, dtype, last)
    wide = [t.detach().double().requires_grad_() for t in tensors]
    ours, torchs = both(name, *tensors)
    _, exact = both(name, *wide)
    assert ours.dtype is dtype
    if len(tensors[0].shape) < 5:  # torch's plain loops, in 3-d, do not keep channels_last
        assert ours.stride() == torchs.stride()
    grad = torch.randn_like(ours)
    ours.backward(grad)
    exact.backward(grad.double())
    # Sums of up to a hundred products in float32 or float64, rounded once to 16 bits.
    eps = torch.finfo(dtype).eps
    atol = 200 * torch.finfo(torch.float64 if dtype is torch.float64 else torch.float32).eps
    torch.testing.assert_close(ours.double(), exact, rtol=eps, atol=atol)
    for mine, truth in zip(tensors, wide, strict=True):
        torch.testing.assert_close(mine.grad.double(), truth.grad, rtol=2 * eps, atol=atol)


@pytest.mark.parametrize("asked", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_only_gradients_that_are_asked_for(asked: tuple[int, ...]) -> None:
    tensors = arguments("5x5 by 2")
    all_of = torch.autograd.grad(both("5x5 by 2", *tensors)[0].sum(), tensors)
    for i, t in enumerate(tensors):
        t.requires_grad_(i in asked)
    some = torch.autograd.grad(both("5x5 by 2", *tensors)[0].sum(), [tensors[i] for i in asked])
    for i, grad in zip(asked, some, strict=True):
        assert torch.equal(grad, all_of[i])


@pytest.mark.parametrize("last", [False, True])
def test_infinities_stay_where_they_are(last: bool) -> None:
    """The last column is seen by no output, and that of the second row by one tap alone."""
    x = torch.ones(1, 1 if not last else 18, 5, 6)
    if last:
        x = x.contiguous(memory_format=torch.channels_last)
    x[..., -1] = torch.inf
    weight = torch.ones(x.size(1), 1, 3, 3, requires_grad=True)
    output = F.depthwise_conv2d(x, weight, stride=2)
    assert torch.isfinite(output).all()
    output.sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.full_like(weight.grad, 4))


STRANGE: dict[str, Any] = {
    "expanded": lambda x: x[:1].expand_as(x),
    "transposed": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "sliced": lambda x: torch.cat([x, x], -1)[..., ::2],
    "with an offset": lambda x: torch.cat([x.flatten(), x.flatten()])[1 : 1 + x.numel()].view_as(x),
    "no samples": lambda x: x[:0],
}


@pytest.mark.parametrize("strange", STRANGE)
def test_inputs_of_any_strides(strange: str) -> None:
    tensors = [t.detach() for t in arguments("3x3")]
    tensors[0] = STRANGE[strange](tensors[0])
    tensors = [t.requires_grad_() for t in tensors]
    ours, torchs = both("3x3", *tensors)
    torch.testing.assert_close(ours, torchs)
    mine = torch.autograd.grad(ours.sum(), tensors)
    theirs = torch.autograd.grad(torchs.sum(), tensors)
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation"),
    [((3, 3), 1 << 29, 1, 1), ((2, 2), 1, 1 << 20, 1 << 20)],
)
@pytest.mark.parametrize("last", [False, True])
def test_strides_and_dilations_far_beyond_the_input(
    kernel: tuple[int, int], stride: int, padding: int, dilation: int, last: bool
) -> None:
    x = torch.randn(1, 16, 4, 5)
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    weight = torch.randn(16, 1, *kernel)
    tensors = [x.requires_grad_(), weight.requires_grad_()]
    if dilation > 1:  # torch's output would have 10^12 elements, but for one row
        tensors[0] = x[:, :, :1].detach().requires_grad_()
        padding, dilation = (0, padding), (1, dilation)
        tensors[1] = weight[:, :, :1].detach().requires_grad_()
    rest = (None, stride, padding, dilation)
    ours = F.depthwise_conv2d(*tensors, *rest)
    torchs = T.conv2d(*tensors, *rest, 16)
    torch.testing.assert_close(ours, torchs)
    for a, b in zip(
        torch.autograd.grad(ours.sum(), tensors), torch.autograd.grad(torchs.sum(), tensors),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_weights_in_channels_last() -> None:
    x, weight, bias = arguments("3x3")
    last = weight.detach().contiguous(memory_format=torch.channels_last)
    ours, torchs = both("3x3", x, last, bias)
    assert ours.stride() == torchs.stride()
    torch.testing.assert_close(ours, torchs)


WRONG: dict[str, tuple[Any, ...]] = {
    "kernel too large": (torch.ones(1, 2, 2, 2), torch.ones(2, 1, 3, 3)),
    "channels": (torch.ones(1, 3, 4, 4), torch.ones(2, 1, 3, 3)),
    "dense weight": (torch.ones(1, 2, 4, 4), torch.ones(2, 2, 3, 3)),
    "bias": (torch.ones(1, 2, 4, 4), torch.ones(2, 1, 3, 3), torch.ones(3)),
    "dtypes": (torch.ones(1, 2, 4, 4), torch.ones(2, 1, 3, 3).double()),
    "dimensions": (torch.ones(2, 4), torch.ones(2, 1, 3, 3)),
    "stride": (torch.ones(1, 2, 4, 4), torch.ones(2, 1, 3, 3), None, 0),
    "padding": (torch.ones(1, 2, 4, 4), torch.ones(2, 1, 3, 3), None, 1, -1),
    "a word": (torch.ones(1, 2, 4, 4), torch.ones(2, 1, 3, 3), None, 1, "some"),
    "same by 2": (torch.ones(1, 2, 4, 4), torch.ones(2, 1, 3, 3), None, 2, "same"),
    "no tensor": ([[1.0]], torch.ones(2, 1, 3, 3)),
    "no tensor of weights": (torch.ones(1, 2, 4, 4), 3),
    "three strides": (torch.ones(1, 2, 4, 4), torch.ones(2, 1, 3, 3), None, (1, 1, 1)),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_errors_are_torchs(mistake: str) -> None:
    call = WRONG[mistake]
    rest = (*call, *(None, 1, 0, 1)[len(call) - 2 :])
    groups = call[0].size(-3) if isinstance(call[0], Tensor) and call[0].dim() > 2 else 1
    with pytest.raises(Exception) as theirs:
        T.conv2d(*rest, groups)
    with pytest.raises(type(theirs.value)) as ours:
        F.depthwise_conv2d(*call)
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype: torch.dtype) -> None:
    tensors = arguments("3x3")
    with torch.autocast("cpu", dtype):
        ours, torchs = both("3x3", *tensors)
    assert ours.dtype is torchs.dtype is dtype
    torch.testing.assert_close(ours, torchs, rtol=4 * torch.finfo(dtype).eps, atol=0.05)
    grads = torch.autograd.grad(ours.sum(), tensors)
    assert [g.dtype for g in grads] == [torch.float32] * 3


@pytest.mark.parametrize("dims", CLASSES)
@pytest.mark.parametrize("mode", ["zeros", "reflect", "circular"])
@pytest.mark.parametrize("padding", [1, "same"])
def test_modules(dims: int, mode: str, padding: Any) -> None:
    torch.manual_seed(1)
    ours = CLASSES[dims](4, 8, 3, padding=padding, padding_mode=mode)
    torch.manual_seed(1)
    stock = getattr(nn, f"Conv{dims}d")(4, 8, 3, padding=padding, groups=4, padding_mode=mode)
    for (name, a), (other, b) in zip(
        ours.state_dict().items(), stock.state_dict().items(), strict=True
    ):
        assert name == other
        assert torch.equal(a, b)
    x = torch.randn(2, 4, *[6] * dims)
    want = stock(x)
    scripted = torch.jit.script(ours)
    for module in (ours, copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), scripted):
        torch.testing.assert_close(module(x), want)
    saved = io.BytesIO()
    torch.jit.save(scripted, saved)
    saved.seek(0)
    torch.testing.assert_close(torch.jit.load(saved)(x), want)
    assert repr(ours).partition("(")[2] == repr(stock).partition("(")[2]


def test_modules_have_as_many_groups_as_channels() -> None:
    assert fused.DepthwiseConv2d(4, 4, 3, groups=4).groups == 4
    with pytest.raises(ValueError, match=r"groups: a depthwise .* in_channels, 4, not 2"):
        fused.DepthwiseConv2d(4, 4, 3, groups=2)


OPS = {
    op: getattr(depthwise_autograd, op) for op in ("_depthwise_conv", "_depthwise_conv_backward")
}


def counting(op: str, called: list[str]) -> Any:
    def run(*arguments: Any) -> Any:
        called.append(op)
        return OPS[op](*arguments)

    return run


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_the_rule(name: str, last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever computes what, the results are the same to rounding, and each kernel runs."""
    tensors = arguments(name, last=last)
    want = both(name, *tensors)[0]
    grads = torch.autograd.grad(want.sum(), tensors)
    monkeypatch.setattr(_depthwise, "_EVERYWHERE", False)
    for some in itertools.product((False, True), repeat=3):
        rule = {"cpu": lambda *_, some=some: _depthwise.Faster(*some)}
        monkeypatch.setattr(_depthwise, "_MEASURED", rule)
        called: list[str] = []
        for op in OPS:
            monkeypatch.setattr(depthwise_autograd, op, counting(op, called))

        def run() -> list[Tensor]:
            output = both(name, *tensors)[0]
            return [output, *torch.autograd.grad(output.sum(), tensors)]

        by_cpp, by_python = by_both(run)
        for a, b, c in zip(by_cpp, by_python, (want, *grads), strict=True):
            assert torch.equal(a, b)
            assert a.stride() == b.stride()
            torch.testing.assert_close(a, c, rtol=1e-4, atol=1e-4)
        unequal = name == "same"  # which torch pads by a copy
        assert ("_depthwise_conv" in called) == (some[0] or unequal)
        assert ("_depthwise_conv_backward" in called) == (some[1] or some[2] or unequal)


F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
# Kernel, outputs a channel and what else differs from a contiguous float32 call; the passes in
# which ours run: f(orward), i(nput), w(eight). Two lines are the sides of a limit.
LIMITS: list[tuple[tuple[int, ...], int, dict[str, Any], str]] = [
    # contiguous planes
    ((3, 3), 999, {}, ""),
    ((3, 3), 1000, {}, "fiw"),
    ((4, 3), 999, {}, ""),
    ((3, 4), 699, {}, "w"),
    ((3, 4), 700, {}, "fiw"),
    ((5, 5), 999, {"stride": (1, 2)}, "w"),
    ((5, 5), 1000, {"stride": (1, 2)}, "fiw"),
    ((9, 9), 699, {}, "w"),
    ((10, 3), 999, {}, "f"),
    ((3, 3), 999, {"dilation": (1, 2)}, "iw"),
    ((3, 3), 999, {"dilation": (4, 1)}, "iw"),  # a window of 9
    ((3, 3), 999, {"dilation": (5, 1)}, "fiw"),
    ((15, 3), 1000, {}, "fiw"),
    ((16, 3), 1000, {}, "fw"),
    ((16, 3), 1000, {"dilation": (1, 2)}, "fiw"),
    # volumes
    ((3, 3, 3), 7999, {}, "iw"),
    ((3, 3, 3), 8000, {}, "fiw"),
    ((5, 5, 5), 7999, {}, "iw"),
    # rows
    ((5,), 1, {}, "fiw"),
    ((6,), 9999, {}, "w"),
    ((9,), 1, {}, "w"),
    ((10,), 1, {}, "fw"),
    ((6,), 1, {"dilation": (2,)}, "fiw"),
    # channels_last
    ((3, 3), 9999, {"last": True}, ""),
    ((9, 3), 9999, {"last": True}, ""),
    ((3, 4), 1, {"last": True}, "w"),
    ((10, 3), 1, {"last": True}, "fi"),
    ((15, 3), 1, {"last": True}, "fi"),
    ((16, 3), 1, {"last": True}, "i"),
    ((3, 3), 1, {"last": True, "dilation": (2, 1)}, "iw"),
    ((3, 3, 3), 9999, {"last": True}, "iw"),
    # 16 bits
    ((3, 3), 3999, {"dtype": BF16}, ""),
    ((3, 3), 4000, {"dtype": BF16}, "fiw"),
    ((3, 3), 4000, {"dtype": BF16, "last": True}, ""),
    ((3, 4), 3999, {"dtype": BF16}, "w"),
    ((3, 3), 3999, {"dtype": BF16, "stride": (1, 2)}, "i"),
    ((3, 3), 3999, {"dtype": BF16, "dilation": (1, 2)}, "iw"),
    ((5,), 4000, {"dtype": BF16}, "w"),
    ((3,), 4000, {"dtype": BF16}, ""),
    ((3, 3, 3), 4000, {"dtype": BF16}, "iw"),
    # torch's plain loops
    ((1, 1), 1, {}, "fiw"),
    ((1, 2), 1, {}, ""),
    ((3, 3), 1, {"dtype": F64}, "fiw"),
    ((3, 3), 1, {"dtype": torch.float16}, "fiw"),  # of which this oneDNN has none
]


@pytest.mark.parametrize(("kernel", "outputs", "rest", "passes"), LIMITS, ids=str)
def test_the_limits_of_the_rule(
    kernel: tuple[int, ...], outputs: int, rest: dict[str, Any], passes: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Numbers that were measured (docs/depthwise.md); whoever changes one changes a line here."""
    ones = (1,) * len(kernel)
    call = (rest.get("dtype", F32), kernel, rest.get("stride", ones), rest.get("dilation", ones))
    monkeypatch.setattr(_depthwise, "mkldnn_is_on", lambda: True)
    monkeypatch.setattr(_depthwise, "mkldnn_takes", lambda dtype: dtype is BF16)
    use = _depthwise.faster(*call, outputs, rest.get("last", False))
    assert "".join(itertools.compress("fiw", use)) == passes
    monkeypatch.setattr(_depthwise, "mkldnn_is_on", lambda: False)
    assert all(_depthwise.faster(*call, outputs, rest.get("last", False)))


def test_other_devices_run_torchs_kernels() -> None:
    """Nothing was measured on them."""
    x, weight, _ = (t.detach().to("meta") for t in arguments("3x3"))
    everywhere = _depthwise._plan_of(x, weight, None, 1, 1, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_depthwise, "_EVERYWHERE", False)
        measured = _depthwise._plan_of(x, weight, None, 1, 1, 1)
    assert everywhere is not None
    assert measured is not None
    assert (everywhere.use, measured.use) == ((True, True, True), (False, False, False))


@pytest.mark.parametrize(
    "value", [True, 1.0, (1.0, 1.0), (True, 1), [1, 1, 1], None, torch.tensor(1)]
)
def test_numbers_that_are_no_integers_are_torchs(value: Any) -> None:
    """Plans are cached, and `True == 1.0 == 1`."""
    x, weight, _ = (t.detach() for t in arguments("3x3"))
    assert _depthwise._plan_of(x, weight, None, 1, 1, 1) is not None
    assert _depthwise._plan_of(x, weight, None, value, 1, 1) is None
    assert _depthwise._plan_of(x, weight, None, 1, value, 1) is None
    assert _depthwise._plan_of(x, weight, None, 1, 1, value) is None
