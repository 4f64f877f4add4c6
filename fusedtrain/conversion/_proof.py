"""Runs a model forward and backward on an example, and compares the results with the stock model's.

The effect of rounding differs from model to model by orders of magnitude, so it is measured:
the stock model runs once more with its layers' outputs off by up to one unit in the last place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks

from .._graph.difference import norm_of, relative_difference
from .._graph.example import arguments_of
from .._graph.hooks import observing
from .._graph.kept import counted_bytes
from .._graph.state import Preserver
from .._recompute import Recipe
from .._torch_private import pytree

# Gradients below this part of the largest are rounding: those of biases before a batch norm.
_NEGLIGIBLE = 1e-3


# A call: the module, the module around it, and its number among such calls in that forward.
Key = tuple[int, int, int]


@dataclass
class _Frame:
    """A forward that runs. What it saves itself counts for the child it called last."""

    module: nn.Module | None
    key: Key
    last: Key | None = None
    calls: Counter[int] = field(default_factory=Counter)


@dataclass
class Run:
    """One forward and backward. `layers`: copies of the outputs of watched modules, by call."""

    watched: set[int]
    layers: dict[tuple[int, int], list[Tensor]] = field(default_factory=dict)
    outputs: list[Tensor] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    saved: Counter[Key] = field(default_factory=Counter)


@dataclass
class Errors:
    """Largest relative differences: norm of the difference by norm of what it should be."""

    layers: dict[int, float] = field(default_factory=dict)  # id of a watched module
    outputs: float = 0.0
    gradients: dict[str, float] = field(default_factory=dict)
    buffers: dict[str, float] = field(default_factory=dict)
    dtypes: dict[Any, torch.dtype] = field(default_factory=dict)
    failed: str = ""

    @property
    def gradient(self) -> float:
        return max(self.gradients.values(), default=0.0)

    @property
    def is_16_bit(self) -> bool:
        return any(torch.finfo(dtype).bits == 16 for dtype in self.dtypes.values())

    def of(self, key: Any, actual: Tensor, expected: Tensor, floor: float = 0.0) -> float:
        """The relative difference of one tensor; notes the coarsest dtype by the key."""
        if expected.is_floating_point():
            dtypes = (self.dtypes.get(key, expected.dtype), expected.dtype)
            self.dtypes[key] = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
        return relative_difference(actual, expected, floor=floor)


def run(
    model: nn.Module,
    example: Any,
    watched: Iterable[nn.Module] = (),
    reference: Run | None = None,
    noise: bool = False,
    preserver: Preserver | None = None,
) -> tuple[Run, Errors]:
    """The model is left as it was. One `preserver` for all runs of a model saves a run each.

    With a reference, outputs of layers are compared at once and not kept.
    """
    ids = {id(module) for module in watched}
    done, errors = Run(ids if reference is None else ids & reference.watched), Errors()
    with (preserver or scouted(model, example))(), torch.enable_grad():
        arguments, named = arguments_of(example)
        # Backward is under it too: there torch.utils.checkpoint computes again, in the same way.
        with _perturbed(ids) if noise else nullcontext():
            with _recording(model, done, errors, reference), _naming(arguments, named):
                output = model(*arguments, **named)
            leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
            done.outputs = [leaf.detach() for leaf in leaves]
            # Here and not later: torch's batch norm moves its statistics in each recomputation.
            done.buffers = {name: b.detach().clone() for name, b in model.named_buffers()}
            _backward(leaves)
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                done.gradients[name] = parameter.grad
    if reference is not None:
        _compare(done, reference, errors)
    return done, errors


def scouted(model: nn.Module, example: Any) -> Preserver:
    """Runs the model once, to find out what it writes to."""
    preserver = Preserver(model)
    run(model, example, preserver=preserver)
    return preserver


def _backward(leaves: list[Tensor]) -> None:
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if wanted:
        torch.autograd.backward(wanted, [_weights(leaf) for leaf in wanted])


@contextmanager
def _naming(arguments: tuple[Any, ...], named: dict[str, Any]) -> Iterator[None]:
    """Adds the argument types to the model's exceptions: a batch of a loader, say, is two
    arguments."""
    try:
        yield
    except Exception as error:
        if hasattr(error, "add_note"):  # from Python 3.11
            values = [*map(_described, arguments)]
            values += [f"{name}={_described(value)}" for name, value in named.items()]
            error.add_note(
                f"with example_inputs the model was called as model({', '.join(values)}), below a "
                "TorchDispatchMode; without them convert calls no model"
            )
        raise


def _described(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def _compare(done: Run, reference: Run, errors: Errors) -> None:
    if len(done.outputs) != len(reference.outputs):
        errors.failed = "what the model returns"
        return
    if done.gradients.keys() != reference.gradients.keys():
        errors.failed = "what has a gradient"
        return
    for a, b in zip(done.outputs, reference.outputs):
        errors.outputs = max(errors.outputs, errors.of("outputs", a, b))
    for name, buffer in reference.buffers.items():
        # A mean of zero is rounding, of values that are mostly around one.
        floor = _NEGLIGIBLE * buffer.numel() ** 0.5
        errors.buffers[name] = errors.of(name, done.buffers[name], buffer, floor)
    floor = _NEGLIGIBLE * max(map(norm_of, reference.gradients.values()), default=0.0)
    for name, gradient in reference.gradients.items():
        errors.gradients[name] = errors.of(name, done.gradients[name], gradient, floor)


def _weights(leaf: Tensor) -> Tensor:
    """Gradients of all sizes and both signs."""
    ramp = torch.linspace(-1.0, 1.3, leaf.numel(), device=leaf.device, dtype=torch.float64)
    return ramp.view(leaf.shape).to(leaf.dtype)


@contextmanager
def _perturbed(watched: set[int]) -> Iterator[None]:
    """Outputs of these modules, and those in 16 bits of all, are off by up to an eps: as after two
    roundings to the nearest."""
    generators: dict[torch.device, torch.Generator] = {}

    def off(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.is_meta:
            return value
        if value.device not in generators:
            generators[value.device] = torch.Generator(value.device).manual_seed(1)
        wide = torch.promote_types(value.dtype, torch.float32)
        options: Any = {"device": value.device, "dtype": wide}
        noise = torch.rand(value.shape, generator=generators[value.device], **options)
        factor = 1 + (2 * noise - 1) * torch.finfo(value.dtype).eps
        return (value * factor).to(value.dtype)

    def leave(module: nn.Module, _: Any, output: Any) -> Any:
        if id(module) in watched:
            return pytree.tree_map(off, output)
        # Rounding to 16 bits within a watched module moves the float32 statistics behind it.
        narrow = isinstance(output, Tensor) and output.dtype in (torch.bfloat16, torch.float16)
        return off(output) if narrow else None

    handle = hooks.register_module_forward_hook(leave)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _recording(
    model: nn.Module,
    done: Run,
    errors: Errors,
    reference: Run | None,
) -> Iterator[None]:
    frames = [_Frame(None, (0, 0, 0))]
    seen: Counter[int] = Counter()

    def enter(module: nn.Module, _: Any) -> None:
        outer = frames[-1]
        key = (id(module), id(outer.module), outer.calls[id(module)])
        outer.calls[id(module)] += 1
        frames.append(_Frame(module, key))

    def leave(module: nn.Module, _: Any, __: Any, output: Any) -> None:
        if frames[-1].module is module:
            frame = frames.pop()
            frames[-1].last = frame.last or frame.key
        if id(module) not in done.watched:
            return
        leaves = [t.detach() for t in pytree.tree_leaves(output) if isinstance(t, Tensor)]
        call = (id(module), seen[id(module)])
        seen[id(module)] += 1
        if reference is None:
            done.layers[call] = [leaf.clone() for leaf in leaves]
        else:
            check(call, leaves, reference.layers.get(call))

    def check(call: tuple[int, int], leaves: list[Tensor], expected: list[Tensor] | None) -> None:
        before = errors.layers.get(call[0], 0.0)
        if expected is None or len(expected) != len(leaves):
            errors.layers[call[0]] = float("inf")
            return
        for a, b in zip(leaves, expected):
            before = max(before, errors.of(call[0], a, b))
        errors.layers[call[0]] = before

    def owner(_: int, before: Key | None, recipe: Recipe | None) -> Key:
        """The last who saves it: the next layer needs its input, whoever made it."""
        if recipe is not None and before is not None:
            return before
        return frames[-1].last or frames[-1].key

    constants = (*model.parameters(), *model.buffers())
    with observing(enter, leave), counted_bytes(constants, owner) as done.saved:
        yield
