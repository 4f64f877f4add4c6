"""One method of nn.Module does the work of torch.fx's two: fusedtrain/_graph/intercept.py."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from fusedtrain import _torch_private
from fusedtrain._graph.intercept import intercepting
from fusedtrain._graph.tracer import Tracer

ATTRIBUTES = ("__call__", "__getattr__", "__getattribute__", "training")


class Block(nn.Module):
    def __init__(self, between: Callable[[], Any] = lambda: None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.ReLU()
        self.scale = nn.Parameter(torch.ones(3))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.between()
        return self.second(x) * self.scale


def traced(module: nn.Module) -> list[str]:
    """Calls and reads in the graph of a forward."""
    tracer = Tracer()
    with intercepting(), tracer.seen:
        return targets(tracer.trace(module))


def targets(graph: fx.Graph) -> list[str]:
    return [str(n.target) for n in graph.nodes if n.op in ("call_module", "get_attr")]


def methods() -> list[Any]:
    return [vars(nn.Module).get(name) for name in ATTRIBUTES]


def test_calls_and_parameters_are_in_the_graph() -> None:
    assert traced(Block()) == ["first", "second", "scale"]


def test_nn_module_is_as_before_also_where_a_forward_raises() -> None:
    before, patcher = methods(), fx._symbolic_trace._Patcher

    def fail() -> None:
        raise RuntimeError("no forward")

    with pytest.raises(RuntimeError, match="no forward"):
        traced(Block(fail))
    assert methods() == before
    assert fx._symbolic_trace._Patcher is patcher
    assert patcher is _torch_private.FxPatcher
    block = Block()
    assert torch.equal(block(torch.ones(2, 3)), block.second(block.first(torch.ones(2, 3))))


def test_a_trace_inside_of_a_forward_is_torch_fxs_own() -> None:
    inner = []

    def trace_another() -> None:
        inner.append(targets(fx.symbolic_trace(nn.Sequential(nn.Tanh(), nn.ReLU())).graph))

    assert traced(Block(trace_another)) == ["first", "second", "scale"]
    assert inner == [["0", "1"]]


def test_a_trace_in_another_thread_is_torch_fxs_own() -> None:
    inner = []

    def trace_another() -> None:
        inner.append(targets(fx.symbolic_trace(nn.Sequential(nn.Tanh(), nn.ReLU())).graph))

    def in_a_thread() -> None:
        thread = threading.Thread(target=trace_another)
        thread.start()
        thread.join()

    assert traced(Block(in_a_thread)) == ["first", "second", "scale"]
    assert inner == [["0", "1"]]


def test_other_threads_calls_are_no_part_of_the_graph() -> None:
    results = []
    other = nn.Sequential(nn.Linear(3, 3), nn.ReLU())

    def call() -> None:
        results.append(other(torch.ones(1, 3)))

    def in_a_thread() -> None:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    assert traced(Block(in_a_thread)) == ["first", "second", "scale"]
    assert torch.equal(results[0], other(torch.ones(1, 3)))
