"""Random numbers of dropout: Philox 4x32-10 (Salmon et al., SC 2011). A word of the stream of two
64-bit numbers decides two elements in memory: csrc/philox.h says how, and how independent they
are."""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


def philox(seed: Tensor, count: int) -> Tensor:
    """The first words of a seed's stream, int64 numbers from 0 to 2^32 - 1."""
    block = torch.arange((count + 3) // 4, device=seed.device)
    key, high = seed.unbind()
    c0, c1 = block & _MASK, block >> 32
    c2, c3 = (high & _MASK).expand_as(block), ((high >> 32) & _MASK).expand_as(block)
    k0, k1 = key & _MASK, (key >> 32) & _MASK
    for _ in range(10):
        # Wraps around as unsigned products do: bits are what counts.
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (
            ((b >> 32) & _MASK) ^ c1 ^ k0, b & _MASK, ((a >> 32) & _MASK) ^ c3 ^ k1, a & _MASK,
        )  # fmt: skip
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return torch.stack((c0, c1, c2, c3), 1).flatten()[:count]


def numbers_of(seed: Tensor, count: int) -> Tensor:
    """The numbers of the first elements: four words of a block, then these with their halves
    exchanged."""
    words = philox(seed, (count + 7) // 8 * 4).view(-1, 4)
    return torch.cat((words, (words << 16 | words >> 16) & _MASK), 1).flatten()[:count]


def keep_mask(seed: Tensor, p: float, model: Tensor) -> Tensor:
    """Mask of the elements of a tensor like the model (in its strides) that are not dropped."""
    numbers = numbers_of(seed, model.numel())
    mask = torch.empty_like(model, dtype=torch.bool)
    flat = mask.as_strided((mask.numel(),), (1,))
    flat.copy_(numbers >= int(p * 4294967296.0))
    return mask
