"""The compiled backends that are loaded, and why a backend is not."""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import importlib.util
import json
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from .._version import __version__
from . import autograd_build, gpus

_PACKAGE = Path(__file__).parent.parent  # the binaries lie there
_CAPABILITIES = ("default", "avx2", "avx512")
_CHOICES = ("cuda", "triton", "reference")
_AUTOGRAD_CHOICES = ("cpp", "python")
_SETTINGS = (  # variables of the environment that change the choice of kernels
    "ATEN_CPU_CAPABILITY", "CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES",
    "FUSEDTRAIN_AUTOGRAD", "FUSEDTRAIN_BACKEND",
    "FUSEDTRAIN_CPU_CAPABILITY", "FUSEDTRAIN_REQUIRE", "OMP_NUM_THREADS",
)  # fmt: skip
_OLDEST_OF_TRITON = (7, 0)  # torch.compile has the same limit


@dataclass(frozen=True)
class Backend:
    """One backend: ``loaded``, its ``architectures``, and the ``reason`` if it is not loaded, or
    slower than it could be."""

    loaded: bool
    architectures: tuple[str, ...] = ()
    reason: str = ""

    def __str__(self) -> str:
        if not self.loaded:
            return f"not loaded: {self.reason}"
        architectures = f" ({', '.join(self.architectures)})" if self.architectures else ""
        return f"loaded{architectures}" + (f", {self.reason}" if self.reason else "")


@dataclass(frozen=True)
class BackendInfo:
    """The result of :func:`backend_info`. ``str()`` makes a table."""

    version: str
    torch_version: str
    backends: dict[str, Backend] = field(default_factory=dict)
    build: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"fusedtrain {self.version}, torch {self.torch_version}"]
        lines += [f"  {name:<10} {backend}" for name, backend in self.backends.items()]
        if self.build:
            built = ", ".join(f"{k} {v}" for k, v in self.build.items() if isinstance(v, str))
            lines.append(f"  built with {built}")
        return "\n".join(lines)


_state: dict[str, Backend] = {}


def _build_record() -> dict[str, Any]:
    path = _PACKAGE / "_build_info.json"
    if not path.exists():
        return {}
    try:
        record = json.loads(path.read_text())
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def _load_library(path: Path, not_built: str) -> str:
    """Loads one file; returns the reason if that fails, otherwise ""."""
    if not path.exists():
        checkout = (_PACKAGE.parent / "setup.py").exists()
        elsewhere = " in this checkout; an installed package is seen from other folders"
        return not_built or f"{path.name} was not built{elsewhere if checkout else ''}"
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        return f"{path.name} failed to load under torch {torch.__version__}: {error}"
    return ""


def _cpu_capability(path: Path) -> str:
    function = ctypes.CDLL(str(path)).fusedtrain_cpu_capability
    function.restype = ctypes.c_char_p
    name: bytes = function()
    return name.decode()


def _load_cpu(record: dict[str, Any]) -> Backend:
    asked = os.environ.get("FUSEDTRAIN_CPU_CAPABILITY") or None
    if asked is not None and asked not in _CAPABILITIES:
        raise ValueError(
            f"FUSEDTRAIN_CPU_CAPABILITY={asked!r}: must be one of {', '.join(_CAPABILITIES)}"
        )
    path = _PACKAGE / "_C.so"
    reason = _load_library(path, record.get("cpu_not_built", ""))
    if reason:
        return Backend(False, reason=reason)
    capability, built = _cpu_capability(path), str(record.get("instruction_sets", ""))
    if asked is not None and capability != asked:
        raise RuntimeError(
            f"FUSEDTRAIN_CPU_CAPABILITY={asked}: this processor (or ATEN_CPU_CAPABILITY, or the "
            f"build, which has {built or 'all'}) allows {capability} only"
        )
    best = torch.backends.cpu.get_cpu_capability().lower()
    if built and asked is None and best in _CAPABILITIES and best not in built.split("+"):
        note = (
            f"built without {best}, which this processor has: build it on this machine, or with "
            "FUSEDTRAIN_ISAS=all"
        )
        return Backend(True, (capability,), note)
    return Backend(True, (capability,))


def _unfit(what: str, fits: Callable[[tuple[int, int]], bool], asked: bool, note: str) -> str:
    """Why kernels cannot serve the visible GPUs; empty if they can, or if GPUs are unknown.

    Args:
        what: begins the reason.
        fits: whether the kernels run on a GPU of this compute capability.
        asked: whether the user named the backend. One fitting GPU is then enough; otherwise all
            must fit, since a process has one kernel of an op for all of its GPUs.
        note: follows the names of the other GPUs.
    """
    visible = gpus.visible(os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID") or []
    others = list(dict.fromkeys(str(gpu) for gpu in visible if not fits(gpu.capability)))
    good = list(dict.fromkeys(str(gpu) for gpu in visible if fits(gpu.capability)))
    if not others or (asked and good):
        return ""
    reason = f"{what} for {', '.join(others)}{note}"
    if good:
        reason += f" (but for {', '.join(good)}: CUDA_VISIBLE_DEVICES can hide the others)"
    return reason


def _load_cuda(record: dict[str, Any], asked: bool) -> Backend:
    if torch.version.cuda is None:
        kind = "for ROCm" if torch.version.hip is not None else "without CUDA"
        return Backend(False, reason=f"torch {torch.__version__} is a build {kind}")
    path = _PACKAGE / "_C_cuda.so"
    archs = record.get("cuda_archs", [])
    ptx = record.get("cuda_ptx", archs[-1] if archs else "")
    images = tuple(f"sm_{a}" for a in archs) + ((f"PTX {ptx}",) if ptx else ())
    if archs and path.exists():
        reason = _unfit(
            f"{path.name} has no image", lambda c: gpus.has_image(c, archs, ptx), asked,
            f": it has {', '.join(images)}",
        )  # fmt: skip
        if reason:
            return Backend(False, images, reason)
    reason = _load_library(path, record.get("cuda_not_built", ""))
    return Backend(False, reason=reason) if reason else Backend(True, images)


def _load_triton(library: torch.library.Library, asked: bool) -> Backend:
    if importlib.util.find_spec("triton") is None:
        return Backend(False, reason="triton is not installed (pip install triton)")
    from .. import triton

    reason = triton.available()
    if reason is None and torch.version.cuda is not None:
        reason = _unfit(
            "Triton has no compiler", lambda c: c >= _OLDEST_OF_TRITON, asked,
            ": it needs sm_70",
        )  # fmt: skip
    if reason:
        return Backend(False, reason=reason)
    triton.register(library)
    return Backend(True)


@functools.cache
def autograd() -> ModuleType | None:
    """``_C_autograd``, the autograd nodes in C++; None where the nodes are those of Python.

    The file has no stable ABI: it is loaded under the torch and the Python of its build only.
    ``FUSEDTRAIN_AUTOGRAD=python`` switches it off; ``cpp`` is the default.

    Raises:
        ValueError: FUSEDTRAIN_AUTOGRAD has an unknown value.
    """
    module, reason = _load_autograd(_build_record())
    _state["autograd"] = Backend(module is not None, reason=reason)
    return module


def _load_autograd(record: dict[str, Any]) -> tuple[ModuleType | None, str]:
    chosen = os.environ.get("FUSEDTRAIN_AUTOGRAD") or "cpp"
    if chosen not in _AUTOGRAD_CHOICES:
        names = ", ".join(_AUTOGRAD_CHOICES)
        raise ValueError(f"FUSEDTRAIN_AUTOGRAD={chosen!r}: must be one of {names}")
    if chosen == "python":
        return None, "FUSEDTRAIN_AUTOGRAD=python"
    if os.environ.get("FUSEDTRAIN_BACKEND") == "reference":
        return None, "FUSEDTRAIN_BACKEND=reference"
    path = _PACKAGE / autograd_build.NAME
    if not path.exists():
        reason = record.get("autograd_not_built", f"{path.name} was not built")
        return None, f"{reason} ({autograd_build.COMMAND} builds it)"
    built_for = record.get("autograd")
    present = autograd_build.built_for(torch.__version__)
    if built_for != present:
        then, now = _in_words(built_for), _in_words(present)
        what = f"was built for {then}, this is {now}"
        if then == now:
            what = "was built from other sources of fusedtrain"
        return None, f"{path.name} {what} ({autograd_build.COMMAND} builds it anew)"
    name = f"{__package__}.{path.stem}"
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        return None, f"{path.name} failed to load under torch {torch.__version__}: {error}"
    return module, ""


def build_autograd() -> Path:
    """Builds ``_C_autograd.so`` for this torch and this Python, beside the package.

    Raises:
        CannotBuild: a compiler, Python.h or the sources are missing, or the folder is read-only.
    """
    compiler = autograd_build.find_compiler(os.environ.get("CXX"))
    torch_folder = Path(torch.__file__).parent
    return autograd_build.build(_PACKAGE, torch_folder, torch.__version__, compiler)


def _in_words(built_for: Any) -> str:
    if not isinstance(built_for, dict):
        return "an unknown torch"
    return f"torch {built_for.get('torch')}, {built_for.get('python')}"


def load(library: torch.library.Library) -> None:
    """Loads the kernels once, by the settings of the environment.

    ``FUSEDTRAIN_BACKEND``: the kernels for GPU tensors in this process: ``cuda``, ``triton``, or
    ``reference`` (plain torch, on the CPU too); unset, the first available backend that runs on
    every GPU of the process.
    ``FUSEDTRAIN_REQUIRE=cpu,cuda,triton``: backends whose absence is an error.

    Args:
        library: the schemas' library, where Triton kernels are registered.

    Raises:
        RuntimeError: a backend named in either is not available; the message has the reason.
        ValueError: one of the settings, or FUSEDTRAIN_CPU_CAPABILITY, has an unknown value.
    """
    record = _build_record()
    chosen = os.environ.get("FUSEDTRAIN_BACKEND") or ""
    if chosen and chosen not in _CHOICES:
        raise ValueError(f"FUSEDTRAIN_BACKEND={chosen!r}: must be one of {', '.join(_CHOICES)}")
    off = Backend(False, reason=f"FUSEDTRAIN_BACKEND={chosen}")
    _state["cpu"] = off if chosen == "reference" else _load_cpu(record)
    _state["cuda"] = _load_cuda(record, bool(chosen)) if chosen in ("", "cuda") else off
    # If both were registered for one key, the later one would win silently.
    if not chosen and _state["cuda"].loaded:
        _state["triton"] = Backend(False, reason="the CUDA kernels are loaded")
    else:
        ours = chosen in ("", "triton")
        _state["triton"] = _load_triton(library, bool(chosen)) if ours else off
    _state["reference"] = Backend(True)
    autograd()
    _state["autograd"] = _state.pop("autograd")  # the last row of the table
    if chosen and not _state[chosen].loaded:
        raise RuntimeError(f"FUSEDTRAIN_BACKEND={chosen}: {_state[chosen].reason}")
    required = os.environ.get("FUSEDTRAIN_REQUIRE", "").split(",")
    for name in filter(None, (part.strip() for part in required)):
        if name not in _state:
            raise ValueError(f"FUSEDTRAIN_REQUIRE={name!r}: must name {', '.join(_state)}")
        if not _state[name].loaded:
            raise RuntimeError(f"FUSEDTRAIN_REQUIRE={name}: {_state[name].reason}")


def why_not(device_type: str) -> str:
    """Why ops on this device run in plain torch; empty if FUSEDTRAIN_BACKEND says so."""
    if os.environ.get("FUSEDTRAIN_BACKEND") == "reference":
        return ""
    if device_type == "cuda":
        return f"CUDA: {_state['cuda'].reason}; Triton: {_state['triton'].reason}"
    return _state[device_type].reason if device_type in _state else "no kernel for this device"


def is_opaque_to_compile(device: torch.device) -> bool:
    """Whether batch norm stays one op under torch.compile, rather than become plain operators.

    One op is faster on the CPU: Inductor's kernels take 1.3 to 6 times as long
    (docs/decisions/0007-batch-norm.md). GPUs are not measured yet.
    """
    return device.type == "cpu" and _state["cpu"].loaded


def backend_info() -> BackendInfo:
    """The loaded backends, their architectures, and why a backend is not loaded.

    Returns:
        A :class:`BackendInfo`; ``print(fusedtrain.backend_info())`` shows it as a table.

    Example:
        >>> import fusedtrain
        >>> fusedtrain.backend_info().backends["reference"].loaded
        True
    """
    return BackendInfo(__version__, torch.__version__, dict(_state), _build_record())


def machine_info() -> dict[str, str]:
    """Facts for a bug report besides `backend_info`: system, Python, torch, devices, settings.

    Starts no CUDA context.
    """
    built_for = "CPU only"
    if torch.version.cuda is not None:
        built_for = f"CUDA {torch.version.cuda}"
    elif torch.version.hip is not None:
        built_for = f"ROCm {torch.version.hip}"
    capability = torch.backends.cpu.get_cpu_capability()
    rows = {
        "system": platform.platform(),
        "Python": f"{platform.python_version()} ({platform.python_implementation()})",
        "torch": f"{torch.__version__}, built for {built_for}",
        "processor": f"{processor()}, {capability}, {torch.get_num_threads()} threads",
        "GPUs": _gpus_in_words(),
        "installed": str(_PACKAGE),
    }
    settings = [f"{key}={os.environ[key]}" for key in sorted(os.environ) if key in _SETTINGS]
    return rows | {"settings": ", ".join(settings) or "none"}


def local_ranks() -> int:
    """Processes that torchrun has started on this machine; 1 without it."""
    count = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(int(count), 1) if count.isdecimal() else 1


@contextmanager
def quiet_kineto() -> Iterator[None]:
    """Keeps Kineto from writing two lines to stderr for each use of the profiler. Kineto reads the
    variable once, when the process profiles for the first time."""
    name = "KINETO_LOG_LEVEL"
    added = name not in os.environ
    os.environ.setdefault(name, "99")
    try:
        yield
    finally:
        if added:
            os.environ.pop(name, None)


def processor() -> str:
    """The CPU's model name where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def _gpus_in_words() -> str:
    visible = gpus.visible(os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID")
    if visible is None:
        return "unknown (no NVIDIA driver answers)"
    return ", ".join(map(str, visible)) or "none visible"
