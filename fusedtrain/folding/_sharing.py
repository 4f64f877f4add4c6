"""Other users of a convolution before its norm: ties, shared memory, code that reads or calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._graph.flow import Flow
from .._graph.functions import functions_of
from .._graph.hooks import HOOKS
from .._graph.modules import attribute_of, is_scripted
from .._graph.report import shown
from ._code import WHOLE, Mention, environment, mentions, resolve
from ._links import Link

_KEYS = {"weight", "bias", "running_mean", "running_var"}
_OWN = ("forward", "_conv_forward", "reset_parameters")
# Libraries whose norms are known.
_LIBRARIES = ("fusedtrain.", "timm.", "torchvision.")
# They make a module, or a text of it.
_UNSEEN = ("__init__", "__repr__", "extra_repr", "__getstate__", "__setstate__")


@dataclass
class _Place:
    name: str
    owner: nn.Module
    key: str
    tensor: Tensor


@dataclass
class _Code:
    """A function. `runs`: a call of its module's forward may come here; `seen`: and is traced."""

    where: str
    scope: nn.Module
    names: dict[str, Any]
    mentions: tuple[Mention, ...]
    runs: bool
    seen: bool
    internal: bool  # part of what a convolution or norm is


def _span(tensor: Tensor) -> tuple[int, int] | None:
    """The addresses of its elements; None where there are none."""
    try:
        start = tensor.data_ptr()
    except (RuntimeError, NotImplementedError):
        return None
    if not start or not tensor.numel() or tensor.layout is not torch.strided:
        return None
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def _overlap(a: Tensor, b: Tensor) -> bool:
    if a is b:
        return True
    if a.device != b.device:
        return False
    first, second = _span(a), _span(b)
    if first is None or second is None:
        return False
    return first[0] < second[1] and second[0] < first[1]


def _is_partial(tensor: Tensor) -> bool:
    """Whether its storage holds more than it."""
    span = _span(tensor)
    return span is not None and tensor.untyped_storage().nbytes() > span[1] - span[0]


class Sharing:
    """Answers for the modules of a model, with flows that were made of it."""

    def __init__(self, model: nn.Module, flows: Sequence[Flow]) -> None:
        self.model, self.flows = model, flows
        self.places = list(_places(model))
        self._resolve_all()
        self.reads = [
            (flow.name(trace.module), attribute_of(trace.module, str(node.target)))
            for flow in flows
            for trace in flow.traces
            for graph in trace.graphs
            for node in graph.nodes
            if node.op == "get_attr"
        ]

    def tied(self, owner: nn.Module, key: str) -> str:
        """Reason why others see a write to a tensor, or ''."""
        tensor = getattr(owner, key, None)
        if not isinstance(tensor, Tensor):
            return ""
        for place in self.places:
            if place.owner is owner and place.key == key:
                continue
            if place.tensor is tensor:
                return f"its {key} is {place.name}, too"
            if _overlap(place.tensor, tensor):
                return f"its {key} shares memory with {place.name}"
        if _is_partial(tensor):
            return f"its {key} is a view of a larger storage, which others may see"
        if tensor.is_inference():
            return f"its {key} was made in inference mode"
        hooks = ("_backward_hooks", "_post_accumulate_grad_hooks")
        if tensor.requires_grad and any(getattr(tensor, name, None) for name in hooks):
            return f"its {key} has a hook"
        return ""

    def other_norms(self, norm: nn.Module, key: str) -> Iterator[nn.Module]:
        """Modules with the same buffer."""
        tensor = getattr(norm, key, None)
        if isinstance(tensor, Tensor):
            for place in self.places:
                if place.owner is not norm and _overlap(place.tensor, tensor):
                    yield place.owner

    def read(self, owner: nn.Module, *keys: str, running: bool = False) -> str:
        """A reader of a parameter or buffer of `owner`, in words; '' where there is none.

        `running`: of code that names no module of the model, only what a forward runs counts.
        """
        for key in keys:
            tensor = getattr(owner, key, None)
            if not isinstance(tensor, Tensor):
                continue
            for where, other in self.reads:
                if other is tensor:
                    return f"its {key} is read by the forward of {where}"
            for code in self._readers(owner, key, tensor, running):
                if not (code.internal and code.scope is owner):
                    return f"its {key} is read by {code.where}"
        return ""

    def _readers(
        self, owner: nn.Module, key: str, tensor: Tensor, running: bool
    ) -> Iterator[_Code]:
        yield from self._tensors.get(id(tensor), [])
        for code, within in self._whole:
            if code.runs and any(m is owner for m in within.modules()):
                yield code
        for code, within in self._unknown.get(key, []):
            if not (running and not code.runs) and any(m is owner for m in within.modules()):
                yield code

    def _resolve_all(self) -> None:
        """Resolves the mentions in the code and sorts them by their kind."""
        # Calls and values of modules in code that was not traced.
        self._modules: dict[int, list[tuple[_Code, Mention, bool]]] = {}
        self._tensors: dict[int, list[_Code]] = {}
        self._whole: list[tuple[_Code, nn.Module]] = []  # .parameters() and the like
        # Names of parameters of some module within this one.
        self._unknown: dict[str, list[tuple[_Code, nn.Module]]] = {}
        for code in self._code():
            for mention in code.mentions:
                value, rest = resolve(code.names, mention.chain)
                is_module = isinstance(value, nn.Module)
                if is_module and rest in ((), ("forward",)):
                    if not code.seen:
                        uses = self._modules.setdefault(id(value), [])
                        uses.append((code, mention, bool(rest)))
                elif mention.harmless:
                    continue
                elif isinstance(value, Tensor):
                    self._tensors.setdefault(id(value), []).append(code)
                elif is_module and rest[0] in WHOLE:
                    self._whole.append((code, value))
                elif not code.seen and not (is_module and len(rest) < 2):
                    for key in _KEYS.intersection(rest):
                        within = value if is_module else code.scope
                        self._unknown.setdefault(str(key), []).append((code, within))

    def called(self, link: Link) -> str:
        """A caller of one of both without the other; '' where there is none."""
        parts = [m for m in (link.conv, link.norm) if m is not None]
        groups = [parts[::-1] if link.norm_first else parts, *([m] for m in link.levels)]
        return next(filter(None, map(self.called_apart, groups)), "")

    def called_apart(self, parts: Sequence[nn.Module]) -> str:
        """Code that calls one of these modules, but not each with the output of the one before.

        For traced code, the graph knows the calls.
        """
        for place, part in enumerate(parts):
            name = self.flows[0].name(part)
            for code, mention, forward in self._modules.get(id(part), []):
                if code.scope is part:  # its own methods
                    continue
                if not mention.called:
                    if code.runs and not mention.harmless:
                        return f"{code.where} hands {name} on"
                    continue
                separate = forward or len(parts) == 1
                for chain, other in ((mention.source, place - 1), (mention.sink, place + 1)):
                    if 0 <= other < len(parts):
                        met = None if chain is None else resolve(code.names, chain)
                        separate |= met is None or met[0] is not parts[other] or bool(met[1])
                if separate:
                    return f"{code.where} calls {name}, too"
        return next(filter(None, map(self._elsewhere, parts)), "")

    def _elsewhere(self, module: nn.Module) -> str:
        """Untraced module to which a module belongs besides another one, in words; or ''."""
        parents = [p for p in self.model.modules() if any(c is module for c in p._modules.values())]
        for parent in parents if len(parents) > 1 else []:
            if is_scripted(parent) or any(id(parent) in flow.failed for flow in self.flows):
                where = shown(self.flows[0].names[id(parent)])
                return f"{self.flows[0].name(module)} is a part of {where}, too"
        return ""

    def _code(self) -> Iterator[_Code]:
        traced = {id(trace.module) for flow in self.flows for trace in flow.traces}
        failed = {key for flow in self.flows for key in flow.failed}
        for name, module in self.model.named_modules():
            if is_scripted(module):
                continue
            methods = list(_methods(module))
            runs = _reached(methods)
            for key, function, owner in methods:
                where = f"{type(module).__name__}.{key}"
                reached = function in runs
                yield _Code(
                    where,
                    module,
                    environment(function, owner),
                    mentions(function.__code__),
                    reached,
                    reached and id(module) in traced - failed,
                    key in _OWN or function.__module__.startswith(_LIBRARIES),
                )
            for table in HOOKS:
                for hook in getattr(module, table, {}).values():
                    owner = getattr(hook, "__self__", module)
                    where = f"a hook of {shown(name)}"
                    for function in functions_of(hook):
                        if not function.__module__.startswith("torch."):
                            known = environment(function, owner)
                            mentioned = mentions(function.__code__)
                            yield _Code(where, self.model, known, mentioned, True, False, False)


def _places(model: nn.Module) -> Iterator[_Place]:
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        tables = ("_parameters", "_buffers")
        items = [(k, t) for table in tables for k, t in getattr(module, table).items()]
        if not is_scripted(module):
            for key, value in vars(module).items():
                if key in tables or key == "_modules":
                    continue
                inside = value.values() if isinstance(value, dict) else value
                several = isinstance(value, (dict, list, tuple, set))
                items += [(key, v) for v in (inside if several else (value,))]
        for key, tensor in items:
            if isinstance(tensor, Tensor):
                yield _Place(prefix + key, module, key, tensor)


class _Method(NamedTuple):
    """`owner` is what the first argument of the function is; None: anything."""

    name: str
    function: FunctionType
    owner: Any


def _methods(module: nn.Module) -> Iterator[_Method]:
    """The methods that somebody wrote for it, with the decorators around them."""
    taken: set[str] = set()
    for cls in type(module).__mro__:
        if cls.__module__.partition(".")[0] in ("torch", "builtins", "abc", "typing"):
            continue
        for key, value in vars(cls).items():
            functions = functions_of(value)
            if not functions or key in _UNSEEN:
                continue
            name = key if key not in taken else f"{cls.__name__}.{key}"
            taken.add(key)
            owner = None if isinstance(value, staticmethod) else module
            yield from (_Method(name, function, owner) for function in functions)
    for key, value in vars(module).items():
        inside = list(value.values()) if isinstance(value, dict) else value
        for one in inside if isinstance(inside, (list, tuple)) else [value]:
            for function in functions_of(one) if not key.startswith("_") else []:
                yield _Method(f"{key} (of the instance)", function, getattr(one, "__self__", None))


def _reached(methods: Sequence[_Method]) -> set[FunctionType]:
    """Functions of the methods that a module's forward calls, or that such methods call."""
    pending = [m for m in methods if m.name.rpartition(".")[2] == "forward" or "(of" in m.name]
    reached: set[FunctionType] = set()
    while pending:
        _, function, _ = pending.pop()
        if function in reached:
            continue
        reached.add(function)
        used = {key for mention in mentions(function.__code__) for key in mention.chain.path}
        pending += [m for m in methods if m.name.rpartition(".")[2] in used]
    return reached
