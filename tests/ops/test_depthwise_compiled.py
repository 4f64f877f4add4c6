"""Depthwise convolutions under torch.compile, torch.export and functorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as T
from torch import Tensor, nn

import fusedtrain
import fusedtrain.functional as F
from fusedtrain import nn as fused

OURS = {1: F.depthwise_conv1d, 2: F.depthwise_conv2d}
# Input, kernel, the arguments behind the bias.
CALLS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "3x3": ((2, 20, 9, 10), (20, 1, 3, 3), {"padding": 1}),
    "5x5 by 2": ((2, 6, 11, 12), (6, 1, 5, 5), {"stride": 2, "padding": 2}),
    "pairs": (
        (2, 4, 9, 12), (8, 1, 2, 4), {"stride": (1, 3), "padding": (0, 2), "dilation": (2, 1)},
    ),
    "1-d": ((2, 6, 40), (6, 1, 31), {"padding": 15}),
}  # fmt: skip


def arguments(name: str, last: bool = False) -> list[Tensor]:
    shape, kernel, _ = CALLS[name]
    generator = torch.Generator().manual_seed(3)
    made = [torch.randn(s, generator=generator) for s in (shape, kernel, kernel[:1])]
    if last and len(shape) == 4:
        made[0] = made[0].contiguous(memory_format=torch.channels_last)
    return made


def graph_of(function: Any, dynamic: bool | None = None) -> tuple[Any, list[str]]:
    """The function under torch.compile with fullgraph=True, and the graphs that Dynamo makes."""
    graphs: list[str] = []

    def backend(graph: Any, example: Any) -> Any:
        graphs.append(str(graph.graph))
        return torch._dynamo.lookup_backend("aot_eager")(graph, example)

    torch._dynamo.reset()
    return torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic), graphs


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("name", ["3x3", "5x5 by 2", "pairs", "1-d"])
def test_one_op_under_compile(name: str, last: bool, dynamic: bool) -> None:
    """Eager's bits, layouts and gradients under autocast and in float32, in one graph."""
    shape, _, rest = CALLS[name]
    function = OURS[len(shape) - 2]
    compiled, graphs = graph_of(lambda *tensors: function(*tensors, **rest), dynamic)
    tensors = [t.requires_grad_() for t in arguments(name, last=last)]
    for autocasts in (True, False):
        for count in (2, 3) if dynamic else (2,):
            kept = torch.channels_last if last and len(shape) == 4 else torch.contiguous_format
            batch = torch.cat([tensors[0].detach()] * count).contiguous(memory_format=kept)
            batch.requires_grad_()
            results = []
            for call in (compiled, lambda *tensors: function(*tensors, **rest)):
                with torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
                    output = call(batch, *tensors[1:])
                grads = torch.autograd.grad(output.float().square().sum(), [batch, *tensors[1:]])
                results.append([output, *grads])
            for one, other in zip(*results, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=0)
                assert one.stride() == other.stride()
    assert all("depthwise_conv_chosen" in graph for graph in graphs)


def test_a_converted_model_keeps_the_op_under_compile() -> None:
    """Its convolution has torch's class; an export shows torch's convolution."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(8, 8, 3, padding=1, groups=8)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x).relu()

    model, x = Net(), torch.randn(2, 8, 9, 9)
    fusedtrain.convert(model, x, memory="recompute")
    compiled, graphs = graph_of(model)
    torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=0)
    assert "depthwise_conv_chosen" in graphs[0]
    model.conv.groups, kernel = 4, torch.randn(8, 2, 3, 3)
    model.conv.weight = nn.Parameter(kernel)
    want = T.conv2d(x, kernel, model.conv.bias, padding=1, groups=4).relu()
    torch.testing.assert_close(model(x), want)
    torch.testing.assert_close(compiled(x), want)
    model.conv.groups, model.conv.weight = 8, nn.Parameter(kernel[:, :1].clone())
    fusedtrain.revert(model)
    torch.testing.assert_close(compiled(x), model(x))
    assert "depthwise_conv_chosen" not in graphs[1]
    fusedtrain.convert(model, x, memory="recompute")
    assert "fusedtrain" not in str(torch.export.export(model, (x,)).graph)


def test_transforms_and_exports_see_torchs_convolution() -> None:
    tensors = arguments("3x3")
    want = T.conv2d(*tensors, padding=1, groups=20)
    module = fused.DepthwiseConv2d(20, 20, 3, padding=1)
    exported = torch.export.export(module, (tensors[0],)).graph
    assert "conv2d" in str(exported)
    assert "fusedtrain" not in str(exported)
    gradients = torch.func.grad(lambda x: F.depthwise_conv2d(x, *tensors[1:], padding=1).sum())
    compiled, graphs = graph_of(gradients)
    torch.testing.assert_close(compiled(tensors[0]), gradients(tensors[0]))
    assert "fusedtrain" not in graphs[0]
    every = torch.vmap(lambda x: F.depthwise_conv2d(x, *tensors[1:], padding=1))(tensors[0])
    torch.testing.assert_close(every, want)
    _, slope = torch.func.jvp(
        lambda x: F.depthwise_conv2d(x, *tensors[1:], padding=1), (tensors[0],), (tensors[0],)
    )
    torch.testing.assert_close(slope, want - tensors[2].view(-1, 1, 1))
    traced = torch.jit.trace(module, (tensors[0],))
    torch.testing.assert_close(traced(tensors[0]), module(tensors[0]))
