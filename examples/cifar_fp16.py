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
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import fusedtrain
from _epochs import World, build, fit, launch, load, memory_format, options, parsed, positive_float
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

    def forward(images: Tensor) -> Tensor:
        return model(images.half()).float()

    def step(net: nn.Module, images: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        optimizer.zero_grad()
        output = net(images.half()).float()
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
