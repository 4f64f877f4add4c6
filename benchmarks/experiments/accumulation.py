"""Gradient accumulation: does it give the large batch's gradient in the small batch's memory?"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedtrain
from benchmarks.experiments.experiment import Row, Settings, peak_mb, require, timed
from benchmarks.experiments.models import gradient_of, random_batch, small_resnet
from benchmarks.harness.memory import step_of

MICRO = (1, 4, 16)  # micro-batches a batch
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "torch SGD": torch.optim.SGD,
    "fusedtrain SGD": fusedtrain.optim.SGD,
}
SAME = 1e-9  # of the gradient's norm, in float64: sums in another order differ by about 1e-15


def accumulate(model: nn.Module, images: Tensor, labels: Tensor, micro: int) -> None:
    """Adds the gradient of the mean loss over the batch to the parameters' gradients."""
    for part, wanted in zip(images.chunk(micro), labels.chunk(micro), strict=True):
        (F.cross_entropy(model(part), wanted) * (len(part) / len(images))).backward()


def difference(
    model: nn.Module, images: Tensor, labels: Tensor, micro: int, *, frozen: bool
) -> float:
    """Norm of the difference from the whole batch's gradient in float64, relative to that
    gradient's norm. Frozen batch norms let no sample see another."""
    gradients = []
    for parts in (1, micro):
        network = copy.deepcopy(model).double().train()
        for module in network.modules():
            if frozen and isinstance(module, nn.BatchNorm2d):
                module.eval()
        # 128 images are enough: float64 is slow on many GPUs.
        accumulate(network, images[:128].double(), labels[:128], parts)
        gradients.append(gradient_of(network))
    whole, accumulated = gradients
    return float((accumulated - whole).norm() / whole.norm())


def rows(settings: Settings) -> Iterator[Row]:
    batch, pixels, width, steps = settings.pick((32, 8, 8, 1), (128, 32, 16, 2), (1024, 32, 64, 8))
    model = small_resnet(settings, width)
    images, labels = random_batch(settings, batch, pixels)
    gradients = sum(4 * p.numel() for p in model.parameters()) / 1e6
    off: dict[int, dict[str, float]] = {1: {}}
    for micro in MICRO[1:]:
        part = images.chunk(micro)[0], labels.chunk(micro)[0]
        alone = copy.deepcopy(model)
        step_of(alone, *part)()
        alone.zero_grad()
        peak = peak_mb(step_of(alone, *part), settings)
        label = f"one micro-batch alone (1/{micro} of the batch)"
        yield Row(label, {"peak MB": peak, "MB of gradients": gradients})
        frozen, norm = (difference(model, images, labels, micro, frozen=f) for f in (True, False))
        off[micro] = {
            "gradient off by %, frozen batch norm": 100 * require("gradient", frozen, SAME),
            "gradient off by %, batch norm": 100 * norm,
        }

    def epoch_of(who: str, micro: int) -> Callable[[], None]:
        """An epoch; the first call makes the states of the optimizer."""
        network = copy.deepcopy(model)
        optimizer = OPTIMIZERS[who](network.parameters(), lr=1e-3, momentum=0.9)

        def epoch() -> None:
            for _ in range(steps):
                optimizer.zero_grad()
                accumulate(network, images, labels, micro)
                optimizer.step()
            optimizer.zero_grad()  # the memory of the next epoch is measured without them

        return epoch

    names = {micro: f"{micro} micro-batches" for micro in MICRO} | {1: "the whole batch"}
    epochs = {
        f"{names[micro]}, {who}": epoch_of(who, micro) for who in OPTIMIZERS for micro in MICRO
    }
    times = timed(epochs, settings, 20, 40.0)
    for who in OPTIMIZERS:
        for micro, name in names.items():
            label, whole = f"{name}, {who}", f"{names[1]}, {who}"
            ratio = {} if micro == 1 else {"time, of the whole batch": times.gain(label, whole)}
            peak = peak_mb(epochs[label], settings)
            numbers = {"s an epoch": times.seconds(label), "peak MB": peak}
            yield Row(label, {**numbers, **ratio, **off[micro]})
