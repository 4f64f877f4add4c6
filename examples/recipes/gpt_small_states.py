"""A small GPT in bfloat16: optimizer states of 8 bits, and gradients that are freed at once.

python examples/recipes/gpt_small_states.py --steps 200 --width 256 --layers 6
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

import fusedtrain


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).transpose(1, 3)
        query, key, value = qkv.unbind(2)
        y = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, symbols: int, length: int, width: int, layers: int, heads: int = 4) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(symbols, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, symbols)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.places(places))))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--text", type=Path, default=Path(__file__), help="what to learn")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    text = torch.tensor(list(args.text.read_bytes()))
    model = GPT(256, args.length, args.width, args.layers).bfloat16()
    print(fusedtrain.convert(model, lambda: torch.randint(256, (2, args.length)), memory="q8"))
    optimizer = fusedtrain.optim.AdamW(
        model.parameters(), lr=2e-3, state_dtype="q8", master_weights="split24",
        stochastic_rounding=True, agc=0.05,
    )  # fmt: skip
    losses = []
    with optimizer.release_gradients(model):  # backward updates; no loss scaler with this
        for _ in range(args.steps):
            starts = torch.randint(len(text) - args.length, (8,))
            chunks = torch.stack([text[start : start + args.length + 1] for start in starts])
            logits = model(chunks[:, :-1]).float()
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), chunks[:, 1:].flatten())
            loss.backward()
            optimizer.step()  # ends the step
            losses.append(loss.item())
    count = sum(p.numel() for p in model.parameters())
    states = [value for state in optimizer.state.values() for value in state.values()]
    size = sum(v.numel() * v.element_size() for v in states if isinstance(v, Tensor))
    print(f"optimizer: {size / count:.2f} bytes a parameter beside the weights' 2")
    print(f"loss: {losses[0]:.2f} at first, {losses[-1]:.2f} after {args.steps} steps")
    return 0


if __name__ == "__main__":
    sys.exit(main())
