"""The suite itself: wrong kernels are seen by the comparison that all numbers go through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fusedtrain.functional as F
from helpers.activations import check_every_layout

NAMES = ["mish", "leaky_relu", "hardtanh", "gelu", "softplus", "relu_squared"]

# How the forward and the backward of a mutant treat (the right result, the tensor they were given).
MUTANTS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "forward is the identity": (lambda right, x: x.clone(), lambda right, g: right),
    "forward has its sign flipped": (lambda right, x: -right, lambda right, g: right),
    "forward is 2 % off": (lambda right, x: right * 1.02, lambda right, g: right),
    "forward misses the last element": (
        lambda right, x: torch.where(torch.arange(right.numel()).view(right.shape)
                                     == right.numel() - 1, 0.0, right),
        lambda right, g: right,
    ),
    "backward is the identity": (lambda right, x: right, lambda right, g: g.clone()),
    "backward has its sign flipped": (lambda right, x: right, lambda right, g: -right),
    "backward is 2 % off": (lambda right, x: right, lambda right, g: right * 1.02),
    "backward swaps the strides": (
        lambda right, x: right,
        lambda right, g: right.flip(-1) if right.dim() else right * 2,
    ),
}  # fmt: skip


def home_of(name: str) -> tuple[dict[str, Any], str]:
    """Where the function looks its kernel up, and by which name: in its module, or in a table."""
    names: dict[str, Any] = getattr(F, name).__globals__
    return (names, f"_{name}") if f"_{name}" in names else (names["_F"], name)


def mutate(name: str, mutant: str) -> Callable[..., Tensor]:
    names, key = home_of(name)
    kernel: Callable[..., Tensor] = names[key]
    on_forward, on_backward = MUTANTS[mutant]

    class Mutant(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, inplace: bool, *parameters: float) -> Tensor:
            with torch.enable_grad():
                inner = x.detach().requires_grad_()
                right = kernel(inner, False, *parameters)
            ctx.save_for_backward(inner, right)
            return on_forward(right.detach(), x).reshape(right.shape)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
            inner, right = ctx.saved_tensors
            (slope,) = torch.autograd.grad(right, inner, grad)
            return (
                on_backward(slope, grad),
                None,
                *(None for _ in range(len(ctx.needs_input_grad) - 2)),
            )

    return Mutant.apply


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_kernel_fails(
    name: str, mutant: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(*home_of(name), mutate(name, mutant))
    with pytest.raises(AssertionError):
        check_every_layout(name, dtype)


@pytest.mark.parametrize("name", NAMES)
def test_the_wrapper_alone_passes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the failures above come from the mutation."""
    MUTANTS["none"] = (lambda right, x: right, lambda right, g: right)
    try:
        monkeypatch.setitem(*home_of(name), mutate(name, "none"))
        check_every_layout(name, torch.float32)
    finally:
        del MUTANTS["none"]
