"""What torch.fx.symbolic_trace, and with it feature extraction and quantisation, sees.

A function of this package is one call of it. A module of this package is one call of it wherever
the tracer has one call of torch's own modules, so that modes and names are those of torch. What
`convert` has rewritten is traced as it was before: who makes a graph takes values out of it by the
names of modules, so no module may do the work of another there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import handle_torch_function

from ._records import record_of
from ._rewritten import passes_on, rewritten_of

_NN = f"{__package__}.nn."
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def path_of(tracer: Any, module: nn.Module) -> str | None:
    """Where a graph can call the module, whose forward is under way; None where it cannot.

    Hooks run while the forward is traced: a call in the graph would run them once more.
    """
    if not isinstance(tracer, fx.Tracer) or module is tracer.root:
        return None
    if any(getattr(module, hooks) for hooks in _HOOKS):
        return None
    if "forward" in vars(module) and not passes_on(module):
        return None
    try:
        return tracer.path_of_module(module)
    except NameError:  # not a part of the root
        return None


def handle(function: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> Any:
    """As torch.overrides.handle_torch_function, called by `function` itself.

    Where torch.fx traces the forward of a module of this package that calls `function`, the graph
    gets a call of that module instead.
    """
    proxy = next((t for t in tensors if isinstance(t, fx.Proxy)), None)
    called = None if proxy is None else _module_call(proxy.tracer, sys._getframe(2))
    if proxy is None or called is None:
        return handle_torch_function(function, tensors, *args, **kwargs)
    module, path, given = called
    call = proxy.tracer.create_proxy("call_module", path, given, {})
    if passes_on(module):
        # Under the name of the module, but not by its forward, which hands on its input.
        node: Any = call.node
        node.op, node.target = "call_function", function
        node.args, node.kwargs = proxy.tracer.create_arg(args), proxy.tracer.create_arg(kwargs)
    return call


def _module_call(tracer: Any, frame: FrameType) -> tuple[nn.Module, str, tuple[Any, ...]] | None:
    """The module whose forward a frame is, its path and its arguments, where it is to be one call.

    A subclass with a forward of its own is not: its super().forward() is but a part of it.
    """
    code, names = frame.f_code, frame.f_locals
    module = names.get("self")
    ours = frame.f_globals.get("__name__", "").startswith(_NN)
    if not ours or not isinstance(module, nn.Module):
        return None
    if getattr(type(module).forward, "__code__", None) is not code:
        return None
    path = path_of(tracer, module)
    # Asked of a module of torch in its place: only those are calls by default.
    if path is None or not tracer.is_leaf_module(nn.Identity(), path):
        return None
    return module, path, tuple(names[name] for name in code.co_varnames[1 : code.co_argcount])


def follow(tracer: Any) -> None:
    """Makes a tracer that has come upon a converted module look into whatever works together with
    modules outside of it since `convert`, also where it would call the likes of it as a whole.

    Raises RuntimeError if it has called such a module as a whole already.
    """
    if not isinstance(tracer, fx.Tracer) or "is_leaf_module" in vars(tracer):
        return
    is_leaf: Callable[[nn.Module, str], bool] = tracer.is_leaf_module
    partners = _partners(tracer.root)

    def is_closed(module: nn.Module) -> bool:
        parts = set(module.modules())
        return all(partners.get(part, set()) <= parts for part in parts)

    vars(tracer)["is_leaf_module"] = lambda m, path: is_leaf(m, path) and is_closed(m)
    for node in tracer.graph.nodes:
        if node.op == "call_module" and not is_closed(tracer.root.get_submodule(node.target)):
            raise RuntimeError(
                f"torch.fx: the tracer calls {node.target} as a whole, in which fusedtrain.convert "
                "has moved work from or to the modules around it. Trace before converting, or "
                "fusedtrain.revert first"
            )


def _partners(root: nn.Module) -> dict[nn.Module, set[nn.Module]]:
    """Of each module that gives away or takes over work: those that it does so with."""
    found: dict[nn.Module, set[nn.Module]] = {}
    makers = _makers(root)
    for module in root.modules():
        mine = vars(module)
        if isinstance(module, _BatchNorm) and record_of(module) is not None:
            parts = [mine[kind] for kind in ("act", "drop") if kind in mine]
            mates = found.setdefault(module, set())
            if mine.get("_adds"):
                mates.add(root)  # the sum is in a forward somewhere around it
            if mine.get("overwrite_input"):
                mates.add(makers.get(module, root))
            for part in (part for part in parts if type(part) is not nn.Identity):
                found[module].add(part)
                found.setdefault(part, set()).add(module)
        forward = rewritten_of(module)
        if forward is not None and any(
            path.endswith(":gated") for path in forward.imports.values()
        ):
            for part in filter(passes_on, module.modules()):
                found.setdefault(part, set()).add(module)
    return found


def _makers(root: nn.Module) -> dict[nn.Module, nn.Module]:
    """Modules that are called with the value of another one, as far as containers tell."""
    found: dict[nn.Module, nn.Module] = {}
    for module in root.modules():
        if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
            found.update(zip(list(module)[1:], module))
    return found
