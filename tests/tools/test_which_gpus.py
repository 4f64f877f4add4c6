"""Kernels that a machine's GPUs get: images in the binary, Triton, the reference.

All GPUs here are answers that the test made up.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fusedtrain import _backends
from fusedtrain._backends import gpus as _gpus
from helpers import ROOT

SHIPPED = ["75", "80", "90", "100", "120"]
V100, T4, A100, A10, H100, B300, THOR = (
    _gpus.Gpu(name, capability, f"GPU-{number}{name}")
    for number, (name, capability) in enumerate(
        [("V100", (7, 0)), ("T4", (7, 5)), ("A100", (8, 0)), ("A10", (8, 6)), ("H100", (9, 0)),
         ("B300", (10, 3)), ("Thor", (11, 0))]
    )
)  # fmt: skip
P100, FUTURE = _gpus.Gpu("P100", (6, 0)), _gpus.Gpu("Future", (13, 0))


@pytest.mark.parametrize(
    ("capability", "archs", "ptx", "runs"),
    [
        ((7, 5), SHIPPED, "120", True),
        ((7, 0), SHIPPED, "120", False),
        ((7, 2), SHIPPED, "120", False),
        ((8, 0), SHIPPED, "120", True),
        ((8, 9), SHIPPED, "120", True),  # by the code of sm_80
        ((10, 3), SHIPPED, "120", True),
        ((11, 0), SHIPPED, "120", False),  # no 11.x, and PTX of newer ones
        ((12, 1), SHIPPED, "120", True),
        ((13, 0), SHIPPED, "120", True),  # by PTX
        ((13, 0), SHIPPED, "", False),
        ((8, 0), ["86"], "86", False),  # machine code is for the same or newer
        ((8, 6), ["80"], "", True),
        ((9, 0), ["80"], "80", True),
        ((8, 0), ["90"], "90", False),
        ((9, 0), ["90a"], "", True),
        ((9, 1), ["90a"], "", False),
        ((10, 3), ["100f"], "", True),
        ((11, 0), ["75"], "75", True),
    ],
)
def test_images(capability: tuple[int, int], archs: list[str], ptx: str, runs: bool) -> None:
    assert _gpus.has_image(capability, archs, ptx) is runs


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> list[_gpus.Gpu]:
    """The GPUs of a machine, which has none yet."""
    gpus: list[_gpus.Gpu] = []
    monkeypatch.setattr(_gpus, "_installed", lambda: list(gpus))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.version, "hip", None)
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "FUSEDTRAIN_BACKEND"):
        monkeypatch.delenv(name, raising=False)
    return gpus


@pytest.mark.parametrize(
    ("here", "setting", "by_bus", "seen"),
    [
        ([A100, A100], None, False, [A100, A100]),
        ([A100, A100], "", False, []),
        ([A100, A100], "-1", False, []),
        ([A100, A100], "1", False, [A100]),
        ([A100], "0,5,0", False, []),  # CUDA takes a repeated number for none at all
        ([A100], "0,5", False, [A100]),
        ([A100, A100], "5,0", False, []),
        ([T4, H100], None, False, [T4, H100]),
        ([T4, H100], "0", True, [T4]),
        ([T4, H100], "1", True, [H100]),
        ([T4, H100], "0", False, [T4, H100]),  # CUDA's order is its own
        ([T4, H100], "GPU-4H", False, [H100]),
        ([T4, H100], "GPU-1T4,GPU-4H100", False, [T4, H100]),
        ([T4, H100], "MIG-1", False, [T4, H100]),
    ],
)
def test_visible_gpus(
    machine: list[_gpus.Gpu], monkeypatch: pytest.MonkeyPatch, here: list[_gpus.Gpu],
    setting: str | None, by_bus: bool, seen: list[_gpus.Gpu],
) -> None:  # fmt: skip
    machine += here
    if setting is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    assert _gpus.visible(by_bus) == seen


def test_once_cuda_runs_it_is_asked(
    machine: list[_gpus.Gpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine += [T4, H100]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: "H100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: (9, 0))
    assert _gpus.visible() == [_gpus.Gpu("H100", (9, 0))]


class Files:
    """A package folder with (or without) a CUDA file, of which nothing is loaded."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loaded: list[str] = []
        (folder / "_C_cuda.so").touch()
        monkeypatch.setattr(_backends, "_PACKAGE", folder)
        monkeypatch.setattr(torch.ops, "load_library", self.loaded.append)

    def cuda(self, archs: list[str] = SHIPPED, asked: bool = False) -> _backends.Backend:
        record = {"cuda_archs": archs, "cuda_ptx": archs[-1]} if archs else {}
        return _backends._load_cuda(record, asked)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Files:
    return Files(tmp_path, monkeypatch)


@pytest.mark.parametrize("here", [[], [T4], [A10, H100], [B300], [FUTURE]], ids=str)
def test_gpus_with_an_image_get_the_cuda_kernels(
    machine: list[_gpus.Gpu], files: Files, here: list[_gpus.Gpu]
) -> None:
    machine += here
    backend = files.cuda()
    assert backend.loaded
    assert "sm_75, sm_80, sm_90, sm_100, sm_120, PTX 120" in str(backend)
    assert len(files.loaded) == 1


def test_a_gpu_without_an_image_is_named(machine: list[_gpus.Gpu], files: Files) -> None:
    machine += [V100, V100]
    backend = files.cuda()
    assert not backend.loaded
    assert files.loaded == []  # loaded, it would register kernels that cannot run
    assert backend.reason == (
        "_C_cuda.so has no image for V100 (sm_70): it has sm_75, sm_80, sm_90, sm_100, sm_120, "
        "PTX 120"
    )
    assert not files.cuda(asked=True).loaded
    assert files.cuda(["70"]).loaded
    assert files.cuda([]).loaded  # nothing is known of the file


def test_one_of_two_gpus_without_an_image(
    machine: list[_gpus.Gpu], files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine += [V100, A100]
    backend = files.cuda()
    assert not backend.loaded
    assert "V100 (sm_70)" in backend.reason
    assert "but for A100 (sm_80): CUDA_VISIBLE_DEVICES can hide the others" in backend.reason
    assert files.cuda(asked=True).loaded
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert not files.cuda().loaded  # which of the two that is, is CUDA's secret
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert files.cuda().loaded
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert not files.cuda().loaded


def test_nobody_to_ask(files: Files, machine: object, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library() -> list[_gpus.Gpu]:
        raise OSError("libnvidia-ml.so.1: cannot open shared object file")

    monkeypatch.setattr(_gpus, "_installed", no_library)
    assert _gpus.visible() is None
    assert files.cuda().loaded


def test_an_older_record_has_ptx_of_its_last(machine: list[_gpus.Gpu], files: Files) -> None:
    machine += [FUTURE]
    assert _backends._load_cuda({"cuda_archs": ["80", "90"]}, False).loaded


@pytest.mark.parametrize(
    ("here", "loaded"), [([V100], True), ([P100], False), ([P100, T4], False), ([], True)]
)
def test_triton_takes_over_where_it_can(
    machine: list[_gpus.Gpu], here: list[_gpus.Gpu], loaded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fusedtrain.triton as triton

    pytest.importorskip("triton")
    machine += here
    registered: list[object] = []
    monkeypatch.setattr(triton, "register", registered.append)
    library = torch.library.Library("fusedtrain", "FRAGMENT")
    backend = _backends._load_triton(library, False)
    assert backend.loaded is loaded
    assert bool(registered) is loaded
    assert loaded or "Triton has no compiler for P100 (sm_60)" in backend.reason
    assert _backends._load_triton(library, True).loaded is (here != [P100])


NVML = """
#include <string.h>
static int open;
static const char* const kNames[] = {"V100", "A10"};
static const char* const kIdentities[] = {"GPU-a", "GPU-b"};
static int of(void* h) { return (int)((long)h - 0x7f0000000000); }
int nvmlInit_v2(void) { open = 1; return 0; }
int nvmlShutdown(void) { open = 0; return 0; }
int nvmlDeviceGetCount_v2(unsigned* count) { *count = 2; return !open; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void** h) {
  *h = (void*)(0x7f0000000000 + i);
  return 0;
}
int nvmlDeviceGetCudaComputeCapability(void* h, int* major, int* minor) {
  *major = of(h) ? 8 : 7;
  *minor = of(h) ? 6 : 0;
  return 0;
}
int nvmlDeviceGetName(void* h, char* s, unsigned n) { strcpy(s, kNames[of(h)]); return 0; }
int nvmlDeviceGetUUID(void* h, char* s, unsigned n) { strcpy(s, kIdentities[of(h)]); return 0; }
"""
PROGRAM = """
import os, torch
torch.version.cuda = "12.8"
torch._C._cuda_init = lambda: 1 / 0
torch.ops.load_library = lambda path: print("loads", path.rsplit("/", 1)[1])
from pathlib import Path
exists = Path.exists
Path.exists = lambda p, **k: p.name in ("_C_cuda.so", "_build_info.json") or exists(p, **k)
Path.read_text = lambda p: '{"cuda_archs": ["80", "90"], "cuda_ptx": "90"}'
import fusedtrain
assert not torch.cuda.is_initialized()
print(fusedtrain.backend_info())
"""


@pytest.mark.slow
def test_an_import_asks_the_driver_and_leaves_cuda_alone(tmp_path: Path) -> None:
    """The stand-in has the names and types of NVML's own functions, in a process of its own."""
    compiler = shutil.which("cc") or shutil.which("c++")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs Linux and a C compiler")
    (tmp_path / "nvml.c").write_text(NVML)
    library = tmp_path / "libnvidia-ml.so.1"
    flags = ("-x", "c", "-shared", "-fPIC", "-w", str(tmp_path / "nvml.c"), "-o", str(library))
    subprocess.run([compiler, *flags], check=True)

    def run(**settings: str) -> str:
        names = ("CUDA_VISIBLE_DEVICES", "FUSEDTRAIN_BACKEND", "FUSEDTRAIN_REQUIRE")
        env = {k: v for k, v in os.environ.items() if k not in names}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], capture_output=True, text=True, cwd=ROOT, check=False,
            env={**env, "LD_LIBRARY_PATH": str(tmp_path), **settings},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    both = run()
    assert "loads _C_cuda.so" not in both
    assert "no image for V100 (sm_70): it has sm_80, sm_90, PTX 90 (but for A10 (sm_86)" in both
    assert "loads _C_cuda.so" in run(CUDA_VISIBLE_DEVICES="GPU-b")
    assert "loads _C_cuda.so" not in run(CUDA_VISIBLE_DEVICES="GPU-a")
