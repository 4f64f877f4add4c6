"""Convolutions with the activation inside, where the library refuses the call: the same numbers
without the fusion (test_fold_activations.py has the calls that it takes). A stand-in for cuDNN, and
on a GPU cuDNN.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusedtrain.folding import _conv_act
from fusedtrain.folding._conv_act import Act, ConvAct2d, assign
from helpers.gpu import NEEDS_GPU

NOT_SUPPORTED = "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"


class Library:
    """cuDNN's ops on the CPU: refuses what it is told to, and counts."""

    def __init__(self, error: Callable[[Tensor], Exception | None]) -> None:
        self.error, self.calls = error, 0

    def relu(self, input: Tensor, weight: Tensor, bias: Any, *sizes: Any) -> Tensor:
        self.calls += 1
        if (error := self.error(input)) is not None:
            raise error
        return F.conv2d(input, weight, bias, *sizes).relu() + 0.0

    def add_relu(
        self, input: Tensor, weight: Tensor, z: Tensor, alpha: float, bias: Any, *sizes: Any
    ) -> Tensor:
        self.calls += 1
        if (error := self.error(input)) is not None:
            raise error
        return (F.conv2d(input, weight, bias, *sizes) + alpha * z).relu()


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Library]:
    def put(error: Callable[[Tensor], Exception | None]) -> Library:
        library, platform = Library(error), _conv_act._Cudnn()
        monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
        monkeypatch.setattr(torch, "cudnn_convolution_relu", library.relu)
        monkeypatch.setattr(torch, "cudnn_convolution_add_relu", library.add_relu)
        monkeypatch.setitem(_conv_act.PLATFORMS, "cpu", platform)
        monkeypatch.setattr(_conv_act, "_warned", set())
        return library

    return put


def conv_act() -> ConvAct2d:
    conv = nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2).eval().requires_grad_(False)
    assign(conv, Act("relu"))
    assert isinstance(conv, ConvAct2d)
    return conv


def want(conv: ConvAct2d, x: Tensor, z: Tensor | None = None) -> Tensor:
    y = F.conv2d(x, conv.weight, conv.bias, 2, 1, 1, 2)
    return (y if z is None else y + z).relu()


@pytest.mark.parametrize("residual", [False, True])
def test_a_refused_call_runs_without_the_fusion(
    install: Callable[..., Library], residual: bool
) -> None:
    """And is not tried again; calls of another shape, layout or dtype are."""
    library = install(lambda x: RuntimeError(NOT_SUPPORTED) if x.size(2) == 8 else None)
    conv = conv_act()
    x, other = torch.randn(2, 4, 8, 8), torch.randn(2, 4, 6, 6)
    z, small = (torch.randn(2, 6, n, n) if residual else None for n in (4, 3))
    with pytest.warns(UserWarning, match="without the fusion from now on.*NOT_SUPPORTED"):
        assert torch.equal(conv(x, z), want(conv, x, z))
    assert library.calls == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            torch.testing.assert_close(conv(x + 1, z), want(conv, x + 1, z))
        assert library.calls == 1
        assert torch.equal(conv(other, small), want(conv, other, small))
        assert torch.equal(conv(other, small), want(conv, other, small))
        assert library.calls == 3
        conv(x.to(memory_format=torch.channels_last), z)
        assert library.calls == 4
        conv(torch.randn(2, 4, 8, 8), None if residual else torch.randn(2, 6, 4, 4))
        assert library.calls == 5


def test_what_was_refused_is_of_one_convolution_and_not_saved(
    install: Callable[..., Library],
) -> None:
    library = install(lambda x: RuntimeError(NOT_SUPPORTED))
    conv, x = conv_act(), torch.randn(2, 4, 8, 8)
    with pytest.warns(UserWarning, match="without the fusion"):
        conv(x)
    for other in (copy.deepcopy(conv), pickle.loads(pickle.dumps(conv)), conv_act()):
        before = library.calls
        assert other._refused is None
        assert torch.equal(other(x), want(other, x))
        assert library.calls == before + 1
    for size in range(3, 100):
        conv(torch.randn(1, 4, size, 3))
    assert conv._refused is not None
    assert len(conv._refused) == _conv_act._REFUSALS


def test_lack_of_memory_is_not_remembered(install: Callable[..., Library]) -> None:
    library = install(lambda x: torch.OutOfMemoryError("CUDA out of memory") if full else None)
    conv, x = conv_act(), torch.randn(2, 4, 8, 8)
    full = True
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(conv(x), want(conv, x))
        full = False
        conv(x)
    assert library.calls == 2


def test_other_errors_and_mistakes(install: Callable[..., Library]) -> None:
    install(lambda x: TypeError("a bug"))
    with pytest.raises(TypeError, match="a bug"):
        conv_act()(torch.randn(2, 4, 8, 8))
    install(lambda x: RuntimeError("cuDNN's words"))
    conv = conv_act()
    with pytest.raises(RuntimeError, match=r"expected input.* to have 4 channels"):
        conv(torch.randn(2, 3, 8, 8))
    assert conv._refused is None


@NEEDS_GPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("residual", [False, True])
def test_cudnn(residual: bool, last: bool, dtype: torch.dtype) -> None:
    """Without a residual torch gives cuDNN the output as `z`, times 0: memory full of NaN shows
    whether it is read."""
    conv = conv_act().to("cuda", dtype)
    x = torch.randn(2, 4, 8, 8).to("cuda", dtype)
    z = torch.randn(2, 6, 4, 4).to("cuda", dtype) if residual else None
    if last:
        form = torch.channels_last
        conv, x = conv.to(memory_format=form), x.to(memory_format=form)
        z = None if z is None else z.to(memory_format=form)
    exact = copy.deepcopy(conv).double()
    expected = want(exact, x.double(), None if z is None else z.double())
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for _ in range(2):
            limit = 1e-4 if dtype is torch.float32 else 3e-2
            torch.testing.assert_close(conv(x, z).double(), expected, rtol=limit, atol=limit)
    finally:
        torch.use_deterministic_algorithms(False)
