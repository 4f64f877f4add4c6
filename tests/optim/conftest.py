"""Fixtures of the optimizers' tests."""

from __future__ import annotations

import pytest

from fusedtrain.optim import _codes


@pytest.fixture
def codes_of_small_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """States of all parameters are codes with "q8", also of those with few elements."""
    monkeypatch.setattr(_codes, "LEAST_ELEMENTS", 1)
