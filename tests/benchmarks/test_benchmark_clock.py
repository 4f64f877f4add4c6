"""How benchmarks measure, and who is let in."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from benchmarks.harness import race
from fusedtrain.advisor.bench import clock as measuring
from fusedtrain.advisor.bench.gate import ANY, NotTheJob, Tolerance, agrees, first_call


def test_interleave_takes_turns() -> None:
    log: list[str] = []
    calls = {name: (lambda name=name: log.append(name)) for name in ("a", "b", "c")}

    def fake(call: Callable[[], object], repeats: int) -> float:
        call()
        return {"a": 100.0, "b": 50.0, "c": 400.0}[log[-1]]

    effort = measuring.Effort(min_rounds=5, max_rounds=5, seconds=0.0, sample_ns=100.0)
    samples = measuring.interleave(calls, fake, effort)
    assert samples == {"a": [100.0] * 5, "b": [50.0] * 5, "c": [400.0] * 5}
    rounds = [log[-15:][start : start + 3] for start in range(0, 15, 3)]
    assert all(sorted(r) == ["a", "b", "c"] for r in rounds)
    assert len({tuple(r) for r in rounds}) > 1


def test_median_interval() -> None:
    assert measuring.median_interval([3.0, 1.0, 2.0]) == (1.0, 3.0)
    # P(fewer than 4 of 20 coins are heads) is 0.13 %, fewer than 5 is 0.59 %.
    assert measuring.median_interval([float(i) for i in range(20)]) == (3.0, 16.0)


def test_admit() -> None:
    def check(who: str, contestant: type[Exception] | None) -> None:
        if contestant is not None:
            raise contestant(f"{who} is wrong")

    wrong, broken = NotTheJob, RuntimeError
    with pytest.warns(UserWarning, match="here: ") as seen:
        admitted = race.admit(
            {"fusedtrain": None, "eager": wrong, "compile": broken, "exact": None}, check, "here"
        )
    assert list(admitted) == ["fusedtrain", "exact"]
    assert [str(warning.message) for warning in seen] == [
        "here: eager left out: eager is wrong",
        "here: compile left out: RuntimeError: compile is wrong",
    ]
    with pytest.raises(pytest.fail.Exception, match=r"here: fusedtrain is wrong\. Not timed"):
        race.admit({"fusedtrain": wrong}, check, "here")
    with pytest.raises(pytest.fail.Exception, match=r"here: own: own is wrong\. Not timed"):
        race.admit({"fusedtrain": None, "own": wrong}, check, "here", ours=("fusedtrain", "own"))
    with pytest.raises(RuntimeError, match="eager is wrong"):
        race.admit({"eager": broken}, check, "here")


@pytest.mark.parametrize(
    ("tolerance", "off", "right"),
    [
        (Tolerance(), 0.0, True),
        (Tolerance(), 1e-7, False),
        (Tolerance(atol=1e-3), 1e-3, True),
        (Tolerance(atol=1e-3), 1.1e-3, False),
        (Tolerance(rtol=1e-3), 1.9e-3, True),
        (Tolerance(rtol=1e-3), 2.1e-3, False),
        (Tolerance(ANY, norm=1e-2), 0.19, True),
        (Tolerance(ANY, norm=1e-2), 0.21, False),
        (Tolerance(1.0, norm=1e-2), 0.21, False),
        (Tolerance(atol=1e3, norm=1e3), torch.nan, False),
    ],
    ids=str,
)
def test_agreement(tolerance: Tolerance, off: float, right: bool) -> None:
    """One of a hundred elements of 2 is off; the norm is 20."""
    expected = torch.full((100,), 2.0, dtype=torch.float64)
    actual = expected.clone()
    actual[17] += off
    if right:
        agrees("output", actual, expected, tolerance)
    else:
        with pytest.raises(NotTheJob, match="wrong output: off by"):
            agrees("output", actual, expected, tolerance)
    with pytest.raises(NotTheJob, match=r"wrong output: shape \(99,\)"):
        agrees("output", actual[1:], expected, tolerance)


def test_a_first_call_has_the_gradients_of_what_is_trained() -> None:
    x, weight, keep = torch.randn(4, 3), torch.randn(3), torch.ones(4, 1)
    results = first_call(
        lambda x, w, k: x * w * k, [x, weight, keep], torch.ones(4, 3), constants=1
    )
    expected = [x * weight, weight.expand(4, 3), x.sum(0)]
    assert len(results) == 3
    for actual, wanted in zip(results, expected):
        torch.testing.assert_close(actual, wanted)
