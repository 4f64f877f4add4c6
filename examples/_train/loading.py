"""Data sets and loaders for one process among several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler

from _train.data import Data, Images, load_data
from _train.modes import Batch, World


def load_in_turn(name: str, root: Path, seed: int, world: World, image_size: int = 32) -> Data:
    """`load_data`, in the first process before the others: it may be downloading."""
    if world.rank > 0:
        world.wait()
    try:
        return load_data(name, root, seed, image_size)
    finally:
        if world.rank == 0:
            world.wait()


def training_loader(
    images: Images, batch_size: int, seed: int, world: World, workers: int = 0
) -> DataLoader[Batch]:
    """Whole batches of this process, in an order that the seed and the epoch decide."""
    sampler: DistributedSampler[Batch] = DistributedSampler(
        images, world.size, world.rank, shuffle=True, seed=seed, drop_last=True
    )
    return DataLoader(
        images,
        batch_size,
        sampler=sampler,
        num_workers=workers,
        collate_fn=_as_it_is,  # the data set hands out whole batches
        drop_last=True,
        pin_memory=world.device.type == "cuda",
    )


def _as_it_is(batch: Any) -> Any:
    return batch
