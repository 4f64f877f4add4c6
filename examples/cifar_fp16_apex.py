"""The float16 CIFAR recipe of old, by hand: apex.fp16_utils, on fusedtrain.

    python examples/cifar_fp16_apex.py
    python examples/cifar_fp16_apex.py --data cifar10 --epochs 90 --loss-scale 512

A float16 network with float32 batch norms, float32 master copies of its parameters, which the
optimizer updates, a static loss scale, and copies to and fro. Of an Apex script only the imports
change. cifar_fp16.py is the same as one writes it today. Exit status: 2 for unusable options or
data.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

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
from fusedtrain.apex.fp16_utils import (
    master_params_to_model_params,
    model_grads_to_master_grads,
    network_to_half,
    prep_param_lists,
)
from fusedtrain.apex.parallel import DistributedDataParallel as DDP


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = options(
        "cifar_fp16_apex.py", "A float16 network by hand.", batch_size=128, weight_decay=5e-4
    )
    parser.add_argument("--loss-scale", type=positive_float, default=128.0, help="static")
    return parsed(parser, argv)


def run(args: argparse.Namespace, world: World) -> None:
    data = load(args, world)
    model = build(args, data.classes).to(world.device)
    model = network_to_half(model.to(memory_format=memory_format(args)))  # type: ignore[call-overload]
    model_params, master_params = prep_param_lists(model)
    optimizer = torch.optim.SGD(
        master_params, args.lr, momentum=args.momentum, weight_decay=args.weight_decay
    )

    first_epoch, best = 0, 0.0
    if args.resume:
        checkpoint = load_checkpoint(args, world.device)
        first_epoch, best = checkpoint["epoch"], checkpoint["best"]
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        for master, saved in zip(master_params, checkpoint["masters"], strict=True):
            master.data.copy_(saved)
    criterion = nn.CrossEntropyLoss().to(world.device)
    if args.evaluate:
        model.eval()
        validate(model, data, args, world)
        return

    record = Record(args, world)
    record.measure(model, lambda images, y: criterion(model(images).float(), y), data.train)
    net = DDP(model) if world.size > 1 else model
    loader = training_loader(data.train, args.batch_size, args.seed, world, args.workers)
    top1 = best
    for epoch in range(first_epoch, args.epochs):
        data.train.set_epoch(epoch)
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        params = model_params, master_params
        train(loader, net, params, criterion, optimizer, epoch, args, world, record)
        model.eval()
        top1 = validate(model, data, args, world)
        is_best, best = top1 > best, max(top1, best)
        state = {
            "epoch": epoch + 1,
            "arch": args.arch,
            "model": model.state_dict(),
            "masters": [master.detach() for master in master_params],
            "best": best,
            "optimizer": optimizer.state_dict(),
        }
        save_checkpoint(state, is_best, args.output, world.rank)
    record.write(top1, len(data.test))


def train(
    loader: DataLoader[Batch],
    model: nn.Module,
    params: tuple[list[nn.Parameter], list[Tensor]],
    criterion: nn.Module,
    optimizer: torch.optim.Optimizer,
    epoch: int,
    args: argparse.Namespace,
    world: World,
    record: Record,
) -> None:
    model_params, master_params = params
    progress = Progress(epoch, len(loader), args, world)
    model.train()
    for i, (images, target) in enumerate(record.batches(loader)):
        adjust_learning_rate(optimizer, epoch, i, len(loader), args)

        output = model(images).float()
        loss = criterion(output, target)

        model.zero_grad()
        (loss * args.loss_scale).backward()
        model_grads_to_master_grads(model_params, master_params)
        for master in master_params:
            if master.grad is not None:
                master.grad.data.mul_(1.0 / args.loss_scale)
        optimizer.step()
        master_params_to_model_params(model_params, master_params)

        record.loss(loss)
        progress.update(i, loss, output, target)


def main(argv: Sequence[str] | None = None) -> int:
    return launch(run, parse(argv))


if __name__ == "__main__":
    sys.exit(main())
