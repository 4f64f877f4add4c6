"""Guards against benchmark numbers that would mislead."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Mapping
from functools import cache
from typing import TypeVar

import pytest
import torch

from fusedtrain.advisor.bench.gate import NotTheJob

T = TypeVar("T")


@cache
def has_kernel(op: str, device: str) -> bool:
    """Whether the device has a kernel of fusedtrain's op."""
    key = {"cpu": "CPU", "cuda": "CUDA"}[device]
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"fusedtrain::{op}", key)


def refuse_the_reference(op: str, device: str) -> None:
    """Skip where plain torch would pass for a kernel (the conftest sets FUSEDTRAIN_REQUIRE)."""
    required = os.environ.get("FUSEDTRAIN_REQUIRE", "").split(",")
    if device in required and not has_kernel(op, device):
        pytest.skip(f"fusedtrain has no {device} kernel of {op}")


def admit(
    contestants: Mapping[str, T],
    check: Callable[[str, T], None],
    where: str,
    *,
    ours: Collection[str] = ("fusedtrain",),
    may_break: Collection[str] = ("compile",),
) -> dict[str, T]:
    """Contestants to be timed: they passed the gate, and ours must.

    ``check`` takes a contestant and its name and raises NotTheJob; those that ``may_break`` may
    fail otherwise too.
    """
    admitted = {}
    for who, contestant in contestants.items():
        try:
            check(who, contestant)
        except NotTheJob as error:
            if who in ours:
                blame = f"{who}: {error}" if len(ours) > 1 else str(error)
                pytest.fail(f"{where}: {blame}. Not timed", pytrace=False)
            warnings.warn(f"{where}: {who} left out: {error}", stacklevel=2)
        except Exception as error:
            if who not in may_break:
                raise
            rival = "torch.compile" if who == "compile" else who
            warnings.warn(f"{where}: no {rival} rival: {error}", stacklevel=2)
        else:
            admitted[who] = contestant
    return admitted
