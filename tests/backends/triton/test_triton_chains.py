"""Cuts of the chains' Triton kernels that small tensors do not have: several tiles side by side and
below each other, the last of them cut off, with units of every length; and the threshold itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fusedtrain.reference import bias_act, gated, scale_add
from fusedtrain.reference.pointwise import IDENTITY, INDEX
from helpers.backends import BACKENDS

pytest.importorskip("triton", reason="triton is not installed")

SILU = INDEX["silu"]
# Rows of several tiles and a rest: of 16 bytes, of 8, of 4 and of single elements.
LENGTHS = (2064, 1036, 2050, 1027)


@pytest.fixture
def ops() -> Any:
    return BACKENDS["triton"]()


def close(result: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(result.double().cpu(), wanted.double(), rtol=2e-5, atol=2e-5)


def wide(*tensors: Tensor) -> list[Tensor]:
    return [t.double() for t in tensors]


@pytest.mark.parametrize("n", LENGTHS)
def test_gated(ops: Any, n: int) -> None:
    """Halves of packed rows, whose distances are not their lengths."""
    packed, grad = torch.randn(3, 2 * n + 8), torch.randn(3, n)
    gate, value = packed[:, :n], packed[:, n : 2 * n]
    close(
        ops("gated", gate.to(ops.device), value.to(ops.device), SILU, 0.0, 0.0),
        gated.gated(*wide(gate, value), SILU, 0.0, 0.0),
    )
    outs = torch.full((3, 2 * n + 8), 7.0, device=ops.device)
    wanted = [torch.empty(3, n, dtype=torch.float64) for _ in range(2)]
    on_device = packed.to(ops.device)
    ops(
        "gated_backward", grad.to(ops.device), on_device[:, :n], on_device[:, n : 2 * n],
        outs[:, :n], outs[:, n : 2 * n], SILU, 0.0, 0.0,
    )  # fmt: skip
    gated.gated_backward(*wide(grad, gate, value), *wanted, SILU, 0.0, 0.0)
    close(outs[:, :n], wanted[0])
    close(outs[:, n : 2 * n], wanted[1])
    assert (outs[:, 2 * n :] == 7).all()


# Shape, and how the memory lies: planes, columns of channels, columns of channels and pixels.
SHAPES = {
    "planes": ((2, 3, 2050), False),
    "planes of units": ((2, 3, 1032), False),
    "channels last": ((3, 1036, 5), True),
    "few pixels": ((5, 300, 7), False),
}


def tensor_of(kind: str) -> Tensor:
    shape, last = SHAPES[kind]
    t = torch.randn(shape)
    return t.transpose(1, 2).contiguous().transpose(1, 2) if last else t


@pytest.mark.parametrize("samples", [False, True], ids=["channels", "samples and channels"])
@pytest.mark.parametrize("kind", SHAPES)
def test_scale(ops: Any, kind: str, samples: bool) -> None:
    x, grad, residual = (tensor_of(kind) for _ in range(3))
    scale = torch.randn(x.size(0) if samples else 1, x.size(1))
    output = ops("scale_add", *(t.to(ops.device) for t in (x, scale, residual)), 1)
    close(output, scale_add.scale_add(*wide(x, scale, residual), 1))
    gradients = ops("scale_add_backward", *(t.to(ops.device) for t in (grad, x, scale)), 1, True)
    wanted = scale_add.scale_add_backward(*wide(grad, x, scale), 1, True)
    close(gradients[0], wanted[0])
    torch.testing.assert_close(gradients[1].double().cpu(), wanted[1], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("kind", SHAPES)
def test_bias(ops: Any, kind: str) -> None:
    x, grad = tensor_of(kind), tensor_of(kind)
    bias = torch.randn(x.size(1))
    seed = torch.tensor([12345, 678])
    rest = (1, SILU, 0.0, 0.0, 1.5, 0.7, 0.25)
    moved = [t.to(ops.device) for t in (x, bias, seed, grad)]
    close(ops("bias_act", *moved[:3], *rest), bias_act.bias_act(*wide(x, bias), seed, *rest))
    gradients = ops("bias_act_backward", moved[3], *moved[:3], *rest, True)
    wanted = bias_act.bias_act_backward(*wide(grad, x, bias), seed, *rest, True)
    close(gradients[0], wanted[0])
    torch.testing.assert_close(gradients[1].double().cpu(), wanted[1], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("n", [64, 61])
def test_a_word_that_is_the_threshold_is_kept(ops: Any, n: int) -> None:
    """p 2^32 is exact for a p of 32 bits: element 17 is the first that is not dropped."""
    seed = torch.tensor([3, 4])
    x = torch.ones(n)
    rest = (-1, IDENTITY, 0.0, 0.0, 1.0, -1.0)
    low, high = 0, 2**32
    while low < high:  # the largest threshold that keeps element 17, which is its word
        middle = (low + high + 1) // 2
        kept = bias_act.bias_act(x, None, seed, *rest, middle / 2**32 if middle < 2**32 else 0.5)
        low, high = (middle, high) if middle < 2**32 and kept[17] != 0 else (low, middle - 1)
    for word, kept in ((low, True), (low + 1, False)):
        output = ops("bias_act", x.to(ops.device), None, seed.to(ops.device), *rest, word / 2**32)
        assert bool(output[17] != 0) == kept
