"""Whether a process grows: its resident memory, and the tensors that Python can reach."""

from __future__ import annotations

import gc
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

Sample = tuple[int, int, int]  # step, resident bytes, live tensors
# Largest differences allowed between the medians of a run's second and last quarter. A tensor
# leaked at each step shows in the count, a graph of a step (100 KB and more) in the bytes.
TENSORS = 16
BYTES = 4 << 20  # ten minutes have shown 0.1 MiB
LEAST = 12  # samples


def sample(step: int) -> Sample:
    """Sample of this process, after a collection. Linux."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    # The type, not isinstance: lazy modules run code when asked for their class.
    tensors = sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())
    return step, pages * os.sysconf("SC_PAGE_SIZE"), tensors


@dataclass(frozen=True)
class Growth:
    """From the second quarter of a run to its last one; the first quarter warms up."""

    steps: int  # from the middle of one to that of the other
    bytes: int
    tensors: int
    resident: int  # bytes in the last quarter

    @property
    def too_much(self) -> bool:
        return self.bytes > BYTES or self.tensors > TENSORS

    def __str__(self) -> str:
        return (
            f"{self.bytes / 2**20:+.1f} MiB of {self.resident / 2**20:.0f} (at most "
            f"{BYTES / 2**20:.0f} allowed) and {self.tensors:+d} tensors (at most {TENSORS}) over "
            f"{self.steps:,} steps"
        )


def growth(samples: Sequence[Sample]) -> Growth | None:
    """None where there are too few samples to tell."""
    if len(samples) < LEAST:
        return None
    quarter = len(samples) // 4
    early, late = samples[quarter : 2 * quarter], samples[-quarter:]
    a, b = ([int(statistics.median(column)) for column in zip(*part)] for part in (early, late))
    return Growth(b[0] - a[0], b[1] - a[1], b[2] - a[2], resident=b[1])
