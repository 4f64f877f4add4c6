"""Calls of modules: the model's outermost ones, what they keep for backward, and batch norms."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..._graph.hooks import Observation
from ..._graph.modules import has_own_forward
from ..._recompute.recipes import Saved
from ..._torch_private import (
    BatchNormBase,
    backward_number,
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    pytree,
    saved_tensors_hooks_allowed,
)
from .._views import OutermostCalls, Site, user_site
from ._depthwise import CallsOfSteps, call_of

KEY = "fusedtrain.advisor.diagnosis"  # of marks in the metadata of autograd's nodes
_PLAIN_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class Mark:
    """Lives as long as the graph of a model's output."""

    def __init__(self, step: int, size: int) -> None:
        self.step, self.bytes, self.used = step, size, False


@dataclass
class Root:
    """A module that the script calls itself. `example`: the arguments of a call in training."""

    module: nn.Module
    site: Site | None
    example: tuple[tuple[Any, ...], dict[str, Any]] | None = None


@dataclass
class Unused:
    """A call of a model in eval mode that made a graph."""

    site: Site | None
    type: str
    bytes: int
    mark: Mark


@dataclass
class Norms:
    """Calls of batch norms by module: those in backward that move statistics, frozen ones."""

    moved: Counter[int] = field(default_factory=Counter)
    frozen: dict[int, int] = field(default_factory=dict)  # bytes of the input
    forward: Counter[int] = field(default_factory=Counter)
    modules: dict[int, nn.Module] = field(default_factory=dict)


class Calls:
    """Follows modules by global hooks while `listening`; `step()` is the number of the step."""

    def __init__(self, step: Callable[[], int], keep_examples: bool) -> None:
        self.roots: dict[int, Root] = {}
        self.marks: list[weakref.ref[Mark]] = []
        self.unused: list[Unused] = []
        self.norms = Norms()
        self.autocast: Counter[str] = Counter()
        self.autocast_site: Site | None = None
        self.shapes: dict[int, set[tuple[int, ...]]] = {}
        self.outputs: dict[int, tuple[tuple[int, ...], int]] = {}  # and the bytes of an element
        self.depthwise: dict[int, CallsOfSteps] = {}  # calls in training
        self.devices: Counter[str] = Counter()
        self._step, self._keep_examples = step, keep_examples
        self._outermost = OutermostCalls()
        self._observation: Observation | None = None
        self._thread = threading.get_ident()
        self._sizes: dict[int, int] = {}
        self._packs = False

    def listen(self) -> None:
        if self._observation is None:
            self._observation = Observation(self._enter, self._leave)

    def rest(self) -> None:
        """Removes the hooks, unless a call of this thread is running: `rest` is called again."""
        done = not self._outermost.running or threading.get_ident() != self._thread
        if done and self._observation is not None:
            self._observation.remove()
            self._observation = None

    def follow(self) -> None:
        """Follows the calls of this thread from now on."""
        self._thread, self._outermost = threading.get_ident(), OutermostCalls()

    def _enter(self, module: nn.Module, args: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        if backward_number() != -1:
            if isinstance(module, BatchNormBase) and _moves(module):
                self.norms.moved[id(module)] += 1
                self.norms.modules[id(module)] = module
            return
        if isinstance(module, BatchNormBase):
            self._norm(module, args)
        if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) and args:
            self.shapes.setdefault(id(module), set()).add(tuple(args[0].shape))
            call = call_of(module, args[0])
            if call is not None and (self._outermost.running or [module])[0].training:
                self.depthwise.setdefault(id(module), Counter())[self._step(), call] += 1
        for device in ("cuda", "cpu") if torch.is_grad_enabled() else ():
            if torch.is_autocast_enabled(device):
                dtype = str(torch.get_autocast_dtype(device)).removeprefix("torch.")
                self.autocast[dtype] += 1
                self.autocast_site = self.autocast_site or user_site()
                break
        if self._outermost.enter(module):
            self._sizes = {}
            self._packs = saved_tensors_hooks_allowed()
            if self._packs:
                push_saved_tensors_hooks(self._pack, Saved.take)

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if threading.get_ident() != self._thread or backward_number() != -1:
            return
        if isinstance(output, Tensor) and getattr(module, "bias", None) is not None:
            self.outputs[id(module)] = (tuple(output.shape), output.element_size())
        within = bool(self._outermost.running)
        ends = self._outermost.leave(module)
        if within and not self._outermost.running and self._packs:
            pop_saved_tensors_hooks()
        if ends:
            self._root(module, args, kwargs, output)

    def _pack(self, tensor: Tensor) -> Saved:
        if not isinstance(tensor, nn.Parameter) and tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            self._sizes[storage.data_ptr()] = storage.nbytes()
        return Saved.of(tensor)

    def _root(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        first = next(module.parameters()).device.type
        self.devices[first] += 1
        root = self.roots.setdefault(id(module), Root(module, None))
        size = sum(self._sizes.values())
        graphs = [t for t in pytree.tree_leaves(output) if isinstance(t, Tensor) and t.grad_fn]
        if module.training and self._keep_examples and root.example is None and graphs:
            root.example = pytree.tree_map(_copied, (args, kwargs))
        if not graphs:
            return
        mark = Mark(self._step(), size)

        def used(_: Any) -> None:
            mark.used = True

        for tensor in graphs:
            tensor.register_hook(used)
            node: Any = tensor.grad_fn
            node.metadata[KEY] = mark
        if module.training:
            self.marks.append(weakref.ref(mark))
        else:
            # The graph's mark would die with it; what is asked here is whether it was used.
            kind = type(module).__name__
            self.unused.append(Unused(user_site(), kind, size, mark))

    def _norm(self, norm: Any, args: Any) -> None:
        key = id(norm)
        self.norms.modules[key] = norm
        if norm.training:
            self.norms.forward[key] += 1
        elif (
            type(norm) in _PLAIN_NORMS
            and not has_own_forward(norm)
            and self._outermost.running
            and self._outermost.running[0].training
            and torch.is_grad_enabled()
            and args
            and (args[0].requires_grad or (norm.affine and norm.weight.requires_grad))
        ):
            self.norms.frozen[key] = args[0].nbytes


def _moves(norm: Any) -> bool:
    """Norms of fusedtrain know that a checkpoint repeats a forward."""
    ours = type(norm).__module__.startswith("fusedtrain.") or has_own_forward(norm)
    return bool(norm.training and norm.track_running_stats and not ours)


def _copied(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)
