"""Counters of operations see in a folded or converted model what they see in the stock one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import fusedtrain
from helpers.folding import waken


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()
        self.up, self.up_norm = nn.ConvTranspose2d(4, 4, 2), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.up_norm(self.up(self.act(self.norm(self.conv(x)) + x)))


def network() -> nn.Module:
    depthwise = nn.Conv2d(4, 4, 3, padding=1, groups=4)
    stem = (nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.SiLU(), depthwise)
    head = (nn.Conv2d(4, 2, 1), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(98, 5))
    return waken(nn.Sequential(*stem, Residual(), *head))


def folded(model: nn.Module) -> nn.Module:
    result, report = fusedtrain.fold_conv_bn(model)
    assert (len(report), len(report.fused)) == (4, 2)
    return result


def tuned(model: nn.Module) -> nn.Module:
    assert len(fusedtrain.fold_frozen_norms(model)) == 4
    return model


def converted(model: nn.Module) -> nn.Module:
    assert "DepthwiseConv2d" in str(fusedtrain.convert(model))
    return model


def image() -> Tensor:
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def by_mode(model: nn.Module) -> Any:
    """Counts operators, as torch.utils.flop_counter and ptflops count."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(image())
    return counter.get_flop_counts()["Global"]


def by_patches(model: nn.Module) -> Any:
    """Counts calls of torch.nn.functional's functions, as DeepSpeed's profiler does."""
    calls: Counter[str] = Counter()

    def counted(name: str, stock: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            calls[name] += 1
            return stock(*args, **options)

        return call

    with pytest.MonkeyPatch.context() as patches, torch.no_grad():
        for name in ("conv2d", "conv_transpose2d", "linear", "relu", "silu"):
            patches.setattr(F, name, counted(name, getattr(F, name)))
        model(image())
    return calls


def by_trace(model: nn.Module) -> Any:
    """Counts operators of a traced graph, as fvcore does."""
    with torch.no_grad():
        graph = torch.jit.trace(model, image(), check_trace=False).inlined_graph
    kinds = Counter(node.kind() for node in graph.nodes())
    return kinds["aten::_convolution"], kinds["aten::linear"]


@pytest.mark.parametrize("change", [folded, tuned, converted])
@pytest.mark.parametrize("count", [by_mode, by_patches, by_trace])
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_counts(
    change: Callable[[nn.Module], nn.Module], count: Callable[[nn.Module], Any]
) -> None:
    """A folded model had 11,176 of 49,032 operations: `_convolution_pointwise` has no formula."""
    model = network()
    expected = count(model)
    assert expected
    counted = count(change(model))
    if change is converted and count is by_patches:  # activations are calls of fusedtrain
        expected = {name: number for name, number in expected.items() if "conv" in name}
        counted = {name: number for name, number in counted.items() if "conv" in name}
    assert counted == expected


def test_nobody_watches() -> None:
    """The test above would see nothing if the fused operator never ran."""
    folds = folded(network())
    with torch.no_grad(), torch.profiler.profile() as profiler:
        folds(image())
    names = {event.key for event in profiler.key_averages()}
    assert "mkldnn::_convolution_pointwise" in names
