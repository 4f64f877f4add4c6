"""Train with stock PyTorch and with fusedtrain, side by side: what is won, and do the losses agree?

    python examples/train.py                    # digits of scikit-learn: needs no network
    python examples/train.py --dtype float32 --steps 200 --batch-size 64

Three modes train an EfficientNet-B0 of half width with AdamW, clipping and mixed precision: stock;
fusedtrain; fusedtrain with memory="recompute", which computes cheap outputs again in backward. They
start from equal weights and take turns, one step each on the same batch. A fourth run is the
control: stock, but one layer's weights start off by one unit in the last place. Training amplifies
any rounding; the control says how far. `make_mode` and `Mode.step` are for you to copy.

Exit status: 0 if fusedtrain trains as stock does, 1 if not, 2 for unusable arguments or data.
"""

from __future__ import annotations

import argparse
import copy
import gc
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedtrain

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler, which counts bytes, is silent
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
MAX_NORM = 1.0  # of all gradients
WINDOW = 10  # steps whose mean losses are compared
# Rounding changes a gradient by 0.00002 to 0.005 of its norm, a layer that is 5 % off by 0.05.
# Equal gradients move weights equally, but for float32's last bits. Losses: beside the control's.
GRADIENT_LIMIT, UPDATE_LIMIT, LOSS_LIMIT = 0.04, 0.001, 0.1
Batch = tuple[Tensor, Tensor]
Tensors = Sequence[Tensor]


@dataclass(eq=False)
class Mode:
    """One way to train: a model, its optimizer, and the losses and seconds of its steps."""

    name: str
    model: nn.Module
    make_optimizer: Callable[..., torch.optim.Optimizer]
    scaler: Any  # torch's or fusedtrain's GradScaler; does nothing unless the dtype is float16
    dtype: torch.dtype
    clips: bool  # whether the optimizer clips in its own step
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.optimizer = self.make_optimizer(self.model.parameters())

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(images.device.type, self.dtype, self.dtype is not torch.float32):
            return F.cross_entropy(self.model(images), labels)

    def step(self, images: Tensor, labels: Tensor) -> float:
        self.optimizer.zero_grad()
        loss = self.loss(images, labels)
        self.scaler.scale(loss).backward()
        if not self.clips:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.item()


def make_mode(
    name: str, base: nn.Module, images: Tensor, dtype: torch.dtype, lr: float, memory: str = ""
) -> Mode:
    """Stock, or with ``memory`` fusedtrain: another optimizer and scaler, and a converted model."""
    model, device, scaled = copy.deepcopy(base), images.device.type, dtype is torch.float16
    if memory:
        print(f"{name}: {fusedtrain.convert(model, images[:2], memory=memory)}\n", flush=True)
        optimizer: Any = partial(fusedtrain.optim.AdamW, max_grad_norm=MAX_NORM)
        scaler: Any = fusedtrain.amp.GradScaler(device, enabled=scaled)
    else:
        # torch's fused AdamW ignores strides on the CPU: channels_last weights go wrong (2.13).
        optimizer = partial(torch.optim.AdamW, fused=device == "cuda")
        scaler = torch.amp.GradScaler(device, enabled=scaled)
    optimizer = partial(optimizer, lr=lr, weight_decay=0.05)
    return Mode(name, model, optimizer, scaler, dtype, clips=bool(memory))


# The network and its data: put yours here.
# Stages: factor of the width, kernel, stride, channels, blocks.
STAGES = ((1, 3, 1, 8, 1), (6, 3, 2, 16, 2), (6, 5, 2, 24, 2), (6, 3, 2, 40, 3),
          (6, 5, 1, 56, 3), (6, 5, 2, 96, 4), (6, 3, 1, 160, 1))  # fmt: skip


def conv_norm(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> Any:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs))


class Block(nn.Module):
    """EfficientNet's: expand, depthwise convolution, squeeze and excite, project."""

    def __init__(self, inputs: int, outputs: int, factor: int, kernel: int, stride: int) -> None:
        super().__init__()
        width, squeezed = inputs * factor, inputs // 4
        self.features = nn.Sequential(
            conv_norm(inputs, width, 1), nn.SiLU(inplace=True),
            conv_norm(width, width, kernel, stride, groups=width), nn.SiLU(inplace=True),
        )  # fmt: skip
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(width, squeezed, 1), nn.SiLU(inplace=True),
            nn.Conv2d(squeezed, width, 1), nn.Sigmoid(),
        )  # fmt: skip
        self.project = conv_norm(width, outputs, 1)
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        features = self.features(x)
        output = self.project(features * self.gate(features))
        return x + output if self.residual else output


def efficientnet(classes: int) -> nn.Module:
    """EfficientNet-B0 of half width; its stem has stride 1, as the pictures have 32 pixels."""
    layers: list[nn.Module] = [conv_norm(3, 16, 3), nn.SiLU(inplace=True)]
    inputs = 16
    for factor, kernel, stride, outputs, count in STAGES:
        for number in range(count):
            layers.append(Block(inputs, outputs, factor, kernel, 1 if number else stride))
            inputs = outputs
    layers += [conv_norm(inputs, 640, 1), nn.SiLU(inplace=True)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(640, classes))


def digits(device: torch.device) -> tuple[Batch, Batch]:
    """Handwritten digits for training and, by other writers, for testing: 32 x 32 pixels."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        print(
            "train.py: error: digits are scikit-learn's: pip install scikit-learn", file=sys.stderr
        )
        sys.exit(2)
    bunch = load_digits()
    pixels = torch.from_numpy(bunch.images).float()[:, None] / 16
    images = F.interpolate(pixels, size=(32, 32), mode="bilinear").expand(-1, 3, -1, -1)
    images = ((images - images.mean()) / images.std()).to(device, memory_format=torch.channels_last)
    labels = torch.from_numpy(bunch.target).long().to(device)
    return (images[:1500], labels[:1500]), (images[1500:], labels[1500:])


def kept_bytes(mode: Mode, batch: Batch) -> int:
    """Memory that a forward pass leaves allocated: what it keeps for backward."""
    gc.collect()
    if batch[0].is_cuda:
        before = torch.cuda.memory_allocated()
        loss = mode.loss(*batch)
        return torch.cuda.memory_allocated() - before
    with torch.autograd.profiler.profile(profile_memory=True, use_kineto=False) as profile:
        loss = mode.loss(*batch)
    del loss
    return sum(event.self_cpu_memory_usage for event in profile.function_events or ())


def probe(mode: Mode, batch: Batch, known: Tensors = ()) -> tuple[Tensors, Tensors]:
    """Float32 gradients of a batch, and how three steps on them (or known ones) move weights."""
    model = copy.deepcopy(mode.model)
    weights = list(model.parameters())
    # TF32's rounding, amplified through a deep network, would hide an error of several percent.
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        loss = F.cross_entropy(model(batch[0]), batch[1])
        gradients = torch.autograd.grad(loss, weights, materialize_grads=True)
    starts = [weight.detach().clone() for weight in weights]
    optimizer = mode.make_optimizer(weights)
    known = known or gradients
    norm = torch.stack([gradient.norm() for gradient in known]).norm()
    for size in (0.5, 3.0, -0.8):  # clipping matters in the second step alone
        for weight, gradient in zip(weights, known, strict=True):
            weight.grad = gradient * (size * MAX_NORM / norm)
        if not mode.clips:
            nn.utils.clip_grad_norm_(weights, MAX_NORM)
        optimizer.step()
    return gradients, [w.detach() - start for w, start in zip(weights, starts, strict=True)]


def worst(ours: Tensors, theirs: Tensors) -> float:
    """The largest relative error of a tensor. Biases before a norm are all rounding: left out."""
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(ours, theirs) if b.ndim > 1]
    return math.nan if any(map(math.isnan, errors)) else max(errors)


def distance(mode: Mode, stock: Mode) -> float:
    """The largest difference of the mean losses of ten steps."""
    pairs = [a - b for a, b in zip(mode.losses, stock.losses, strict=True)]
    means = [statistics.fmean(pairs[i : i + WINDOW]) for i in range(0, len(pairs), WINDOW)]
    return max(map(abs, means)) if all(map(math.isfinite, means)) else math.nan


def check(what: str, value: float, limit: float) -> bool:
    passed = value <= limit  # NaN fails
    print(f"{'ok' if passed else 'FAILED'}: {what}, {value:.2g} (limit {limit:.2g})", flush=True)
    return passed


def train(modes: Sequence[Mode], data: Batch, size: int, steps: int) -> None:
    """One step of every mode on each batch; who goes first changes, as caches are cold then."""
    begun = said = time.perf_counter()
    for number in range(1, steps + 1):
        chosen = torch.randint(len(data[1]), (size,))
        batch = data[0][chosen], data[1][chosen]
        for turn in range(len(modes)):
            mode = modes[(number + turn) % len(modes)]
            start = time.perf_counter()
            mode.losses.append(mode.step(*batch))
            if batch[0].is_cuda:
                torch.cuda.synchronize()
            mode.seconds.append(time.perf_counter() - start)
        now = time.perf_counter()
        if number in (1, steps) or now - said > 2:
            losses = " | ".join(f"{mode.losses[-1]:.3f}" for mode in modes)
            left = (now - begun) / number * (steps - number)
            print(f"step {number} of {steps}: loss {losses}; {left:.0f} s left", flush=True)
            said = now


def compare(args: argparse.Namespace) -> bool:
    """Trains, prints what was won, and returns whether the fused modes train as stock does."""
    print(f"EfficientNet-B0 on digits: {args.steps} steps, {args.dtype}; converting", flush=True)
    device, dtype, size = torch.device(args.device), DTYPES[args.dtype], args.batch_size
    torch.manual_seed(0)
    data, test = digits(device)
    batch = data[0][:size], data[1][:size]
    base = efficientnet(10).to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    shared = base, batch[0], dtype, args.lr
    stock, control = make_mode("stock", *shared), make_mode("control", *shared)
    with torch.no_grad():
        next(control.model.parameters()).mul_(1 + torch.finfo(dtype).eps)
    plain = make_mode("fusedtrain", *shared, memory="store")
    again = make_mode("fusedtrain, recompute", *shared, memory="recompute")
    modes, passed = (stock, plain, again, control), True
    gradients, changes = probe(stock, batch)
    for mode in (plain, again):
        ours, moved = probe(mode, batch, gradients)
        passed &= check(f"{mode.name}, first gradient", worst(ours, gradients), GRADIENT_LIMIT)
        passed &= check(f"{mode.name}, three equal steps", worst(moved, changes), UPDATE_LIMIT)
    kept = {mode: kept_bytes(mode, batch) for mode in modes}
    train(modes, data, size, args.steps)
    farthest = {mode: distance(mode, stock) for mode in modes}
    for mode in (plain, again):
        limit = LOSS_LIMIT + min(0.5, 3 * farthest[control])  # where stock tumbles, too: not open
        passed &= check(f"{mode.name}, mean losses of {WINDOW} steps", farthest[mode], limit)

    seconds = {m: statistics.median(m.seconds[min(3, len(m.seconds) // 2) :]) for m in modes}
    for mode in modes:
        right = (mode.model.eval()(test[0]).argmax(1) == test[1]).float().mean()
        print(f"{mode.name}: {seconds[mode] * 1e3:.1f} ms a step, {kept[mode] / 1e6:.1f} MB for "
              f"backward, test accuracy {right:.1%}")  # fmt: skip
    verdict = "the same to rounding" if passed else "NOT shown to be the same, see FAILED above"
    memory = [kept[mode] / kept[stock] for mode in (plain, again)]
    times = [seconds[mode] / seconds[stock] for mode in (plain, again)]
    print(f"Losses: {verdict}; {farthest[plain]:.2g} from stock's at most, with recompute "
          f"{farthest[again]:.2g}; the control {farthest[control]:.2g}.")  # fmt: skip
    print(f"Memory: backward needs {memory[0]:.2f}x of stock's bytes, with recompute "
          f"{memory[1]:.2f}x: {size / memory[1]:.0f} images fit where {size} did.")  # fmt: skip
    print(f"Time: a step takes {times[0]:.2f}x of stock's time, with recompute {times[1]:.2f}x.")
    return passed


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("train.py", description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--steps", type=int, default=40, help="of each mode (%(default)s)")
    add("--batch-size", type=int, default=32, help="images of a step (%(default)s)")
    add("--dtype", choices=DTYPES, help="of autocast; float32: none (bfloat16, where it is fast)")
    add("--lr", type=float, default=1e-3, help="learning rate (%(default)s)")
    args = parser.parse_args(argv)
    if args.steps < 1 or not 2 <= args.batch_size <= 1500 or not 0 < args.lr < math.inf:
        parser.error("--steps: from 1 on; --batch-size: 2 to 1500, the digits; --lr: above 0")
    args.device = "cuda" if torch.cuda.is_available() else "cpu"
    # With AVX2 alone bfloat16 convolutions take 8 times float32's time.
    slow = torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2")
    slow = slow and args.device == "cpu" and platform.machine() in ("x86_64", "AMD64")
    args.dtype = args.dtype or ("float32" if slow else "bfloat16")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    return 0 if compare(parse(argv)) else 1


if __name__ == "__main__":
    sys.exit(main())
