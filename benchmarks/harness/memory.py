"""Bytes that a call allocates."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as T
from torch import Tensor

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # no line on stderr for each profile


def step_of(model: Any, images: Tensor, labels: Tensor) -> Callable[[], None]:
    """Forward and backward; gradients of the step before are dropped."""

    def step() -> None:
        model.zero_grad()
        T.cross_entropy(model(images), labels).backward()

    return step


def bytes_of_step(model: Any, images: Tensor, labels: Tensor) -> tuple[int, int]:
    """Peak of forward and backward with gradients, and what forward keeps."""
    device = images.device.type

    def forward() -> Tensor:
        return T.cross_entropy(model(images), labels)

    model.zero_grad()
    peak, _ = most_allocated(step_of(model, images, labels), device)
    model.zero_grad()
    _, kept = most_allocated(forward, device)
    return peak, kept


def most_allocated(run: Callable[[], Any], device: str) -> tuple[int, int]:
    """Bytes allocated by a call: at most, and in the end, while its result lives."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = run()
        torch.cuda.synchronize()
        most, end = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
        del result
        return most - before, end - before
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        result = run()
    assert profile.profiler is not None
    events = profile.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    del result
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most, now
