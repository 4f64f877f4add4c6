"""Emulated CUDA kernels of batch norm: one order of threads, a GPU with little shared memory,
misaligned tensors, launches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import cuda_emulator
from helpers.backends import Emulated


class EmulatedOnce(Emulated):
    """In one order of threads: the emulator notices a race by itself."""

    orders = ("shuffled",)

    def __init__(self, whole: bool = True) -> None:
        """``whole``: whether training may be one launch a pass, where channels fit."""
        super().__init__()
        self.whole = whole
        self.emulator.set_device(0 if whole else 1)


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
