"""cifar_fp16_apex.py as one writes it today: a float16 network, an optimizer with master weights.

    python examples/cifar_fp16.py
    python examples/cifar_fp16.py --data cifar10 --epochs 90

fusedtrain's SGD keeps the float32 weights as a state, and its GradScaler has the check for
infinities, the unscaling, the update and the copy to the model in two sweeps. Exit status: 2 for
unusable options or data.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

import fusedtrain
from _train.loading import training_loader
from _train.modes import Batch, World
from _train.options import positive_float
from _train.recipe import (
    Progress,
    adjust_learning_rate,
    build,
    launch,
    load,
    load_checkpoint,
    memory_format,
    options,
    parsed,
    save_checkpoint,
    validate,
)
from _train.record import Record
from fusedtrain.apex.fp16_utils import convert_network


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = options(
        "cifar_fp16.py", "A float16 network with master weights.", batch_size=128, weight_decay=5e-4
    )
    parser.add_argument("--loss-scale", type=positive_float, default=65536.0, help="the first")
    return parsed(parser, argv)


def run(args: argparse.Namespace, world: World) -> None:
    data = load(args, world)
    model = build(args, data.classes).to(world.device)
    model = convert_network(model.to(memory_format=memory_format(args)), torch.float16)  # type: ignore[call-overload]
    optimizer = fusedtrain.optim.SGD(
        model.parameters(),
        args.lr,
        momentum=args.momentum,
        weight_decay=args.weight_decay,
        master_weights=True,
    )
    scaler = fusedtrain.amp.GradScaler(world.device.type, init_scale=args.loss_scale)

    first_epoch, best = 0, 0.0
    if args.resume:
        checkpoint = load_checkpoint(args, world.device)
        first_epoch, best = checkpoint["epoch"], checkpoint["best"]
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scaler.load_state_dict(checkpoint["scaler"])
    criterion = nn.CrossEntropyLoss().to(world.device)

    def forward(images: Tensor) -> Tensor:
        return model(images.half()).float()

    if args.evaluate:
        model.eval()
        validate(forward, data, args, world)
        return

    record = Record(args, world)
    record.measure(model, lambda images, y: criterion(forward(images), y), data.train)
    net = DDP(model) if world.size > 1 else model
    loader = training_loader(data.train, args.batch_size, args.seed, world, args.workers)
    top1 = best
    for epoch in range(first_epoch, args.epochs):
        data.train.set_epoch(epoch)
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        train(loader, net, criterion, optimizer, scaler, epoch, args, world, record)
        model.eval()
        top1 = validate(forward, data, args, world)
        is_best, best = top1 > best, max(top1, best)
        state = {
            "epoch": epoch + 1,
            "arch": args.arch,
            "model": model.state_dict(),
            "best": best,
            "optimizer": optimizer.state_dict(),
            "scaler": scaler.state_dict(),
        }
        save_checkpoint(state, is_best, args.output, world.rank)
    record.write(top1, len(data.test))


def train(
    loader: DataLoader[Batch],
    model: nn.Module,
    criterion: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: fusedtrain.amp.GradScaler,
    epoch: int,
    args: argparse.Namespace,
    world: World,
    record: Record,
) -> None:
    progress = Progress(epoch, len(loader), args, world)
    model.train()
    for i, (images, target) in enumerate(record.batches(loader)):
        adjust_learning_rate(optimizer, epoch, i, len(loader), args)

        optimizer.zero_grad()
        output = model(images.half()).float()
        loss = criterion(output, target)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

        record.loss(loss)
        progress.update(i, loss, output, target)


def main(argv: Sequence[str] | None = None) -> int:
    return launch(run, parse(argv))


if __name__ == "__main__":
    sys.exit(main())
