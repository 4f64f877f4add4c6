"""Helpers of the tests of functions of the pointwise chains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.float16: 5e-3, torch.bfloat16: 4e-2}


def same(result: Any, want: Any, dtype: torch.dtype) -> None:
    limit = TOLERANCE[dtype]
    torch.testing.assert_close(result, want.to(result.dtype), rtol=limit, atol=limit)


def gradients(function: Callable[..., Tensor], *tensors: Tensor, grad: Tensor) -> list[Tensor]:
    inputs = [t.detach().clone().requires_grad_() for t in tensors]
    output = function(*inputs)
    assert output.dtype == grad.dtype
    return [output.detach(), *torch.autograd.grad(output, inputs, grad)]
