"""Train on real images with stock PyTorch and with fusedtrain, and compare the two.

    python examples/train.py                                  # digits, needs no network
    python examples/train.py --data fashion-mnist --steps 200 --output runs/fashion
    python examples/train.py --model resnet18 --optimizer sgd --clip off --ema off
    python examples/train.py --optimizer-state q8 --amp bf16 --masters split24
    python examples/train.py --frozen-norms
    python examples/train.py --memory store recompute
    python examples/train.py --memory inplace --model darknet19 --optimizer sgd --lr 0.01
    torchrun --nproc-per-node 2 examples/train.py

Modes: fp32 eager; AMP eager; AMP with fusedtrain's layers, optimizer and GradScaler; the same with
outputs computed again in backward. They take turns, one step each on the same batch, so that a slow
moment of the machine hits all of them. The first lines say what
will happen, the last three what was won.
--frozen-norms then takes the weights that fp32 eager has reached and fine-tunes them with frozen
batch norms, in eager torch and with fusedtrain.fold_frozen_norms. --memory then trains in float32
from the first weights: eager, with each way to keep what backward needs, and with
torch.utils.checkpoint.
Exit status: 0 if the fused run follows the eager one, 1 if it does not, 2 for unusable arguments
or data.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from rich.progress import Progress
from torch import Tensor
from torch.utils.data import DataLoader

from _train.checks import (
    Check,
    check_rounding,
    compare_bits,
    compare_gradients,
    compare_rounded_gradients,
    compare_runs,
    compare_updates,
)
from _train.data import Data, DataError
from _train.loading import load_in_turn, training_loader
from _train.models import build_model
from _train.modes import (
    PROBE_SCALE,
    Batch,
    Mode,
    World,
    build_memory_modes,
    build_modes,
    build_tuning_modes,
    correct_answers,
    gradients,
    measure_saved_bytes,
    step,
    step_with_peak,
)
from _train.optimizers import Settings, Stepper, updates
from _train.options import DTYPES, parse
from _train.report import Report, progress_bar
from _train.words import how_long, what_will_happen

# Left out of the timing: allocator, oneDNN and cuDNN caches fill up, torch.compile compiles.
WARM_UP = 3
TUNING_LR = 0.1  # of the peak of training, for fine-tuning


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    torch.backends.cudnn.benchmark = args.cudnn_benchmark
    torch.backends.cudnn.deterministic = not args.cudnn_benchmark
    world = World.start(args.device)
    try:
        data = _load(args, world)
        report = run(args, data, world)
    except DataError as error:
        print(f"train.py: error: {error}", file=sys.stderr)
        return 2
    finally:
        world.stop()
    if world.rank == 0:
        report.show()
        report.write(args.output)
        report.show_result()
    return 0 if report.passed else 1


def _load(args: argparse.Namespace, world: World) -> Data:
    data = load_in_turn(args.data, args.data_root, args.seed, world)
    if args.test_images:
        data.test.keep(args.test_images)
    needed = args.batch_size * args.accumulate * world.size
    if needed > len(data.train):
        raise DataError(
            f"--batch-size {args.batch_size} x --accumulate {args.accumulate} x {world.size} "
            f"process(es) needs {needed} training images, {args.data} has {len(data.train)}"
        )
    return data


def run(args: argparse.Namespace, data: Data, world: World) -> Report:
    torch.manual_seed(args.seed)
    base = build_model(args.model, data.classes, args.width)
    settings = Settings(args.optimizer, args.clip, args.ema, args.optimizer_state, args.masters)
    in_float32 = replace(settings, masters="none")
    modes = build_modes(
        base,
        DTYPES[args.amp],
        world,
        compiled=args.compile,
        channels_last=args.channels_last,
        settings=settings,
    )
    loader = training_loader(data.train, args.batch_size, args.seed, world, args.workers)
    steps = args.epochs * (len(loader) // args.accumulate)
    steps = min(steps, args.steps or steps)
    report = Report(args, modes, world.size, WARM_UP)
    if world.rank == 0:
        print(what_will_happen(args.model, args.data, steps, [mode.name for mode in modes]))
    with progress_bar(visible=world.rank == 0 and not args.no_progress) as progress:
        report.checks += _train(args, modes, steps, args.lr, loader, data, world, progress)
        if args.frozen_norms:
            tuned = build_tuning_modes(
                modes[0].net, world, compiled=args.compile, settings=in_float32
            )
            lr = args.lr * TUNING_LR
            report.checks += _train(args, tuned, steps, lr, loader, data, world, progress)
            modes += tuned  # the report's, too
        if args.memory:
            kept = build_memory_modes(
                base,
                args.memory,
                world,
                compiled=args.compile,
                channels_last=args.channels_last,
                settings=in_float32,
            )
            report.checks += _train(args, kept, steps, args.lr, loader, data, world, progress)
            report.checks += compare_bits(kept)
            modes += kept
    return report


def _train(
    args: argparse.Namespace,
    modes: list[Mode],
    steps: int,
    lr: float,
    loader: DataLoader[Batch],
    data: Data,
    world: World,
    progress: Progress,
) -> list[Check]:
    """Trains and tests modes that start from equal weights, in turns; what was found wrong."""
    checks = _probe(args, modes, data, world)
    task = progress.add_task("training", total=steps, note="")
    for number, batches in zip(range(steps), _batches(args, loader, data, world), strict=False):
        start = time.perf_counter()
        losses = world.average(_turns(modes, batches, number, lr, steps))
        if number == 1 and world.rank == 0:  # the first step fills caches
            seconds = time.perf_counter() - start
            progress.console.print(how_long(seconds, steps - 2), highlight=False)
        for mode, loss in zip(modes, losses, strict=True):
            mode.losses.append(loss)
        note = "loss " + " | ".join(f"{loss:.3f}" for loss in losses)
        progress.update(task, advance=1, note=note)
        if not all(math.isfinite(loss) for loss in losses):
            break
    task = progress.add_task("testing", total=len(modes), note=f"{len(data.test)} images")
    for mode in modes:
        mode.accuracy = _accuracy(mode, data, world, args.batch_size)
        progress.update(task, advance=1)
    return checks + compare_runs(modes, len(data.test), args.tolerance)


def _to_device(args: argparse.Namespace, batch: Batch, world: World) -> Batch:
    images, labels = (tensor.to(world.device, non_blocking=True) for tensor in batch)
    if args.channels_last:
        images = images.contiguous(memory_format=torch.channels_last)
    return images, labels


def _batches(
    args: argparse.Namespace, loader: DataLoader[Batch], data: Data, world: World
) -> Iterator[list[Batch]]:
    """The micro-batches of each optimizer step, on the device."""
    for epoch in range(args.epochs):
        data.train.set_epoch(epoch)
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        gathered: list[Batch] = []
        for batch in loader:
            gathered.append(_to_device(args, batch, world))
            if len(gathered) == args.accumulate:
                yield gathered
                gathered = []


def _turns(
    modes: Sequence[Mode], batches: Sequence[Batch], number: int, peak_lr: float, steps: int
) -> list[float]:
    """One step of every mode; who goes first changes, as the first meets cold caches."""
    losses = {}
    for turn in range(len(modes)):
        mode = modes[(number + turn) % len(modes)]
        on_cuda = batches[0][0].is_cuda
        # By the second step the optimizer has its state.
        take = step_with_peak if on_cuda and number == min(1, steps - 1) else step
        losses[mode.name] = take(mode, batches, learning_rate(number, steps, peak_lr))
    return [losses[mode.name] for mode in modes]


def learning_rate(number: int, steps: int, peak: float) -> float:
    """Linear warm-up over a fifth of the steps, then half a cosine down to nearly zero."""
    warm = max(1, steps // 5)
    if number < warm:
        return peak * (number + 1) / warm
    return peak * 0.5 * (1 + math.cos(math.pi * (number + 1 - warm) / (steps + 1 - warm)))


def _probe(
    args: argparse.Namespace, modes: Sequence[Mode], data: Data, world: World
) -> list[Check]:
    """Before training: what each mode saves for backward, whether gradients and updates agree."""
    batch = _to_device(args, data.train.__getitems__(range(args.batch_size)), world)
    by_name = {mode.name: mode for mode in modes}
    checks = []
    for mode in modes:
        measure_saved_bytes(mode, batch)
        if not mode.fused or mode.reference is None:
            continue
        eager = by_name[mode.reference]
        exact = gradients(eager, batch, None)
        of_mode = [compare_gradients(gradients(mode, batch, None), exact)]
        if mode.dtype is not None:
            ours, theirs = (gradients(m, batch, mode.dtype) for m in (mode, eager))
            of_mode.append(compare_rounded_gradients(ours, theirs, exact))
        of_mode += _probe_updates(args, mode, list(exact.values()))
        checks += [replace(check, mode=mode.name) for check in of_mode]
    return checks


def _probe_updates(args: argparse.Namespace, mode: Mode, grads: list[Tensor]) -> list[Check]:
    """Three optimizer steps from equal weights on equal gradients, stock and fused."""
    weights = list(mode.net.parameters())
    settings = mode.stepper.settings

    def make(params: list[Tensor], fused: bool) -> Stepper:
        return Stepper(
            params,
            settings,
            fused=fused,
            device=params[0].device,
            scaled=mode.dtype is torch.float16,
            scale=PROBE_SCALE,
        )

    ours, theirs = (updates(make, fused, weights, grads, args.lr) for fused in (True, False))
    checks = [compare_updates("change of weights", ours.weights, theirs.weights, weights, settings)]
    if theirs.averages:
        what = "change of averages"
        checks.append(compare_updates(what, ours.averages, theirs.averages, weights, settings))
    dtypes = {w.dtype for w in weights} - {torch.float32}
    return checks + [check_rounding(ours.rounding, dtype) for dtype in dtypes]


def _accuracy(mode: Mode, data: Data, world: World, batch_size: int) -> float:
    mine = range(world.rank, len(data.test), world.size)
    correct = correct_answers(mode, data.test, mine, batch_size)
    return world.average([float(correct)])[0] * world.size / len(data.test)


if __name__ == "__main__":
    sys.exit(main())
