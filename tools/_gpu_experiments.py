"""The experiments of `make gpu` as tests: the journal has a line for each, with the reason of a
failure, and a test that was cut runs again."""

from __future__ import annotations

import os

import pytest

from benchmarks.experiments import NAMES
from benchmarks.experiments.command import INTERRUPTED, main

OPTIONS = "FUSEDTRAIN_EXPERIMENT_OPTIONS"  # of the command, in the environment


@pytest.mark.parametrize("name", NAMES)
def test_experiment(name: str) -> None:
    """No run raises. A verdict against a published claim is a result and no failure."""
    code = main([name, *os.environ[OPTIONS].split()])
    if code == INTERRUPTED:  # the time is up: neither passed nor failed
        raise KeyboardInterrupt
    assert code == 0
