"""A diffusion U-Net: group norms, the time added to each block, attention at the lowest level,
averages of the weights, bfloat16."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import fusedtrain

from .harness import Part, Run, images

T = 100  # steps of the noise


def time_embedding(t: Tensor, channels: int) -> Tensor:
    rates = torch.exp(torch.arange(channels // 2) * (-math.log(1e4) / (channels // 2)))
    angles = t[:, None] * rates.to(torch.get_default_dtype())
    return torch.cat([angles.sin(), angles.cos()], 1)


class ResBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, time: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, inputs), nn.GroupNorm(4, outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.emb = nn.Linear(time, outputs)
        self.dropout = nn.Dropout(0.1)
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.emb(F.silu(emb))[:, :, None, None]
        h = self.conv2(self.dropout(F.silu(self.norm2(h))))
        return self.skip(x) + h


class AttentionBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, channels)
        self.qkv = nn.Conv1d(channels, 3 * channels, 1)
        self.proj = nn.Conv1d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        b, c, height, width = x.shape
        flat = self.qkv(self.norm(x).reshape(b, c, -1)).transpose(1, 2)
        q, k, v = flat.unsqueeze(1).chunk(3, dim=-1)
        h = F.scaled_dot_product_attention(q, k, v).squeeze(1).transpose(1, 2)
        return x + self.proj(h).reshape(b, c, height, width)


class UNet(nn.Module):
    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.channels, time = channels, 4 * channels
        self.time = nn.Sequential(nn.Linear(channels, time), nn.SiLU(), nn.Linear(time, time))
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.down = ResBlock(channels, channels, time)
        self.pool = nn.Conv2d(channels, channels, 3, stride=2, padding=1)
        self.middle = ResBlock(channels, 2 * channels, time)
        self.attention = AttentionBlock(2 * channels)
        self.up = ResBlock(3 * channels, channels, time)
        self.norm, self.last = nn.GroupNorm(4, channels), nn.Conv2d(channels, 3, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        emb = self.time(time_embedding(t, self.channels))
        skip = self.down(self.first(x), emb)
        h = self.attention(self.middle(self.pool(skip), emb))
        h = torch.cat([F.interpolate(h, scale_factor=2.0), skip], 1)
        return self.last(F.silu(self.norm(self.up(h, emb))))


def main(fused: str = "") -> Run:
    torch.manual_seed(1)
    model, report = UNet(), None
    dataset = images(16, 16)
    example = {"x": dataset.tensors[0][:4], "t": torch.arange(4) * 20}
    if fused:
        report = fusedtrain.convert(model, example, memory=fused)
        options = {"max_grad_norm": 1.0, "ema_decay": 0.9}
        optimizer = fusedtrain.optim.AdamW(model.parameters(), lr=1e-3, **options)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ema = {name: p.detach().clone() for name, p in model.named_parameters()}
    alphas = torch.cumprod(1 - torch.linspace(1e-4, 0.02, T), 0)
    loader = DataLoader(dataset, batch_size=4, shuffle=True)

    def train() -> list[float]:
        model.train()
        losses = []
        for x0, _ in loader:
            t, noise = torch.randint(T, (len(x0),)), torch.randn_like(x0)
            alpha = alphas[t][:, None, None, None]
            noisy = alpha.sqrt() * x0 + (1 - alpha).sqrt() * noise
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.mse_loss(model(noisy, t), noise)
            optimizer.zero_grad()
            loss.backward()
            if not fused:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if not fused:
                for name, p in model.named_parameters():
                    ema[name].lerp_(p.detach(), 1 - 0.9)
            losses.append(loss.item())
        return losses

    losses = train()
    if fused:
        averages = dict(optimizer.averaged_parameters())
        ema = {name: averages[parameter] for name, parameter in model.named_parameters()}
    return Run({"unet": Part(model, optimizer, example, report)}, losses, train, ema)
