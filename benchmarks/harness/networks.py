"""Jobs timed with whole networks: a training step, inference, a step with frozen batch norms.

A job has contestants that start from the same network, and a gate: the outputs, gradients and
running statistics of each are compared with the stock network's in float64.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedtrain
from benchmarks.harness.cases import LAYOUTS
from fusedtrain._graph.kept import kept_bytes
from fusedtrain.advisor.bench.gate import NetworkGate, Results

JOBS = {
    "train": "training step",
    "inference": "inference",
    "tune": "training step, frozen statistics",
}
LR = 1e-6  # what is timed does not depend on it, and the weights stay sane
OPTIMIZERS: Mapping[str, Mapping[str, float]] = {
    "AdamW": {"lr": LR, "weight_decay": 1e-2},
    "SGD": {"lr": LR, "momentum": 0.9, "weight_decay": 1e-4},
}
DTYPES = {
    "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16,
    "float16 AMP": torch.float32, "bfloat16 AMP": torch.float32,
}  # fmt: skip


@dataclass(frozen=True)
class Setup:
    """A network with its input, which all contestants of a row share."""

    job: str
    model: str
    batch: int
    pixels: int
    layout: str = "channels_last"
    dtype: str = "float32"  # in DTYPES
    optimizer: str = "SGD"  # in training

    def autocast(self, device: str) -> torch.autocast:
        """Autocast for AMP, otherwise off."""
        half = torch.bfloat16 if self.dtype.startswith("b") else torch.float16
        return torch.autocast(device, half, enabled=self.dtype.endswith("AMP"))


@dataclass(frozen=True)
class NetworkCase:
    """One row: its rivals share the network, its input and the measurement loop."""

    setup: Setup
    compiled: bool = False

    @property
    def op(self) -> str:
        """The name that --op selects by."""
        return self.setup.job

    @property
    def model(self) -> str:
        """The name that --model selects by."""
        return self.setup.model

    def __str__(self) -> str:
        parts = map(str, vars(self.setup).values())
        return "-".join(part.replace(" ", "_") for part in parts)


_declared: list[torch.library.Library] = []


@cache
def import_module(name: str) -> ModuleType:
    """The module; timm's and torchvision's also where torchvision's C++ part does not fit torch.

    Imported (by timm, too), torchvision registers fake kernels for operators of its C++ part.
    """
    try:
        return importlib.import_module(name)
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
    library = torch.library.Library("torchvision", "FRAGMENT")
    _declared.append(library)  # the names vanish with the object
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return importlib.import_module(name)


def build(setup: Setup, device: str) -> nn.Module:
    """torchvision's network, or timm's, seeded, without dropout: all contestants compute the
    same."""
    models = import_module("torchvision.models")
    in_torchvision = setup.model in models.list_models()
    create = models.get_model if in_torchvision else import_module("timm").create_model
    torch.manual_seed(0)
    model: Any = create(setup.model)
    norms: list[Any] = []
    module: Any
    for module in model.modules():
        if type(module).__name__ in ("Dropout", "StochasticDepth"):
            module.p = 0.0
        elif isinstance(module, nn.BatchNorm2d):
            norms.append(module)
            nn.init.uniform_(module.weight, 0.9, 1.1)
            nn.init.uniform_(module.bias, -0.1, 0.1)
    model.to(device, memory_format=LAYOUTS[setup.layout]).train()
    if setup.job != "train":
        _settle(model, norms, replace(setup, batch=4, dtype="float32"), device)
        for module in model.modules() if setup.job == "inference" else norms:
            module.eval()
    network: nn.Module = model.to(DTYPES[setup.dtype])
    return network


@lru_cache(maxsize=1)
def stock_of(setup: Setup, device: str) -> nn.Module:
    """The network that the contestants of neighbouring rows are copies of."""
    return build(setup, device)


@torch.no_grad()
def _settle(model: nn.Module, norms: Sequence[Any], setup: Setup, device: str) -> None:
    """Running statistics that fit the network: numbers must neither vanish nor explode."""
    kept = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 1.0
    model(batch_of(setup, device)[0])
    for norm, momentum in zip(norms, kept, strict=True):
        norm.momentum = momentum


def batch_of(setup: Setup, device: str, size: int = 0, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Images and labels."""
    generator = torch.Generator().manual_seed(seed)
    shape = (size or setup.batch, 3, setup.pixels, setup.pixels)
    images = torch.randn(shape, generator=generator).to(device, DTYPES[setup.dtype])
    labels = torch.randint(1000, shape[:1], generator=generator).to(device)
    return images.contiguous(memory_format=LAYOUTS[setup.layout]), labels


# --- contestants ---


@dataclass
class Contestant:
    """A network that may be timed, and what fusedtrain says it did to it."""

    model: Any
    note: str = ""


def contestant(who: str, setup: Setup, stock: nn.Module) -> Contestant:
    """One of "fusedtrain", "eager", "compile", from a copy of the stock network."""
    model: Any = copy.deepcopy(stock)
    if who == "eager":
        return Contestant(model)
    if who == "compile":
        torch.compiler.reset()
        return Contestant(torch.compile(model, dynamic=False))
    if setup.job == "train":
        converted = fusedtrain.convert(model)
        modules = f"{len(converted.norms)} norms and {len(converted.converted)} modules"
        return Contestant(model, f"converted {modules}")
    if setup.job == "tune":
        folded = fusedtrain.fold_frozen_norms(model).folded
        return Contestant(model, f"folds {len(folded)} norms at each call")
    model, report = fusedtrain.fold_conv_bn(model)
    note = f"folded {len(report.folded)} norms, {len(report.fused)} activations into convs"
    return Contestant(model, note)


# --- the job ---


def _loss(model: Any, setup: Setup, images: Tensor, labels: Tensor) -> Tensor:
    with setup.autocast(images.device.type):
        return F.cross_entropy(model(images), labels)


def call(
    model: Any, setup: Setup, images: Tensor, labels: Tensor, ours: bool = False
) -> Callable[[], Tensor]:
    """The call to be timed, with fusedtrain's optimizer or torch's fused one."""
    if setup.job == "inference":

        def infer() -> Tensor:
            with torch.no_grad():
                output: Tensor = model(images)
                return output

        return infer
    trained = [p for p in model.parameters() if p.requires_grad]
    options: dict[str, Any] = dict(OPTIMIZERS[setup.optimizer])
    kind = getattr(fusedtrain.optim if ours else torch.optim, setup.optimizer)
    if not ours:
        options["fused"] = True
        if setup.optimizer == "AdamW" and images.is_cuda:
            options["capturable"] = True  # for the row's time in a CUDA graph
    optimizer = kind(trained, **options)
    scaler = torch.amp.GradScaler(images.device.type, enabled=setup.dtype == "float16 AMP")

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = _loss(model, setup, images, labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return step


def saved_bytes(model: Any, setup: Setup, images: Tensor, labels: Tensor) -> int:
    """Bytes that one forward keeps for backward, without parameters, buffers and the images."""
    owned = (images, labels, *model.parameters(), *model.buffers())
    return kept_bytes(lambda: _loss(model, setup, images, labels), owned)


# --- the gate ---

GATE_BATCH = 4  # of a training step: float64 takes long
FLOOR, GATE_SEEDS = 1e-5, (1, 2, 3)


def results(setup: Setup, model: Any, images: Tensor, labels: Tensor) -> Results:
    """Outputs of one call; in training gradients and the running statistics after it, too.
    Images in float64 are the truth, without autocast."""
    if setup.job == "inference":
        with torch.no_grad():
            return {"output": [model(images)]}
    exact = images.dtype == torch.float64
    model.zero_grad()
    with contextlib.nullcontext() if exact else setup.autocast(images.device.type):
        output = model(images)
        loss = F.cross_entropy(output, labels)
    loss.backward()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    buffers = [b.double() for b in model.buffers() if b.is_floating_point()]
    model.zero_grad()
    return {"output": [output.detach()], "gradient": gradients, "running statistics": buffers}


class Gate(NetworkGate):
    """Compares contestants with the stock network in float64.

    Args:
        stock: the network that all are copies of.
        setup: the job.
        device: "cpu" or "cuda".
        whole: with the whole batch, for torch.compile, which compiles for one size.
    """

    def __init__(self, stock: nn.Module, setup: Setup, device: str, *, whole: bool = False) -> None:
        size = setup.batch if whole else min(setup.batch, GATE_BATCH)
        batches = [batch_of(setup, device, size, seed) for seed in GATE_SEEDS]
        super().__init__(partial(results, setup), stock, batches, FLOOR)
