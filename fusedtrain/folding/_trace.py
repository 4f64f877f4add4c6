"""The graph of one forward, by torch.fx; model and generators stay as they were."""

from __future__ import annotations

import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from .._graph.tracer import Proxy

_MUTABLE = (list, dict, set, deque, OrderedDict, defaultdict, Counter)


class GraphTracer(fx.Tracer):
    __module__ = "fusedtrain.folding"  # the name in pickles

    # Buffers show as nodes, and a forward that updates one in place updates nothing here.
    proxy_buffer_attributes = True
    sees_conversions = True  # forwards as they run, not as they were before `convert`

    def __init__(self, is_leaf: Callable[[nn.Module], bool] = lambda _: True) -> None:
        super().__init__()
        self._is_leaf = is_leaf

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return self._is_leaf(m)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return Proxy(node, self)  # which records `x += y` for what it is


@dataclass
class Trace:
    """The graph of one module's forward."""

    root: nn.Module
    graph: fx.Graph

    def module_of(self, node: object) -> nn.Module | None:
        """What a node calls, where that is a module."""
        if not isinstance(node, fx.Node) or node.op != "call_module":
            return None
        return self.root.get_submodule(str(node.target))

    def tensors(self) -> Iterator[tuple[fx.Node, torch.Tensor]]:
        """The nodes that read a parameter or buffer, and that."""
        for node in self.graph.nodes:
            if node.op != "get_attr":
                continue
            value: Any = self.root
            for name in str(node.target).split("."):
                value = getattr(value, name, None)
            if isinstance(value, torch.Tensor):
                yield node, value


@contextmanager
def same_generators(seed: int | None = None) -> Iterator[None]:
    """Gives the generators of torch, Python and numpy their states back; `seed`: seeds them."""
    numpy: Any = sys.modules.get("numpy")
    state, other = random.getstate(), None if numpy is None else numpy.random.get_state()
    # Asking for the state of a GPU would start CUDA, after which no process may be forked.
    started = torch.cuda.is_initialized()
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count()) if started else ()):
            if seed is not None:
                random.seed(seed)
                torch.default_generator.manual_seed(seed)
                if started:
                    torch.cuda.manual_seed_all(seed)
                if numpy is not None:
                    numpy.random.seed(seed)
            yield
    finally:
        random.setstate(state)
        if numpy is not None:
            numpy.random.set_state(other)


def is_scripted(module: object) -> bool:
    return isinstance(module, torch.jit.ScriptModule)


def scripted_parts(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Name and class of each scripted module that is no part of another."""
    inside: set[int] = set()
    for name, module in model.named_modules():
        if is_scripted(module) and id(module) not in inside:
            inside.update(id(m) for m in module.modules())
            yield name, str(getattr(module, "original_name", type(module).__name__))


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Forwards may store what they compute in a module, which while tracing are no tensors."""
    kept: list[tuple[Any, Any]] = []
    for m in model.modules():
        if is_scripted(m):  # nothing is written there, and its tables cannot be
            continue
        tables: tuple[dict[str, Any], ...] = (vars(m), m._parameters, m._buffers, m._modules)
        for table in tables:
            kept.append((table, dict(table)))
            kept += [(v, v.copy()) for v in table.values() if type(v) in _MUTABLE]
    try:
        yield
    finally:
        for table, entries in kept:
            table.clear()
            (table.extend if isinstance(table, (list, deque)) else table.update)(entries)


def trace(module: nn.Module, is_leaf: Callable[[nn.Module], bool]) -> Trace | str:
    """Its graph, or why there is none."""
    if is_scripted(module):
        return "it is scripted"
    try:
        with unchanged(module), same_generators():
            return Trace(module, GraphTracer(is_leaf).trace(module))
    except Exception as error:  # whatever a forward makes of what is no tensor
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"


def input_of(node: fx.Node) -> object:
    """The first argument of a call of a module or function."""
    if node.args:
        return node.args[0]
    return node.kwargs.get("input", node.kwargs.get("x"))
