"""The benchmark of batch norm: its networks, its gate, its rows, and the driver of the families."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from _models import timm, torchvision
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import _measure, _store, report  # noqa: E402
from benchmarks._norm_contestants import (  # noqa: E402
    CONTESTANTS,
    OPS,
    Contestant,
    NotTheJob,
    check,
    exact,
)
from benchmarks._norm_shapes import NETWORKS, distinct_layers, layers  # noqa: E402


@pytest.fixture
def bench() -> ModuleType:
    return importlib.import_module("benchmarks.bench_batch_norm")


# --- layers of networks ---


def _seen(network: nn.Module) -> list[tuple[tuple[int, ...], nn.Module]]:
    """Shape of the input of each batch norm, in the order of the calls."""
    found: list[tuple[tuple[int, ...], nn.Module]] = []
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.register_forward_hook(
                lambda module, inputs, _: found.append((tuple(inputs[0].shape[1:]), module))
            )
    network.train()(torch.empty(8, 3, 224, 224, device="meta"))
    return found


@pytest.mark.parametrize("model", NETWORKS)
def test_layers_are_those_of_torchvision(model: str) -> None:
    models = importlib.import_module(torchvision().__name__ + ".models")
    with torch.device("meta"):
        network = getattr(models, model)()
    assert [layer[1:] for layer in layers(model)] == [shape for shape, _ in _seen(network)]


def test_layers_and_activations_are_those_of_timm() -> None:
    with torch.device("meta"):
        network = timm().create_model("efficientnet_b0")
    acts = {"SiLU": "bn_silu", "Identity": "bn"}
    found = [(acts[type(norm.act).__name__], *shape) for shape, norm in _seen(network)]
    assert [(layer.op.removesuffix("_add"), *layer[1:]) for layer in layers("efficientnet_b0")] == (
        found
    )
    skips = sum(getattr(block, "has_skip", False) for block in network.modules())
    assert sum(layer.op == "bn_add" for layer in layers("efficientnet_b0")) == skips


def test_layers_of_resnet50() -> None:
    found = layers("resnet50")
    assert len(found) == 53
    # 16 blocks add, 4 of them after a convolution and norm of the shortcut.
    assert sum(layer.op == "bn_add_relu" for layer in found) == 16
    assert sum(layer.op == "bn" for layer in found) == 4
    assert len(distinct_layers("resnet50")) == len(set(found))


# --- bytes ---


@pytest.mark.parametrize(
    ("op", "forward", "both"),
    [
        ("bn_relu", 3, 8),
        ("bn_silu", 3, 8),
        ("bn_add_relu", 4, 11),
        ("bn_add", 4, 9),
        ("bn", 3, 8),
        ("frozen_bn_relu", 2, 5),
    ],
)
def test_least_tensors(op: str, forward: int, both: int) -> None:
    assert OPS[op].tensors("forward") == forward
    assert OPS[op].tensors("forward+backward") == both


# --- the gate ---

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _tensors(op: str, dtype: torch.dtype, layout: Any) -> tuple[Tensor, Tensor | None, Tensor]:
    torch.manual_seed(0)
    x, residual, gradient = (
        torch.randn(4, 6, 9, 7).to(dtype).contiguous(memory_format=layout) for _ in range(3)
    )
    return x, residual if OPS[op].add else None, gradient


def _check(op: str, contestant: Contestant, dtype: torch.dtype, layout: Any) -> None:
    x, residual, gradient = _tensors(op, dtype, layout)
    check(contestant, exact(OPS[op], x, residual, gradient), x, residual)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("who", ["fusedtrain", "eager"])
@pytest.mark.parametrize("op", OPS)
def test_gate_accepts_right_contestants(op: str, who: str, dtype: torch.dtype, layout: Any) -> None:
    _check(op, CONTESTANTS[who](OPS[op], 6, "cpu"), dtype, layout)


def _without_gradient_of_statistics(x: Tensor, norm: Any) -> Tensor:
    with torch.no_grad():
        mean, var = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), keepdim=True, correction=0)
        norm(x)
    weight, bias = (p.view(1, -1, 1, 1) for p in (norm.weight, norm.bias))
    return ((x - mean) * torch.rsqrt(var + norm.eps) * weight + bias).relu().to(x.dtype)


MISTAKES: dict[str, tuple[Callable[[Tensor, Any], Tensor], str]] = {
    "no-op": (lambda x, norm: x * 1, "wrong output"),
    "no activation": (lambda x, norm: norm(x), "wrong output"),
    "another one": (lambda x, norm: nn.functional.silu(norm(x)), "wrong output"),
    "sign": (lambda x, norm: -norm(x).relu(), "wrong output"),
    "2 percent": (lambda x, norm: 1.02 * norm(x).relu(), "wrong output"),
    "gradient of the input": (lambda x, norm: norm(x.detach()).relu(), "no gradient of input"),
    "fixed statistics": (_without_gradient_of_statistics, "wrong gradient of input"),
    "nan": (lambda x, norm: norm(x).relu() * torch.nan, "wrong output"),
    "dtype": (lambda x, norm: norm(x).relu().double(), "returned torch.float64"),
    "layout": (lambda x, norm: norm(x).relu().contiguous(), "returned"),
    "statistics": (lambda x, norm: norm.eval()(x).relu(), "wrong output"),
    "no graph": (lambda x, norm: norm(x).relu().detach(), "does not require"),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_gate_refuses_a_wrong_contestant(mistake: str, dtype: torch.dtype) -> None:
    function, message = MISTAKES[mistake]
    norm = CONTESTANTS["eager"](OPS["bn_relu"], 6, "cpu").norm
    wrong = Contestant(norm, lambda x, residual: function(x, norm))
    with pytest.raises(NotTheJob, match=message):
        _check("bn_relu", wrong, dtype, torch.channels_last)


def test_gate_refuses_who_leaves_the_running_statistics() -> None:
    right = CONTESTANTS["eager"](OPS["bn_relu"], 6, "cpu")

    def function(x: Tensor, residual: Tensor | None) -> Tensor:
        kept = right.norm.running_var.clone()
        output = right.function(x, residual)
        right.norm.running_var.data = kept
        return output

    with pytest.raises(NotTheJob, match="wrong running_var"):
        _check("bn_relu", Contestant(right.norm, function), torch.float32, torch.channels_last)


def test_gate_refuses_who_does_not_add() -> None:
    right = CONTESTANTS["eager"](OPS["bn_add_relu"], 6, "cpu")
    wrong = Contestant(right.norm, lambda x, residual: right.function(x, 1.02 * residual))
    with pytest.raises(NotTheJob, match="wrong output"):
        _check("bn_add_relu", wrong, torch.bfloat16, torch.contiguous_format)


# --- what is run ---


def test_selection(bench: ModuleType) -> None:
    cases = bench.select("cpu")
    assert len(set(map(str, cases))) == len(cases)
    assert {case.op for case in cases if not case.model} == set(bench.STANDARD)
    of_networks = [case for case in cases if case.model]
    assert not any(case.compiled for case in of_networks)
    assert {case.layout for case in of_networks} == {"contiguous", "channels_last"}
    for network in NETWORKS:
        found = {(c.op, *c.shape[1:]) for c in of_networks if c.model == network}
        assert found == set(layers(network))
    # Where ratios to torch.compile are quoted.
    assert {(c.op, c.layout) for c in cases if c.compiled} == {
        (op, layout)
        for op in ("bn_relu", "bn_silu", "bn_add_relu")
        for layout in ("contiguous", "channels_last")
    }
    assert {case.model for case in bench.select("cpu", models=("resnet50",))} == {"resnet50"}
    assert bench.select("cpu", ops=("mish",)) == []
    assert not any(case.compiled for case in bench.select("cpu", full=True, compiled=False))
    assert len(bench.select(quick=True)) == 4


# --- rows and report ---

STEADY = [1e6] * 9


def times(factor: float) -> list[float]:
    return [factor * ns for ns in STEADY]


@pytest.fixture
def results(tmp_path: Path) -> Callable[..., Path]:
    """Writes a results file from (op, layout, network, shape, ns of the rivals / 1 ms)."""

    def write(*rows: tuple[str, str, str, tuple[int, ...], dict[str, float]]) -> Path:
        entries = []
        for op, layout, model, shape, rivals in rows:
            samples = {"fusedtrain": STEADY, "copy": times(0.25), "copy_fresh": times(0.5)}
            info = _measure.row(
                op=op,
                pass_name="forward+backward",
                dtype=torch.float32,
                numel=torch.Size(shape).numel(),
                device="cpu",
                samples=samples | {who: times(t) for who, t in rivals.items()},
                tensors=OPS[op].tensors("forward+backward"),
            )
            info |= {
                "family": "batch_norm",
                "shape": list(shape),
                "layout": layout,
                "model": model,
                "allocator": "kept",
            }
            entries.append({"extra_info": info})
        path = tmp_path / "results.json"
        path.write_text(json.dumps({"benchmarks": entries}))
        return path

    return write


LARGE, SMALL = (32, 96, 56, 56), (8, 512, 7, 7)


def test_table(results: Callable[..., Path], capsys: Any) -> None:
    path = results(
        ("bn_silu", "channels_last", "", LARGE, {"eager": 2.0, "compile": 3.0}),
        ("bn_relu", "contiguous", "resnet50", (8, 64, 112, 112), {"eager": 0.5}),
        ("bn_add_relu", "contiguous", "resnet50", SMALL, {"eager": 8.0}),
    )
    assert report.main([str(path), "--fail-slower"]) == 1
    text = capsys.readouterr().out
    assert "float32, 32 x 96 x 56 x 56 (" in text
    assert "float32, the batch norms of resnet50, batch 8 (" in text
    assert "freed memory kept" in text
    (line,) = (x for x in text.splitlines() if "│ bn_silu" in x)
    # 8 tensors of 38.5 MB in 1 ms; the new copy moved 2 in half of that.
    assert [cell.strip() for cell in line.split("│")[1:-1]] == [
        *("bn_silu channels_last", "forward+backward", "1 ms", "308.3", "200", "100"),
        *("2.00x", "2.00-2.00", "3.00x", ""),
    ]
    assert text.index("bn_relu 64x112x112") < text.index("bn_add_relu 512x7x7")
    assert "SLOWER" in text
    assert "  bn_relu 64x112x112 contiguous forward+backward float32" in text


def test_markdown(results: Callable[..., Path], capsys: Any) -> None:
    path = results(
        ("bn_silu", "channels_last", "", LARGE, {"eager": 2.0, "compile": 3.0}),
        ("bn_relu", "contiguous", "resnet50", (8, 64, 112, 112), {"eager": 2.0}),
        ("bn_add_relu", "contiguous", "resnet50", SMALL, {"eager": 8.0}),
    )
    assert report.main([str(path), "--markdown"]) == 0
    table = [x for x in capsys.readouterr().out.splitlines() if x.startswith("|")]
    assert table[2] == "| bn_silu channels_last | 308.3 (200 %) | 2.00x | 3.00x |"
    assert table[5] == (
        "| resnet50, batch 8 | float32 | contiguous | forward+backward | 2 | 4.00x | "
        "2.00x (bn_relu 64x112x112) |"
    )
    assert len(table) == 6


def test_chart(results: Callable[..., Path], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = results(
        ("bn_silu", "channels_last", "", LARGE, {"eager": 2.0, "compile": 3.0}),
        ("bn_relu", "contiguous", "resnet50", (8, 64, 112, 112), {"eager": 2.0}),
    )
    assert report.main([str(path), "--png", str(tmp_path / "bars.png")]) == 0
    assert (tmp_path / "bars-batch-norm.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "bars.png").exists()
    only_layers = results(("bn", "contiguous", "resnet50", SMALL, {"eager": 2.0}))
    assert report.main([str(only_layers), "--png", str(tmp_path / "layers.png")]) == 0


def test_families_apart(results: Callable[..., Path], capsys: Any) -> None:
    path = results(("bn_silu", "channels_last", "", LARGE, {"eager": 2.0}))
    assert report.main([str(path), "--family", "batch_norm"]) == 0
    assert report.main([str(path), "--family", "activations"]) == 2


# --- memory, and the driver ---


def test_rows_tell_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("MALLOC_")]:
        monkeypatch.delenv(name)
    assert _measure.allocator() == "default"
    for name, settings in _measure.ALLOCATORS.items():
        with monkeypatch.context() as patch:
            for variable, value in settings.items():
                patch.setenv(variable, value)
            assert _measure.allocator() == name
            assert _measure.setting("cpu")["allocator"] == name
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    assert _measure.allocator() == "with MALLOC_ARENA_MAX"


def test_every_family_has_a_file_and_a_report() -> None:
    run = importlib.import_module("benchmarks.run")
    files = {path.stem.removeprefix("bench_") for path in (ROOT / "benchmarks").glob("bench_*.py")}
    assert set(run.FAMILIES) == files
    assert set(run.FAMILIES.values()) <= set(_measure.ALLOCATORS)
    assert {part.family for part in report._parts([])} == files


def test_rows_replace_those_of_their_names(tmp_path: Path) -> None:
    path = tmp_path / "device.json"

    def put(name: str, ns: int) -> None:
        entry = {"fullname": f"benchmarks/bench_{name}", "ns": ns}
        _store.put(path, {"benchmarks": [entry], "datetime": str(ns)})

    def rows() -> dict[str, int]:
        entries = _store.read(path)["benchmarks"]
        return {e["fullname"].removeprefix("benchmarks/bench_"): e["ns"] for e in entries}

    put("batch_norm.py::test[1]", 1)
    put("activations.py::test[1]", 2)
    put("batch_norm.py::test[2]", 3)
    put("batch_norm.py::test[1]", 4)
    assert rows() == {"batch_norm.py::test[1]": 4, "activations.py::test[1]": 2,
                      "batch_norm.py::test[2]": 3}  # fmt: skip
    assert _store.read(path)["datetime"] == "4"
    _store.drop(path, "batch_norm", {"benchmarks/bench_batch_norm.py::test[2]"})
    assert rows() == {"activations.py::test[1]": 2, "batch_norm.py::test[2]": 3}
    _store.drop(path, "activations", set())  # all of its ops are wrong
    assert rows() == {"batch_norm.py::test[2]": 3}
    assert [p.name for p in tmp_path.iterdir()] == ["device.json"]


def test_a_write_that_fails_leaves_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "device.json"
    _store.write(path, {"benchmarks": []})
    with pytest.raises(TypeError):
        _store.write(path, {"benchmarks": [object()]})
    assert _store.read(path) == {"benchmarks": []}


def test_only_rows_that_torch_compile_takes_part_in() -> None:
    pytest.importorskip("pytest_benchmark")

    def rows(*options: str) -> list[str]:
        command = [sys.executable, "-m", "pytest", "benchmarks", "--collect-only", "-q", *options]
        done = subprocess.run(
            [*command, "--family=pool", "--family=amp_step", "-p", "no:cacheprovider"],
            cwd=ROOT, capture_output=True, text=True, check=False,
            env={k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")},
        )  # fmt: skip
        return [line for line in done.stdout.splitlines() if "::" in line]

    everything, compiled = rows(), rows("--only-compile")
    assert compiled == [row for row in everything if "bench_pool" in row and "float32" in row]
    assert 0 < len(compiled) < len(everything)
    assert rows("--only-compile", "--no-compile") == []


# --- a run ---


def _run(tmp_path: Path, *options: str, **environment: str) -> tuple[int, str, list[Any]]:
    command = [sys.executable, "-m", "benchmarks.run", "--quick", *options]
    command += ["-o", "addopts=", "--threads=1", "-p", "no:cacheprovider", "-p", "no:xdist"]
    # Here the machinery is tested, which the plain-torch reference serves as well as a binary.
    environment = {
        **os.environ,
        "FUSEDTRAIN_REQUIRE": "",
        "OMP_NUM_THREADS": "1",
        "RESULTS_DIR": str(tmp_path),
        **environment,
    }
    for name in ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER"):
        environment.pop(name, None)
    done = subprocess.run(
        command, cwd=ROOT, env=environment, text=True, capture_output=True, timeout=240, check=False
    )
    entries = []
    for path in tmp_path.glob("*.json"):
        entries += json.loads(path.read_text())["benchmarks"]
    return done.returncode, done.stdout + done.stderr, entries


def test_smoke_run(tmp_path: Path) -> None:
    pytest.importorskip("pytest_benchmark")
    code, output, entries = _run(tmp_path, "--family", "batch_norm", "--op", "bn_add_relu")
    assert code == 0, output
    assert [entry["extra_info"]["layout"] for entry in entries] == ["contiguous", "channels_last"]
    for entry in entries:
        row = entry["extra_info"]
        assert (row["family"], row["op"], row["model"]) == ("batch_norm", "bn_add_relu", "")
        assert row["bytes"] == 11 * 4 * torch.Size(row["shape"]).numel()
        assert row["ns"].keys() == {"fusedtrain", "eager", "copy", "copy_fresh"}
        assert row["allocator"] == "kept"
        assert entry["stats"]["median"] == pytest.approx(row["ns"]["fusedtrain"] * 1e-9)
    assert "batch norm, " in output
    assert list(tmp_path.glob("*-quick-batch-norm.png"))


WRONG = """
from benchmarks import _norm_contestants

right = _norm_contestants.CONTESTANTS["fusedtrain"]


def wrong(*arguments):
    contestant = right(*arguments)
    function = contestant.function
    contestant.function = lambda x, residual: 1.02 * function(x, residual)
    return contestant


_norm_contestants.CONTESTANTS["fusedtrain"] = wrong
"""


def test_a_wrong_norm_is_not_reported(tmp_path: Path) -> None:
    pytest.importorskip("pytest_benchmark")
    (tmp_path / "wrong_norm.py").write_text(WRONG)
    path = os.pathsep.join(filter(None, (str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH"))))
    options = ("-p", "wrong_norm", "--family", "batch_norm", "--user-allocator")
    code, output, entries = _run(tmp_path, *options, PYTHONPATH=path)
    assert code == 1, output
    assert "wrong output" in output
    assert "Not timed" in output
    assert entries == []


KILLED = """
import os, signal

begun = []


def pytest_runtest_setup(item):
    begun.append(item)
    if len(begun) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_run_that_is_killed_keeps_its_rows(tmp_path: Path) -> None:
    pytest.importorskip("pytest_benchmark")
    (tmp_path / "killed.py").write_text(KILLED)
    path = os.pathsep.join(filter(None, (str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH"))))
    options = ("--family", "batch_norm", "--user-allocator", "--no-chart", "--also")
    also = tmp_path / "also"
    code, output, entries = _run(tmp_path, *options, str(also), "-p", "killed", PYTHONPATH=path)
    assert code != 0, output
    assert [entry["extra_info"]["layout"] for entry in entries] == ["contiguous"]
    (copy,) = also.glob("*.json")
    assert json.loads(copy.read_text())["benchmarks"] == entries
    last = ("-k", "channels_last", "--keep-rows")
    code, output, entries = _run(tmp_path, *options, str(also), *last)
    assert code == 0, output
    layouts = [entry["extra_info"]["layout"] for entry in entries]
    assert layouts[0] == "contiguous"
    assert set(layouts[1:]) == {"channels_last"}
    assert len({entry["fullname"] for entry in entries}) == len(entries)
    assert not list(tmp_path.glob("*.png"))
