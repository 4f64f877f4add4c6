"""New modules in the places of old ones, and modules with a changed forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx, nn

from .._graph.flow import Trace
from .._graph.hooks import is_hooked
from .._graph.modules import attribute_of, has_own_forward
from .._graph.tracer import Tracer


class GraphTracer(Tracer):
    """Traces the code of a rewritten module when that is loaded from a pickle."""

    __module__ = "fusedtrain.folding"  # the name in pickles


def replace(model: nn.Module, swapped: Mapping[int, nn.Module]) -> nn.Module:
    """Puts the module of each id where that one was, at all its places; returns the root."""
    if not swapped:
        return model
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if child is not None and id(child) in swapped:
                module._modules[name] = swapped[id(child)]
    return swapped.get(id(model), model)


def obstacle(trace: Trace) -> str:
    """Reason why a module cannot be given the forward of its graph, or ''."""
    if is_hooked(trace.module) or has_own_forward(trace.module):
        return "the module around it has hooks or a patched forward"
    if trace.inexact:
        return f"the module around it: {trace.inexact}"
    for node in trace.graphs[0].nodes:
        if node.op == "get_attr" and attribute_of(trace.module, str(node.target)) is None:
            return "the forward around it makes tensors"
    return ""


def rewritten(trace: Trace) -> nn.Module:
    """The module of a changed graph, with the parameters and children that it still uses."""
    graph = fx.Graph(tracer_cls=GraphTracer)
    graph.output(graph.graph_copy(trace.graphs[0], {}))
    for node in reversed(list(graph.nodes)):
        if node.op == "get_attr" and not node.users:
            graph.erase_node(node)
        # Some annotations are strings (PEP 563), which a graph module cannot pickle.
        node.type = None
    graph.lint()
    module = fx.GraphModule(trace.module, graph, type(trace.module).__name__)
    module.training = trace.module.training
    return module


def rewrite_all(model: nn.Module, traces: Sequence[Trace]) -> nn.Module:
    """Installs the forward of each changed graph; returns the root."""
    places = {id(module): i for i, module in enumerate(model.modules())}
    # Children first: a parent's graph module takes over the children that it finds.
    for trace in sorted(traces, key=lambda t: -places[id(t.module)]):
        model = replace(model, {id(trace.module): rewritten(trace)})
    return model
