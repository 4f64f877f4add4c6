"""Settings of the whole suite: threads, repeatable random numbers, GPU tensors where there are."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fusedtrain
from helpers import ROOT, pretended_gpu
from helpers.launches import pytest_pyfunc_call  # noqa: F401  (a hook)

# The benchmarks, which no installation has; at the end, after a package that is installed.
sys.path.append(str(ROOT))
pytest_plugins = ["helpers.tiers"]

# Triton has no compiler for the CPU; its interpreter must be chosen before triton is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Each process has one stretch of the tests, and with it the fixtures of a file as a rule; who
    is done takes half of what another has left, so that none is idle at the end."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.getvalue("dist") == "load" else None


def pytest_collection_finish() -> None:
    _freeze()


def _freeze() -> None:
    """A full collection of garbage, which many tests ask for, takes 0.8 s beside all tests and all
    libraries that they have imported. It passes over frozen objects. Once thawed, they made the
    suite take 30 minutes instead of 20."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _objects_of_earlier_files_are_frozen() -> Iterator[None]:
    yield
    _freeze()


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Without a GPU, torch.manual_seed() keeps a traceback for each kind of device, for 1 ms."""
    (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(0)


@pytest.fixture(autouse=True)
def _amp_switched_off() -> Iterator[None]:
    """Undoes the changes of amp.initialize to the process, autocast above all."""
    yield
    if "fusedtrain.apex.amp._state" in sys.modules:
        from fusedtrain.apex import amp

        if amp._amp_state.initialized:
            amp.initialize([], enabled=False)
            amp._amp_state.initialized = False


@pytest.fixture(autouse=True)
def _convolutions_are_repeatable() -> Iterator[None]:
    """On a GPU: the same bits each time; and TF32's 10 bits would hide an error of a thousandth."""
    if not torch.cuda.is_available():
        yield
        return
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        yield


@pytest.fixture(autouse=True)
def _flags_may_be_set() -> None:
    """torch.testing._internal, which torch.library.opcheck imports, forbids it to the process."""
    torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True


@pytest.fixture(autouse=True)
def _pretended() -> Iterator[None]:
    """For test_launch_rule.py."""
    with pretended_gpu.pretended() if pretended_gpu.IS_ON else contextlib.nullcontext():
        yield


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """One thread for many small operators: on two busy cores two threads, which spin for each
    other, took 443 s for test_convert.py, and one 35 s."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def fill_new_memory(fills: bool) -> None:
    """Whether the bindings of the CPU fill fresh outputs with NaN, as torch does where algorithms
    are to be deterministic."""
    if fusedtrain.backend_info().backends["cpu"].loaded:
        path = Path(fusedtrain.__file__).parent / "_C.so"
        ctypes.CDLL(str(path)).fusedtrain_fill_new_memory(ctypes.c_bool(fills))


@pytest.fixture
def memory_is_full_of_nan() -> Iterator[None]:
    """Shows elements that nobody has written: memory that torch or a kernel's binding hands out is
    filled with NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    fill_new_memory(True)
    yield
    fill_new_memory(False)
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def default_device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where a test's tensors are made: the CPU, and where a module has ON_THE_GPU_TOO, the GPU."""
    if not hasattr(request, "param"):
        yield "cpu"
        return
    if request.param == "cuda" and request.node.get_closest_marker("cpu_only"):
        pytest.skip("not a case: a test of the CPU only")
    torch.set_default_device(request.param)
    assert torch.get_default_device().type == request.param
    yield request.param
    torch.set_default_device(None)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if torch.cuda.is_available() and getattr(metafunc.module, "ON_THE_GPU_TOO", False):
        metafunc.parametrize("default_device", ["cpu", "cuda"], indirect=True)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cpu_only: not to be run on a GPU's tensors")
    config.addinivalue_line("markers", "launches_nothing(reason): see tests/helpers/launches.py")
    config.addinivalue_line("markers", "long: run by `-m long` alone")
    config.addinivalue_line("markers", "slow: among many, only in `--cases third` or `all`")
    if pretended_gpu.IS_ON:
        config.option.cases = "all"  # of which pretended_gpu.some() takes a few
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if pretended_gpu.IS_ON:
        items[:] = pretended_gpu.some(items)
    if "long" not in config.option.markexpr:
        long = [item for item in items if item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in set(long)]
