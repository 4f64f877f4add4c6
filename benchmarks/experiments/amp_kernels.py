"""Autocast, kernel by kernel: what runs in 16 bits, and when is a GradScaler needed?

Times are of torch.profiler, of kernels on a GPU and of operators on a CPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.experiments.experiment import Row, Settings
from benchmarks.experiments.models import gradient_of
from benchmarks.experiments.training import LOSS_SCALE, Job, Maker, autocast, fresh_step, full
from fusedtrain import profile
from fusedtrain.advisor.profiling import top_operators

FP16, BF16 = torch.float16, torch.bfloat16
SCALED, PLAIN, UNSCALED = "float16 + GradScaler", "bfloat16", "float16 without scaler"
MAKERS: Mapping[str, Maker] = {
    "float32": full,
    SCALED: autocast(FP16, scaled=True),
    PLAIN: autocast(BF16, scaled=False),
    f"{SCALED}, fusedtrain": autocast(FP16, scaled=True, fused=True),
    f"{PLAIN}, fusedtrain": autocast(BF16, scaled=False, fused=True),
}
# Label -> dtype and scale of a gradient that is compared with that of float32.
GRADIENTS = {SCALED: (FP16, LOSS_SCALE), UNSCALED: (FP16, 1.0), PLAIN: (BF16, 1.0)}
LOST = "gradient lost, %"
TOP = 10
ENGINE = "autograd::engine::evaluate_function: "
PRODUCTS = ("convolution", "mm", "addmm", "bmm", "baddbmm", "matmul", "linear")


def job(settings: Settings) -> Job:
    return Job("resnet18", *settings.pick((8, 2), (16, 8), (64, 128)))


class Products(TorchDispatchMode):
    """Counts convolutions and matrix products by the dtype of their first input."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: Counter[torch.dtype] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if func.overloadpacket.__name__.removesuffix("_backward") in PRODUCTS:
            self.dtypes[args[0].dtype] += 1
        return func(*args, **(kwargs or {}))

    @property
    def half(self) -> float:
        """% of them in 16 bits."""
        return 100 * sum(self.dtypes[t] for t in (FP16, BF16)) / max(1, self.dtypes.total())


def rows(settings: Settings) -> Iterator[Row]:
    exact = _gradient(settings, None, 1.0)
    for label, make in MAKERS.items():
        step = fresh_step(job(settings), make, settings)
        for _ in range(1 if settings.device == "cpu" else 5):
            step()
        with Products() as products:
            step()
        numbers, top = _profiled(step, settings)
        numbers["products in 16 bits, %"] = products.half
        if label in GRADIENTS:
            numbers[LOST] = lost(_gradient(settings, *GRADIENTS[label]), exact)
        yield Row(label, numbers)
        for place, operator in enumerate(top, 1):
            name = operator["operator"].removeprefix(ENGINE).removeprefix("aten::")
            name = f"{label} #{place}: {name} {operator['pass']}"
            shares = {"ms/step": operator["ms"], "share, %": 100 * operator["share"]}
            yield Row(name, shares, operator["family"])
    yield Row(UNSCALED, {LOST: lost(_gradient(settings, *GRADIENTS[UNSCALED]), exact)})


def _profiled(
    step: Callable[[], object], settings: Settings
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Milliseconds of a step, shares of families, and the operators with most time."""
    with profile() as window:
        for _ in range(settings.pick(1, 3, 10)):
            step()
    assert window.recording is not None
    families = {f["family"]: f["ms"] for f in window.summary["families"]}
    families.pop("idle")
    total = sum(families.values()) or 1.0
    pairs = {
        "convolutions and products, %": ("conv", "matmul"),
        "casts and pointwise, %": ("copies", "pointwise"),
        "norms, %": ("norm",),
    }
    shares = {key: 100 * sum(families[f] for f in names) / total for key, names in pairs.items()}
    numbers = {"ms/step": total, "share, %": 100.0, **shares}
    return numbers, top_operators(window.recording)[:TOP]


def _gradient(settings: Settings, dtype: torch.dtype | None, scale: float) -> Tensor:
    """All gradients of the weights in a row, after the loss was scaled."""
    model = job(settings).model(settings)
    images, labels = job(settings).data(settings)
    with torch.autocast(settings.device, dtype or BF16, enabled=dtype is not None):
        loss = F.cross_entropy(model(images), labels)
    (loss * scale).backward()
    return gradient_of(model) / scale


def lost(gradient: Tensor, exact: Tensor) -> float:
    """% of the elements that are 0 although those in float32 are not; NaN after an overflow."""
    if not bool(gradient.isfinite().all()):
        return float("nan")
    return 100 * float((gradient[exact != 0] == 0).double().mean())
