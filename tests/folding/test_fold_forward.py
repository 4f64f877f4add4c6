"""Forwards of fold_frozen_norms and drop_redundant_bias: pickles in any order, TorchScript."""

from __future__ import annotations

import inspect
import pickle

import pytest
import torch
from torch import Tensor, nn

import fusedtrain


class Net(nn.Module):
    def __init__(self, norm_first: bool) -> None:
        super().__init__()
        layers: list[tuple[str, nn.Module]] = [("c", nn.Conv2d(3, 4, 1)), ("n", nn.BatchNorm2d(4))]
        for name, layer in reversed(layers) if norm_first else layers:
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.n(self.c(x))
        return y


FUNCTIONS = {"tune": fusedtrain.fold_frozen_norms, "bias": fusedtrain.drop_redundant_bias}


@pytest.mark.parametrize("norm_first", [False, True], ids=["conv first", "norm first"])
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_pickles(kind: str, norm_first: bool) -> None:
    """Convolution and norm refer to each other: whichever comes first."""
    model = Net(norm_first)
    assert len(FUNCTIONS[kind](model)) == 1
    model.eval()
    x = torch.randn(2, 3, 4, 4)
    expected = model(x)
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), expected)
    norm, conv = pickle.loads(pickle.dumps((model.n, model.c)))
    assert torch.equal(norm(conv(x)), expected)
    with torch.no_grad():
        norm.weight += 1
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_shows_the_forward_of_the_class(kind: str) -> None:
    model = Net(False)
    FUNCTIONS[kind](model)
    model.eval()
    x = torch.randn(2, 3, 4, 4)
    assert inspect.signature(model.c.forward) == inspect.signature(nn.Conv2d(3, 4, 1).forward)
    torch.testing.assert_close(torch.jit.script(model)(x), model(x))
