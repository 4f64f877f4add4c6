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
import torch.nn.functional as F
from torch import Tensor, nn

from _epochs import UsageError, World, build, fit, launch, load, memory_format, options, parsed
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

    def step(net: nn.Module, images: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        output = net(images)
        loss = F.cross_entropy(output, target)

        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        return output, loss

    fit(args, world, data, model, optimizer, {"amp": amp}, model, step, DDP)


def main(argv: Sequence[str] | None = None) -> int:
    return launch(run, parse(argv))


if __name__ == "__main__":
    sys.exit(main())
