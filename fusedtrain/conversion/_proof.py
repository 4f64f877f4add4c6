"""Runs a model forward and backward on an example, and compares it with what it was.

What rounding alone may do differs from model to model by orders of magnitude, so it is measured:
the stock model runs once more with its layers' outputs off by up to one unit in the last place.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks

from .._graph.difference import norm_of, relative_difference
from .._graph.example import arguments_of
from .._graph.hooks import observing
from .._graph.kept import counted_bytes
from .._graph.tracer import same_generators
from .._recompute import Recipe
from .._torch_private import pytree

# Allowed: so many units in the last place, or so many times what rounding did to the stock model.
_UNITS, _GROWTH = 32, 32
# torch's own float64 backward of Hardsigmoid and CELU has factors rounded to float32.
_LEAST = 2e-7
# Where more than this is allowed a comparison says little, and where an error is little more than
# allowed too: one in float64 decides.
_DOUBTFUL, _LITTLE = 0.1, 10.0
# One value that rounding moves over the edge of a ReLU changes gradients, and nothing else, by
# this at most: 0.4 % in the first block of a narrow SE-ResNet (31 times what was allowed; AVX2).
_FLIP = 0.05
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

    def bytes_of(self, module: nn.Module) -> int:
        return sum(size for key, size in self.saved.items() if key[0] == id(module))


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


def run(
    model: nn.Module,
    example: Any,
    watched: Iterable[nn.Module] = (),
    reference: Run | None = None,
    noise: bool = False,
) -> tuple[Run, Errors]:
    """The model is left as it was: gradients, buffers, states of random number generators.

    With a reference, outputs of layers are compared at once and not kept.
    """
    ids = {id(module) for module in watched}
    done, errors = Run(ids if reference is None else ids & reference.watched), Errors()
    with _unchanged(model), torch.enable_grad():
        arguments, named = arguments_of(example)
        # Backward is under it too: there torch.utils.checkpoint computes again, in the same way.
        with _perturbed(ids) if noise else nullcontext():
            with _recording(model, done, errors, reference), _naming(arguments, named):
                output = model(*arguments, **named)
            leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
            done.outputs = [leaf.detach() for leaf in leaves]
            # Here and not later: torch's batch norm moves its statistics in each recomputation.
            done.buffers = {name: b.detach().clone() for name, b in model.named_buffers()}
            wanted = [leaf for leaf in leaves if leaf.requires_grad]
            if wanted:
                torch.autograd.backward(wanted, [_weights(leaf) for leaf in wanted])
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                done.gradients[name] = parameter.grad
    if reference is not None:
        _compare(done, reference, errors)
    return done, errors


@contextmanager
def _naming(arguments: tuple[Any, ...], named: dict[str, Any]) -> Iterator[None]:
    """Notes in what the model raises with what it was called: a batch of a loader, say, is two
    arguments."""
    try:
        yield
    except Exception as error:
        if hasattr(error, "add_note"):  # from Python 3.11
            values = [*map(_described, arguments)]
            values += [f"{name}={_described(value)}" for name, value in named.items()]
            error.add_note(
                f"with example_inputs the model was called as model({', '.join(values)})"
            )
        raise


def _described(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def excess(errors: Errors, noise: Errors) -> tuple[float, str]:
    """How many times larger than allowed the worst error is, and what it is an error of."""
    if errors.failed:
        return float("inf"), errors.failed
    worst = (0.0, "")
    for what, error, allowed in _limits(errors, noise):
        worst = max(worst, (error / allowed if math.isfinite(error) else math.inf, what))
    return worst


def is_doubtful(errors: Errors, noise: Errors, factor: float) -> bool:
    loose = any(allowed > _DOUBTFUL for _, _, allowed in _limits(errors, noise))
    return factor <= _LITTLE and (loose or factor > 1)


def is_perhaps_a_flip(errors: Errors, noise: Errors) -> bool:
    """Gradients alone differ by more than is allowed, and not by much."""
    rest = replace(errors, gradients={})
    return excess(rest, noise)[0] <= 1 < excess(errors, noise)[0] and errors.gradient <= _FLIP


def _limits(errors: Errors, noise: Errors) -> Iterator[tuple[str, float, float]]:
    def allowed(key: Any, of_noise: float) -> float:
        units = _UNITS * torch.finfo(errors.dtypes.get(key, torch.float32)).eps
        return max(units, _GROWTH * of_noise, _LEAST)

    # A NaN or an infinity of the noisy run alone allows nothing.
    def largest(noises: Iterable[float]) -> float:
        return max(filter(math.isfinite, noises), default=0.0)

    yield "outputs", errors.outputs, allowed("outputs", largest([noise.outputs]))
    for layer, error in errors.layers.items():
        yield "a layer", error, allowed(layer, largest([noise.layers.get(layer, 0.0)]))
    for name, error in errors.buffers.items():
        yield f"the buffer {name}", error, allowed(name, largest(noise.buffers.values()))
    # One bound for all: how rounding spreads over them is chance.
    for name, error in errors.gradients.items():
        yield f"the gradient of {name}", error, allowed(name, largest(noise.gradients.values()))


def _compare(done: Run, reference: Run, errors: Errors) -> None:
    if len(done.outputs) != len(reference.outputs):
        errors.failed = "what the model returns"
        return
    if done.gradients.keys() != reference.gradients.keys():
        errors.failed = "what has a gradient"
        return
    for a, b in zip(done.outputs, reference.outputs):
        errors.outputs = max(errors.outputs, relative_difference(a, b))
        _note_dtype(errors, "outputs", a)
    for name, buffer in reference.buffers.items():
        # A mean of zero is rounding, of values that are mostly around one.
        floor = _NEGLIGIBLE * buffer.numel() ** 0.5
        errors.buffers[name] = relative_difference(done.buffers[name], buffer, floor=floor)
        _note_dtype(errors, name, buffer)
    scale = max((norm_of(g) for g in reference.gradients.values()), default=0.0)
    for name, gradient in reference.gradients.items():
        floor = _NEGLIGIBLE * scale
        errors.gradients[name] = relative_difference(done.gradients[name], gradient, floor=floor)
        _note_dtype(errors, name, gradient)


def _note_dtype(errors: Errors, key: Any, tensor: Tensor) -> None:
    if tensor.is_floating_point():
        before = errors.dtypes.get(key, tensor.dtype)
        errors.dtypes[key] = max(before, tensor.dtype, key=lambda dtype: torch.finfo(dtype).eps)


def _weights(leaf: Tensor) -> Tensor:
    """Gradients of all sizes and both signs."""
    ramp = torch.linspace(-1.0, 1.3, leaf.numel(), device=leaf.device, dtype=torch.float64)
    return ramp.view(leaf.shape).to(leaf.dtype)


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    gradients = [(p, p.grad) for p in model.parameters()]
    buffers = [
        (m._buffers, name, buffer, None if buffer is None else buffer.detach().clone())
        for m in model.modules()
        for name, buffer in m._buffers.items()
    ]
    try:
        for parameter, _ in gradients:
            parameter.grad = None
        with same_generators(seed=0):
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for table, name, buffer, values in buffers:
                if buffer is None or values is None:
                    pass
                elif buffer.shape != values.shape:  # of observers, at their first call
                    buffer.resize_(values.shape).copy_(values)
                elif buffer.is_meta or not torch.equal(buffer, values):
                    buffer.copy_(values)
                table[name] = buffer


@contextmanager
def _perturbed(watched: set[int]) -> Iterator[None]:
    """Outputs of these modules are off by up to an eps: as after two roundings to the nearest."""
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
        return pytree.tree_map(off, output) if id(module) in watched else None

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
            before = max(before, relative_difference(a, b))
            _note_dtype(errors, call[0], b)
        errors.layers[call[0]] = before

    def owner(_: int, before: Key | None, recipe: Recipe | None) -> Key:
        """The last who saves it: the next layer needs its input, whoever made it."""
        if recipe is not None and before is not None:
            return before
        return frames[-1].last or frames[-1].key

    constants = (*model.parameters(), *model.buffers())
    with observing(enter, leave), counted_bytes(constants, owner) as done.saved:
        yield
