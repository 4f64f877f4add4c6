"""max_pool2d and MaxPool2d: torch's errors, what is kept for backward, everything around them.

test_pool_kernels.py has the numbers, conformance/ torch's samples, test_every_function.py gradients
of any order.
"""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as T
from torch import Tensor, nn

import fusedtrain
import fusedtrain.functional as F
from helpers.observed import saved_by
from helpers.recompute import assert_same_bits, kept_by, recomputed, run_both

ELSEWHERE: dict[str, dict[str, Any]] = {
    "dilation": {"kernel_size": 2, "dilation": 2},
    "large": {"kernel_size": 17, "stride": 1, "padding": 8},
    "list of one": {"kernel_size": [2]},
}


def image(*shape: int, last: bool = False) -> Tensor:
    x = torch.randint(-4, 5, shape).float()
    return x.contiguous(memory_format=torch.channels_last) if last else x


@pytest.mark.parametrize("call", ELSEWHERE)
def test_runs_in_torch(call: str) -> None:
    x = torch.randn(2, 3, 20, 20, requires_grad=True)
    y = F.max_pool2d(x, **ELSEWHERE[call])
    assert "WithIndices" in str(y.grad_fn)
    assert y.equal(T.max_pool2d(x, **ELSEWHERE[call]))


def test_indices() -> None:
    x = torch.randn(2, 3, 8, 8)
    ours, want = (f(x, 2, return_indices=True) for f in (F.max_pool2d, T.max_pool2d))
    assert isinstance(ours, tuple)
    assert all(map(torch.equal, ours, want))
    _, index = fusedtrain.nn.MaxPool2d(2, return_indices=True)(x)
    assert index.equal(want[1])


def test_other_dtypes_run_in_torch() -> None:
    x = torch.randint(0, 9, (1, 2, 6, 6))
    assert F.max_pool2d(x, 2).equal(T.max_pool2d(x, 2))


@pytest.mark.parametrize(
    "arguments",
    [
        (2, 0), (2, None, 2), (9,), ((2, 2, 2),), (0,), (2, -1), (2, None, -1), ("2",), (2.5,),
        (2, None, 0, 0), (True,), (2, None, 0, 1, None),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("shape", [(1, 2, 6, 6), (6, 6), (2, 0, 6, 6), (2, 3, 0, 6)], ids=str)
def test_mistakes_are_torchs(shape: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
    x = torch.randn(shape)
    outcomes: list[Any] = []
    for function in (F.max_pool2d, T.max_pool2d):
        try:
            outcomes.append(function(x, *arguments))
        except Exception as error:
            outcomes.append((type(error), str(error)))
    ours, theirs = outcomes
    assert ours.equal(theirs) if isinstance(theirs, Tensor) else ours == theirs


@pytest.mark.parametrize(
    ("window", "bits"), [((1, 2), 1), (2, 2), (3, 4), (4, 4), (5, 8), (16, 8)], ids=str
)
@pytest.mark.parametrize("last", [False, True])
def test_keeps_a_few_bits(window: Any, bits: int, last: bool) -> None:
    x = image(4, 16, 32, 32, last=last).requires_grad_()
    y, (codes,) = saved_by(lambda: F.max_pool2d(x, window))
    count = y.numel()
    assert codes.dtype is torch.uint8
    assert codes.numel() == -(-count // 256) * 256 * bits // 8
    assert codes.untyped_storage().nbytes() == codes.numel()
    assert not saved_by(lambda: F.max_pool2d(x.detach(), window))[1]
    _, eager = saved_by(lambda: T.max_pool2d(x, window))
    assert sum(t.nbytes for t in eager) == x.nbytes + 8 * count


def test_input_and_output_may_be_modified() -> None:
    """Neither is kept: `x = pool(x); x += 1` needs no exception."""
    x = torch.randn(2, 3, 6, 6, requires_grad=True)
    inner = x * 1
    y = F.max_pool2d(inner, 2)
    (want,) = torch.autograd.grad(T.max_pool2d(x, 2).sum(), x)
    with torch.no_grad():
        inner.zero_()
    y.add_(1)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert gradient.equal(want)


def test_what_others_keep_may_not_be_modified() -> None:
    x, conv = torch.randn(1, 2, 6, 6, requires_grad=True), nn.Conv2d(2, 2, 1)
    for context in (nullcontext(), fusedtrain.recompute()):
        with context:
            y = F.max_pool2d(F.silu(x), 2)
            z = conv(y)
        y.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.sum().backward()


def test_recompute() -> None:
    """The consumer of a pooled output keeps nothing, where the pool's input is kept or noted."""
    x = torch.randn(2, 8, 16, 16, requires_grad=True)
    conv = nn.Conv2d(8, 8, 1)

    def model(pool: Any) -> Tensor:
        return conv(pool(F.silu(x), 2))

    quarter = x.nbytes // 4
    assert kept_by(lambda: model(T.max_pool2d), quarter) == 4 + 4 + 2 + 1
    assert kept_by(lambda: model(F.max_pool2d), quarter) == 4 + 1
    assert kept_by(lambda: recomputed(lambda: model(F.max_pool2d)), quarter) == 4
    # The input of the pool is kept by nobody.
    assert kept_by(lambda: recomputed(lambda: conv(F.max_pool2d(x * 2, 2))), quarter) == 1
    stem = nn.Sequential(
        nn.Conv2d(3, 8, 3), fusedtrain.nn.BatchNormAct2d(8), fusedtrain.nn.MaxPool2d(3, 2, 1), conv
    )
    assert_same_bits(run_both(stem, torch.randn(2, 3, 14, 14)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype: torch.dtype) -> None:
    x = torch.randn(1, 3, 8, 8)
    with torch.autocast("cpu", dtype):
        for t in (x, x.to(dtype)):
            assert F.max_pool2d(t, 2).dtype == T.max_pool2d(t, 2).dtype


def test_an_expanded_gradient() -> None:
    x = torch.randn(2, 3, 6, 6, requires_grad=True)
    gradients = (
        torch.autograd.grad(f(x, 3, 1, 1).sum(), x)[0] for f in (F.max_pool2d, T.max_pool2d)
    )
    assert torch.equal(*gradients)


def in_a_function(x: Tensor) -> Tensor:
    return F.max_pool2d(x, 3, 2, padding=1)


def test_script() -> None:
    x = torch.randn(2, 3, 9, 9)
    traced = torch.jit.trace(fusedtrain.nn.MaxPool2d(3, 2, 1), x)
    assert "aten::max_pool2d" in str(traced.graph)
    assert traced(x).equal(in_a_function(x))
    assert torch.jit.script(in_a_function)(x).equal(in_a_function(x))
    assert torch.jit.script(fusedtrain.nn.MaxPool2d(2))(x).equal(T.max_pool2d(x, 2))
    _, index = torch.jit.script(fusedtrain.nn.MaxPool2d(2, return_indices=True))(x)
    assert index.equal(T.max_pool2d(x, 2, return_indices=True)[1])


def test_module() -> None:
    stock = nn.MaxPool2d((3, 2), (2, 1), 1, 1, ceil_mode=True)
    ours = fusedtrain.nn.MaxPool2d((3, 2), (2, 1), 1, 1, ceil_mode=True)
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    assert repr(ours) == repr(stock)
    assert ours.state_dict() == stock.state_dict()
    for module in (ours, copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        y = module(x)
        assert y.equal(stock(x))
        assert "MaxPool2dBackward" in str(y.grad_fn)
        assert "Indices" not in str(y.grad_fn)


def test_convert() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.MaxPool2d(2), nn.MaxPool2d(3, 1, dilation=2))
    x = torch.randn(2, 3, 12, 12)
    want = model(x)
    report = fusedtrain.convert(model, x)
    assert [one.name for one in report.converted] == ["1", "2"]
    assert report.proof is not None
    # The input of 2 x 2 windows, 4 channels: kept by the convolution's output, now by nobody.
    assert report.proof.saved_before - report.proof.saved_after > 2 * 4 * 144 * 4
    assert model(x).equal(want)
    assert fusedtrain.revert(model) == 2
    assert type(model[1]) is nn.MaxPool2d
