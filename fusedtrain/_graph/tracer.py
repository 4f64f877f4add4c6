"""The tracer that :mod:`fusedtrain._graph.flow` runs forwards with, and what it notices besides the
graph: guesses, contexts, values that outlive the forward, forwards that are called by name.
"""

from __future__ import annotations

import ctypes
import dis
import functools
import gc
import operator
import random
import sys
import types
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from .._torch_private import TorchDispatchMode, top_saved_tensors_hooks
from .intercept import Interceptor

CONTEXT, KEPT = "fusedtrain_context", "fusedtrain_kept"  # in the `meta` of nodes
DECISION = operator.truth  # of the nodes where a forward asks a value for its truth
_PLAIN = (dict, list, tuple, torch.Size, fx.immutable_collections.immutable_dict,
          fx.immutable_collections.immutable_list)  # fmt: skip
_MOST_CHOICES = 64
_OPTIONAL = {"grad", "grad_fn", "_base"}  # attributes of a tensor that may be None


@dataclass
class Choices:
    """The answers of one way through a forward: the forced ones, then always the first."""

    forced: tuple[bool, ...] = ()
    made: list[bool] = field(default_factory=list)

    def choose(self, first: bool) -> bool:
        place = len(self.made)
        if place >= _MOST_CHOICES:  # `while not done:`
            raise RuntimeError("its forward has too many branches")
        self.made.append(self.forced[place] if place < len(self.forced) else first)
        return self.made[-1]


class _StandIn:
    """Notes what a forward asks of a stand-in that is answered otherwise than for a tensor."""

    tracer: Any

    def _ask(self, question: str) -> None:
        if self.tracer.seen.listens:
            self.tracer.guessed = self.tracer.guessed or f"its forward {question} of a value"

    def __hash__(self) -> int:
        self._ask("takes the hash")  # the dtype is a key of a dict, say
        return id(self)

    def __repr__(self) -> str:
        self._ask("makes a string")
        return super().__repr__()

    def __format__(self, spec: str) -> str:
        self._ask("makes a string")
        return super().__format__(spec)

    def __getattr__(self: Any, name: str) -> Any:
        if name in _OPTIONAL or (self.tracer.seen.probes and not hasattr(torch.Tensor, name)):
            self._ask(f"asks for the `{name}`")
        return Attribute(self, name)


class Attribute(_StandIn, fx.proxy.Attribute):
    pass


class Proxy(_StandIn, fx.Proxy):
    """Also records `x += y` for what it is, which fx would take for `x = x + y`, and refuses
    `x.data = y`, which fx would not record. Has no length, but can be unpacked."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("tracer", "node"):
            raise AttributeError(f"its forward sets `{name}` of a tensor")
        super().__setattr__(name, value)

    def __len__(self) -> int:
        raise TypeError("its forward takes the length of a tensor")  # `*list` does without


def _in_place(name: str) -> Any:
    function = getattr(operator, name)

    def record(self: fx.Proxy, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    return record


IN_PLACE = (
    "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor",
)  # fmt: skip
for _name in IN_PLACE:
    setattr(Proxy, f"__{_name}__", _in_place(_name))


class Tracer(fx.Tracer):
    # So that a forward which updates a buffer in place updates nothing here.
    proxy_buffer_attributes = True

    def __init__(self, choices: Choices | None = None, extras: bool = True) -> None:
        super().__init__()
        self.extras = extras  # whether arguments of any number are stand-ins, or empty
        self.choices = Choices() if choices is None else choices
        self.guessed = ""
        self.lists = False  # whether the forward goes through lists of any length
        self.kinds: dict[fx.Node, bool] = {}
        self.context = context_now()
        self.proxies: list[weakref.ref[fx.Proxy]] = []
        self.bypassed: set[str] = set()  # names of modules called by their `forward`
        self.seen = Interceptor()  # what the forward looks at
        self.asks_mode = False  # whether the forward reads the training flag of a module
        self.parts_train: bool | None = None  # their training flag here; None: as it is

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True

    def create_args_for_root(self, *args: Any, **kwargs: Any) -> Any:
        forward, arguments = super().create_args_for_root(*args, **kwargs)
        if not self.extras:
            arguments = [_emptied(argument) for argument in arguments]
        seen = self.seen

        def seeing(*args: Any, **kwargs: Any) -> Any:
            with seen.listening():
                return forward(*args, **kwargs)

        # torch.fx asks for the globals of the forward.
        function = types.FunctionType(
            seeing.__code__, forward.__globals__, "forward", None, seeing.__closure__
        )
        return functools.update_wrapper(function, forward), arguments

    def getattr(self, *args: Any, **kwargs: Any) -> Any:
        with self.seen.listening(False):  # looks through all parameters of the root
            return super().getattr(*args, **kwargs)

    def create_proxy(self, *args: Any, **kwargs: Any) -> Any:
        with self.seen.listening(False):
            return super().create_proxy(*args, **kwargs)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        made = Proxy(node, self)
        self.proxies.append(weakref.ref(made))
        return made

    def create_arg(self, a: Any) -> Any:
        plain = type(a) in _PLAIN or hasattr(a, "_fields")  # fx knows named tuples
        if isinstance(a, (dict, list, tuple)) and not plain:
            self.guessed = f"its forward makes a value of type {type(a).__name__}"
        if isinstance(a, float):
            a = float(a)  # of numpy's, which source cannot name
        with self.seen.listening(False):
            return super().create_arg(a)

    def call_module(self, m: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if type(m).__call__ is not nn.Module.__call__:  # its work is in the graph, too
            self.guessed = f"{type(m).__name__} overrides __call__"
        with self.seen.listening(False):
            if self._is_changed(m):
                self.guessed = "its forward stores something"
            return super().call_module(m, *args, **kwargs)

    def _is_changed(self, part: nn.Module) -> bool:
        """Whether the forward has set a number of a part, as the `p` of a dropout for one call."""
        original = self.seen.originals.get(id(part), part)
        before = vars(original)
        if self.parts_train is not None:
            before = before | {"training": self.parts_train}
        return any(
            type(value) in (int, float, str, bool) and value != before.get(name, value)
            for name, value in vars(part).items()
        )

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if context_now() != self.context:
            self.guessed = "its forward works under no_grad, autocast or checkpoint"
        if "set_" in args:  # Tensor.set_
            self.guessed = "its forward puts one tensor into the place of another"
        node = super().create_node(*args, **kwargs)
        node.meta[CONTEXT] = context_now()
        return node

    def mark_kept(self) -> None:
        """Marks the values that something has kept beyond the end of the forward."""
        # A cycle may hold them. All that the forward made is young where `collector_paused` was on;
        # a full collection takes 0.2 s beside timm, which was two thirds of the time of `convert`.
        for generation in range(3):
            if self._kept():
                gc.collect(generation)
        for node in self._kept():
            node.meta[KEPT] = True
            self.guessed = self.guessed or "its forward stores something"

    def _kept(self) -> list[fx.Node]:
        nodes = [proxy.node for ref in self.proxies if (proxy := ref()) is not None]
        return [node for node in nodes if node.op not in ("placeholder", "get_attr")]

    def to_bool(self, obj: fx.Proxy) -> bool:
        self.create_node("call_function", DECISION, (obj.node,), {})
        return self.choices.choose(False)

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        self.guessed = "its forward takes a list of tensors"
        self.lists = True
        item: Any = obj
        return iter((item[0], item[1]))

    def is_instance(self, obj: fx.Proxy, kinds: Any) -> bool:
        """A tensor at first, then a list."""
        flat = kinds if isinstance(kinds, tuple) else (kinds,)
        if obj.node.op == "get_attr":
            return isinstance(_registered(self.root, str(obj.node.target)), kinds)
        if not {torch.Tensor, list, tuple} & set(flat):
            self.guessed = "its forward asks for the type of its input"  # a str or a dict, say
            return isinstance(obj, kinds)
        if obj.node not in self.kinds:
            if set(flat) == {torch.Tensor}:
                asked = self.create_node("call_function", torch.is_tensor, (obj.node,), {})
                self.create_node("call_function", DECISION, (asked,), {})
            self.kinds[obj.node] = self.choices.choose(True)
        if set(flat) != {torch.Tensor}:
            self.guessed = "its forward asks for the type of its input"
        return (torch.Tensor in flat) == self.kinds[obj.node]


def _emptied(argument: Any) -> Any:
    """No arguments in the place of the stand-in for any number of them."""
    target = str(argument.node.target) if isinstance(argument, fx.Proxy) else ""
    if not target.startswith("*"):
        return argument
    return {} if target.startswith("**") else ()


def _registered(module: nn.Module, path: str) -> Any:
    """A parameter or buffer, while `getattr` gives its stand-in."""
    *parts, name = path.split(".")
    for part in parts:
        module = vars(module)["_modules"][part]
    return vars(module)["_parameters"].get(name, vars(module)["_buffers"].get(name))


@contextmanager
def collector_paused() -> Iterator[None]:
    """Context in which new objects stay in the collector's youngest generation."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@functools.cache
def _device_types() -> tuple[str, str]:
    return "cpu", str(torch.accelerator.current_accelerator(False) or "cuda")


def context_now() -> tuple[Any, ...]:
    """State that a `with` around a call changes, and that a graph does not record."""
    autocast = [
        (torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in _device_types()
    ]
    # The hooks on saved tensors: those of torch.utils.checkpoint, say.
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        autocast,
        top_saved_tensors_hooks(False),
    )


class Watch(TorchDispatchMode):
    """Records whether anything is computed while a forward runs on stand-ins."""

    computed = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.computed = True
        return func(*args, **(kwargs or {}))


@contextmanager
def answering(forward: Any, tracer: Tracer) -> Iterator[None]:
    """Lets the file that a forward was written in ask for the types of stand-ins."""
    names = forward.__globals__
    had, before = "isinstance" in names, names.get("isinstance")

    def is_instance(obj: Any, kinds: Any) -> bool:
        return (
            tracer.is_instance(obj, kinds) if isinstance(obj, fx.Proxy) else isinstance(obj, kinds)
        )

    names["isinstance"] = is_instance
    try:
        yield
    finally:
        if had:
            names["isinstance"] = before
        else:
            del names["isinstance"]


def bypass(tracer: Tracer, part: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Stand-in for the forward of a part whose caller goes round its `__call__`."""
    for name, module in tracer.root.named_modules():
        if module is part:
            tracer.bypassed.add(name)
    forward: Any = type(part).forward
    return forward(part, *args, **kwargs)


@functools.lru_cache(1024)
def has_block(code: types.CodeType) -> str:
    """The kind of block in code that a graph cannot show; "" if there is none."""
    steps = {step.opname for step in dis.get_instructions(code)}
    if not steps.isdisjoint(("BEFORE_WITH", "SETUP_WITH", "LOAD_SPECIAL")):
        return "with"
    return "" if steps.isdisjoint(("CHECK_EXC_MATCH", "JUMP_IF_NOT_EXC_MATCH")) else "try"


def may_ask_mode(root: nn.Module) -> bool:
    """Whether a forward may read a training flag unseen: in `__dict__`, or by code of a class."""
    code = getattr(type(root).forward, "__code__", None)
    if code is None or not {"__dict__", "vars"}.isdisjoint(code.co_names):
        return True
    kinds = {cls for kind in {type(m) for m in root.modules()} for cls in kind.__mro__}
    return any(
        not {"training", "__getattribute__"}.isdisjoint(vars(cls))
        for cls in kinds - {nn.Module, object}
    )


@contextmanager
def same_generators(seed: int | None = None) -> Iterator[None]:
    """Restores the generators of torch, Python and numpy at its end. `seed`: seeds them first."""
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


def random_states() -> tuple[Any, ...]:
    """States of all generators, to be compared. Bytes: to print them took 0.3 of a conversion."""
    numpy: Any = sys.modules.get("numpy")
    drawn: tuple[Any, ...] = ()
    if numpy is not None:
        name, numbers, *place = numpy.random.get_state()
        drawn = (name, numbers.tobytes(), *place)
    state = torch.default_generator.get_state()
    return ctypes.string_at(state.data_ptr(), state.numel()), random.getstate(), drawn
