"""Measurements of one script in its own run, for compare_apex.py to read."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from _train.data import Images
from _train.memory import saved_bytes
from _train.modes import Batch, World, finish
from _train.recipe import memory_format


class Record:
    """Losses and seconds of each step, memory and accuracy; without --json it measures nothing."""

    def __init__(self, args: argparse.Namespace, world: World) -> None:
        self.path: Path | None = args.json
        self.format = memory_format(args)
        self.batch_size: int = args.batch_size
        self.world = world
        self.losses: list[Tensor] = []
        self.seconds: list[float] = []
        self.bytes = 0

    def measure(
        self, model: nn.Module, loss_of: Callable[[Tensor, Tensor], Tensor], data: Images
    ) -> None:
        """Before training: what one forward pass keeps for backward."""
        if self.path is None:
            return
        model.train()
        images, target = self._moved(data.__getitems__(range(self.batch_size)))
        self.bytes = saved_bytes(model, lambda: loss_of(images, target), self.world.device)

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Batches on the device; what is done between one and the next is timed."""
        device = self.world.device
        for batch in loader:
            moved = self._moved(batch)
            if self.path is None:
                yield moved
                continue
            # By the second step the optimizer has its state.
            at_peak = device.type == "cuda" and len(self.seconds) == 1
            if at_peak:
                torch.cuda.reset_peak_memory_stats(device)
            finish(device)
            start = time.perf_counter()
            yield moved
            finish(device)
            self.seconds.append(time.perf_counter() - start)
            if at_peak:
                self.bytes = torch.cuda.max_memory_allocated(device)

    def _moved(self, batch: Batch) -> Batch:
        images, target = (t.to(self.world.device, non_blocking=True) for t in batch)
        return images.contiguous(memory_format=self.format), target

    def loss(self, loss: Tensor) -> None:
        """Records the loss of a step; nothing waits for it."""
        if self.path is not None:
            self.losses.append(loss.detach().float())

    def write(self, accuracy: float, test_images: int) -> None:
        """The accuracy at the end, in percent, and all that was measured."""
        if self.path is None or self.world.rank > 0:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        measured = {
            "script": Path(sys.argv[0]).name,
            "processes": self.world.size,
            "losses": [str(x) if x != x else x for x in (loss.item() for loss in self.losses)],
            "seconds": self.seconds,
            "memory_mb": self.bytes / 1e6,
            "accuracy": accuracy / 100,
            "test_images": test_images,
        }
        self.path.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
