"""Emulated CUDA kernels of batch norm: one order of threads, misaligned tensors, launches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import cuda_emulator
from helpers.backends import Emulated


class EmulatedOnce(Emulated):
    """In one order of threads: the emulator notices a race by itself."""

    orders = ("shuffled",)


def misaligned(t: Tensor) -> Tensor:
    """A dense tensor one element after the beginning of its memory."""
    memory = torch.empty(t.numel() + 1, dtype=t.dtype)
    return memory.as_strided(t.shape, t.stride(), 1).copy_(t)


def launches(name: str, arguments: tuple[Any, ...]) -> int:
    """How many kernels a call starts."""
    emulator = cuda_emulator.load()
    before = emulator.launches()
    emulator.call(name, *arguments)
    return emulator.launches() - before
