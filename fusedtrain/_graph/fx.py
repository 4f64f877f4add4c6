"""Models as torch.fx.symbolic_trace, and with it feature extraction and quantisation, sees them.

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
from torch.overrides import handle_torch_function

from .._torch_private import BatchNormBase
from .forward import record_of
from .hooks import is_hooked
from .modules import has_own_forward

_NN = "fusedtrain.nn."


def path_of(tracer: Any, module: nn.Module) -> str | None:
    """Path by which a graph can call the module, whose forward is under way; None without one.

    Hooks run while the forward is traced: a call in the graph would run them once more.
    """
    if not isinstance(tracer, fx.Tracer) or module is tracer.root:
        return None
    if is_hooked(module):
        return None
    if has_own_forward(module):
        return None
    try:
        return tracer.path_of_module(module)
    except NameError:  # not a part of the root
        return None


def handle(function: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> Any:
    """torch.overrides.handle_torch_function, called by `function` itself.

    Where torch.fx traces the forward of a module of this package that calls `function`, the graph
    gets a call of that module instead.
    """
    proxy = next((t for t in tensors if isinstance(t, fx.Proxy)), None)
    called = None if proxy is None else _module_call(proxy.tracer, sys._getframe(2))
    if proxy is None or called is None:
        return handle_torch_function(function, tensors, *args, **kwargs)
    path, arguments = called
    return proxy.tracer.create_proxy("call_module", path, arguments, {})


def module_call(input: fx.Proxy) -> fx.Proxy | None:
    """The call of the module whose forward calls this, where the graph is to have one: asked before
    the forward reads parameters, of which the graph would get nodes."""
    frame = sys._getframe(1)
    called = _module_call(input.tracer, frame)
    return None if called is None else input.tracer.create_proxy("call_module", *called, {})


def _module_call(tracer: Any, frame: FrameType) -> tuple[str, tuple[Any, ...]] | None:
    """Path and arguments of the module whose forward a frame is, where it is to be one call.

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
    if path is None or not tracer.is_leaf_module(_in_its_place(module), path):
        return None
    return path, tuple(names[name] for name in code.co_varnames[1 : code.co_argcount])


def _in_its_place(module: nn.Module) -> nn.Module:
    """A module of torch, of which a tracer makes one call by default; or of the class that an
    activation had before `convert`: a tracer looks into timm's."""
    record = record_of(module)
    if record is None or isinstance(module, BatchNormBase):
        return nn.Identity()
    stock: nn.Module = object.__new__(record.original)
    vars(stock).update(vars(module))
    return stock
