"""Shared parts of the ImageNet- and CIFAR-style scripts: options, schedule, meters, checkpoints."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from _train.data import Data, DataError
from _train.loading import load_in_turn
from _train.models import build_model, import_torchvision
from _train.modes import World
from _train.options import common_options, model_width, not_negative, positive, positive_float

SMALL = "cifar_"  # before the name of a torchvision ResNet: the one of _train/models.py


class UsageError(Exception):
    """Options that cannot be followed; the message names the option."""


def options(prog: str, description: str, **defaults: Any) -> argparse.ArgumentParser:
    """The options of these scripts."""
    parser = common_options(prog, description)
    add = parser.add_argument
    add("--image-size", type=positive, default=32, help="pixels of digits and picture folders")
    add(
        "--arch", "-a", default="cifar_resnet18",
        help="a torchvision model; cifar_resnet18 and cifar_resnet50 are for small images",
    )  # fmt: skip
    add("--width", type=model_width, default=64, help="channels of a cifar_ model's stem")
    add("--epochs", type=positive, default=3, help="number of the last epoch")
    add("--batch-size", "-b", type=positive, default=64, help="images per process and step")
    add("--lr", type=positive_float, default=0.1, help="peak learning rate")
    add("--momentum", type=float, default=0.9, help="of SGD")
    add("--weight-decay", "--wd", type=float, default=1e-4, help="of SGD")
    add("--warmup-epochs", type=not_negative, default=1, help="of a rate that grows linearly")
    add(
        "--decay-epochs", type=positive, nargs="*", default=[30, 60, 80],
        help="after so many epochs the learning rate falls to a tenth",
    )  # fmt: skip
    add("--print-freq", "-p", type=positive, default=10, help="steps from one line to the next")
    add(
        "--output", type=Path, help="folder for checkpoint.pt and best.pt (none are kept if absent)"
    )
    add("--resume", type=Path, help="continue from this checkpoint")
    add("--evaluate", "-e", action="store_true", help="test the model, and train nothing")
    add("--train-images", type=positive, help="use only so many images of the training split")
    add("--json", type=Path, help="write losses, seconds, memory and accuracy to this file")
    parser.set_defaults(**defaults)
    return parser


def launch(run: Callable[[argparse.Namespace, World], None], args: argparse.Namespace) -> int:
    """Runs a script's main part in its world; returns the exit status."""
    world = World.start(args.device)
    try:
        run(args, world)
    except (DataError, UsageError) as error:
        print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr)
        return 2
    finally:
        world.stop()
    return 0


def load(args: argparse.Namespace, world: World) -> Data:
    """The data set, as small as it is asked for."""
    data = load_in_turn(args.data, args.data_root, args.seed, world, args.image_size)
    for images, count in ((data.train, args.train_images), (data.test, args.test_images)):
        if count:
            images.keep(count)
    needed = args.batch_size * world.size
    if needed > len(data.train):
        raise DataError(
            f"--batch-size {args.batch_size} x {world.size} process(es) needs {needed} training "
            f"images, there are {len(data.train)}"
        )
    return data


def build(args: argparse.Namespace, classes: int) -> nn.Module:
    """The network of --arch, the same for the same --seed."""
    torch.manual_seed(args.seed)
    if args.arch in (SMALL + "resnet18", SMALL + "resnet50"):
        return build_model(args.arch.removeprefix(SMALL), classes, args.width)
    models = import_torchvision().models
    if args.arch not in models.list_models(module=models):
        raise UsageError(
            f"--arch {args.arch}: neither cifar_resnet18, cifar_resnet50 nor one of torchvision's "
            "classification models (torchvision.models.list_models(module=torchvision.models))"
        )
    model: nn.Module = models.get_model(args.arch, num_classes=classes)
    return model


def memory_format(args: argparse.Namespace) -> torch.memory_format:
    return torch.channels_last if args.channels_last else torch.contiguous_format


def adjust_learning_rate(
    optimizer: torch.optim.Optimizer,
    epoch: int,
    step: int,
    steps: int,
    args: argparse.Namespace,
) -> None:
    """Linear warm-up by iteration, then a tenth after each of --decay-epochs."""
    lr = args.lr * 0.1 ** sum(epoch >= number for number in args.decay_epochs)
    if epoch < args.warmup_epochs:
        lr *= (epoch * steps + step + 1) / (args.warmup_epochs * steps)
    for group in optimizer.param_groups:
        group["lr"] = lr


class AverageMeter:
    """The last value and the mean of a quantity."""

    def __init__(self) -> None:
        self.val = self.sum = 0.0
        self.count = 0

    @property
    def avg(self) -> float:
        return self.sum / max(self.count, 1)

    def update(self, value: float, count: int = 1) -> None:
        self.val = value
        self.sum += value * count
        self.count += count


def accuracy(output: Tensor, target: Tensor, topk: Sequence[int] = (1,)) -> list[float]:
    """Percent of the targets that are among the k largest outputs, for each k."""
    most = min(max(topk), output.size(1))
    hits = output.topk(most, dim=1).indices == target[:, None]
    return [100.0 * hits[:, :k].any(1).float().mean().item() for k in topk]


class Progress:
    """Time, loss and accuracies of an epoch, in a line every --print-freq steps."""

    def __init__(self, epoch: int, steps: int, args: argparse.Namespace, world: World) -> None:
        self.epoch, self.steps, self.every, self.world = epoch, steps, args.print_freq, world
        self.meters = {name: AverageMeter() for name in ("Time", "Loss", "Prec@1", "Prec@5")}
        self.done, self.since = 0, time.perf_counter()

    def update(self, step: int, loss: Tensor, output: Tensor, target: Tensor) -> None:
        """After a step. Reading the loss waits for the device: not at every step."""
        if step % self.every and step + 1 < self.steps:
            return
        values = [loss.item(), *accuracy(output.float(), target, (1, 5))]
        values = self.world.average(values)
        now, steps = time.perf_counter(), step + 1 - self.done
        self.meters["Time"].update((now - self.since) / steps, steps)
        for name, value in zip(("Loss", "Prec@1", "Prec@5"), values, strict=True):
            self.meters[name].update(value, len(target))
        self.done, self.since = step + 1, now
        parts = (f"{name} {m.val:.4f} ({m.avg:.4f})" for name, m in self.meters.items())
        say(self.world, f"Epoch: [{self.epoch}][{step + 1}/{self.steps}]  {'  '.join(parts)}")


@torch.no_grad()
def validate(
    forward: Callable[[Tensor], Tensor], data: Data, args: argparse.Namespace, world: World
) -> float:
    """Top-1 accuracy in percent over the test images of all processes; prints it with others."""
    mine = range(world.rank, len(data.test), world.size)
    meters = AverageMeter(), AverageMeter(), AverageMeter()
    for start in range(0, len(mine), args.batch_size):
        images, target = data.test.__getitems__(mine[start : start + args.batch_size])
        target = target.to(world.device)
        images = images.to(world.device, memory_format=memory_format(args))
        output = forward(images).float()
        values = [F.cross_entropy(output, target).item(), *accuracy(output, target, (1, 5))]
        for meter, value in zip(meters, values, strict=True):
            meter.update(value, len(target))
    sums = world.average([*(meter.sum for meter in meters), float(meters[0].count)])
    loss, top1, top5 = (part / sums[3] for part in sums[:3])
    say(world, f" * Loss {loss:.4f}  Acc@1 {top1:.3f}  Acc@5 {top5:.3f}")
    return top1


def say(world: World, text: str) -> None:
    """Prints in the first process."""
    if world.rank == 0:
        print(text, flush=True)


def save_checkpoint(state: dict[str, Any], is_best: bool, folder: Path | None, rank: int) -> None:
    """Writes checkpoint.pt, in one go, and best.pt where it is the best so far."""
    if folder is None or rank > 0:
        return
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "checkpoint.pt"
    torch.save(state, folder / "checkpoint.tmp")
    os.replace(folder / "checkpoint.tmp", path)
    if is_best:
        shutil.copyfile(path, folder / "best.pt")


def load_checkpoint(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """The checkpoint that `save_checkpoint` has written, on the device."""
    if not args.resume.is_file():
        raise UsageError(f"--resume {args.resume}: there is no such file")
    state: dict[str, Any] = torch.load(args.resume, map_location=device)
    if state["arch"] != args.arch:
        raise UsageError(f"--resume {args.resume}: it is of --arch {state['arch']}")
    return state
