"""Losses that are kept with their graph, and what each one costs."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedtrain
from benchmarks.experiments.experiment import Claim, Column, Experiment, Run, Settings, Verdict
from benchmarks.experiments.models import random_batch, small_resnet
from benchmarks.harness.memory import most_allocated
from fusedtrain._graph.kept import kept_bytes
from fusedtrain.advisor.bench.clock import median_interval

TORCH, OURS = "torch", "fusedtrain"
TRAINED, EVALUATED, RETAINED = "after backward", "without backward", "after backward, retained"
ITEM, DETACHED, NO_GRAD = "loss.item()", "loss.detach()", "without backward, no_grad"
TINY = 0.01  # of a step's graph: less is no growth by the graph
CPU_GB = 16.0  # of the machine in the words of the verdict


class Sizes(NamedTuple):
    batch: int
    pixels: int
    width: int
    steps: int


def sizes(settings: Settings) -> Sizes:
    if settings.quick:
        return Sizes(batch=8, pixels=8, width=8, steps=2)
    if settings.device == "cuda":
        return Sizes(batch=256, pixels=32, width=64, steps=16)
    return Sizes(batch=32, pixels=32, width=16, steps=16)


Keep = Callable[[Tensor], Any]


def keep_trained(loss: Tensor) -> Any:
    loss.backward()
    return loss


def keep_retained(loss: Tensor) -> Any:
    loss.backward(retain_graph=True)
    return loss


def keep_item(loss: Tensor) -> Any:
    loss.backward()
    return loss.item()


def keep_detached(loss: Tensor) -> Any:
    loss.backward()
    return loss.detach()


def keep_evaluated(loss: Tensor) -> Any:
    return loss


WAYS: Mapping[str, Keep] = {
    TRAINED: keep_trained,
    RETAINED: keep_retained,
    EVALUATED: keep_evaluated,
    NO_GRAD: keep_evaluated,
    ITEM: keep_item,
    DETACHED: keep_detached,
}


def nodes_of(value: Any) -> int:
    """Autograd's nodes that a kept value holds."""
    waiting = [value.grad_fn] if isinstance(value, Tensor) and value.grad_fn is not None else []
    seen = {*waiting}
    while waiting:
        for node, _ in waiting.pop().next_functions:
            if node is not None and node not in seen:
                seen.add(node)
                waiting.append(node)
    return len(seen)


def label_of(way: str, who: str) -> str:
    what = way if way.startswith("loss.") else f"loss {way}"
    return f"{what}, {who}"


def _graph_megabytes(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """MB that one forward saves for backward."""
    owned = (images, labels, *model.parameters(), *model.buffers())
    return kept_bytes(lambda: F.cross_entropy(model(images), labels), owned) / 1e6


def growth(
    model: nn.Module, way: str, images: Tensor, labels: Tensor, settings: Settings
) -> tuple[list[float], int]:
    """MB that stay allocated after each step while all kept values live, and nodes of the last."""
    kept: list[Any] = []

    def step() -> None:
        with torch.set_grad_enabled(way != NO_GRAD):
            loss = F.cross_entropy(model(images), labels)
            kept.append(WAYS[way](loss))
        model.zero_grad()

    step()  # kernels and workspaces
    kept.clear()
    gc.collect()
    growths = [most_allocated(step, settings.device)[1] / 1e6 for _ in range(sizes(settings).steps)]
    return growths, nodes_of(kept[-1])


def _runs(settings: Settings) -> Iterator[Run]:
    batch, pixels, width, _ = sizes(settings)
    images, labels = random_batch(settings, batch, pixels)
    for who in (TORCH, OURS):
        model = small_resnet(settings, width)
        if who == OURS:
            fusedtrain.convert(model)
        graph = _graph_megabytes(model, images, labels)
        for way in WAYS:
            growths, nodes = growth(model, way, images, labels, settings)
            low, high = median_interval(growths)
            yield Run(
                label_of(way, who),
                {
                    "slope": statistics.median(growths),
                    "low": low,
                    "high": high,
                    "graph": graph,
                    "nodes": float(nodes),
                },
            )


def _full_gb(settings: Settings) -> float:
    if settings.device == "cuda":
        return float(torch.cuda.get_device_properties(0).total_memory) / 1e9
    return CPU_GB


def _judge(runs: Mapping[str, Run], settings: Settings) -> Sequence[Verdict]:
    reason = (
        "; backward frees what the graph saved, and small nodes on the host remain, "
        "so that item() and detach() save no memory to speak of here"
    )
    return [
        _judge_way(runs, TRAINED, settings, reason),
        _judge_way(runs, EVALUATED, settings, ""),
        _judge_remedies(runs),
    ]


def _judge_way(runs: Mapping[str, Run], way: str, settings: Settings, reason: str) -> Verdict:
    """Whether memory grows by a graph each step, as the interval of the growths tells."""
    chosen = [run for who in (TORCH, OURS) if (run := runs.get(label_of(way, who))) is not None]
    if not chosen:
        return Verdict(None, "nothing was measured")
    words, shares = [], []
    for run in chosen:
        low, high, graph = (run.numbers[key] for key in ("low", "high", "graph"))
        shares.append((low / graph, high / graph))
        text = (
            f"{run.label}: {run.numbers['slope']:.3f} MB a step ({low:.3f} to {high:.3f}), the "
            f"graph saves {graph:.2f} MB, {run.numbers['nodes']:.0f} nodes live"
        )
        if low > TINY * graph:
            full = _full_gb(settings)
            text += f"; {full:.0f} GB are full after {full * 1e3 / run.numbers['slope']:,.0f} steps"
        words.append(text)
    # A graph may share storages with the input, or save views: 0.8 of it is growth by the graph.
    if all(low > 0.8 for low, _ in shares):
        return Verdict(True, "; ".join(words))
    if all(high < TINY for _, high in shares):
        return Verdict(False, "; ".join(words) + reason)
    return Verdict(None, "; ".join(words) + "; neither nothing nor the graph stays")


def _judge_remedies(runs: Mapping[str, Run]) -> Verdict:
    chosen = [
        run
        for way in (ITEM, DETACHED, NO_GRAD)
        for who in (TORCH, OURS)
        if (run := runs.get(label_of(way, who))) is not None
    ]
    if not chosen:
        return Verdict(None, "nothing was measured")
    most = max(chosen, key=lambda run: run.numbers["high"] / run.numbers["graph"])
    words = (
        f"the most that stays is {1e3 * most.numbers['high']:.2f} KB a step ({most.label}), of a "
        f"graph of {1e3 * most.numbers['graph']:,.0f} KB"
    )
    return Verdict(most.numbers["high"] < TINY * most.numbers["graph"], words)


def _setup(settings: Settings) -> str:
    batch, pixels, width, steps = sizes(settings)
    return (
        f"ResNet-8 ({width} to {4 * width} channels), {batch} random images of {pixels} pixels, "
        f"float32, {steps} steps whose losses go to a list. Growth: bytes of tensors that stay "
        "allocated after a step; gradients are dropped before. Nodes are autograd's, of one loss."
    )


EXPERIMENT = Experiment(
    name="retained_graph",
    title="Losses kept with their graph",
    question="How much memory does a list of losses cost if nobody calls item() or detach()?",
    setup=_setup,
    columns={
        "slope": Column("MB more a step", 4),
        "low": Column("at least", 4),
        "high": Column("at most", 4),
        "graph": Column("MB that the graph saves", 2),
        "nodes": Column("nodes kept a step", 0),
    },
    claims=(
        Claim(
            "A loss kept after backward (total_loss += loss) keeps its graph: memory grows until "
            "it is exhausted.",
            "PyTorch FAQ, 'My model reports cuda runtime error(2): out of memory'; no number",
        ),
        Claim(
            "A loss kept without backward, as in validation without no_grad, keeps its graph: "
            "memory grows by the graph each step.",
            "guides to PyTorch; no number, no device",
        ),
        Claim(
            "loss.item(), loss.detach() and torch.no_grad() end the growth.",
            "PyTorch FAQ; no number, no device",
        ),
    ),
    runs=_runs,
    judge=_judge,
)
