"""An ImageNet-style training script in the calls of NVIDIA Apex, on fusedtrain.

    python examples/imagenet_apex.py --opt-level O2
    python examples/imagenet_apex.py --data folder:imagenet --image-size 224 -a resnet50 -b 128 \
        --epochs 90 --warmup-epochs 5 --opt-level O1
    torchrun --nproc-per-node 2 examples/imagenet_apex.py --opt-level O2 --sync_bn

Of an Apex script only the imports change. imagenet_amp.py is the same script as one writes it
today. Exit status: 2 for unusable options or data.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
from torch import nn
from torch.utils.data import DataLoader

from _train.loading import training_loader
from _train.modes import Batch, World
from _train.recipe import (
    Progress,
    UsageError,
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
from fusedtrain.apex import amp
from fusedtrain.apex.optimizers import FusedSGD
from fusedtrain.apex.parallel import DistributedDataParallel as DDP, convert_syncbn_model


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = options("imagenet_apex.py", "ImageNet-style training in Apex's calls.")
    parser.add_argument("--opt-level", choices=("O0", "O1", "O2", "O3"), default="O1")
    parser.add_argument("--keep-batchnorm-fp32", choices=("True", "False"), default=None)
    parser.add_argument("--loss-scale", default=None, help="a number, or dynamic")
    parser.add_argument("--sync_bn", action="store_true", help="batch norms over all processes")
    return parsed(parser, argv)


def run(args: argparse.Namespace, world: World) -> None:
    data = load(args, world)
    model = build(args, data.classes)
    if args.sync_bn:
        model = convert_syncbn_model(model)
    model = model.to(world.device).to(memory_format=memory_format(args))  # type: ignore[call-overload]

    args.lr *= args.batch_size * world.size / 256
    optimizer = FusedSGD(
        model.parameters(),
        args.lr,
        momentum=args.momentum,
        weight_decay=args.weight_decay,
        set_grad_none=True,
    )
    try:
        model, optimizer = amp.initialize(
            model,
            optimizer,
            opt_level=args.opt_level,
            keep_batchnorm_fp32=args.keep_batchnorm_fp32,
            loss_scale=args.loss_scale,
        )
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError) as error:
        raise UsageError(str(error)) from error

    first_epoch, best = 0, 0.0
    if args.resume:
        checkpoint = load_checkpoint(args, world.device)
        first_epoch, best = checkpoint["epoch"], checkpoint["best"]
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        amp.load_state_dict(checkpoint["amp"])
    criterion = nn.CrossEntropyLoss().to(world.device)
    if args.evaluate:
        model.eval()
        validate(model, data, args, world)
        return

    record = Record(args, world)
    record.measure(model, lambda images, target: criterion(model(images), target), data.train)
    net = DDP(model) if world.size > 1 else model
    loader = training_loader(data.train, args.batch_size, args.seed, world, args.workers)
    top1 = best
    for epoch in range(first_epoch, args.epochs):
        data.train.set_epoch(epoch)
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        train(loader, net, criterion, optimizer, epoch, args, world, record)
        model.eval()
        top1 = validate(model, data, args, world)
        is_best, best = top1 > best, max(top1, best)
        state = {
            "epoch": epoch + 1,
            "arch": args.arch,
            "model": model.state_dict(),
            "best": best,
            "optimizer": optimizer.state_dict(),
            "amp": amp.state_dict(),
        }
        save_checkpoint(state, is_best, args.output, world.rank)
    record.write(top1, len(data.test))


def train(
    loader: DataLoader[Batch],
    model: nn.Module,
    criterion: nn.Module,
    optimizer: torch.optim.Optimizer,
    epoch: int,
    args: argparse.Namespace,
    world: World,
    record: Record,
) -> None:
    progress = Progress(epoch, len(loader), args, world)
    model.train()
    for i, (images, target) in enumerate(record.batches(loader)):
        adjust_learning_rate(optimizer, epoch, i, len(loader), args)

        output = model(images)
        loss = criterion(output, target)

        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

        record.loss(loss)
        progress.update(i, loss, output, target)


def main(argv: Sequence[str] | None = None) -> int:
    return launch(run, parse(argv))


if __name__ == "__main__":
    sys.exit(main())
