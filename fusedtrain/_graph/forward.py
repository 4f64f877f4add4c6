"""Another forward for one module, kept in its `__dict__`, which is as good as the one of its class.

It survives deepcopy and pickle, torch.compile and torch.export trace it, and to TorchScript,
inspect and torch.fx it shows the forward of the class.
"""

from __future__ import annotations

import importlib
import linecache
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from .._recompute import recompute
from .._torch_private import BatchNormBase, is_fx_tracing
from .absorbed import HOOKING, NOTE, warning_method, watch_replacements
from .modules import attribute_of, is_scripted
from .records import record_of, unassign


def _template(replacement: Any, *args: Any, **kwargs: Any) -> Any:
    return replacement.run(*args, **kwargs)


def _of_class(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(module).forward(module, *args, **kwargs)


def _same(module: nn.Module, input: Tensor) -> Tensor:
    return input


def _proxy_in(values: Any) -> fx.Proxy | None:
    """A proxy of torch.fx among values, in lists and dicts, too."""
    if isinstance(values, fx.Proxy):
        return values
    if isinstance(values, dict):
        values = list(values.values())
    if not isinstance(values, (tuple, list)):
        return None
    return next((p for p in map(_proxy_in, values) if p is not None), None)


class Replacement:
    """The other forward: `run` is what it does. `install` puts it into its module."""

    _module: Callable[[], nn.Module | None]
    run: Callable[..., Any]
    others: tuple[str, ...] = ()  # methods that take the place of the module's, besides forward
    obstacle = "its forward is patched"  # why others leave the module

    @property
    def forward(self) -> types.MethodType:
        # pickle asks for this attribute of this object; TorchScript for the source and globals.
        module = self._module()
        if module is None:  # a pickle with circles is being read
            return types.MethodType(_template, self)
        original: Any = getattr(type(module), "forward")  # noqa: B009 (it may be None)
        function = types.FunctionType(_template.__code__, original.__globals__, "forward")
        function.__wrapped__ = original  # type: ignore[attr-defined]
        return types.MethodType(function, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Older pickles have the object itself in the place of its method."""
        return self.run(*args, **kwargs)


class Rewritten(Replacement):
    """A forward from source. The module is not kept alive by it.

    `source` is a function named "forward", `imports` what the names in it stand for, written as
    "module:qualified.name": so that pickle needs no function that cannot be imported. Without a
    source it is the forward of the class. `recomputes`: it runs within `fusedtrain.recompute`.
    `frozen`: attributes, by their paths, whose values the source was made with.
    """

    __module__ = "fusedtrain.conversion"  # the name in pickles

    def __init__(
        self,
        module: nn.Module,
        source: str = "",
        imports: Mapping[str, str] | None = None,
        recomputes: bool = False,
        frozen: Mapping[str, Any] | None = None,
    ) -> None:
        state = {"module": module, "source": source, "recomputes": recomputes}
        self.__setstate__(state | {"imports": dict(imports or {}), "frozen": dict(frozen or {})})

    def __getstate__(self) -> dict[str, Any]:
        names = ("source", "imports", "recomputes", "frozen")
        return {"module": self._module()} | {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._module = weakref.ref(state["module"])
        self.source: str = state["source"]
        self.imports: dict[str, str] = state["imports"]
        self.recomputes: bool = state["recomputes"]
        self.frozen: dict[str, Any] = state.get("frozen", {})
        self._function = self._compiled()
        watch_replacements()

    def _compiled(self) -> Callable[..., Any]:
        if not self.source:
            return _of_class
        name = f"<fusedtrain.convert {type(self._module()).__name__} {id(self)}>"
        # As fx does it: tracebacks and torch.compile's messages show the line.
        linecache.cache[name] = (
            len(self.source), None, self.source.splitlines(keepends=True), name,
        )  # fmt: skip
        weakref.finalize(self, linecache.cache.pop, name, None)
        names = {name: resolve(path) for name, path in self.imports.items()}
        exec(compile(self.source, name, "exec"), names)
        function: Callable[..., Any] = names["forward"]
        return function

    def run(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self._module()
        if is_fx_tracing() and self._is_traced(args, kwargs):
            return _of_class(module, *args, **kwargs)
        for path, value in self.frozen.items():
            now = attribute_of(module, path)
            if now is not value and now != value:
                raise RuntimeError(
                    f"{path} of this {type(module).__name__} was {value!r} when fusedtrain.convert "
                    f"wrote its forward, and is {now!r} now: call fusedtrain.revert, and convert "
                    "once more"
                )
        if self.recomputes and not torch.compiler.is_compiling():
            with recompute():
                return self._function(module, *args, **kwargs)
        return self._function(module, *args, **kwargs)

    def _is_traced(self, *values: Any) -> bool:
        """Whether a tracer follows that shall see the forward of the class."""
        proxy = _proxy_in(values)
        if proxy is None or getattr(proxy.tracer, "sees_conversions", False):
            return False
        follow(proxy.tracer)
        return True


class PassesOn(Rewritten):
    """Of an activation or drop module whose work a batch norm does: hands on its input."""

    __module__ = "fusedtrain.conversion"  # the name in pickles

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)

    hands_on = True
    others = ("extra_repr", *HOOKING)

    def _compiled(self) -> Callable[..., Any]:
        return _same

    def run(self, *args: Any, **kwargs: Any) -> Any:
        # A network has a hundred such calls.
        if len(args) == 1 and not kwargs and not is_fx_tracing():
            return args[0]
        return super().run(*args, **kwargs)

    def extra_repr(self) -> str:
        module: Any = self._module()
        text = type(module).extra_repr(module)
        return f"{text}, {NOTE}" if text else NOTE


for _name in HOOKING:
    setattr(PassesOn, _name, warning_method(_name))


def install(replacement: Replacement) -> None:
    module = replacement._module()
    assert module is not None
    vars(module)["forward"] = replacement.forward
    vars(module).update({name: getattr(replacement, name) for name in replacement.others})


def obstacle_of(module: nn.Module) -> str:
    """Why a module whose forward is another than that of its class stays as it is; mostly ''."""
    if "forward" not in vars(module):
        return ""
    replacement = replacement_of(module)
    return Replacement.obstacle if replacement is None else replacement.obstacle


def replacement_of(module: nn.Module) -> Replacement | None:
    held = vars(module).get("forward")
    owner = getattr(held, "__self__", held)
    return owner if isinstance(owner, Replacement) else None


def rewritten_of(module: nn.Module) -> Rewritten | None:
    replacement = replacement_of(module)
    return replacement if isinstance(replacement, Rewritten) else None


def has_foreign_forward(module: nn.Module) -> bool:
    """Whether something else has replaced the forward of its class."""
    return is_scripted(module) or ("forward" in vars(module) and rewritten_of(module) is None)


def passes_on(module: nn.Module) -> bool:
    return isinstance(rewritten_of(module), PassesOn)


def remove(module: nn.Module) -> bool:
    """Whether there was one."""
    rewritten = rewritten_of(module)
    if rewritten is None:
        return False
    for name in ("forward", *rewritten.others):
        vars(module).pop(name, None)  # pickles of older versions have the forward alone
    return True


def restore(module: nn.Module) -> bool:
    """Takes back class, attributes and forward; whether there was anything to take back."""
    rewritten = remove(module)
    return unassign(module) or rewritten


def is_changed(module: nn.Module) -> bool:
    return record_of(module) is not None or rewritten_of(module) is not None


def set_recomputing(module: nn.Module, wanted: bool) -> None:
    """Whether a model's forward, rewritten or not, runs within `fusedtrain.recompute`."""
    now = rewritten_of(module)
    if (now is not None and now.recomputes) == wanted or passes_on(module):
        return
    if wanted or (now is not None and now.source):
        state = ("", {}, {}) if now is None else (now.source, now.imports, now.frozen)
        install(Rewritten(module, *state[:2], wanted, state[2]))
    else:
        remove(module)


def resolve(path: str) -> Any:
    """The object behind a name of `imports`."""
    module, _, qualified = path.partition(":")
    value = importlib.import_module(module)
    for part in filter(None, qualified.split(".")):
        value = getattr(value, part)
    return value


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
    """Maps each module that gives away or takes over work to the modules it does so with."""
    partners: dict[nn.Module, set[nn.Module]] = {}
    makers = _makers(root)
    for module in root.modules():
        mine = vars(module)
        if isinstance(module, BatchNormBase) and record_of(module) is not None:
            parts = [mine[kind] for kind in ("act", "drop") if kind in mine]
            mates = partners.setdefault(module, set())
            if mine.get("_adds"):
                mates.add(root)  # the sum is in a forward somewhere around it
            if mine.get("overwrite_input"):
                mates.add(makers.get(module, root))
            for part in (part for part in parts if type(part) is not nn.Identity):
                partners[module].add(part)
                partners.setdefault(part, set()).add(module)
        forward = rewritten_of(module)
        if forward is not None and any(
            path.endswith((":gated", ":gated_formula")) for path in forward.imports.values()
        ):
            for part in filter(passes_on, module.modules()):
                partners.setdefault(part, set()).add(module)
    return partners


def _makers(root: nn.Module) -> dict[nn.Module, nn.Module]:
    """Maps a module to the one whose output it is called with, as far as containers show."""
    makers: dict[nn.Module, nn.Module] = {}
    for module in root.modules():
        if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
            makers.update(zip(list(module)[1:], module))
    return makers
