"""One way of training (a mode): its model, its step, its evaluation and its memory."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fusedtrain
from _train.data import Images
from _train.memory import restore, saved_bytes
from _train.optimizers import Settings, Stepper

Batch = tuple[Tensor, Tensor]
STOCK_SETTINGS = Settings()
PROBE_SCALE = 1024.0  # of losses in float16, whose gradients are to be finite at once


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

    def wait(self) -> None:
        if self.size > 1:
            dist.barrier()

    def stop(self) -> None:
        if self.size > 1:
            dist.destroy_process_group()
            # A thread of Gloo (DDP's reducer keeps the group alive) that lets go of the last
            # tensor while Python is already ending aborts the process: pytorch pull 179291.
            time.sleep(0.5)


@dataclass
class Mode:
    name: str
    net: nn.Module
    dtype: torch.dtype | None  # of autocast; None trains in float32
    reference: str | None  # the mode whose loss curve this one is compared with
    fused: bool
    conversion: str
    forward: nn.Module  # net, compiled where asked for
    parallel: nn.Module  # forward, in DDP where there are several processes
    stepper: Stepper
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    saved_bytes: int = 0
    saved_bytes_of_an_image: float = 0.0  # what one more image adds
    peak_bytes: int | None = None
    frozen: bool = False  # batch norms stay in eval mode, as when a checkpoint is fine-tuned
    memory: str = ""  # how it keeps what backward needs, where modes differ in that alone
    accuracy: float = float("nan")


def build_modes(
    base: nn.Module,
    dtype: torch.dtype | None,
    world: World,
    *,
    compiled: bool,
    channels_last: bool,
    settings: Settings = STOCK_SETTINGS,
) -> list[Mode]:
    """The modes to compare, all starting from the weights of ``base``.

    With masters, the fused modes have 16-bit weights. Those are rounded once, for all modes.
    """
    if settings.masters != "none" and dtype is not None:
        base = copy.deepcopy(base)
        for weight in large_weights(base):
            weight.data = weight.data.to(dtype).float()
    short = {None: "fp32", torch.float16: "AMP fp16", torch.bfloat16: "AMP bf16"}[dtype]
    plan: list[tuple[str, torch.dtype | None, str | None, str]]
    plan = [("fp32 eager", None, None, "")]
    if dtype is not None:
        plan.append((f"{short} eager", dtype, "fp32 eager", ""))
    for name, memory in (("fusedtrain", "store"), ("fusedtrain + recompute", "recompute")):
        plan.append((f"{short} {name}", dtype, f"{short} eager", memory))
    modes = []
    for name, mode_dtype, reference, memory in plan:
        net = copy.deepcopy(base)
        fused = bool(memory)
        conversion = str(fusedtrain.convert(net, memory=memory)) if fused else ""
        if fused and settings.masters != "none" and mode_dtype is not None:
            for weight in large_weights(net):
                weight.data = weight.data.to(mode_dtype)
        net.to(world.device)
        if channels_last:
            net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        modes.append(
            _mode(name, net, mode_dtype, reference, fused, conversion, world, compiled, settings)
        )
    return modes


def large_weights(net: nn.Module) -> list[nn.Parameter]:
    """The weights of convolutions and linear layers: neither biases nor those of norms."""
    layers = (nn.modules.conv._ConvNd, nn.Linear)
    params = (
        p for m in net.modules() if isinstance(m, layers) for p in m.parameters(recurse=False)
    )
    return [p for p in dict.fromkeys(params) if p.ndim > 1]


def build_tuning_modes(
    checkpoint: nn.Module, world: World, *, compiled: bool, settings: Settings = STOCK_SETTINGS
) -> list[Mode]:
    """Fine-tuning in float32 with the statistics of a trained network: stock, and folded."""
    modes = []
    for name, fused in (("frozen eager", False), ("frozen folded", True)):
        net = copy.deepcopy(checkpoint)
        conversion = str(fusedtrain.fold_frozen_norms(net)) if fused else ""
        reference = "frozen eager" if fused else None
        mode = _mode(name, net, None, reference, fused, conversion, world, compiled, settings)
        mode.frozen = True
        train(mode)
        modes.append(mode)
    return modes


MEMORY = ("store", "recompute", "inplace", "q8")  # of fusedtrain.convert


class Checkpointed(nn.Module):
    """A block whose forward runs again in backward, whole (torch.utils.checkpoint)."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = checkpoint(self.block, x, use_reentrant=False)
        return output


_BLOCKS = ("BasicBlock", "Bottleneck", "MBConv", "InvertedResidual", "CNBlock", "DarknetStage")


def checkpointed(net: nn.Module) -> nn.Module:
    """Every block of one of the networks here is checkpointed, in place."""
    for module in list(net.modules()):
        for name, child in module.named_children():
            if type(child).__name__ in _BLOCKS:
                setattr(module, name, Checkpointed(child))
    return net


def build_memory_modes(
    base: nn.Module,
    kinds: Sequence[str],
    world: World,
    *,
    compiled: bool,
    channels_last: bool,
    settings: Settings = STOCK_SETTINGS,
) -> list[Mode]:
    """Training in float32 from the weights of ``base``: eager, with fusedtrain's ways to keep what
    backward needs, and with torch.utils.checkpoint around each block."""
    modes = []
    for kind in ("eager", *kinds, "checkpoint"):
        net = copy.deepcopy(base)
        conversion = ""
        if kind in MEMORY:
            # The same norms for all, also those that only recompute has a use for: so that the
            # losses of the two can be compared bit for bit.
            first = "q8" if kind == "q8" else "recompute"
            conversion = str(fusedtrain.convert(net, memory=first))
            fusedtrain.convert(net, memory=kind)
        if kind == "checkpoint":
            net = checkpointed(net)
        net.to(world.device)
        if channels_last:
            net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        fused = kind in MEMORY
        # Derivatives in 8 bits are another training, which the accuracy judges.
        reference = "memory: eager" if fused and kind != "q8" else None
        name = f"memory: {kind}"
        mode = _mode(name, net, None, reference, fused, conversion, world, compiled, settings)
        mode.memory = kind
        modes.append(mode)
    return modes


def _mode(
    name: str,
    net: nn.Module,
    dtype: torch.dtype | None,
    reference: str | None,
    fused: bool,
    conversion: str,
    world: World,
    compiled: bool,
    settings: Settings,
) -> Mode:
    forward: Any = torch.compile(net) if compiled else net
    parallel = DistributedDataParallel(forward) if world.size > 1 else forward
    stepper = Stepper(
        net.parameters(),
        settings,
        fused=fused,
        device=world.device,
        scaled=dtype is torch.float16,
    )
    return Mode(name, net, dtype, reference, fused, conversion, forward, parallel, stepper)


def train(mode: Mode) -> None:
    """Training mode, but for frozen batch norms."""
    mode.net.train()
    for module in mode.net.modules():
        if mode.frozen and isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()


def autocast(device: torch.device, dtype: torch.dtype | None) -> torch.autocast:
    return torch.autocast(device.type, dtype or torch.bfloat16, enabled=dtype is not None)


def loss_of(net: nn.Module, batch: Batch, dtype: torch.dtype | None) -> Tensor:
    with autocast(batch[0].device, dtype):
        logits = net(batch[0])
    return F.cross_entropy(logits.float(), batch[1])


def backward(mode: Mode, batches: Sequence[Batch]) -> Tensor:
    """Add up the gradients of the mean loss over the batches; returns that loss."""
    total = torch.zeros((), device=batches[0][0].device)
    for number, batch in enumerate(batches, 1):
        waits = number < len(batches) and isinstance(mode.parallel, DistributedDataParallel)
        with mode.parallel.no_sync() if waits else nullcontext():  # type: ignore[operator]
            loss = loss_of(mode.parallel, batch, mode.dtype) / len(batches)
            mode.stepper.scaler.scale(loss).backward()
        total += loss.detach()
    return total


def step(mode: Mode, batches: Sequence[Batch], lr: float) -> float:
    """One timed optimizer step on batches that are already on the device; returns the loss."""
    mode.stepper.set_lr(lr)
    device = batches[0][0].device
    finish(device)
    start = time.perf_counter()
    loss = backward(mode, batches)
    mode.stepper.step()
    finish(device)
    mode.seconds.append(time.perf_counter() - start)
    mode.stepper.collect()
    return float(loss)


def finish(device: torch.device) -> None:
    """Waits for the device, so that what follows or went before can be timed."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.no_grad()
def correct_answers(mode: Mode, data: Images, indices: Sequence[int], batch_size: int) -> int:
    device = next(mode.net.parameters()).device
    mode.net.eval()
    correct = 0
    for start in range(0, len(indices), batch_size):
        images, labels = data.__getitems__(indices[start : start + batch_size])
        with autocast(device, mode.dtype):
            logits = mode.net(images.to(device))
        correct += int((logits.argmax(1) == labels.to(device)).sum())
    train(mode)
    return correct


def gradients(mode: Mode, batch: Batch, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Gradients of one batch by parameter name (zero if none); leaves the model as it was.

    Without a ``dtype`` they are of float32 weights, also where the model has 16-bit ones.
    """
    net = mode.net
    if dtype is None and any(p.dtype is not torch.float32 for p in net.parameters()):
        net = copy.deepcopy(net).float()
    scale = PROBE_SCALE if dtype is torch.float16 else 1.0
    buffers = [b.clone() for b in net.buffers()]
    # TF32's rounding, amplified through a deep net, would hide an error of several percent.
    with torch.backends.cudnn.flags(deterministic=True, allow_tf32=False):
        (loss_of(net, batch, dtype) * scale).backward()
    by_name = {
        name: torch.zeros_like(p).double() if p.grad is None else p.grad.double() / scale
        for name, p in net.named_parameters()
    }
    net.zero_grad(set_to_none=True)
    restore(net, buffers)
    return by_name


def measure_saved_bytes(mode: Mode, batch: Batch) -> None:
    """Bytes that one forward pass leaves allocated, which is what it keeps for backward."""

    def bytes_of(part: Batch) -> int:
        forward = partial(loss_of, mode.forward, part, mode.dtype)
        return saved_bytes(mode.net, forward, part[0].device)

    images = len(batch[1])
    half = images // 2
    mode.saved_bytes = bytes_of(batch)
    mode.saved_bytes_of_an_image = mode.saved_bytes / images
    if half > 1:  # a batch norm of one image may have a single value a channel
        saved = bytes_of((batch[0][:half], batch[1][:half]))
        mode.saved_bytes_of_an_image = (mode.saved_bytes - saved) / (images - half)


def step_with_peak(mode: Mode, batches: Sequence[Batch], lr: float) -> float:
    """``step`` that also records the CUDA peak, as if this mode were alone on the device."""
    device = batches[0][0].device
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    loss = step(mode, batches, lr)
    mode_bytes = sum(t.nbytes for t in (*mode.net.parameters(), *mode.net.buffers()))
    mode_bytes += mode.stepper.state_bytes()
    mode.peak_bytes = torch.cuda.max_memory_allocated(device) - before + mode_bytes
    return loss
