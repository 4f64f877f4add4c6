"""torch.testing's tables of operators, modules and optimizers: the one place that imports them.

They are private to torch: where a version lacks them, the tests that need them are skipped.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
_PLACES = {
    "op_db": "common_methods_invocations",
    "module_db": "common_modules",
    "optim_db": "common_optimizers",
}


@cache
def table(name: str) -> list[Any]:
    """`op_db`, `module_db` or `optim_db`."""
    path, frozen = list(sys.path), torch.backends.flags_frozen()
    try:
        module = importlib.import_module(f"torch.testing._internal.{_PLACES[name]}")
    except ImportError as error:
        pytest.skip(f"torch {torch.__version__}, torch.testing._internal: {error}")
    finally:
        # Undo the import: directories of torch's own tests, and flags that no other test could set.
        sys.path[:] = path
        vars(torch.backends)["__allow_nonbracketed_mutation_flag"] = not frozen
    entries = getattr(module, name, None)
    if entries is None:
        pytest.skip(f"torch {torch.__version__} has no torch.testing._internal {name}")
    return list(entries)


@cache
def op_info(name: str) -> Any:
    """The entry of a function of torch.nn.functional, or of torch."""
    for info in table("op_db"):
        if info.name in (name, f"nn.functional.{name}") and not info.variant_test_name:
            return info
    pytest.skip(f"torch {torch.__version__} has no OpInfo of {name}")


@cache
def module_info(name: str) -> Any:
    """The entry of a class of torch.nn; None where the table lacks it."""
    return next((i for i in table("module_db") if i.module_cls.__name__ == name), None)


@cache
def optimizer_info(name: str) -> Any:
    """The entry of a class of torch.optim."""
    for info in table("optim_db"):
        if info.optim_cls.__name__ == name:
            return info
    pytest.skip(f"torch {torch.__version__} has no OptimizerInfo of {name}")


def sample_input(input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """A sample as those of an OpInfo."""
    from torch.testing._internal.opinfo.core import SampleInput

    return SampleInput(input, args=args, kwargs=kwargs)


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def outcome(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Result of a call, or the type of the exception that it raises."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        return type(error)


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def error(actual: Tensor, truth: Tensor) -> float:
    """Largest error in units of the last place, of what float64 says; inf for a wrong NaN.

    16-bit math is done in float32: 16 bits are lost relative to the number itself, however small,
    and float32's relative to the largest.
    """
    assert actual.shape == truth.shape, f"shape {actual.shape} instead of {truth.shape}"
    if actual.numel() == 0:
        return 0.0
    info = torch.finfo(actual.dtype)
    a, t = actual.detach().double(), truth.detach().double()
    same = (a == t.to(actual.dtype).double()) | (a.isnan() & t.isnan())
    if bool(same.all()):
        return 0.0
    finite = t[t.isfinite()].abs()
    largest = max(1.0, float(finite.max()) if finite.numel() else 1.0)
    fine = info.eps if info.bits >= 32 else torch.finfo(torch.float32).eps
    unit = info.eps * t.abs() + fine * largest + info.smallest_normal * info.eps
    off = ((a - t).abs() / unit)[~same]
    worst = float(off.max())
    return worst if worst == worst else float("inf")


def spread(actual: Tensor, truth: Tensor) -> float:
    """Norm of the error by the norm of what float64 says, in units of the last place.

    Not of what has cancelled, or vanishes: `error` has an absolute part for these.
    """
    a, t = actual.detach().double(), truth.detach().double()
    finite = t.isfinite() & a.isfinite()
    difference, size = float((a - t)[finite].norm()), float(t[finite].norm())
    return difference / size / torch.finfo(actual.dtype).eps if size > 1e-3 else 0.0
