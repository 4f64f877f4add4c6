"""`example_inputs` is the same argument in every function that runs a model."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedtrain
from helpers.folding import waken

FUNCTIONS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "convert": lambda m, e: fusedtrain.convert(m, e).proof,
    "memory_report": lambda m, e: fusedtrain.memory_report(m, e).totals,
    "fold_conv_bn": lambda m, e: fusedtrain.fold_conv_bn(m, e)[1].error is not None,
    "verify": lambda m, e: fusedtrain.fold_conv_bn(m, verify=e)[1].error is not None,
    "fold_frozen_norms": lambda m, e: fusedtrain.fold_frozen_norms(m, e).error is not None,
    "drop_redundant_bias": lambda m, e: fusedtrain.drop_redundant_bias(m.train(), e) is not None,
}
each_function = pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)


def network() -> nn.Module:
    """Linear and BatchNorm1d: only an example shows that the input has two dimensions."""
    return waken(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.SiLU()))


X = torch.arange(15.0).reshape(5, 3)
FORMS: dict[str, Any] = {
    "tensor": X,
    "tuple": (X,),
    "list": [X],
    "dict": {"input": X},
    "mapping": collections.UserDict(input=X),
    "shape": (5, 3),
    "size": torch.Size([5, 3]),
    "function": lambda: X,
    "function of a shape": lambda: (5, 3),
}


@each_function
@pytest.mark.parametrize("form", FORMS)
def test_forms(
    form: str, function: Callable[[nn.Module, Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but convert took a tensor, a tuple or a dict."""
    model, state, seen, forward = network(), torch.get_rng_state(), [], nn.Linear.forward

    def noting(self: nn.Linear, input: Tensor) -> Tensor:
        if type(input) is Tensor:
            seen.append(input)
        return forward(self, input)

    monkeypatch.setattr(nn.Linear, "forward", noting)
    assert function(model, FORMS[form])
    assert {tuple(x.shape) for x in seen} == {(5, 3)}
    assert all(torch.equal(x, seen[0]) for x in seen)
    assert torch.equal(seen[0], X) is (form not in ("shape", "size", "function of a shape"))
    assert torch.equal(torch.get_rng_state(), state)


@each_function
@pytest.mark.parametrize("example", [3, "x", {1, 2}])
def test_no_example_at_all(example: Any, function: Callable[[nn.Module, Any], Any]) -> None:
    with pytest.raises(TypeError, match=r"example_inputs: expected a tensor.* got (int|str|set)"):
        function(network(), example)


def test_a_mode_in_the_place_of_the_example() -> None:
    with pytest.raises(TypeError, match=r"got str; a mode is named: memory='recompute'$"):
        fusedtrain.convert(network(), "recompute")


@each_function
def test_several_shapes(function: Callable[[nn.Module, Any], Any]) -> None:
    with pytest.raises(ValueError, match=r"example_inputs: .* may be shapes or arguments"):
        function(network(), ((5, 3), (2, 3)))


BATCHLESS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "images": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), (3, 8, 8)),
    "grey": (lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)), (1, 8, 8)),
    "volumes": (lambda: nn.Sequential(nn.Conv3d(2, 4, 1), nn.Flatten()), (2, 4, 4, 4)),
    "sequences": (lambda: nn.Sequential(nn.Conv1d(2, 4, 1), nn.BatchNorm1d(4)), (2, 6)),
    "norm first": (lambda: nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 1)), (3, 8, 8)),
    "vectors": (network, (3,)),
}


@each_function
@pytest.mark.parametrize("name", BATCHLESS)
def test_a_shape_without_a_batch(name: str, function: Callable[[nn.Module, Any], Any]) -> None:
    """The model raised an error of its own, of the number of arguments, say."""
    make, shape = BATCHLESS[name]
    with pytest.raises(ValueError, match=r"example_inputs: the shape .* has no batch.*pass \(2, "):
        function(make().eval(), shape)


def test_shapes_that_suit_are_taken() -> None:
    class Waves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(1, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x[:, None])

    assert fusedtrain.convert(Waves(), (2, 16)).proof is not None
    assert fusedtrain.convert(nn.Sequential(nn.Linear(3, 4), nn.SiLU()), (3,)).proof is not None
    assert fusedtrain.convert(nn.Sequential(nn.Conv2d(3, 4, 1)), torch.ones(3, 5, 5)).proof
