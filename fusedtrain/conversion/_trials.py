"""Installs the swaps of a conversion that an example proves right, and takes back the others."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as torch_functional
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from .. import functional as fused_functional
from .._graph.compiled import without_compiled_code
from .._graph.example import example_for
from .._graph.state import duplicate
from .._torch_private import pytree
from ._attention import callers_of_attention
from ._conversion import Conversion
from ._proof import Errors, Key, Run, run, scouted
from ._report import Layer, Proof
from ._rules import slow_convolutions
from ._sites import EpilogueStep

# Allowed: so many units in the last place, or so many times what rounding did to the stock model.
_UNITS, _GROWTH = 32, 32
# torch's own float64 backward of Hardsigmoid and CELU has factors rounded to float32.
_LEAST = 2e-7
# A comparison says little if more than this is allowed, or if an error is little more than allowed:
# one in float64 decides.
_DOUBTFUL, _LITTLE = 0.1, 10.0
# One value that rounding moves over the edge of a ReLU changes gradients, and nothing else, by
# this at most: 0.4 % in the first block of a narrow SE-ResNet (31 times what was allowed; AVX2).
_FLIP = 0.05


def prove(conversion: Conversion, example: Any) -> Proof:
    """Installs what does not change results.

    Raises:
        RuntimeError: what is right one by one is not right together. Nothing is converted then.
    """
    mode = without_dropout() if conversion.dropout else None
    with without_compiled_code(conversion.model), mode or nullcontext():
        try:
            trials = _Trials(conversion, example_for(conversion.model, example), mode)
            return _prove(conversion, trials)
        except BaseException:
            conversion.uninstall()
            raise


def _prove(conversion: Conversion, trials: _Trials) -> Proof:
    conversion.choose()
    conversion.install()
    tried: set[int] = set()
    while wrong := trials.judge():
        modules = [module for module in _modules(conversion) if id(module) not in tried]
        if not modules:
            raise RuntimeError(
                f"the converted model differs from the original one ({wrong}); nothing is converted"
            )
        conversion.uninstall()
        for module in modules:
            tried.add(id(module))
            conversion.choose(lambda other, only=module: other is only)  # type: ignore[misc]
            conversion.install()
            reason = trials.judge()
            conversion.uninstall()
            if reason:
                conversion.undone[id(module)] = f"undone: {reason}"
        # A norm may have lost a sum to one that is undone now, and is tried in the next round.
        conversion.choose()
        conversion.install()
    return trials.result()


def _modules(conversion: Conversion) -> Iterable[nn.Module]:
    """Modules by which swaps and units are chosen, once each."""
    swapped = [entry.module for entry in conversion.swapped]
    return dict.fromkeys(swapped + [unit.module for unit in conversion.plan.units])


class without_dropout(TorchFunctionMode):
    """Context in which dropout drops nothing, torch's and ours: their random numbers differ, and so
    would results."""

    _SUMS = frozenset({fused_functional.dropout_add})
    _ALONE = frozenset({torch_functional.dropout, torch.dropout, fused_functional.dropout})
    _PLACES: ClassVar = {  # of `dropout_p`
        torch_functional.scaled_dot_product_attention: 4,
        fused_functional.scaled_dot_product_attention: 4,
        torch_functional.multi_head_attention_forward: 10,
    }
    _NEVER = 2.0**-100  # drops nothing, by the same kernels, which 0 leaves for others

    def __init__(self) -> None:
        super().__init__()
        self._lets = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.autograd.backward and not self._lets:
            # Under the mode, too: there torch.utils.checkpoint computes again. Torch leaves it for
            # tensors, not for edges.
            (tensors,), inputs = args, kwargs.pop("inputs", None)
            with self:
                return func(_edges(tensors), inputs=inputs and _edges(inputs), **kwargs)
        if not self._lets and func in self._PLACES:
            place = self._PLACES[func]
            if len(args) > place and args[place]:
                args = (*args[:place], self._NEVER, *args[place + 1 :])
            elif kwargs.get("dropout_p"):
                kwargs = kwargs | {"dropout_p": self._NEVER}
            return func(*args, **kwargs)
        if self._lets or func not in (*self._ALONE, *self._SUMS):
            return func(*args, **kwargs)
        input = args[0] if args else kwargs["input"]
        if func in self._ALONE:
            return input
        return input + (args[1] if len(args) > 1 else kwargs["residual"])

    @contextmanager
    def dropping(self) -> Iterator[None]:
        """Context of runs with dropout."""
        self._lets = True
        try:
            yield
        finally:
            self._lets = False


def _edges(tensors: Iterable[Tensor]) -> list[GradientEdge]:
    return [get_gradient_edge(tensor) for tensor in tensors]


class _Trials:
    """Compares the model as it is at the moment with the stock one."""

    def __init__(
        self, conversion: Conversion, example: Any, mode: without_dropout | None = None
    ) -> None:
        self.conversion, self.model, self.example = conversion, conversion.model, example
        self._mode = mode
        self.device = next((p.device.type for p in self.model.parameters()), "cpu")
        watched = conversion.watched()
        self._preserver = scouted(self.model, example)
        with (
            slow_convolutions(conversion.compared_convolutions()) as slow,
            callers_of_attention() as callers,
        ):
            self.stock, _ = self._run(watched)
        conversion.undone.update(slow)
        conversion.attend(callers)
        self._kept_before = self._kept(self.stock)
        self.reference, self._exact = self._in_float32(watched)
        self.noise = self._compared(watched, noise=True)[1]
        if self.reference is not self.stock:
            self._narrow_noise = self._run(watched, self.stock, noise=True)[1]
        self._stock_runs: dict[bool, tuple[Run, Errors]] = {}  # of `_on_copies`
        self._wide: tuple[Errors, Errors] | None = None  # errors and noise in float64

    def _run(
        self, watched: list[nn.Module], reference: Run | None = None, noise: bool = False
    ) -> tuple[Run, Errors]:
        return run(self.model, self.example, watched, reference, noise, self._preserver)

    def _kept(self, done: Run) -> Counter[Key]:
        """Bytes kept for backward by the model as it is, which `done` ran."""
        if self._mode is None:
            return done.saved
        with self._mode.dropping():
            return self._run([])[0].saved

    def _in_float32(self, watched: list[nn.Module]) -> tuple[Run, Any]:
        """The run to compare with, and its example. Under autocast a run without, if the model
        takes float32: rounding to 16 bits grows to the size of the gradients themselves."""
        if not torch.is_autocast_enabled(self.device):
            return self.stock, self.example
        example = pytree.tree_map(partial(_widened, dtype=torch.float32), self.example)
        try:
            with torch.autocast(self.device, enabled=False):
                return run(self.model, example, watched, preserver=self._preserver)[0], example
        except Exception:  # a model that insists on autocast
            return self.stock, self.example

    def _as_compared(self) -> Any:
        """Context of the runs that are compared."""
        alike = self.reference is self.stock
        return nullcontext() if alike else torch.autocast(self.device, enabled=False)

    def _compared(self, watched: list[nn.Module], noise: bool = False) -> tuple[Run, Errors]:
        with self._as_compared():
            return run(self.model, self._exact, watched, self.reference, noise, self._preserver)

    def judge(self) -> str:
        """The fault of the conversion, in words; '' if there is none."""
        watched, self._wide = self.conversion.watched(), None
        try:
            self.after, self.errors = self._compared(watched)
            if self.reference is not self.stock:
                self.after, narrow = self._run(watched, self.stock)
                if what := self._mistaken(narrow, self._narrow_noise):
                    return f"{what} differs under autocast by more than itself"
            self._kept_after = self._kept(self.after)  # with dropout
        except Exception as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        factor, what = excess(self.errors, self.noise)
        if _is_doubtful(self.errors, self.noise, factor):
            factor, what = self._in_float64(watched, (factor, what))
        elif _is_perhaps_a_flip(self.errors, self.noise) and self._was_a_flip(watched):
            return ""
        if factor == float("inf"):
            return f"{what} differs altogether"
        return f"{what} is off by {factor:.2g} times what rounding explains" if factor > 1 else ""

    def _mistaken(self, errors: Errors, noise: Errors) -> str:
        """The first tensor that is off, in 16 bits, by more than its size and four times its noise:
        a mistake, as another dtype is, or a NaN of one run alone. "" without one."""
        pairs: dict[str, tuple[float, float]] = {"outputs": (errors.outputs, noise.outputs)}
        for name, module in self.model.named_modules():
            if id(module) in errors.layers:
                pairs[name or "the model"] = (
                    errors.layers[id(module)],
                    noise.layers.get(id(module), 0.0),
                )
        for name, error in errors.gradients.items():
            pairs[f"the gradient of {name}"] = error, noise.gradients.get(name, 0.0)
        for what, (error, rounding) in pairs.items():
            if not error <= max(1.0, 4 * rounding):
                return what
        return ""

    def _in_float64(self, watched: list[nn.Module], narrow: tuple[float, str]) -> tuple[float, str]:
        """The same with copies in float64: that rounding grows into large errors, as in the last
        layers for a small image, must not hide a mistake."""
        example = pytree.tree_map(_widened, self.example)
        try:
            self._wide = self._on_copies(watched, example, wide=True)
        except Exception:  # a model that insists on its dtype: the first verdict stays
            return narrow
        factor, what = excess(*self._wide)
        return factor, f"{what}, in float64,"

    def _was_a_flip(self, watched: list[nn.Module]) -> bool:
        """Float64 agrees, and so does this dtype on an example whose values are a little different.

        A mistake of a kernel would be there, too; a value that rounding moved over the edge of a
        ReLU is not.
        """
        if self._in_float64(watched, (float("inf"), ""))[0] > 1:
            return False
        shifted = pytree.tree_map(_shifted, self._exact)
        try:
            with self._as_compared():
                return excess(*self._on_copies(watched, shifted, wide=False))[0] <= 1
        except Exception:  # a model that insists on certain numbers
            return False

    def _on_copies(
        self, watched: list[nn.Module], example: Any, wide: bool
    ) -> tuple[Errors, Errors]:
        """Errors and noise of another example, by copies of the model: in float64 if `wide`."""
        converted = _copied(self.model, wide)
        if wide not in self._stock_runs:
            self.conversion.uninstall()
            try:
                stock = _copied(self.model, wide)
            finally:
                self.conversion.install()
            copies = dict(zip(map(id, self.model.modules()), stock.modules()))
            places = [copies[id(module)] for module in watched]
            preserver = scouted(stock, example)
            reference, _ = run(stock, example, places, preserver=preserver)
            _, noise = run(stock, example, places, reference, noise=True, preserver=preserver)
            self._stock_runs[wide] = reference, noise
        reference, noise = self._stock_runs[wide]
        return run(converted, example, (), reference)[1], noise

    def result(self) -> Proof:
        conversion, plan = self.conversion, self.conversion.plan
        kept = self._kept_before, self._kept_after
        layers = []
        for site in plan.sites:
            error = self.errors.layers.get(id(site.place), 0.0)
            parts = list(site.module.modules())
            before, after = (_saved(saved, parts, site.steps) for saved in kept)
            layers.append(Layer(site.name, before, after, error))
        taken = {id(part) for site in plan.sites for part in site.parts}
        taken |= {id(part) for site in plan.sites for part in site.module.modules()}
        for entry in conversion.swapped:
            if id(entry.module) not in taken:
                error = self.errors.layers.get(id(entry.module), 0.0)
                before, after = (_saved(saved, [entry.module]) for saved in kept)
                layers.append(Layer(entry.names[0], before, after, error))
        errors, noise, precision = self.errors, self.noise, ""
        if self._wide is not None and errors.is_16_bit:
            (errors, noise), precision = self._wide, "float64"
        elif self.reference is not self.stock and not errors.is_16_bit:
            precision = "float32"
        return Proof(
            errors.outputs,
            errors.gradient,
            noise.outputs,
            noise.gradient,
            kept[0].total(),
            kept[1].total(),
            layers,
            len(self.after.outputs),
            len(self.after.gradients),
            precision=precision,
            masks=0 if conversion.dropout else _saved(kept[0], conversion.dropouts()),
        )


def _saved(
    saved: Counter[Key], modules: Iterable[nn.Module], steps: Iterable[EpilogueStep] = ()
) -> int:
    """Bytes that modules, and the calls of steps, keep for backward."""
    ids = set(map(id, modules))
    total = sum(size for key, size in saved.items() if key[0] in ids)
    for step in steps:
        if step.is_call and step.module is not None:
            total += saved[(id(step.module), id(step.trace.module), _ordinal(step))]
    return total


def excess(errors: Errors, noise: Errors) -> tuple[float, str]:
    """The worst error as a multiple of the allowed one, and the name of its tensor."""
    if errors.failed:
        return float("inf"), errors.failed
    worst = (0.0, "")
    for what, error, allowed in _limits(errors, noise):
        worst = max(worst, (error / allowed if math.isfinite(error) else math.inf, what))
    return worst


def _is_doubtful(errors: Errors, noise: Errors, factor: float) -> bool:
    loose = any(allowed > _DOUBTFUL for _, _, allowed in _limits(errors, noise))
    return factor <= _LITTLE and (loose or factor > 1)


def _is_perhaps_a_flip(errors: Errors, noise: Errors) -> bool:
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


def _ordinal(step: EpilogueStep) -> int:
    """Number of a step among the calls of its module, in the forward that makes it."""
    nodes = step.trace.graphs[0].nodes
    calls = [node for node in nodes if step.trace.callee(node) is step.module]
    return calls.index(step.nodes[0])


def _copied(model: nn.Module, wide: bool) -> nn.Module:
    copied = duplicate(model)
    return copied.double() if wide else copied


def _widened(value: Any, dtype: torch.dtype = torch.float64) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().to(dtype).requires_grad_(value.requires_grad)
    return value


def _shifted(value: Any) -> Any:
    """Every number of a tensor is moved by up to 1 %."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    generator = torch.Generator(value.device).manual_seed(0)
    factor = torch.rand(value.shape, generator=generator, device=value.device).mul_(0.02).add_(0.99)
    return (value.detach() * factor).to(value.dtype).requires_grad_(value.requires_grad)
