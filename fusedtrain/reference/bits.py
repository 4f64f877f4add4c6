"""Small numbers ("codes") packed into bytes, as csrc/bits.h has it: blocks of 256, in which byte i
holds code i of each part, that of the first part in its lowest bits."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 256


def bytes_of(count: int, bits: int) -> int:
    return (count + BLOCK - 1) // BLOCK * (BLOCK // 8 * bits)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Integers below ``2**bits`` of any shape, in their order, as a 1-d uint8 tensor.

    `bits` is 1, 2, 3, 4 or 8.
    """
    flat = codes.reshape(-1).to(torch.int32)
    blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
    if bits == 3:
        both = [_pack_blocks(blocks & 3, 2), _pack_blocks(blocks >> 2, 1)]
        return torch.cat(both, 1).reshape(-1)
    return _pack_blocks(blocks, bits).reshape(-1)


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` codes, as a 1-d uint8 tensor."""
    blocks = packed.view(-1, BLOCK // 8 * bits)
    if bits == 3:
        codes = _unpack_blocks(blocks[:, :64], 2) | _unpack_blocks(blocks[:, 64:], 1) << 2
    else:
        codes = _unpack_blocks(blocks, bits)
    return codes.reshape(-1)[:count]


def _pack_blocks(blocks: Tensor, bits: int) -> Tensor:
    parts = blocks.view(blocks.size(0), 8 // bits, BLOCK // 8 * bits)
    shifts = torch.arange(0, 8, bits, dtype=torch.int32, device=blocks.device)
    # The sum of numbers without common bits.
    return (parts << shifts.view(1, -1, 1)).sum(1).to(torch.uint8)


def _unpack_blocks(blocks: Tensor, bits: int) -> Tensor:
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=blocks.device)
    codes = (blocks.unsqueeze(1) >> shifts.view(1, -1, 1)) & ((1 << bits) - 1)
    return codes.flatten(1)
