"""Small networks of the kinds that a plan must know: convolutions with norms, skips, attention."""

from __future__ import annotations

import torch
import torch.nn.functional as T
from torch import Tensor, nn

from helpers.norm_models import UNet


class Convolutions(nn.Module):
    """Blocks of convolution, norm and activation, every second with a residual sum."""

    def __init__(self, channels: int = 8, blocks: int = 6) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv2d(3 if i == 0 else channels, channels, 3, padding=1) for i in range(blocks)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(blocks))
        self.act = nn.SiLU()
        self.head = nn.Linear(channels, 4)

    def forward(self, x: Tensor) -> Tensor:
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms)):
            y = self.act(norm(conv(x)))
            x = x + y if i % 2 else y
        return self.head(x.mean((2, 3)))


class Attention(nn.Module):
    """Pre-norm transformer blocks with SwiGLU and dropout."""

    def __init__(self, width: int = 32, blocks: int = 3, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "one": nn.LayerNorm(width),
                    "qkv": nn.Linear(width, 3 * width),
                    "out": nn.Linear(width, width),
                    "two": nn.LayerNorm(width),
                    "gate": nn.Linear(width, 4 * width),
                    "up": nn.Linear(width, 4 * width),
                    "down": nn.Linear(4 * width, width),
                }
            )
            for _ in range(blocks)
        )
        self.drop = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        batch, length, width = x.shape
        for block in self.blocks:
            qkv = block["qkv"](block["one"](x)).view(batch, length, 3, 4, width // 4)
            q, k, v = qkv.permute(2, 0, 3, 1, 4)
            a = T.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.drop(block["out"](a.transpose(1, 2).reshape(batch, length, width)))
            y = block["two"](x)
            x = x + self.drop(block["down"](T.silu(block["gate"](y)) * block["up"](y)))
        return x


EXAMPLES = {
    "convolutions": lambda: (Convolutions(), torch.randn(4, 3, 24, 24)),
    "attention": lambda: (Attention(), torch.randint(50, (8, 48))),
    "skips": lambda: (UNet(4), torch.randn(4, 3, 32, 32)),
}
