"""The benchmarks' own tests: the report, the measuring loop, the gate, and a smoke run."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks._measure")


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.report")


@pytest.fixture
def results(measure: ModuleType, tmp_path: Path) -> Callable[..., Path]:
    """Writes a results file from (op, pass, numel, ns of fusedtrain, ns of the rivals)."""

    def write(
        *rows: tuple[str, str, int, list[float], dict[str, list[float]]], name: str = "results.json"
    ) -> Path:
        benchmarks = []
        for op, pass_name, numel, ours, rivals in rows:
            copies = {"copy": [0.5 * t for t in ours], "copy_fresh": ours}
            info = measure.row(
                op=op,
                pass_name=pass_name,
                dtype=torch.float32,
                numel=numel,
                device="cpu",
                samples={"fusedtrain": ours, **rivals, **copies},
            )
            benchmarks.append({"name": f"test_activation[{op}]", "extra_info": info})
        benchmarks.append({"name": "of another kind", "extra_info": {}})
        path = tmp_path / name
        path.write_text(json.dumps({"benchmarks": benchmarks}))
        return path

    return write


N = 2**20
STEADY = [1e6] * 9


def times(factor: float) -> list[float]:
    return [factor * ns for ns in STEADY]


def test_table(results: Callable[..., Path], report: ModuleType, capsys: Any) -> None:
    path = results(
        ("mish", "forward", N, STEADY, {"eager": times(3), "compile": times(1.25)}),
        ("mish", "forward+backward", N, STEADY, {"eager": times(4)}),
        ("silu", "forward", 2**10, STEADY, {"eager": times(1)}),
    )
    assert report.main([str(path)]) == 0
    text = capsys.readouterr().out
    assert "float32, 2^20 elements" in text
    assert torch.__version__ in text
    (line,) = (x for x in text.splitlines() if "mish" in x and "forward " in x)
    # 2 tensors of 4 MiB in 1 ms; the copy moves the same bytes in the same time.
    assert [cell.strip() for cell in line.split("│")[1:-1]] == [
        *("mish", "forward", "1 ms", "8.4", "100", "50", "3.00x", "3.00-3.00", "1.25x", "")
    ]
    assert "1 ms" in text
    assert "21.0" in text
    assert "Slower than eager beyond noise (> 5%): 0 rows" in text
    assert "3.46x (geometric mean of 2)" in text
    assert "+0.0 us per call (silu" in text


def test_markdown(results: Callable[..., Path], report: ModuleType, capsys: Any) -> None:
    path = results(
        ("mish", "forward", N, STEADY, {"eager": times(3), "compile": times(1.25)}),
        ("mish", "forward+backward", N, STEADY, {"eager": times(4)}),
        ("silu", "forward", N, STEADY, {"eager": times(1)}),
        ("silu", "forward", 2**10, STEADY, {"eager": times(1)}),
    )
    assert report.main([str(path), "--markdown"]) == 0
    lines = capsys.readouterr().out.splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 4
    assert table[0].startswith(
        "| op | forward GB/s (% of copy) | forward vs eager | forward vs com"
    )
    assert table[2] == "| mish | 8.4 (100 %) | 3.00x | 1.25x | 21.0 (250 %) | 4.00x |  |"
    assert table[3] == "| silu | 8.4 (100 %) | 1.00x |  |  |  |  |"
    assert {line.count("|") for line in table} == {8}
    assert report.main([str(path), "--markdown", "--numel", "1024"]) == 0
    assert "mish" not in capsys.readouterr().out


def test_chart(results: Callable[..., Path], report: ModuleType, tmp_path: Path) -> None:
    one = results(
        ("mish", "forward", N, STEADY, {"eager": times(3), "compile": times(1)}),
        ("mish", "forward+backward", N, STEADY, {"eager": times(4), "compile": times(2)}),
    )
    other = results(("silu", "forward", 2**10, STEADY, {"eager": times(1)}), name="other.json")
    png = tmp_path / "charts" / "bars.png"
    assert report.main([str(one), str(other), "--png", str(png)]) == 0
    assert png.read_bytes().startswith(b"\x89PNG")
    assert png.stat().st_size > 10_000


def test_no_rows(results: Callable[..., Path], report: ModuleType) -> None:
    assert report.main([str(results())]) == 2


@pytest.mark.parametrize(
    ("numel", "ours", "slower"),
    [
        pytest.param(N, [1.2e6] * 20, True, id="surely slower"),
        pytest.param(N, [1.04e6] * 20, False, id="within 5 percent"),
        pytest.param(N, [0.9e6] + [1.2e6] * 19, True, id="one outlier"),
        pytest.param(N, [0.9e6] * 8 + [1.3e6] * 12, False, id="noise"),
        pytest.param(2**10, [4e3] * 20, False, id="small, 3 us more"),
        pytest.param(2**10, [8e3] * 20, True, id="small, 7 us more"),
    ],
)
def test_slower_rows_are_flagged(
    results: Callable[..., Path],
    report: ModuleType,
    capsys: Any,
    numel: int,
    ours: list[float],
    slower: bool,
) -> None:
    eager = [1e6 if numel == N else 1e3] * 20
    path = results(("relu", "forward", numel, ours, {"eager": eager}))
    assert report.main([str(path), "--fail-slower"]) == int(slower)
    text = capsys.readouterr().out
    assert ("SLOWER" in text) == slower
    assert ("  relu forward float32" in text) == slower
    assert report.main([str(path)]) == 0


def test_rows_of_a_busy_machine_are_marked(
    results: Callable[..., Path], report: ModuleType, capsys: Any
) -> None:
    path = results(
        ("relu", "forward", N, times(3), {"eager": times(3)}),  # its copy is 3 times silu's
        ("silu", "forward", N, STEADY, {"eager": STEADY}),
        ("mish", "forward", 2**10, [1e3] + [3e3] * 8, {"eager": STEADY}),
        ("gelu", "forward", 2**23, times(8), {"eager": STEADY}),  # the only one of its size
    )
    assert report.main([str(path)]) == 0
    text = capsys.readouterr().out
    assert "4 rows, 2 noisy" in text
    lines = {op: x for x in text.splitlines() for op in ("relu", "silu", "mish") if f"│ {op}" in x}
    assert [op for op, line in lines.items() if "noisy" in line] == ["mish", "relu"]
    assert report.main([str(path), "--markdown"]) == 0
    text = capsys.readouterr().out
    assert "| relu | 2.8 (100 %) \\* |" in text
    assert "| silu | 8.4 (100 %) |" in text


def test_interleave_takes_turns(measure: ModuleType) -> None:
    log: list[str] = []
    calls = {name: (lambda name=name: log.append(name)) for name in ("a", "b", "c")}

    def clock(call: Callable[[], object], repeats: int) -> float:
        call()
        return {"a": 100.0, "b": 50.0, "c": 400.0}[log[-1]]

    effort = measure.Effort(min_rounds=5, max_rounds=5, seconds=0.0, sample_ns=100.0)
    samples = measure.interleave(calls, clock, effort)
    assert samples == {"a": [100.0] * 5, "b": [50.0] * 5, "c": [400.0] * 5}
    rounds = [log[-15:][start : start + 3] for start in range(0, 15, 3)]
    assert all(sorted(r) == ["a", "b", "c"] for r in rounds)
    assert len({tuple(r) for r in rounds}) > 1


def test_admit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    guards = importlib.import_module("benchmarks._guards")

    def check(who: str, contestant: type[Exception] | None) -> None:
        if contestant is not None:
            raise contestant(f"{who} is wrong")

    wrong, broken = guards.NotTheJob, RuntimeError
    with pytest.warns(UserWarning, match="here: ") as seen:
        found = guards.admit(
            {"fusedtrain": None, "eager": wrong, "compile": broken, "exact": None}, check, "here"
        )
    assert list(found) == ["fusedtrain", "exact"]
    assert [str(warning.message) for warning in seen] == [
        "here: eager left out: eager is wrong",
        "here: no torch.compile rival: compile is wrong",
    ]
    with pytest.raises(pytest.fail.Exception, match=r"here: fusedtrain is wrong\. Not timed"):
        guards.admit({"fusedtrain": wrong}, check, "here")
    with pytest.raises(RuntimeError, match="eager is wrong"):
        guards.admit({"eager": broken}, check, "here")


def test_median_interval(measure: ModuleType) -> None:
    assert measure.median_interval([3.0, 1.0, 2.0]) == (1.0, 3.0)
    # P(fewer than 4 of 20 coins are heads) is 0.13 %, fewer than 5 is 0.59 %.
    assert measure.median_interval([float(i) for i in range(20)]) == (3.0, 16.0)


def _op(function: Callable[[torch.Tensor], torch.Tensor]) -> SimpleNamespace:
    return SimpleNamespace(name="mish", function=function, eager=F.mish)


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gate_accepts_a_right_op(measure: ModuleType, dtype: torch.dtype) -> None:
    measure.check(_op(F.mish), dtype, "cpu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("function", "message"),
    [
        pytest.param(lambda x: x * 1, "wrong forward", id="no-op"),
        pytest.param(lambda x: -F.mish(x), "wrong forward", id="sign"),
        pytest.param(F.silu, "wrong forward", id="another op"),
        pytest.param(lambda x: F.mish(x) * 1.02, "wrong forward", id="2 percent"),
        pytest.param(lambda x: F.mish(x).detach() + x - x.detach(), "wrong", id="gradient of one"),
        pytest.param(lambda x: F.mish(x.detach()), "does not require", id="no gradient"),
        pytest.param(lambda x: torch.full_like(x, torch.nan) * x, "wrong forward", id="nan"),
        pytest.param(lambda x: F.mish(x)[:-1], "returned", id="shape"),
    ],
)
def test_gate_refuses_a_wrong_op(
    measure: ModuleType,
    function: Callable[[torch.Tensor], torch.Tensor],
    message: str,
    dtype: torch.dtype,
) -> None:
    with pytest.raises(AssertionError, match=message):
        measure.check(_op(function), dtype, "cpu")


def _run(tmp_path: Path, *arguments: str, **environment: str) -> tuple[int, str, dict[str, Any]]:
    path = tmp_path / "quick.json"
    command = [sys.executable, "-m", "pytest", "benchmarks/bench_activations.py", "-q"]
    command += ["-o", "addopts=", "-p", "no:cacheprovider", "-p", "no:xdist", *arguments]
    command += ["--quick", "--op", "mish", f"--benchmark-json={path}"]
    # Here the machinery is tested, which the plain-torch reference serves as well as a binary.
    environment = {**os.environ, "FUSEDTRAIN_REQUIRE": "", **environment}
    for name in ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER"):
        environment.pop(name, None)
    done = subprocess.run(
        command, cwd=ROOT, env=environment, text=True, capture_output=True, timeout=120, check=False
    )
    found: dict[str, Any] = {"benchmarks": []}
    if path.exists():
        found = json.loads(path.read_text())
    return done.returncode, done.stdout + done.stderr, found


def test_smoke_run(tmp_path: Path, report: ModuleType, capsys: Any) -> None:
    code, output, found = _run(tmp_path)
    assert code == 0, output
    rows = [entry["extra_info"] for entry in found["benchmarks"]]
    assert [row["pass"] for row in rows] == ["forward", "forward+backward"]
    for entry, row in zip(found["benchmarks"], rows, strict=True):
        assert (row["op"], row["dtype"], row["numel"]) == ("mish", "float32", 2**16)
        assert row["bytes"] == {"forward": 2, "forward+backward": 5}[row["pass"]] * 4 * 2**16
        assert row["ns"].keys() == {"fusedtrain", "eager", "copy", "copy_fresh"}
        assert all(time > 0 for time in row["ns"].values())
        assert row["gb_per_s"]["fusedtrain"] == pytest.approx(
            row["bytes"] / row["ns"]["fusedtrain"]
        )
        assert row["percent_of_copy"] > 0
        assert row["percent_of_preallocated_copy"] > 0
        low, high = row["ratio_interval"]["eager"]
        assert low <= row["ratio"]["eager"] <= high
        assert row["torch"] == torch.__version__
        assert row["threads"] >= 1
        assert row["device"]
        assert row["device_type"] == "cpu"
        assert row["date"][:2] == "20"
        assert entry["stats"]["median"] == pytest.approx(row["ns"]["fusedtrain"] * 1e-9)
    assert "node" not in found["machine_info"]
    assert report.main([str(tmp_path / "quick.json")]) == 0
    assert "2 rows" in capsys.readouterr().out


WRONG_MISH = """
import fusedtrain.functional

fusedtrain.functional.mish = fusedtrain.functional.silu
"""


def test_a_wrong_op_is_not_reported(tmp_path: Path) -> None:
    (tmp_path / "wrong_mish.py").write_text(WRONG_MISH)
    path = os.pathsep.join(filter(None, (str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH"))))
    code, output, found = _run(tmp_path, "-p", "wrong_mish", PYTHONPATH=path)
    assert code == 1, output
    assert "mish, float32 on cpu: wrong forward, not timed" in output
    assert found["benchmarks"] == []
