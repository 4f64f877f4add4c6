"""How setup.py finds nvcc, and what it asks it to build; nvcc is a script here."""

from __future__ import annotations

import importlib.util
import json
import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest
from setuptools import Distribution

from helpers import ROOT

NVCC = """#!/usr/bin/env python3
import pathlib, sys
arguments = sys.argv[1:]
if arguments == ["--list-gpu-arch"]:
    print({listed!r})
    sys.exit({code})
if arguments == ["--version"]:
    print("nvcc: NVIDIA (R) Cuda compiler driver")
    print("Cuda compilation tools, release 12.4, V12.4.131")
    sys.exit(0)
for option in ("-o", "-MF"):
    if option in arguments:
        path = pathlib.Path(arguments[arguments.index(option) + 1])
        path.write_text("" if option == "-o" else arguments[arguments.index("-o") + 1] + ":\\n")
with open({log!r}, "a") as log:
    print(*arguments, file=log)
"""
OF_12_4 = "compute_50 compute_60 compute_70 compute_75 compute_80 compute_86 compute_89 compute_90"


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    names = ("CUDA_HOME", "CUDA_PATH", "FUSEDTRAIN_CUDA", "FUSEDTRAIN_CUDA_ARCHS", "MAX_JOBS",
             "TORCH_CUDA_ARCH_LIST", "CXX")  # fmt: skip
    for name in names:
        monkeypatch.delenv(name, raising=False)
    spec = importlib.util.spec_from_file_location("fusedtrain_setup", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def script(path: Path, listed: str = OF_12_4, code: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    log = str(path.parent / "log")
    path.write_text(NVCC.format(listed=listed.replace(" ", "\n"), code=code, log=log))
    path.chmod(0o755)
    return path


# --- where it is ---


@pytest.fixture
def nowhere(setup: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No nvcc but those that a test makes: /usr/local and /opt are folders of the test's."""

    def elsewhere(*parts: str) -> Path:
        first, *rest = map(str, parts)
        return tmp_path.joinpath(first.lstrip("/"), *rest)

    monkeypatch.setattr(setup, "Path", elsewhere)
    beside = tmp_path / "path/nvcc"
    monkeypatch.setattr(setup.shutil, "which", lambda _: "/path/nvcc" if beside.exists() else None)
    monkeypatch.setattr(sys, "path", ["/site"])
    return tmp_path


def test_without_nvcc_the_reason_says_how_to_get_it(setup: ModuleType, nowhere: Path) -> None:
    with pytest.raises(setup.CannotBuild, match=r"CUDA_HOME.*pip install nvidia-cuda-nvcc"):
        setup.nvcc()


def test_the_places_of_nvcc_in_their_order(
    setup: ModuleType, nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last place is filled first: each new nvcc comes before the earlier ones."""
    monkeypatch.setenv("CUDA_HOME", "/home")
    monkeypatch.setenv("CUDA_PATH", "/other")
    (nowhere / "site/nvidia/cuda_nvcc/bin").mkdir(parents=True)  # the wheel of CUDA 12
    places = ["site/nvidia/cu9/bin", "site/nvidia/cu13/bin", "opt/cuda/bin",
              "usr/local/cuda-9.2/bin", "usr/local/cuda-12.4/bin", "usr/local/cuda/bin", "path",
              "other/bin", "home/bin"]  # fmt: skip
    for place in places:
        compiler = script(nowhere / place / "nvcc")
        assert setup.nvcc() == str(compiler)
    compiler.chmod(0o644)  # not executable
    assert setup.nvcc() == str(nowhere / "other/bin/nvcc")
    monkeypatch.setenv("FUSEDTRAIN_CUDA", "0")
    with pytest.raises(setup.CannotBuild, match="FUSEDTRAIN_CUDA=0"):
        setup.nvcc()


# --- what it builds ---


@pytest.mark.parametrize(
    ("listed", "asked", "built", "left_out"),
    [
        (OF_12_4, "", ["75", "80", "90"], ["100", "120"]),
        (OF_12_4 + " compute_100 compute_120", "", ["75", "80", "90", "100", "120"], []),
        ("compute_80 compute_90 compute_100 compute_120", "", ["80", "90", "100", "120"], ["75"]),
        (OF_12_4, "90", ["90"], []),
        (OF_12_4, "9.0;8.0+PTX", ["80", "90"], []),
        (OF_12_4, "9.0a, 12.0", ["90a"], ["120"]),
        (OF_12_4, "5.2 6.0 7.0 8.0 8.0", ["70", "80"], ["52", "60"]),
    ],
)
def test_architectures_are_those_that_nvcc_knows(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    listed: str, asked: str, built: list[str], left_out: list[str],
) -> None:  # fmt: skip
    if asked:
        monkeypatch.setenv("FUSEDTRAIN_CUDA_ARCHS", asked)
    assert setup.cuda_archs(str(script(tmp_path / "nvcc", listed))) == (built, left_out)


def test_an_nvcc_that_cannot_list_them_is_asked_for_all(setup: ModuleType, tmp_path: Path) -> None:
    compiler = script(tmp_path / "nvcc", "nvcc fatal: Unknown option '--list-gpu-arch'", code=1)
    assert setup.cuda_archs(str(compiler)) == (["75", "80", "90", "100", "120"], [])


@pytest.mark.parametrize("asked", ["100;120", "5.2", "Hopper"])
def test_nothing_to_build_for(
    setup: ModuleType, tmp_path: Path, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSEDTRAIN_CUDA_ARCHS", asked)
    with pytest.raises(setup.CannotBuild, match=asked.split(";")[0]):
        setup.cuda_archs(str(script(tmp_path / "nvcc")))


def test_a_build_with_an_older_nvcc(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The whole of build_cuda: flags, the message, the record."""
    pytest.importorskip("ninja")
    compiler = script(tmp_path / "bin/nvcc")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", str(compiler))
    (tmp_path / "csrc/cuda").mkdir(parents=True)
    (tmp_path / "csrc/cuda/kernel.cu").touch()
    (tmp_path / "csrc/bindings").mkdir()
    (tmp_path / "csrc/bindings/cuda.cpp").touch()
    monkeypatch.setattr(setup, "CSRC", tmp_path / "csrc")
    record = setup.build_cuda(tmp_path / "_C_cuda.so", tmp_path / "work")
    assert record == {
        "cuda_archs": ["75", "80", "90"],
        "cuda_ptx": "90",
        "cuda_archs_left_out": ["100", "120"],
        "nvcc": "Cuda compilation tools, release 12.4, V12.4.131",
    }
    assert "is built without sm_100, sm_120, which" in capfd.readouterr().err
    (line,) = [ln for ln in (tmp_path / "bin/log").read_text().splitlines() if "kernel.cu " in ln]
    codes = [word for word in line.split() if word.startswith("arch=")]
    assert codes == [
        "arch=compute_75,code=sm_75", "arch=compute_80,code=sm_80", "arch=compute_90,code=sm_90",
        "arch=compute_90,code=compute_90",
    ]  # fmt: skip


@pytest.mark.parametrize(("cores", "together"), [(2, False), (16, True)])
def test_with_many_cores_all_files_are_built_at_once(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int, together: bool
) -> None:
    """And one of them that cannot be built is no reason against the other."""
    begun = threading.Event()
    seen = []

    def build_cpu(out: Path, work: Path) -> dict[str, object]:
        seen.append(begun.wait(5.0 if together else 0.1))
        return {"compiler": "c++"}

    def build_cuda(out: Path, work: Path, asked: bool) -> dict[str, object]:
        begun.set()
        raise setup.CannotBuild("no nvcc")

    def build_autograd(out: Path, work: Path) -> dict[str, object]:
        return {"autograd": "torch"}

    monkeypatch.setattr(setup, "build_autograd", build_autograd)
    monkeypatch.setattr(setup, "build_cpu", build_cpu)
    monkeypatch.setattr(setup, "build_cuda", build_cuda)
    monkeypatch.setattr(setup, "ROOT", tmp_path)
    monkeypatch.setattr(setup, "sources_key", lambda: "key")
    monkeypatch.setattr(setup.os, "cpu_count", lambda: cores)
    monkeypatch.delenv("FUSEDTRAIN_REQUIRE", raising=False)
    command = setup.BuildKernels(Distribution())
    command.inplace = True
    command.run()
    record = json.loads((tmp_path / "fusedtrain/_build_info.json").read_text())
    built = {"compiler": "c++", "cuda_not_built": "no nvcc", "autograd": "torch"}
    assert record == {"sources": "key", **built}
    assert seen == [together]
    monkeypatch.setenv("FUSEDTRAIN_REQUIRE", "cuda")
    with pytest.raises(SystemExit, match="no nvcc"):
        command.run()
