"""Autocast: operators in 16 bits, where the time goes then, and dtypes that need a GradScaler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.experiments.experiment import Claim, Column, Experiment, Run, Settings, Verdict
from benchmarks.experiments.training import (
    LOSS_SCALE,
    Job,
    Maker,
    autocast,
    fresh_step,
    full,
)
from fusedtrain import profile
from fusedtrain.advisor.profiling import top_operators

FP16, BF16 = torch.float16, torch.bfloat16
FLOAT32, SCALED, PLAIN = "float32", "float16 + GradScaler", "bfloat16"
FUSED = ", fusedtrain"
MAKERS: Mapping[str, Maker] = {
    FLOAT32: full,
    SCALED: autocast(FP16, scaled=True),
    PLAIN: autocast(BF16, scaled=False),
    SCALED + FUSED: autocast(FP16, scaled=True, fused=True),
    PLAIN + FUSED: autocast(BF16, scaled=False, fused=True),
}
UNSCALED = "float16 without scaler"
# Label -> dtype and scale of a gradient that is compared with that of float32.
GRADIENTS = {SCALED: (FP16, LOSS_SCALE), UNSCALED: (FP16, 1.0), PLAIN: (BF16, 1.0)}
TOP = 10
LOST = 0.1  # % of the gradient's elements, which no training notices
MOVED = 1.0  # points of a share; two windows of one program differ by less
ENGINE = "autograd::engine::evaluate_function: "
PRODUCTS = ("convolution", "mm", "addmm", "bmm", "baddbmm", "matmul", "linear")


def job(settings: Settings) -> Job:
    if settings.quick:
        return Job("resnet18", 8, 2)
    return Job("resnet18", 64, 128) if settings.device == "cuda" else Job("resnet18", 16, 8)


def steps(settings: Settings) -> int:
    """Number of steps in the profiler's window."""
    if settings.quick:
        return 1
    return 10 if settings.device == "cuda" else 3


def setup(settings: Settings) -> str:
    chosen = job(settings)
    what = "kernels on the GPU" if settings.device == "cuda" else "operators on the CPU"
    return (
        f"ResNet-18 for 32 px (width {chosen.width}) on random images, batch {chosen.batch},"
        f" channels_last, SGD with momentum. Times of {what} in a window of"
        f" {steps(settings)} steps after a warm-up, by torch.profiler. For each run the {TOP}"
        " operators with most time follow. Shares are of the time in which something runs."
        " A gradient's element is lost if the element is 0 and in float32 is not."
    )


class Products(TorchDispatchMode):
    """Counts convolutions and matrix products by the dtype of their first input."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: Counter[torch.dtype] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        name = func.overloadpacket.__name__.removesuffix("_backward")
        if name in PRODUCTS:
            self.dtypes[args[0].dtype] += 1
        return func(*args, **(kwargs or {}))

    @property
    def half(self) -> float:
        """% of them in 16 bits."""
        return 100 * sum(self.dtypes[t] for t in (FP16, BF16)) / max(1, self.dtypes.total())


def runs(settings: Settings) -> Iterator[Run]:
    exact = _gradient(settings, None, 1.0)
    for label, make in MAKERS.items():
        step = fresh_step(job(settings), make, settings)
        for _ in range(1 if settings.device == "cpu" else 5):
            step()
        with Products() as products:
            step()
        numbers, top = _profiled(step, settings)
        numbers["half"] = products.half
        if label in GRADIENTS:
            numbers["lost"] = _lost(_gradient(settings, *GRADIENTS[label]), exact)
        yield Run(label, numbers)
        for place, operator in enumerate(top, 1):
            name = operator["operator"].removeprefix(ENGINE).removeprefix("aten::")
            name = f"{label} #{place}: {name} {operator['pass']}"
            row = {"ms": operator["ms"], "share": 100 * operator["share"]}
            yield Run(name, row, operator["family"])
    lost = _lost(_gradient(settings, *GRADIENTS[UNSCALED]), exact)
    yield Run(UNSCALED, {"lost": lost}, "the gradient alone")


def _profiled(
    step: Callable[[], object], settings: Settings
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Milliseconds of a step, shares of families, and the operators with most time."""
    with profile() as window:
        for _ in range(steps(settings)):
            step()
    assert window.recording is not None
    families = {f["family"]: f["ms"] for f in window.summary["families"]}
    families.pop("idle")
    total = sum(families.values()) or 1.0

    def share(*names: str) -> float:
        return 100 * sum(families[name] for name in names) / total

    numbers = {
        "ms": total,
        "share": 100.0,
        "products": share("conv", "matmul"),
        "moves": share("copies", "pointwise"),
        "norm": share("norm"),
    }
    return numbers, top_operators(window.recording)[:TOP]


def _gradient(settings: Settings, dtype: torch.dtype | None, scale: float) -> Tensor:
    """All gradients of the weights in a row, after the loss was scaled."""
    model: nn.Module = job(settings).model(settings)
    images, labels = job(settings).data(settings)
    with torch.autocast(settings.device, dtype or BF16, enabled=dtype is not None):
        loss = F.cross_entropy(model(images), labels)
    (loss * scale).backward()
    parts = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return torch.cat(parts) / scale


def _lost(gradient: Tensor, exact: Tensor) -> float:
    """% of the elements that are 0 although those in float32 are not; NaN after an overflow."""
    if not bool(gradient.isfinite().all()):
        return float("nan")
    there = exact != 0
    return 100 * float((gradient[there] == 0).double().mean())


def judge(measured: Mapping[str, Run], settings: Settings) -> Sequence[Verdict]:
    if not {*MAKERS, UNSCALED} <= measured.keys():
        return [Verdict(None, "Not all runs were measured.")] * 3
    numbers = {label: measured[label].numbers for label in (*MAKERS, UNSCALED)}
    return [_in_half(numbers), _moves(numbers), _scaler(numbers)]


Numbers = Mapping[str, Mapping[str, float]]


def _in_half(numbers: Numbers) -> Verdict:
    shares = {label: numbers[label]["half"] for label in MAKERS if label != FLOAT32}
    words = ", ".join(f"{label} {share:.0f} %" for label, share in shares.items())
    words = f"Convolutions and matrix products with 16-bit inputs: {words}"
    if all(share == 100 for share in shares.values()):
        return Verdict(True, f"{words}.")
    return Verdict(False, f"{words}: autocast's list of operators for this device is shorter.")


def _moves(numbers: Numbers) -> Verdict:
    shares = {label: numbers[label]["moves"] for label in (FLOAT32, SCALED, PLAIN)}
    words = ", ".join(f"{share:.1f} % in {label}" for label, share in shares.items())
    words = f"Casts and pointwise operators take {words}"
    if all(shares[label] > shares[FLOAT32] + MOVED for label in (SCALED, PLAIN)):
        return Verdict(True, f"{words}.")
    slower = numbers[PLAIN]["ms"] > numbers[FLOAT32]["ms"]
    reason = (
        "16-bit convolutions are slower than those of float32 on this device, and their share grows"
        if slower
        else "convolutions keep their share of the time"
    )
    return Verdict(False, f"{words}; {reason}.")


def _scaler(numbers: Numbers) -> Verdict:
    lost = {label: numbers[label]["lost"] for label in GRADIENTS}
    words = (
        f"Of the gradient's elements bfloat16 loses {lost[PLAIN]:.3f} % without a scaler, float16 "
        f"{lost[UNSCALED]:.3f} % without and {lost[SCALED]:.3f} % with a scale of {LOSS_SCALE:.0f}"
    )
    if lost[PLAIN] <= LOST:  # not so after an overflow, which is NaN
        return Verdict(True, f"{words}.")
    return Verdict(False, f"{words}: bfloat16 loses more than {LOST} %.")


_WHERE = "PyTorch's AMP recipe, without numbers"
EXPERIMENT = Experiment(
    name="amp_kernels",
    title="What autocast changes, kernel by kernel",
    question="Which operators run in 16 bits under autocast, where does the time go, and when is a "
    "GradScaler needed?",
    setup=setup,
    columns={
        "ms": Column("ms/step", 3),
        "share": Column("share, %"),
        "products": Column("convolutions and products, %"),
        "moves": Column("casts and pointwise, %"),
        "norm": Column("norms, %"),
        "half": Column("products in 16 bits, %", 0),
        "lost": Column("gradient lost, %", 3),
    },
    claims=[
        Claim("Under autocast matrix products and convolutions run in half precision.", _WHERE),
        Claim("With fast products the time moves to casts and pointwise operators.", _WHERE),
        Claim("bfloat16 needs no GradScaler.", _WHERE),
    ],
    runs=runs,
    judge=judge,
)
