"""Settings of the tests of examples."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from helpers.models import torchvision


@pytest.fixture(autouse=True, scope="module")
def _torchvision() -> None:
    """Operator names can be declared once per process: let the tests' own helper do it."""
    torchvision()


@pytest.fixture(autouse=True)
def _same_threads_after() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
