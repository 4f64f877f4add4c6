"""Models from torch.compile: what they wrap, and how they run without compiled code."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from .warning import level_outside


def _wrapped_by(module: nn.Module) -> nn.Module | None:
    wraps = type(module).__name__ == "OptimizedModule"
    return module._modules.get("_orig_mod") if wraps else None


def original_of(model: nn.Module, function: str) -> nn.Module:
    """The model itself; of one from torch.compile the model that it wraps, with a warning."""
    inner = _wrapped_by(model)
    if inner is None:
        return model
    warnings.warn(
        f"{function}: the model comes from torch.compile. Call {function} before torch.compile; "
        "this call works on the model that is compiled, model._orig_mod",
        stacklevel=level_outside(),
    )
    return inner


@contextmanager
def without_compiled_code(model: nn.Module) -> Iterator[None]:
    """Context in which parts that torch.compile or `module.compile()` compiled run as written."""
    parts = model.modules()
    if any(_wrapped_by(m) or getattr(m, "_compiled_call_impl", None) for m in parts):
        with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
            # Hooks on all modules then see the wrapper, too: one module more.
            warnings.filterwarnings(
                "ignore", r"Using `torch\.compile\(module\)` when there are glo"
            )
            yield
    else:
        yield
