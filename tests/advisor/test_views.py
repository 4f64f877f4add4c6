"""Views of a run that `doctor`, `profile` and `tune` share."""

from __future__ import annotations

import threading

from torch import nn

from fusedtrain.advisor._views import OutermostCalls


def test_calls_of_two_threads_do_not_mix() -> None:
    calls, inner, outer = OutermostCalls(), nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1))
    results: list[bool] = []

    def other() -> None:
        results.extend((calls.enter(inner), calls.leave(outer), calls.leave(inner)))

    assert calls.enter(outer)
    assert not calls.enter(inner)
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert results == [True, False, True]
    assert not calls.leave(inner)
    assert calls.leave(outer)
    assert not calls.leave(outer)
