"""The scripts are run by tests; a module of theirs that is collected would change the process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from fusedtrain.advisor.diagnosis import _trials

collect_ignore = ["scripts"]


@pytest.fixture(autouse=True)
def _no_gain_by_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes as they are and converted are run, and take the same time."""

    def alike(calls: Mapping[str, Callable[[], Any]], *_: Any) -> dict[str, list[float]]:
        for call in calls.values():
            call()
        return {name: [1e6] * 8 for name in calls}

    monkeypatch.setattr(_trials, "interleave", alike)
