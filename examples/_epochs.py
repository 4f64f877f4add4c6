"""Shared by the scripts in Apex's calls and today's: options, processes, epochs, checkpoints."""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from _data import Batch, Data, DataError, first, gather, import_torchvision, load_data, small_resnet

DTYPES = {"off": None, "fp16": torch.float16, "bf16": torch.bfloat16}
SMALL = "cifar_"  # before the name of a torchvision ResNet: the one of `small_resnet`


class UsageError(Exception):
    """Options that cannot be followed; the message names the option."""


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a positive whole number, not {text!r}")
    return int(text)


def positive_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a positive number, not {text!r}")
    return value


def data_name(text: str) -> str:
    if text in ("digits", "cifar10") or text.startswith("folder:"):
        return text
    raise argparse.ArgumentTypeError(f"must be digits, cifar10 or folder:PATH, not {text!r}")


def model_width(text: str) -> int:
    if positive(text) % 8:
        raise argparse.ArgumentTypeError(f"must be a multiple of 8, not {text!r}")
    return int(text)


def options(prog: str, description: str, **defaults: Any) -> argparse.ArgumentParser:
    """The options of these scripts."""
    parser = argparse.ArgumentParser(
        prog, description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=data_name, default="digits", help="digits, cifar10 or folder:PATH")
    add("--data-root", type=Path, default=Path("data"), help="where cifar10 lies or is put")
    add("--workers", "-j", type=int, default=0, help="data loader processes")
    add("--train-images", type=positive, help="use only so many images of the training split")
    add("--test-images", type=positive, help="use only so many images of the test split")
    add("--image-size", type=positive, default=32, help="pixels of digits and picture folders")
    add("--seed", type=int, default=0, help="of weights, order and augmentation")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to train")
    add("--threads", type=positive, help="CPU threads (torch's choice if absent)")
    add("--channels-last", action="store_true", help="NHWC memory format")
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
    add("--warmup-epochs", type=int, default=1, help="of a rate that grows linearly")
    add(
        "--decay-epochs", type=positive, nargs="*", default=[30, 60, 80],
        help="after so many epochs the learning rate falls to a tenth",
    )  # fmt: skip
    add("--print-freq", "-p", type=positive, default=10, help="steps from one line to the next")
    add("--output", type=Path, help="folder for checkpoint.pt and best.pt (none if absent)")
    add("--resume", type=Path, help="continue from this checkpoint")
    add("--evaluate", "-e", action="store_true", help="test the model, and train nothing")
    add("--json", type=Path, help="write losses, seconds, memory and accuracy to this file")
    parser.set_defaults(**defaults)
    return parser


def parsed(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """The options, with the device decided; exits with status 2 where they are unusable."""
    args = parser.parse_args(argv)
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this torch sees no CUDA device; use --device cpu")
    if args.threads:
        torch.set_num_threads(args.threads)
    return args


@dataclass
class World:
    """This process among those that torchrun started; one process alone is a world of size 1."""

    device: torch.device
    rank: int = 0
    size: int = 1

    @classmethod
    def start(cls, device: str) -> World:
        rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        where = torch.device(device)
        if where.type == "cuda":
            where = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
            torch.cuda.set_device(where)
        if size > 1:
            dist.init_process_group("nccl" if where.type == "cuda" else "gloo")
        return cls(where, rank, size)

    def average(self, values: Sequence[float]) -> list[float]:
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        return (tensor / self.size).tolist()

    def finish(self) -> None:
        """Waits for the device, so that what follows or went before can be timed."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def say(self, text: str) -> None:
        """Prints in the first process."""
        if self.rank == 0:
            print(text, flush=True)

    def stop(self) -> None:
        if self.size > 1:
            dist.destroy_process_group()
            # A thread of Gloo (DDP's reducer keeps the group alive) that lets go of the last
            # tensor while Python is already ending aborts the process: pytorch pull 179291.
            time.sleep(0.5)


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
    """The data set, as small as it is asked for; the first process may be downloading it."""
    if world.rank > 0:
        dist.barrier()
    data = load_data(args.data, args.data_root, args.image_size)
    if world.rank == 0 and world.size > 1:
        dist.barrier()
    data = Data(
        first(data.train, args.train_images), first(data.test, args.test_images), data.classes
    )
    needed, there = args.batch_size * world.size, len(data.train)  # type: ignore[arg-type]
    if needed > there:
        raise DataError(
            f"--batch-size {args.batch_size} x {world.size} process(es) needs {needed} training "
            f"images, there are {there}"
        )
    return data


def build(args: argparse.Namespace, classes: int) -> nn.Module:
    """The network of --arch, the same for the same --seed."""
    torch.manual_seed(args.seed)
    if args.arch in (SMALL + "resnet18", SMALL + "resnet50"):
        return small_resnet(args.arch.removeprefix(SMALL), classes, args.width)
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


def autocast(device: torch.device, dtype: torch.dtype | None) -> torch.autocast:
    return torch.autocast(device.type, dtype or torch.bfloat16, enabled=dtype is not None)


def adjust_learning_rate(
    optimizer: torch.optim.Optimizer, epoch: int, step: int, steps: int, args: argparse.Namespace
) -> None:
    """Linear warm-up by iteration, then a tenth after each of --decay-epochs."""
    lr = args.lr * 0.1 ** sum(epoch >= number for number in args.decay_epochs)
    if epoch < args.warmup_epochs:
        lr *= (epoch * steps + step + 1) / (args.warmup_epochs * steps)
    for group in optimizer.param_groups:
        group["lr"] = lr


def accuracy(output: Tensor, target: Tensor, topk: Sequence[int] = (1,)) -> list[float]:
    """Percent of the targets that are among the k largest outputs, for each k."""
    most = min(max(topk), output.size(1))
    hits = output.topk(most, dim=1).indices == target[:, None]
    return [100.0 * hits[:, :k].any(1).float().mean().item() for k in topk]


@torch.no_grad()
def validate(
    forward: Callable[[Tensor], Tensor], data: Data, args: argparse.Namespace, world: World
) -> float:
    """Top-1 accuracy in percent over the test images of all processes; prints it with others."""
    mine = range(world.rank, len(data.test), world.size)  # type: ignore[arg-type]
    sums = [0.0] * 4  # loss, top 1, top 5, images
    for start in range(0, len(mine), args.batch_size):
        images, target = moved(
            gather(data.test, mine[start : start + args.batch_size]), args, world
        )
        output = forward(images).float()
        values = [F.cross_entropy(output, target).item(), *accuracy(output, target, (1, 5)), 1.0]
        sums = [total + value * len(target) for total, value in zip(sums, values, strict=True)]
    sums = world.average(sums)
    loss, top1, top5 = (part / sums[3] for part in sums[:3])
    world.say(f" * Loss {loss:.4f}  Acc@1 {top1:.3f}  Acc@5 {top5:.3f}")
    return top1


def moved(batch: Batch, args: argparse.Namespace, world: World) -> Batch:
    """The batch on the device, in --channels-last's format."""
    images, target = (tensor.to(world.device, non_blocking=True) for tensor in batch)
    return images.contiguous(memory_format=memory_format(args)), target


def saved_bytes(net: nn.Module, loss_of: Callable[[], Tensor], device: torch.device) -> int:
    """Bytes that one forward pass leaves allocated; the buffers of ``net`` stay as they are."""
    buffers = [b.clone() for b in net.buffers()]
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        loss = loss_of()
        kept = torch.cuda.memory_allocated(device) - before
    else:
        gc.collect()  # tensors from before, freed within, make torch write a line to stderr
        with torch.autograd.profiler.profile(profile_memory=True, use_kineto=False) as profile:
            loss = loss_of()
        kept = sum(event.self_cpu_memory_usage for event in profile.function_events or ())
    del loss
    with torch.no_grad():
        for buffer, value in zip(net.buffers(), buffers, strict=True):
            buffer.copy_(value)
    return kept


def training_loader(
    images: Dataset[Batch], args: argparse.Namespace, world: World
) -> DataLoader[Batch]:
    """Whole batches of this process, in an order that the seed and the epoch decide."""
    sampler: DistributedSampler[Batch] = DistributedSampler(
        images, world.size, world.rank, shuffle=True, seed=args.seed, drop_last=True
    )
    return DataLoader(
        images, args.batch_size, sampler=sampler, num_workers=args.workers, drop_last=True,
        pin_memory=world.device.type == "cuda",
    )  # fmt: skip


class Part(Protocol):
    """A part of a checkpoint: a module, an optimizer, a scaler, or `apex.amp` itself."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


def save_checkpoint(state: dict[str, Any], is_best: bool, folder: Path | None, rank: int) -> None:
    """Writes checkpoint.pt, in one go, and best.pt where it is the best so far."""
    if folder is None or rank > 0:
        return
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(state, folder / "checkpoint.tmp")
    os.replace(folder / "checkpoint.tmp", folder / "checkpoint.pt")
    if is_best:
        shutil.copyfile(folder / "checkpoint.pt", folder / "best.pt")


def load_checkpoint(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """The checkpoint that `save_checkpoint` has written, on the device."""
    if not args.resume.is_file():
        raise UsageError(f"--resume {args.resume}: there is no such file")
    state: dict[str, Any] = torch.load(args.resume, map_location=device)
    if state["arch"] != args.arch:
        raise UsageError(f"--resume {args.resume}: it is of --arch {state['arch']}")
    return state


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

    kept, losses, seconds, top1 = 0, [], [], best
    model.train()
    if args.json:
        images, target = moved(gather(data.train, range(args.batch_size)), args, world)
        kept = saved_bytes(model, lambda: F.cross_entropy(forward(images), target), world.device)
    net = parallel(model) if world.size > 1 else model
    loader = training_loader(data.train, args, world)
    for epoch in range(first_epoch, args.epochs):
        torch.manual_seed(args.seed * 100_003 + epoch)  # of augmentation
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        net.train()
        for i, batch in enumerate(loader):
            images, target = moved(batch, args, world)
            adjust_learning_rate(optimizer, epoch, i, len(loader), args)
            world.finish()
            start = time.perf_counter()
            output, loss = step(net, images, target)
            world.finish()
            seconds.append(time.perf_counter() - start)
            losses.append(loss.detach().float())
            if i % args.print_freq == 0 or i + 1 == len(loader):
                values = [loss.item(), *accuracy(output.detach().float(), target, (1, 5))]
                mean, top1, top5 = world.average(values)
                world.say(
                    f"Epoch: [{epoch}][{i + 1}/{len(loader)}]  Time {seconds[-1]:.4f}  "
                    f"Loss {mean:.4f}  Prec@1 {top1:.2f}  Prec@5 {top5:.2f}"
                )
        model.eval()
        top1 = validate(forward, data, args, world)
        is_best, best = top1 > best, max(top1, best)
        state = {name: part.state_dict() for name, part in parts.items()}
        state |= {"epoch": epoch + 1, "arch": args.arch, "best": best}
        save_checkpoint(state, is_best, args.output, world.rank)
    if args.json and world.rank == 0:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        measured = {
            "script": Path(sys.argv[0]).name,
            "processes": world.size,
            "losses": [str(x) if x != x else x for x in (loss.item() for loss in losses)],
            "seconds": seconds,
            "memory_mb": kept / 1e6,
            "accuracy": top1 / 100,
            "test_images": len(data.test),  # type: ignore[arg-type]
        }
        args.json.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
