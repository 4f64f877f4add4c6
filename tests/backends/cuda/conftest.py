"""The emulator for tests of CUDA's batch norm, on a GPU for each of its two ways."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from helpers.emulated import EmulatedOnce


@pytest.fixture(params=[True, False], ids=["one launch", "three"])
def emulator(request: pytest.FixtureRequest) -> Iterator[EmulatedOnce]:
    emulated = EmulatedOnce(request.param)
    yield emulated
    emulated.emulator.set_device(0)
