"""A small vision transformer (Dosovitskiy et al. 2020, arXiv:2010.11929) for images of a few
pixels, with the mean of the tokens in the place of a class token."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class SmallViT(nn.Module):
    """Patches, blocks with the norm first, the mean of the tokens, a linear layer."""

    def __init__(self, size: int, patch: int, width: int, depth: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.positions = nn.Parameter(0.02 * torch.randn(1, (size // patch) ** 2, width))
        self.blocks = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(
                    width, 4, 2 * width, 0.0, "gelu", batch_first=True, norm_first=True
                )
                for _ in range(depth)
            )
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        y: Tensor = self.head(self.norm(self.blocks(tokens)).mean(1))
        return y


def small_vit(size: int, patch: int, width: int, depth: int, classes: int) -> nn.Module:
    """For images of ``size`` pixels, a multiple of ``patch``; weights from torch's seed."""
    return SmallViT(size, patch, width, depth, classes)
