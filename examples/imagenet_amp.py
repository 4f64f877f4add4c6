"""imagenet_apex.py as one writes it today: torch.autocast, and fusedtrain's GradScaler and SGD.

    python examples/imagenet_amp.py
    python examples/imagenet_amp.py --data folder:imagenet --image-size 224 -a resnet50 -b 128 \
        --epochs 90 --warmup-epochs 5 --amp fp16
    torchrun --nproc-per-node 2 examples/imagenet_amp.py --sync_bn

Exit status: 2 for unusable options or data.
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
from _train.modes import Batch, World, autocast
from _train.options import DTYPES
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


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = options("imagenet_amp.py", "ImageNet-style training in mixed precision.")
    parser.add_argument(
        "--amp",
        choices=("auto", *DTYPES),
        default="auto",
        help="auto: fp16 with GradScaler on CUDA, bf16 on the CPU",
    )
    parser.add_argument("--sync_bn", action="store_true", help="batch norms over all processes")
    args = parsed(parser, argv)
    if args.amp == "auto":
        args.amp = "fp16" if args.device == "cuda" else "bf16"
    return args


def run(args: argparse.Namespace, world: World) -> None:
    data = load(args, world)
    model = build(args, data.classes)
    if args.sync_bn:
        model = fusedtrain.nn.convert_sync_batchnorm(model)
    model = model.to(world.device).to(memory_format=memory_format(args))  # type: ignore[call-overload]

    args.lr *= args.batch_size * world.size / 256
    optimizer = fusedtrain.optim.SGD(
        model.parameters(), args.lr, momentum=args.momentum, weight_decay=args.weight_decay
    )
    scaler = fusedtrain.amp.GradScaler(world.device.type, enabled=args.amp == "fp16")

    first_epoch, best = 0, 0.0
    if args.resume:
        checkpoint = load_checkpoint(args, world.device)
        first_epoch, best = checkpoint["epoch"], checkpoint["best"]
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scaler.load_state_dict(checkpoint["scaler"])
    criterion = nn.CrossEntropyLoss().to(world.device)

    def forward(images: Tensor) -> Tensor:
        with autocast(world.device, DTYPES[args.amp]):
            return model(images)

    if args.evaluate:
        model.eval()
        validate(forward, data, args, world)
        return

    record = Record(args, world)
    record.measure(model, lambda images, target: criterion(forward(images), target), data.train)
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
        with autocast(world.device, DTYPES[args.amp]):
            output = model(images)
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
