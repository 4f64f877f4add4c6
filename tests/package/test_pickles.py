"""Whole models and optimizers that were pickled before modules of the package moved load, and
compute what they did; and no pickle names a private module, so that later moves break none.
"""

from __future__ import annotations

import inspect
import lzma
import pickle
import pickletools
import sys
from typing import Any

import pytest
import torch

from fusedtrain import functional
from helpers import TESTS

sys.path.insert(0, str(TESTS / "data"))
import pickled_models as made

MODELS, OPTIMIZERS = pickle.loads(lzma.decompress(made.FILE.read_bytes()))


@pytest.mark.parametrize("kind", made.KINDS)
def test_models(kind: str) -> None:
    written, expected = MODELS[kind]
    for result, want in zip(made.results(pickle.loads(written)), expected, strict=True):
        torch.testing.assert_close(result, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", made.OPTIMIZERS)
def test_optimizers(name: str) -> None:
    written, state = OPTIMIZERS[name]
    fresh = made.stepped(name)
    fresh.load_state_dict(state)
    loaded = pickle.loads(written)
    for optimizer in (loaded, fresh):
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.full_like(parameter, 0.25)
        optimizer.step()
    torch.testing.assert_close(loaded.state_dict(), fresh.state_dict(), rtol=1e-5, atol=1e-6)
    ours, expected = (o.param_groups[0]["params"] for o in (loaded, fresh))
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


def private_names(pickled: bytes) -> set[str]:
    """Strings of a pickle that name a private module of this package."""
    texts = (argument for _, argument, _ in pickletools.genops(pickled) if type(argument) is str)
    return {
        text for text in texts if "fusedtrain._" in text or ("fusedtrain." in text and "._" in text)
    }


@pytest.mark.parametrize("kind", made.KINDS)
def test_no_private_names(kind: str) -> None:
    model: Any = made.changed(kind)
    made.results(model)
    assert not private_names(pickle.dumps(model))


@pytest.mark.parametrize("name", made.OPTIMIZERS)
def test_no_private_names_of_optimizers(name: str) -> None:
    assert not private_names(pickle.dumps(made.stepped(name)))


def test_functions_are_named_by_their_public_module() -> None:
    public = [f for n, f in vars(functional).items() if inspect.isfunction(f) and n[0] != "_"]
    assert len(public) > 30
    assert {f.__module__ for f in public} == {"fusedtrain.functional"}


def test_private_names_are_noticed() -> None:
    from fusedtrain.conversion._classes import Decision

    assert private_names(pickle.dumps(Decision)) == {"fusedtrain.conversion._classes"}
