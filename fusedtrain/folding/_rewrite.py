"""New modules in the places of old ones, and modules with a changed forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx, nn

from .._graph.modules import is_hooked
from ._trace import Trace


def replace(model: nn.Module, swapped: Mapping[int, nn.Module]) -> nn.Module:
    """Puts the module of each id where that one was, at all its places; gives the root."""
    if not swapped:
        return model
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if child is not None and id(child) in swapped:
                module._modules[name] = swapped[id(child)]
    return swapped.get(id(model), model)


def obstacle(trace: Trace) -> str:
    """Why a module cannot be given the forward of its graph; '' where it can."""
    root = trace.root
    if is_hooked(root) or "forward" in vars(root):
        return "the module around it has hooks or a patched forward"
    for node in trace.graph.nodes:
        # The graph holds for values that the tracer had: it took every argument for a tensor.
        if node.op == "placeholder" and (node.args or str(node.target).startswith("*")):
            return "the forward around it has optional arguments"
    return ""


def rewritten(trace: Trace) -> nn.Module:
    """The module of a changed graph, with the parameters and children that it still uses."""
    for node in reversed(list(trace.graph.nodes)):
        if node.op == "get_attr" and not node.users:
            trace.graph.erase_node(node)
        # Some annotations are strings (PEP 563), which a graph module cannot pickle.
        node.type = None
    trace.graph.lint()
    module = fx.GraphModule(trace.root, trace.graph, type(trace.root).__name__)
    module.training = trace.root.training
    return module


def rewrite_all(model: nn.Module, traces: Sequence[Trace]) -> nn.Module:
    """Gives each module the forward of its changed graph; gives the root."""
    places = {id(module): i for i, module in enumerate(model.modules())}
    # Children first: a parent's graph module takes over the children that it finds.
    for trace in sorted(traces, key=lambda t: -places[id(t.root)]):
        model = replace(model, {id(trace.root): rewritten(trace)})
    return model
