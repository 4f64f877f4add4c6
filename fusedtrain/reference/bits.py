"""Packing of codes of 1, 2, 3, 4 or 8 bits: csrc/bits.h in torch."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK, STEP = 256, 32  # elements


def packed_bytes(count: int, bits: int) -> int:
    """Number of bytes of so many codes."""
    return -(-count // BLOCK) * STEP * bits


def _packed(steps: Tensor, bits: int) -> Tensor:
    """Codes [blocks, 8, 32] -> bytes [blocks, bits, 32]."""
    parts = steps.view(-1, 8 // bits, bits, STEP)
    shifts = torch.arange(0, 8, bits, device=steps.device).view(1, -1, 1, 1)
    return (parts << shifts).sum(1)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes below ``2**bits``, any n integers in their order -> uint8 [packed_bytes(n, bits)]."""
    count = codes.numel()
    padded = codes.new_zeros(-(-count // BLOCK) * BLOCK, dtype=torch.int64)
    padded[:count] = codes.reshape(-1)
    steps = padded.view(-1, BLOCK // STEP, STEP)
    if bits == 3:
        runs = torch.cat((_packed(steps & 3, 2), _packed(steps >> 2, 1)), 1)
    else:
        runs = _packed(steps, bits)
    return runs.to(torch.uint8).flatten()


def _unpacked(runs: Tensor, bits: int) -> Tensor:
    shifts = torch.arange(0, 8, bits, device=runs.device).view(1, -1, 1, 1)
    parts = (runs.unsqueeze(1) >> shifts) & (2**bits - 1)
    return parts.reshape(-1, BLOCK // STEP, STEP)


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """The codes that :func:`pack` packed, int64 [count]."""
    runs = packed.view(-1, bits, STEP).to(torch.int64)
    if bits == 3:
        codes = _unpacked(runs[:, :2], 2) | _unpacked(runs[:, 2:], 1) << 2
    else:
        codes = _unpacked(runs, bits)
    return codes.flatten()[:count]
