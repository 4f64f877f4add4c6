"""The rule that a test of a GPU backend's kernels starts kernels of that backend.

A case with `cuda`, `triton` or `emulated` among its parameters fails where no kernel was started
while it ran, and so does one of the modules below. A case that rightly starts none says why:
`@pytest.mark.launches_nothing("the arguments are refused")`. It fails where one is started after
all, so that no mark outlives its reason. test_launch_rule.py tests the rule.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

import cuda_emulator
import fusedtrain
from helpers import pretended_gpu

_triton_launches = 0


@functools.cache
def _cuda_library() -> ctypes.CDLL | None:
    """The one that the package has loaded: csrc/cuda/launch.cuh counts in it."""
    if not fusedtrain.backend_info().backends["cuda"].loaded:
        return None
    return ctypes.CDLL(str(Path(fusedtrain.__file__).parent / "_C_cuda.so"))


@functools.cache
def _cuda_counter() -> Callable[[], int]:
    library = _cuda_library()
    return (lambda: 0) if library is None else _counter_of(library)


@functools.cache
def _emulated_counter() -> Callable[[], int]:
    return _counter_of(cuda_emulator.load().c)


def _counter_of(library: ctypes.CDLL) -> Callable[[], int]:
    count: Callable[[], int] = library.fusedtrain_cuda_launches
    count.restype = ctypes.c_int64
    return count


@functools.cache
def _count_triton() -> None:
    """Puts a count around the one way in which Triton kernels are started."""
    if importlib.util.find_spec("triton") is None:
        return
    from fusedtrain.triton.launch import Launcher

    launch = Launcher.__call__

    def counted(self: Any, *arguments: Any, **options: Any) -> None:
        global _triton_launches
        launch(self, *arguments, **options)
        _triton_launches += 1

    Launcher.__call__ = counted


def triton() -> int:
    _count_triton()
    return _triton_launches


def cuda() -> int:
    return _cuda_counter()() + pretended_gpu.calls()


def emulated() -> int:
    return _emulated_counter()() if cuda_emulator.load.cache_info().currsize else 0


# Kernels of a backend that were started so far.
COUNTERS: dict[str, Callable[[], int]] = {"cuda": cuda, "triton": triton, "emulated": emulated}
# Modules that drive the emulator themselves; and those of a GPU, for whichever backend is loaded.
EMULATED = ("test_cuda_batch_norm", "test_cuda_optimizers")
GPU_ALONE = ("test_gpu", "test_gpu_graphs", "test_gpu_optimizers")
ON_A_GPU = "GPU"


def on_a_gpu() -> int:
    loaded = fusedtrain.backend_info().backends["triton"].loaded
    return cuda() + (triton() if loaded else 0)


def backend_of(item: pytest.Function) -> str | None:
    """The backend whose kernels the case must start; None where the rule does not apply."""
    if item.module.__name__ in GPU_ALONE:
        return ON_A_GPU
    if item.module.__name__ in EMULATED and "emulator" in item.fixturenames:
        return "emulated"
    # A case with a default device does not only test kernels.
    options = dict(item.callspec.params) if hasattr(item, "callspec") else {}
    options.pop("default_device", None)
    return next((v for v in options.values() if isinstance(v, str) and v in COUNTERS), None)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    backend = backend_of(pyfuncitem)
    count = on_a_gpu if backend == ON_A_GPU else COUNTERS.get(backend or "", lambda: 0)
    before = count()
    result = yield
    if backend is not None:
        judge(backend, count() - before, pyfuncitem.get_closest_marker("launches_nothing"))
    return result


NO_ELEMENTS = pytest.mark.launches_nothing("tensors without elements")


def parameters(table: Iterable[str], *empty: str) -> list[Any]:
    """The names of a table of cases, with those marked that have no elements."""
    return [pytest.param(name, marks=NO_ELEMENTS) if name in empty else name for name in table]


def judge(backend: str, started: int, mark: pytest.Mark | None) -> None:
    """Fails a case that was right otherwise."""
    if mark is None:
        assert started > 0, f"no {backend} kernel was started: what did this test test?"
        return
    assert mark.args, "launches_nothing needs a reason"
    assert started == 0, f"{started} {backend} kernels were started: launches_nothing is wrong"
