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

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import fusedtrain
from _epochs import (
    DTYPES,
    World,
    autocast,
    build,
    fit,
    launch,
    load,
    memory_format,
    options,
    parsed,
)


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

    def forward(images: Tensor) -> Tensor:
        with autocast(world.device, DTYPES[args.amp]):
            return model(images)

    def step(net: nn.Module, images: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        optimizer.zero_grad()
        with autocast(world.device, DTYPES[args.amp]):
            output = net(images)
            loss = F.cross_entropy(output, target)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return output, loss

    fit(args, world, data, model, optimizer, {"scaler": scaler}, forward, step, DDP)


def main(argv: Sequence[str] | None = None) -> int:
    return launch(run, parse(argv))


if __name__ == "__main__":
    sys.exit(main())
