"""A whole AMP step, as a CUDA graph captures it, for a GPU and for its rehearsal on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import fusedtrain
from helpers.optimizers import make

RATES = (1e-2, 3e-3, 0.0, 2e-2, 1e-2)  # of the steps after the first three
OVERFLOWS = 3  # this one of these steps is skipped
Step = Callable[[], None]


def network(convert: bool, device: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.SiLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(),
        nn.Linear(64, 10),
    )  # fmt: skip
    if convert:
        report = fusedtrain.convert(model, lambda: torch.randn(8, 3, 10, 10))
        assert len(report.norms) == 2
    return model.to(device)


@contextmanager
def warm_up(device: str) -> Iterator[None]:
    """On a GPU a stream of its own, as torch asks of steps before a capture."""
    if device != "cuda":
        yield
        return
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        yield
    torch.cuda.current_stream().wait_stream(side)


def train(
    name: str, device: str, replayed: Callable[[Step], Step], convert: bool = True
) -> dict[str, Tensor]:
    """Three steps, then a step for each of RATES, one of which overflows; what they leave.

    Args:
        name: of the optimizer.
        device: of the model.
        replayed: captures the step and returns what replays it; it makes no step itself.
        convert: whether the model has fused layers.
    """
    model = network(convert, device)
    lr = torch.tensor(1e-2, device=device)
    options: dict[str, Any] = {"max_grad_norm": 1.0, "ema_decay": 0.9}
    optimizer = make(name, model.parameters(), lr=lr, **options)
    scaler = fusedtrain.amp.GradScaler(device, init_scale=256.0, growth_interval=2)
    dtype = torch.float16 if device == "cuda" else torch.bfloat16
    generator = torch.Generator().manual_seed(1)
    batches = torch.randn(3 + len(RATES), 8, 3, 10, 10, generator=generator).to(device)
    x, labels = batches[0].clone(), (torch.arange(8) % 10).to(device)
    loss = torch.zeros((), device=device)

    def step() -> None:
        fusedtrain.zero_grad(optimizer, set_to_none=False)
        with torch.autocast(device, dtype):
            value = nn.functional.cross_entropy(model(x).float(), labels)
        scaler.scale(value).backward()
        scaler.step(optimizer)
        scaler.update()
        loss.copy_(value.detach())

    with warm_up(device):
        for batch in batches[:3]:
            x.copy_(batch)
            step()
    again = replayed(step)
    losses, scales = [], []
    for number, (rate, batch) in enumerate(zip(RATES, batches[3:], strict=True)):
        lr.fill_(rate)
        x.copy_(batch)
        if number == OVERFLOWS:
            x.fill_(float("inf"))
            statistics = {n: b.clone() for n, b in model.named_buffers()}
        again()
        if number == OVERFLOWS:
            assert bool(optimizer.last_step_skipped)
            for n, b in model.named_buffers():  # an inf has moved them
                b.copy_(statistics[n])
        losses.append(loss.clone())
        scales.append(torch.tensor(scaler.get_scale()))
    assert int(optimizer.skipped_steps) == 1
    assert int(optimizer.applied_steps) == 3 + len(RATES) - 1
    averages = (value for _, value in optimizer.averaged_parameters())
    return {
        **{n: p.detach().cpu() for n, p in model.named_parameters()},
        **{f"average {n}": value.cpu() for n, value in enumerate(averages)},
        **{n: b.cpu() for n, b in model.named_buffers()},
        "losses": torch.stack(losses).cpu(), "scales": torch.stack(scales),
    }  # fmt: skip
