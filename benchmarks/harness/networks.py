"""Jobs timed with whole networks: a training step, inference, a step with frozen batch norms.

A job has contestants that start from the same network, and a gate: the outputs, gradients and
running statistics of each are compared with the stock network's in float64.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedtrain
from benchmarks.harness.cases import LAYOUTS
from benchmarks.harness.steps import import_module
from fusedtrain._graph.kept import kept_bytes
from fusedtrain.advisor.bench.gate import NotTheJob

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


class Missing(RuntimeError):
    """This fusedtrain cannot do the job (yet)."""


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


def _eager(model: nn.Module) -> Contestant:
    return Contestant(model)


def _compiled(model: nn.Module) -> Contestant:
    torch.compiler.reset()
    return Contestant(torch.compile(model, dynamic=False))


def _feature(name: str) -> Any:
    function = getattr(fusedtrain, name, None)
    if function is None:
        raise Missing(f"this fusedtrain has no {name}")
    return function


def _converted(model: nn.Module) -> Contestant:
    report = _feature("convert")(model)
    norms = f"{len(report.norms)} norms and " if hasattr(report, "norms") else ""
    return Contestant(model, f"converted {norms}{len(report.converted)} modules")


def _folded(model: nn.Module) -> Contestant:
    folded, report = _feature("fold_conv_bn")(model)
    return Contestant(
        folded, f"folded {len(report.folded)} norms, {len(report.fused)} activations into convs"
    )


def _tuned(model: nn.Module) -> Contestant:
    report = _feature("fold_frozen_norms")(model)
    return Contestant(model, f"folds {len(report.folded)} norms at each call")


_OURS: Mapping[str, Callable[[nn.Module], Contestant]] = {
    "train": _converted,
    "inference": _folded,
    "tune": _tuned,
}


def contestant(who: str, setup: Setup, stock: nn.Module) -> Contestant:
    """One of "fusedtrain", "eager", "compile", from a copy of the stock network."""
    make = {"eager": _eager, "compile": _compiled, "fusedtrain": _OURS[setup.job]}[who]
    return make(copy.deepcopy(stock))


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
# Errors of outputs, of all gradients and of all buffers, each as a norm relative to the norm. Of
# two networks that are right, one can be so many times as far from float64 as the other: ReLUs and
# batch statistics make more of each rounding. A batch in which one ReLU is on the other side of 0
# says nothing (1 in 5 of a ResNet-18, eager's as ours, and then 4e-3 of the gradient): what is
# wrong is wrong in all of them.
FLOOR, TIMES_EAGER, GATE_SEEDS = 1e-5, 4.0, (1, 2, 3)
Results = dict[str, list[Tensor]]


def results(model: Any, setup: Setup, images: Tensor, labels: Tensor) -> Results:
    """Outputs of one call; in training gradients and the running statistics after it, too."""
    if setup.job == "inference":
        with torch.no_grad():
            return {"output": [model(images).double()]}
    model.zero_grad()
    with setup.autocast(images.device.type):
        output = model(images)
        loss = F.cross_entropy(output, labels)
    loss.backward()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    seen = {
        "output": [output.detach().double()],
        "gradient": [g.double() for g in gradients],
        "running statistics": [b.double() for b in model.buffers() if b.is_floating_point()],
    }
    model.zero_grad()
    return seen


def truth(stock: nn.Module, setup: Setup, images: Tensor, labels: Tensor) -> Results:
    """The stock network in float64."""
    exact = replace(setup, dtype="float32")
    return results(copy.deepcopy(stock).double(), exact, images.double(), labels)


def errors(actual: Results, exact: Results) -> dict[str, float]:
    """Relative to the norm of each kind of result."""
    kinds = [name for name, tensors in exact.items() if tensors]  # ConvNeXt has no buffers
    return {name: _distance(actual[name], exact[name]) for name in kinds}


def _distance(actual: Iterable[Tensor], exact: Iterable[Tensor]) -> float:
    a, b = (torch.cat([t.flatten() for t in tensors]) for tensors in (actual, exact))
    if a.shape != b.shape:
        return float("nan")
    return float((a - b).norm() / b.norm())


class Gate:
    """Compares contestants with the stock network in float64.

    Args:
        stock: the network that all are copies of.
        setup: the job.
        device: "cpu" or "cuda".
        whole: with the whole batch, for torch.compile, which compiles for one size.
    """

    def __init__(self, stock: nn.Module, setup: Setup, device: str, *, whole: bool = False) -> None:
        self.stock, self.setup = stock, setup
        size = setup.batch if whole else min(setup.batch, GATE_BATCH)
        self._batches = [batch_of(setup, device, size, seed) for seed in GATE_SEEDS]
        self._truths: list[tuple[Results, dict[str, float]]] = []
        self.errors: dict[str, dict[str, float]] = {}  # of those that passed

    def _truth(self, number: int) -> tuple[Results, dict[str, float]]:
        """The results of a batch in float64, and the errors of eager torch."""
        if number == len(self._truths):
            batch = self._batches[number]
            exact = truth(self.stock, self.setup, *batch)
            eager = results(copy.deepcopy(self.stock), self.setup, *batch)
            self._truths.append((exact, errors(eager, exact)))
        return self._truths[number]

    def check(self, who: str, model: Any) -> None:
        """Raise NotTheJob if the errors are too large in every batch, each a step from the same
        state; the errors are those of the last one."""
        before = copy.deepcopy(model.state_dict())
        for number, batch in enumerate(self._batches):
            exact, eager = self._truth(number)
            seen = errors(results(model, self.setup, *batch), exact)
            blame = _blame(seen, eager)
            if not blame:
                self.errors[who] = seen
                return
            model.load_state_dict(before)
        raise NotTheJob(blame)


def _blame(seen: Mapping[str, float], eager: Mapping[str, float]) -> str:
    """Where a contestant's errors exceed what eager's allow; empty if nowhere."""
    for name, error in seen.items():
        limit = max(FLOOR, TIMES_EAGER * eager[name])
        if not error <= limit:  # NaN is wrong
            return f"wrong {name}: off by {error:.1e} of its norm ({limit:.1e} allowed)"
    return ""
