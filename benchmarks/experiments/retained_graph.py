"""Losses kept with their graph: what does a list of losses cost without item() or detach()?

Growth: bytes of tensors that stay allocated after a step. Nodes are autograd's, of one loss.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedtrain
from benchmarks.experiments.experiment import Row, Settings
from benchmarks.experiments.models import random_batch, small_resnet
from benchmarks.harness.memory import most_allocated
from fusedtrain._graph.kept import kept_bytes
from fusedtrain.advisor.bench.clock import median_interval

NO_GRAD = "loss without backward, no_grad"


def _after_backward(keep: Callable[[Tensor], Any], **options: bool) -> Callable[[Tensor], Any]:
    def trained(loss: Tensor) -> Any:
        loss.backward(**options)
        return keep(loss)

    return trained


def _itself(loss: Tensor) -> Tensor:
    return loss


WAYS: Mapping[str, Callable[[Tensor], Any]] = {
    "loss after backward": _after_backward(_itself),
    "loss after backward, retained": _after_backward(_itself, retain_graph=True),
    "loss without backward": _itself,
    NO_GRAD: _itself,
    "loss.item()": _after_backward(Tensor.item),
    "loss.detach()": _after_backward(Tensor.detach),
}


def _nodes_of(value: Any) -> int:
    """Autograd's nodes that a kept value holds."""
    waiting = [value.grad_fn] if isinstance(value, Tensor) and value.grad_fn is not None else []
    seen = {*waiting}
    while waiting:
        for node, _ in waiting.pop().next_functions:
            if node is not None and node not in seen:
                seen.add(node)
                waiting.append(node)
    return len(seen)


def growth(model: nn.Module, way: str, images: Tensor, labels: Tensor, steps: int) -> Any:
    """MB that stay allocated after each step while all kept values live, and nodes of the last."""
    kept: list[Any] = []

    def step() -> None:
        with torch.set_grad_enabled(way != NO_GRAD):
            kept.append(WAYS[way](F.cross_entropy(model(images), labels)))
        model.zero_grad()

    step()  # kernels and workspaces
    kept.clear()
    gc.collect()
    growths = [most_allocated(step, images.device.type)[1] / 1e6 for _ in range(steps)]
    return growths, _nodes_of(kept[-1])


def rows(settings: Settings) -> Iterator[Row]:
    batch, pixels, width, steps = settings.pick((8, 8, 8, 2), (32, 32, 16, 16), (256, 32, 64, 16))
    images, labels = random_batch(settings, batch, pixels)
    for who in ("torch", "fusedtrain"):
        model = small_resnet(settings, width)
        if who == "fusedtrain":
            fusedtrain.convert(model)
        parts = (images, labels, *model.parameters(), *model.buffers())
        saved = kept_bytes(lambda: F.cross_entropy(model(images), labels), parts)  # noqa: B023
        for way in WAYS:
            growths, nodes = growth(model, way, images, labels, steps)
            numbers = {
                "MB more a step": (statistics.median(growths), *median_interval(growths)),
                "MB that the graph saves": saved / 1e6,
                "nodes kept a step": nodes,
            }
            yield Row(f"{way}, {who}", numbers)
