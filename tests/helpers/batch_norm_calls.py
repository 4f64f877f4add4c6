"""Calls of batch norm that differ from the usual one: the table of those that the short way must
leave to the general one, or refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

F64 = torch.float64
C = 3
Arguments = dict[str, Any]


def usual() -> Arguments:
    return {
        "input": torch.randn(4, C, 2, 2, requires_grad=True),
        "running_mean": torch.zeros(C), "running_var": torch.ones(C),
        "weight": torch.rand(C).requires_grad_(), "bias": torch.rand(C).requires_grad_(),
        "momentum": 0.1, "eps": 1e-5, "residual": None,
    }  # fmt: skip


def image(*shape: int, **options: Any) -> Tensor:
    return torch.randn(shape or (4, C, 2, 2), **options)


def inference(*shape: int) -> Tensor:
    with torch.inference_mode():
        return torch.randn(shape)


def every_other() -> Tensor:
    return torch.ones(2 * C)[::2]


def shaped(*shape: int) -> Arguments:
    vectors = {name: torch.ones(shape[1:2]) for name in ("running_var", "weight")}
    vectors |= {name: torch.zeros(shape[1:2]) for name in ("running_mean", "bias")}
    return {"input": image(*shape, requires_grad=True), **vectors}


# Differences from the usual call.
CALLS: dict[str, Callable[[], Arguments]] = {
    "usual": dict,
    "residual": lambda: {"residual": image(requires_grad=True)},
    "residual, one a channel": lambda: {"residual": torch.randn(C, 1, 1)},
    "residual, wider": lambda: {"residual": image(2, 4, C, 2, 2)},
    "residual of float64": lambda: {"residual": image(dtype=F64)},
    "residual that fits nowhere": lambda: {"residual": image(4, C, 2, 3)},
    "residual, sparse": lambda: {"residual": image().to_sparse()},
    "residual alone has a gradient": lambda: {
        "input": image(), "weight": None, "bias": None,
        "residual": image(requires_grad=True),
    },
    "bias alone has a gradient": lambda: {"input": image(), "weight": None},
    "running mean of float64": lambda: {"running_mean": torch.zeros(C).double()},
    "weight of another size": lambda: {"weight": torch.rand(C + 1)},
    "weight of one element": lambda: {"weight": torch.rand(1)},
    "weight [C, 1]": lambda: {"weight": torch.rand(C, 1)},
    "bias of another size": lambda: {"bias": torch.rand(1)},
    "running variance of another size": lambda: {"running_var": torch.ones(1)},
    "running mean that requires a gradient": lambda: {
        "running_mean": torch.zeros(C, requires_grad=True)
    },
    "running mean with gaps": lambda: {"running_mean": every_other()},
    "weight with gaps": lambda: {"weight": every_other().requires_grad_()},
    "only a running mean": lambda: {"running_var": None},
    "no running statistics": lambda: {"running_mean": None, "running_var": None},
    "eps of 0": lambda: {"eps": 0.0},
    "negative eps": lambda: {"eps": -1e-5},
    "momentum, a whole number": lambda: {"momentum": 1},
    "float64": lambda: {
        "input": image(dtype=F64),
        "weight": torch.rand(C).double().requires_grad_(), "bias": torch.rand(C).double(),
        "running_mean": torch.zeros(C).double(), "running_var": torch.ones(C).double(),
    },
    "whole numbers": lambda: {"input": torch.ones(4, C, 2, 2, dtype=torch.int64)},
    "complex": lambda: {"input": image(dtype=torch.complex64)},
    "one value a channel": lambda: {"input": image(1, C, 1, 1)},
    "one dimension": lambda: {"input": torch.randn(C)},
    "inference tensor": lambda: {"input": inference(4, C, 2, 2)},
    "negated": lambda: {"input": image(dtype=torch.complex64).conj().imag},
    "no samples": lambda: shaped(0, 3, 4),
    "no rows": lambda: shaped(0, 3),
    "no places": lambda: shaped(4, 3, 0),
    "no channels": lambda: shaped(4, 0, 5),
    "one value a channel, 2-d": lambda: {"input": image(1, C)},
    "no dimension": lambda: {"input": torch.randn(())},
    "booleans": lambda: {"input": image() > 0},
    "sparse": lambda: {"input": image().to_sparse()},
    "float8": lambda: {"input": image().to(torch.float8_e5m2)},
    "other channels": lambda: {"input": image(4, C + 1, 2)},
    "float64 beside float32": lambda: {"input": image(dtype=F64)},
    "weight of float64": lambda: {"weight": torch.rand(C, dtype=F64)},
    "weight of float16": lambda: {"weight": torch.rand(C).half()},
    # In training torch raises after running statistics have moved.
    "weight on meta": lambda: {
        "weight": torch.ones(C, device="meta"), "running_mean": None, "running_var": None,
    },
    "mean too short": lambda: {"running_mean": torch.zeros(C - 1)},
    "only a running variance": lambda: {"running_mean": None},
    "mean on meta": lambda: {"running_mean": torch.zeros(C, device="meta")},
    "16 bits and float64": lambda: {
        "input": image().half(), "weight": torch.ones(C).half(), "bias": None,
        "running_mean": torch.zeros(C, dtype=F64), "running_var": torch.ones(C, dtype=F64),
    },
    "statistics with a graph": lambda: {"running_mean": torch.zeros(C, requires_grad=True) * 1},
    "eps not a number": lambda: {"eps": float("nan")},
}  # fmt: skip
