"""A GPT in one file: tied weights, GELU as a formula, parameter groups by dimension, accumulated
gradients, a loss scaler, a learning rate that is set by hand."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fusedtrain

from .harness import Part, Run, tokens


@dataclass
class GPTConfig:
    block_size: int = 12
    vocab_size: int = 40
    n_layer: int = 2
    n_head: int = 2
    n_embd: int = 16
    dropout: float = 0.1
    bias: bool = False


def new_gelu(x: Tensor) -> Tensor:
    return (
        0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))
    )


class LayerNorm(nn.Module):
    """Its bias is optional."""

    def __init__(self, ndim: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(ndim))
        self.bias = nn.Parameter(torch.zeros(ndim)) if bias else None

    def forward(self, input: Tensor) -> Tensor:
        return F.layer_norm(input, self.weight.shape, self.weight, self.bias, 1e-5)


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.n_head, self.n_embd, self.dropout = config.n_head, config.n_embd, config.dropout

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        dropout = self.dropout if self.training else 0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.c_fc(x)
        x = new_gelu(x)
        x = self.c_proj(x)
        x = self.dropout(x)
        return x


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        x = x + self.mlp(self.ln_2(x))
        return x


class GPT(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.n_embd),
                "wpe": nn.Embedding(config.block_size, config.n_embd),
                "drop": nn.Dropout(config.dropout),
                "h": nn.ModuleList([Block(config) for _ in range(config.n_layer)]),
                "ln_f": LayerNorm(config.n_embd, bias=config.bias),
            }
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            torch.nn.init.normal_(module.weight, mean=0.0, std=0.2)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        _, t = idx.size()
        assert t <= self.config.block_size, f"a sequence of length {t} is too long"
        pos = torch.arange(0, t, dtype=torch.long, device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        logits = self.lm_head(x)
        if targets is None:
            return logits[:, [-1], :], None
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))

    def configure_optimizers(self, fused: str, weight_decay: float, lr: float) -> Any:
        params = {n: p for n, p in self.named_parameters() if p.requires_grad}
        groups = [
            {"params": [p for p in params.values() if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in params.values() if p.dim() < 2], "weight_decay": 0.0},
        ]
        AdamW = fusedtrain.optim.AdamW if fused else torch.optim.AdamW
        fused_available = "fused" in inspect.signature(AdamW).parameters
        extra: dict[str, Any] = {"fused": True} if fused_available else {}
        if fused:
            extra["max_grad_norm"] = 1.0
        return AdamW(groups, lr=lr, betas=(0.9, 0.95), **extra)


def get_lr(it: int, learning_rate: float = 1e-2, warmup: int = 2, decay: int = 8) -> float:
    if it < warmup:
        return learning_rate * (it + 1) / (warmup + 1)
    ratio = min(1.0, (it - warmup) / (decay - warmup))
    return 1e-3 + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - 1e-3)


def main(fused: str = "", compiled: bool = False) -> Run:
    torch.manual_seed(1337)
    config = GPTConfig()
    data = tokens(32, config.block_size + 1, config.vocab_size)
    model, report = GPT(config), None
    if fused:
        rows = torch.randint(config.vocab_size, (2, 4, config.block_size))
        report = fusedtrain.convert(model, (rows[0], rows[1]), memory=fused)
    Scaler = fusedtrain.amp.GradScaler if fused else torch.amp.GradScaler
    scaler = Scaler("cpu", init_scale=256.0)
    optimizer = model.configure_optimizers(fused, weight_decay=0.1, lr=1e-2)
    raw = model
    if compiled:
        model = torch.compile(model, backend="aot_eager")
    accumulation = 2

    def train(first: int = 0) -> list[float]:
        model.train()
        losses = []
        for it in range(first, first + 4):
            for param_group in optimizer.param_groups:
                param_group["lr"] = get_lr(it)
            for micro in range(accumulation):
                rows = data[(2 * it + micro) % 8 * 4 :][:4]
                x, y = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
                with torch.autocast("cpu", torch.bfloat16):
                    _, loss = model(x, y)
                    loss = loss / accumulation
                scaler.scale(loss).backward()
            if not fused:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.item() * accumulation)
        return losses

    torch.manual_seed(7)
    losses = train()
    example = {"idx": data[:4, :-1].contiguous(), "targets": data[:4, 1:].contiguous()}
    part = Part(raw, optimizer, example, report)
    return Run({"gpt": part}, losses, lambda: train(4))
