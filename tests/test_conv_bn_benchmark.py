"""The benchmark of whole networks: its gate, its rows and its report."""

from __future__ import annotations

import copy
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from _models import torchvision
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import _networks, report  # noqa: E402
from benchmarks._net_rows import NetRow, load, net_row  # noqa: E402
from benchmarks._networks import NotTheJob, Setup  # noqa: E402


@pytest.fixture
def bench() -> ModuleType:
    return importlib.import_module("benchmarks.bench_conv_bn")


TRAIN = Setup("train", "none", 4, 9)
INFERENCE = replace(TRAIN, job="inference")


def _network(setup: Setup) -> nn.Module:
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.BatchNorm2d(4),
        nn.SiLU(), nn.Flatten(), nn.Linear(100, 1000),
    )  # fmt: skip
    return network.train(setup.job == "train")


# --- the gate ---


def _gate(model: nn.Module, setup: Setup) -> None:
    batches = [_networks.batch_of(setup, "cpu", seed=seed) for seed in _networks.GATE_SEEDS]
    _networks.pass_gate(model, _network(setup), setup, batches)


class _Layer(nn.Module):
    """A function in the place of a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, input: Tensor) -> Tensor:
        return self.function(input)


def _with(place: int, make: Callable[[Any], Callable[[Tensor], Tensor]]) -> Any:
    def change(network: Any) -> None:
        network.append(_Layer(lambda x: x))
        layer = network[place]
        layer.forward = make(layer.forward)

    return change


MISTAKES: dict[str, tuple[str, Any, str]] = {
    "2 percent": ("inference", _with(4, lambda f: lambda x: 1.02 * f(x)), "wrong output"),
    "no activation": ("inference", _with(2, lambda f: lambda x: x), "wrong output"),
    "nan": ("inference", _with(2, lambda f: lambda x: torch.nan * f(x)), "wrong output"),
    "shape": ("inference", _with(7, lambda f: lambda x: f(x)[:, 1:]), "wrong output"),
    "forward": ("train", _with(4, lambda f: lambda x: 1.02 * f(x)), "wrong output"),
    "backward": (
        "train",
        _with(4, lambda f: lambda x: 1.02 * f(x) - 0.02 * f(x).detach()),
        "wrong gradient",
    ),
    "no gradient": ("train", _with(0, lambda f: lambda x: f(x).detach()), "wrong gradient"),
    "statistics": ("train", lambda n: setattr(n[1], "momentum", 0.11), "wrong running"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_gate_refuses_a_wrong_contestant(mistake: str) -> None:
    job, change, message = MISTAKES[mistake]
    setup = replace(TRAIN, job=job)
    network = _network(setup)
    change(network)
    with pytest.raises(NotTheJob, match=message):
        _gate(network, setup)


@pytest.mark.parametrize("job", ["train", "inference"])
def test_gate_accepts_right_contestants(job: str) -> None:
    setup = replace(TRAIN, job=job)
    stock = _network(setup)
    for who in ("eager", "fusedtrain") if job == "train" else ("eager",):
        _gate(_networks.contestant(who, setup, stock).model, setup)


def test_contestants_share_nothing() -> None:
    stock = _network(TRAIN)
    before = copy.deepcopy(stock.state_dict())
    for who in ("eager", "fusedtrain"):
        model = _networks.contestant(who, TRAIN, stock).model
        _networks.call(model, TRAIN, *_networks.batch_of(TRAIN, "cpu"))()
    assert all(map(torch.equal, before.values(), stock.state_dict().values()))
    assert all(p.grad is None for p in stock.parameters())
    assert all(type(layer).__module__.startswith("torch.nn.") for layer in stock)


@pytest.mark.parametrize(
    ("job", "name"), [("inference", "fold_conv_bn"), ("tune", "tune_mode"), ("train", "convert")]
)
def test_what_is_not_there_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, job: str, name: str
) -> None:
    monkeypatch.setattr(_networks, "fusedtrain", SimpleNamespace())
    setup = replace(TRAIN, job=job)
    with pytest.raises(_networks.Missing, match=f"has no {name}"):
        _networks.contestant("fusedtrain", setup, _network(setup))


def test_saved_bytes() -> None:
    setup = replace(TRAIN, layout="contiguous")
    norm = nn.Sequential(nn.Flatten(), nn.Linear(243, 1000), nn.BatchNorm1d(1000))
    # The input of the norm, its two vectors of statistics, the output of log_softmax, a scalar.
    saved = _networks.saved_bytes(norm, setup, *_networks.batch_of(setup, "cpu"))
    assert 0 <= saved - 4 * (2 * 4 * 1000 + 2 * 1000) <= 64


# --- networks ---


def test_networks_are_ready() -> None:
    torchvision()
    setup = Setup("tune", "efficientnet_b0", 2, 64)
    network = _networks.build(setup, "cpu")
    norms = [m for m in network.modules() if isinstance(m, nn.BatchNorm2d)]
    assert network.training
    assert not any(norm.training for norm in norms)
    assert all(norm.momentum != 1.0 for norm in norms)
    images, labels = _networks.batch_of(setup, "cpu")
    assert images.is_contiguous(memory_format=torch.channels_last)
    # No dropout: the same twice; and of a size that a trained network has.
    outputs = [network(images) for _ in range(2)]
    assert torch.equal(*outputs)
    assert 1e-3 < float(outputs[0].detach().std()) < 1e3
    assert labels.shape == (2,)
    assert not _networks.build(replace(setup, job="inference"), "cpu").training


def test_selection(bench: ModuleType) -> None:
    for device in ("cpu", "cuda"):
        cases = bench.select(device)
        assert len(set(map(str, cases))) == len(cases)
        assert {case.op for case in cases} == set(_networks.JOBS)
        assert all(case.compiled == (case.op == "inference") for case in cases)
        assert len(bench.select(device, full=True)) == 2 * len(cases)
    assert {case.model for case in bench.select(models=("resnet18",))} == {"resnet18"}
    assert {case.op for case in bench.select(ops=("tune",))} == {"tune"}
    assert not any(case.compiled for case in bench.select(full=True, compiled=False))
    assert len(bench.select(quick=True)) == len(_networks.JOBS)


# --- rows and report ---

STEADY = [1e6] * 9
RESNET = Setup("inference", "resnet50", 8, 224)
EFFICIENTNET = Setup("train", "efficientnet_b0", 32, 96, optimizer="AdamW")


def _write(path: Path, *rows: tuple[Setup, float, dict[str, float]]) -> Path:
    entries = []
    for setup, ours, rivals in rows:
        times = {"fusedtrain": ours, **rivals}
        saved = {} if setup.job == "inference" else {"fusedtrain": 40_000_000, "eager": 100_000_000}
        info = net_row(
            setup,
            device="cpu",
            samples={who: [factor * ns for ns in STEADY] for who, factor in times.items()},
            saved=saved,
            note="folded 53 norms",
            errors={"output": 1e-6},
        )
        entries.append({"extra_info": info})
    path.write_text(json.dumps({"benchmarks": entries}))
    return path


def test_rows_round_trip(tmp_path: Path) -> None:
    path = _write(tmp_path / "r.json", (EFFICIENTNET, 4, {"eager": 6}), (RESNET, 2, {"eager": 3}))
    rows = load([path])
    assert [row.job for row in rows] == ["train", "inference"]
    (entry, _) = json.loads(path.read_text())["benchmarks"]
    assert NetRow.parse(entry["extra_info"]).ratio == {"eager": pytest.approx(1.5)}
    assert rows[0].saved == {"fusedtrain": 40_000_000, "eager": 100_000_000}
    assert (rows[0].model, rows[0].optimizer, rows[0].batch) == ("efficientnet_b0", "AdamW", 32)


def test_table(tmp_path: Path, capsys: Any) -> None:
    path = _write(
        tmp_path / "r.json",
        (RESNET, 4, {"eager": 8, "compile": 6}),
        (EFFICIENTNET, 4, {"eager": 3}),
    )
    assert report.main([str(path), "--fail-slower"]) == 1
    text = capsys.readouterr().out
    assert "│ inference" in text
    assert "2000" in text  # images/s
    assert "1.50x compile" in text
    assert "compile 1.50x, eager 2.00x" in text
    assert "100.0 -> 40.0" in text
    assert "SLOWER" in text
    assert "  train efficientnet_b0 32 x 96² channels_last float32 AdamW: 0.75x eager" in text


def test_markdown(tmp_path: Path, capsys: Any) -> None:
    path = _write(tmp_path / "r.json", (RESNET, 4, {"eager": 8, "compile": 6}))
    assert report.main([str(path), "--markdown"]) == 0
    table = [x for x in capsys.readouterr().out.splitlines() if x.startswith("|")]
    assert table[2] == (
        "| inference | resnet50 8 x 224² channels_last float32 | 4 | 2000 |  | 1.50x compile | "
        "1.50-1.50 | compile 1.50x, eager 2.00x | folded 53 norms |"
    )
    assert {line.count("|") for line in table} == {10}


def test_chart(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = _write(tmp_path / "r.json", (RESNET, 4, {"eager": 8}), (EFFICIENTNET, 4, {"eager": 3}))
    assert report.main([str(path), "--png", str(tmp_path / "bars.png")]) == 0
    assert (tmp_path / "bars-conv-bn.png").read_bytes().startswith(b"\x89PNG")


# --- a run ---


def _run(tmp_path: Path, *options: str, **environment: str) -> tuple[int, str, list[Any]]:
    path = tmp_path / "quick.json"
    command = [sys.executable, "-m", "pytest", "benchmarks/bench_conv_bn.py", "-q", "--threads=1"]
    command += ["-o", "addopts=", "-p", "no:cacheprovider", "-p", "no:xdist", "--quick", "-rs"]
    # Here the machinery is tested, which the plain-torch reference serves as well as a binary.
    environment = {**os.environ, "FUSEDTRAIN_REQUIRE": "", "OMP_NUM_THREADS": "1", **environment}
    for name in ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER"):
        environment.pop(name, None)
    done = subprocess.run(
        [*command, f"--benchmark-json={path}", *options],
        cwd=ROOT, env=environment, text=True, capture_output=True, timeout=300, check=False,
    )  # fmt: skip
    text = path.read_text() if path.exists() else ""
    return done.returncode, done.stdout + done.stderr, json.loads(text or "{}").get("benchmarks")


def test_smoke_run(tmp_path: Path) -> None:
    pytest.importorskip("pytest_benchmark")
    torchvision()
    code, output, entries = _run(tmp_path)
    assert code == 0, output
    done = {entry["extra_info"]["job"]: entry["extra_info"] for entry in entries}
    for job, needs in (("inference", "fold_conv_bn"), ("tune", "tune_mode")):
        assert (job in done) == hasattr(_networks.fusedtrain, needs), output
    row = done["train"]
    assert (row["family"], row["model"]) == ("conv_bn", "resnet18")
    assert row["ns"].keys() == {"fusedtrain", "eager"}
    assert 0 < row["saved"]["fusedtrain"] <= row["saved"]["eager"]
    assert row["errors"].keys() == {"output", "gradient", "running statistics"}
    assert row["note"].startswith("converted ")
    assert report.main([str(tmp_path / "quick.json")]) == 0


WRONG = """
from torch import nn

from benchmarks import _networks

right = _networks.contestant


def wrong(who, setup, stock):
    found = right(who, setup, stock)
    if who == "fusedtrain":
        found.model.fc.register_forward_hook(lambda module, inputs, output: 1.02 * output)
    return found


_networks.contestant = wrong
"""


def test_a_wrong_network_is_not_reported(tmp_path: Path) -> None:
    pytest.importorskip("pytest_benchmark")
    torchvision()
    (tmp_path / "wrong_net.py").write_text(WRONG)
    path = os.pathsep.join(filter(None, (str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH"))))
    code, output, entries = _run(tmp_path, "-p", "wrong_net", "--op", "train", PYTHONPATH=path)
    assert code == 1, output
    assert "wrong output" in output
    assert "Not timed" in output
    assert not entries
