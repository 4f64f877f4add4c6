"""Names that a forward mentions: fusedtrain/_graph/names.py."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusedtrain._graph.names import mentioned


def _named(function: Any) -> Any:
    def wrapper(x: Tensor) -> Tensor:
        y: Tensor = function(x)
        return y

    return wrapper


_first, _second = _named(lambda x: torch.nn.functional.silu(x)), _named(lambda x: torch.tanh(x))


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _first(x) + _second(x)
        return y


class Static(nn.Module):
    """Its method is called by its name of the class, too."""

    def forward(self, x: Tensor) -> Tensor:
        return self.go(x) + _go(self, x)

    def go(self, x: Tensor) -> Tensor:
        return self.gated(x)

    def gated(self, x: Tensor) -> Tensor:
        return torch.nn.functional.gelu(x)


_go = Static.go


def test_names_are_found_whatever_owns_the_first_function_of_a_code() -> None:
    """Two decorated functions have one code: each brings along what it encloses."""
    assert {"silu", "tanh"} <= mentioned(Twice())
    assert "gelu" in mentioned(Static())


@pytest.mark.slow
def test_names_do_not_depend_on_the_order_of_sets() -> None:
    code = (
        "from conversion.test_names import *\n"
        "print(*(sorted(mentioned(c())) for c in (Twice, Static)))"
    )
    texts = [
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
        ).stdout
        for seed in "123"
    ]  # fmt: skip
    assert len(set(texts)) == 1
