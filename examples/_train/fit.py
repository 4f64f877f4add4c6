"""The epochs of the ImageNet- and CIFAR-style scripts: resume, train, test, keep a checkpoint."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from _train.data import Data
from _train.loading import training_loader
from _train.modes import World
from _train.recipe import (
    Progress,
    adjust_learning_rate,
    load_checkpoint,
    save_checkpoint,
    validate,
)
from _train.record import Record


class Part(Protocol):
    """A part of a checkpoint: a module, an optimizer, a scaler, or `apex.amp` itself."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


def fit(
    args: argparse.Namespace,
    world: World,
    data: Data,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    parts: dict[str, Part],
    forward: Callable[[Tensor], Tensor],
    step: Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, Tensor]],
    parallel: Callable[[nn.Module], nn.Module],
) -> None:
    """Trains from the start or the checkpoint of --resume to --epochs; with --evaluate tests alone.

    Args:
        parts: what a checkpoint holds beside the model and the optimizer.
        forward: images -> the model's output, for tests.
        step: the model, as ``parallel`` has wrapped it, images, target -> output, loss: forward,
            backward and update.
        parallel: wraps the model where there are several processes.
    """
    parts = {"model": model, "optimizer": optimizer, **parts}
    first_epoch, best = 0, 0.0
    if args.resume:
        checkpoint = load_checkpoint(args, world.device)
        first_epoch, best = checkpoint["epoch"], checkpoint["best"]
        for name, part in parts.items():
            part.load_state_dict(checkpoint[name])
    if args.evaluate:
        model.eval()
        validate(forward, data, args, world)
        return

    record = Record(args, world)
    record.measure(model, lambda images, y: F.cross_entropy(forward(images), y), data.train)
    net = parallel(model) if world.size > 1 else model
    loader = training_loader(data.train, args.batch_size, args.seed, world, args.workers)
    top1 = best
    for epoch in range(first_epoch, args.epochs):
        data.train.set_epoch(epoch)
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        progress = Progress(epoch, len(loader), args, world)
        net.train()
        for i, (images, target) in enumerate(record.batches(loader)):
            adjust_learning_rate(optimizer, epoch, i, len(loader), args)
            output, loss = step(net, images, target)
            record.loss(loss)
            progress.update(i, loss, output, target)
        model.eval()
        top1 = validate(forward, data, args, world)
        is_best, best = top1 > best, max(top1, best)
        state = {name: part.state_dict() for name, part in parts.items()}
        state |= {"epoch": epoch + 1, "arch": args.arch, "best": best}
        save_checkpoint(state, is_best, args.output, world.rank)
    record.write(top1, len(data.test))
