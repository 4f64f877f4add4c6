"""The kernels that one table of cases drives."""

from __future__ import annotations

import pytest

from helpers.backends import BACKENDS, Kernels


@pytest.fixture(params=BACKENDS)
def ops(request: pytest.FixtureRequest) -> Kernels:
    """Each backend in turn; helpers/backends.py says when one is skipped."""
    return BACKENDS[request.param]()
