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
import torch.nn.functional as F
from torch import Tensor, nn

from _epochs import World, build, fit, launch, load, memory_format, options, parsed, positive_float
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

    masters = nn.ParameterList(master_params)

    def forward(images: Tensor) -> Tensor:
        return model(images).float()

    def step(net: nn.Module, images: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        output = net(images).float()
        loss = F.cross_entropy(output, target)

        net.zero_grad()
        (loss * args.loss_scale).backward()
        model_grads_to_master_grads(model_params, master_params)
        for master in master_params:
            if master.grad is not None:
                master.grad.data.mul_(1.0 / args.loss_scale)
        optimizer.step()
        master_params_to_model_params(model_params, master_params)
        return output, loss

    fit(args, world, data, model, optimizer, {"masters": masters}, forward, step, DDP)


def main(argv: Sequence[str] | None = None) -> int:
    return launch(run, parse(argv))


if __name__ == "__main__":
    sys.exit(main())
