"""Converted models in torch.export and torch.compile: equal numbers, the keys of the stock model,
and no more compilations than of the stock model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import fusedtrain
import fusedtrain.nn as fnn


class Net(nn.Module):
    """Norm, sum and activation; squeeze-and-excitation; a gate; a formula."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.conv, self.second = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.act, self.pool = nn.ReLU(inplace=True), nn.MaxPool2d(2)
        self.excite = nn.Conv2d(8, 8, 1)
        self.gate, self.up, self.down = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.first(self.stem(x)))
        x = self.pool(self.act(self.second(self.conv(x)) + x))
        x = x * torch.sigmoid(self.excite(x.mean((2, 3), keepdim=True)))
        x = x.mean((2, 3))
        x = self.down(F.silu(self.gate(x)) * self.up(x))
        return x * torch.sigmoid(x)


def pair() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    stock = Net().double()
    converted = copy.deepcopy(stock)
    report = fusedtrain.convert(converted, lambda: images(2))
    assert [len(report.norms), len(report.products), len(report.calls)] == [2, 2, 2]
    return stock, converted


def images(samples: int) -> Tensor:
    generator = torch.Generator().manual_seed(samples)
    return torch.randn(samples, 3, 10, 10, generator=generator, dtype=torch.float64)


def step(run: Any, model: nn.Module, x: Tensor) -> list[Tensor]:
    """Output, gradients and buffers of a training step."""
    model.zero_grad()
    y = run(x)
    y.square().sum().backward()
    return [y.detach(), *(p.grad for p in model.parameters()), *map(Tensor.clone, model.buffers())]


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("strict", [False, True], ids=["not strict", "strict"])
def test_export(strict: bool, training: bool) -> None:
    stock, converted = pair()
    for model in (stock, converted):
        step(model, model, images(4))  # statistics of a batch
        model.train(training)
    sizes = ({0: torch.export.Dim("batch", min=2, max=64)},)
    program = torch.export.export(converted, (images(3),), dynamic_shapes=sizes, strict=strict)
    assert "fusedtrain" not in str(program.graph)
    assert set(program.state_dict) == set(stock.state_dict())
    exported = program.module()
    torch.testing.assert_close(exported(images(5)), stock(images(5)))
    # In training mode the exported graph updates its statistics.
    state, expected = exported.state_dict(), stock.state_dict()
    assert {name for name, _ in stock.named_parameters()} <= set(state)
    for name in state:  # strict export drops buffers that the graph does not read
        torch.testing.assert_close(state[name], expected[name])


def test_several_ranks_are_not_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = fnn.SyncBatchNormAct(3)
    x = torch.randn(4, 3, 2, 2)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 0)
    with pytest.raises(RuntimeError, match=r"call model.eval\(\) before the export"):
        torch.export.export(norm, (x,), strict=False)
    with pytest.raises(RuntimeError, match=r"call model.eval\(\) before the export"):
        torch.jit.trace(norm, (x,))
    norm.eval()
    torch.testing.assert_close(torch.export.export(norm, (x,)).module()(x), norm(x))


def test_the_compilers_of_torch_2_10_and_2_11(monkeypatch: pytest.MonkeyPatch) -> None:
    """There, is_exporting() is true in all that is compiled, and no graph asks for autocast."""
    asks = torch.compiler.disable(torch.amp.is_autocast_available)
    monkeypatch.setattr(torch.amp, "is_autocast_available", asks)
    monkeypatch.setattr(
        torch.compiler, "is_exporting", lambda: torch.compiler.is_dynamo_compiling()
    )
    targets: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    def function(x: Tensor, weight: Tensor) -> Tensor:
        x = fusedtrain.functional.prelu(x, weight)
        return fusedtrain.functional.batch_norm_act(x, None, None, training=True)

    torch._dynamo.reset()
    x, weight = torch.randn(4, 3), torch.rand(3)
    compiled = torch.compile(function, backend=backend, fullgraph=True)(x, weight)
    torch.testing.assert_close(compiled, function(x, weight))
    if x.is_cpu:  # elsewhere plain torch is compiled
        assert any("fusedtrain.batch_norm_act" in target for target in targets)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dynamic", "compilations"),
    [(False, 4), (None, 2), (True, 2)],  # those of the stock model
    ids=["static", "auto", "dynamic"],
)
def test_compilations(dynamic: bool | None, compilations: int) -> None:
    """Four sizes of a batch, each twice; then evaluation, which is one graph more."""
    results, counts = [], []
    for model in pair():
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=dynamic)
        outputs = [step(compiled, model, images(n)) for n in (4, 6, 8, 10) for _ in range(2)]
        counts.append(counter.frame_count)
        model.eval()
        with torch.no_grad():
            outputs.append([compiled(images(10)) for _ in range(3)])
        assert counter.frame_count == counts[-1] + 1
        results.append(outputs)
    assert counts == [compilations, compilations]
    torch.testing.assert_close(results[1], results[0])


def test_training_does_not_compile_again() -> None:
    """Changes during training: the learning rate, running statistics, train and eval in turn."""
    _, model = pair()
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    optimizer = fusedtrain.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for epoch in range(4):
        optimizer.param_groups[0]["lr"] = 0.1 / (epoch + 1)
        model.train()
        for _ in range(2):
            optimizer.zero_grad()
            loss = (compiled(images(4)) - 1).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            compiled(images(4))
    assert counter.frame_count == 2
    assert losses[-1] < losses[0]
