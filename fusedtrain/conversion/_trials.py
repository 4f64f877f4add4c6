"""Installs the swaps of a conversion that an example proves right, and takes back the others."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .._graph.example import example_for
from .._graph.hooks import observing
from .._torch_private import pytree
from ..nn.depthwise import DEPTHWISE, passes_of
from ._candidates import TORCH_IS_FASTER
from ._conversion import Conversion
from ._proof import Errors, Run, excess, is_doubtful, is_perhaps_a_flip, run
from ._report import ConversionReport, Layer, Proof
from ._sites import Site, Step


def prove(conversion: Conversion, example: Any) -> ConversionReport:
    """Installs what does not change results.

    Raises:
        RuntimeError: what is right one by one is not right together. Nothing is converted then.
    """
    example = example_for(conversion.model, example)
    try:
        return _prove(conversion, _Trials(conversion, example))
    except BaseException:
        conversion.uninstall()
        raise


def _prove(conversion: Conversion, proof: _Trials) -> ConversionReport:
    conversion.install()
    tried: set[int] = set()
    while wrong := proof.judge():
        modules = [module for module in _modules(conversion) if id(module) not in tried]
        if not modules:
            raise RuntimeError(
                f"the converted model differs from the original one ({wrong}); nothing is converted"
            )
        conversion.uninstall()
        for module in modules:
            tried.add(id(module))
            conversion.install(lambda other, only=module: other is only)  # type: ignore[misc]
            reason = proof.judge()
            conversion.uninstall()
            if reason:
                conversion.undone[id(module)] = f"undone: {reason}"
        # A norm may have lost a sum to one that is undone now, and is tried in the next round.
        conversion.install()
    report = conversion.report()
    report.proof = proof.result()
    return report


def _modules(conversion: Conversion) -> Iterable[nn.Module]:
    """Modules by which swaps and units are chosen, once each."""
    swapped = [entry.module for entry in conversion.swapped]
    return dict.fromkeys(swapped + [unit.module for unit in conversion.plan.units])


class _Trials:
    """Compares the model as it is at the moment with the stock one."""

    def __init__(self, conversion: Conversion, example: Any) -> None:
        self.conversion, self.model, self.example = conversion, conversion.model, example
        conversion.install()
        watched = conversion.watched()
        conversion.uninstall()
        self.stock = self._stock_run(watched)
        _, self.noise = run(self.model, example, watched, self.stock, noise=True)
        self._stock_runs: dict[bool, tuple[Run, Errors]] = {}  # of `_on_copies`

    def _stock_run(self, watched: list[nn.Module]) -> Run:
        """Leaves depthwise convolutions that gain nothing in it, unless `memory` asks for more than
        time: recomputed outputs need the class."""
        entries = self.conversion.activations if self.conversion.memory == "store" else []
        layers = {id(entry.module) for entry in entries if type(entry.module) in DEPTHWISE}
        gains: dict[int, bool] = {}

        def leave(module: nn.Module, args: Any, named: Any, _: Any) -> None:
            if id(module) in layers:
                use = passes_of(module, args[0] if args else named.get("input"))
                gains[id(module)] = any(use) or gains.get(id(module), False)

        with observing(lambda *_: None, leave):
            stock, _ = run(self.model, self.example, watched)
        idle = [layer for layer, gained in gains.items() if not gained]
        self.conversion.undone.update(dict.fromkeys(idle, TORCH_IS_FASTER))
        return stock

    def judge(self) -> str:
        """The fault of the conversion, in words; '' if there is none."""
        watched = self.conversion.watched()
        try:
            self.after, self.errors = run(self.model, self.example, watched, self.stock)
        except Exception as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        factor, what = excess(self.errors, self.noise)
        if is_doubtful(self.errors, self.noise, factor):
            factor, what = self._in_float64(watched, (factor, what))
        elif is_perhaps_a_flip(self.errors, self.noise) and self._was_a_flip(watched):
            return ""
        if factor == float("inf"):
            return f"{what} differs altogether"
        return f"{what} is off by {factor:.2g} times what rounding explains" if factor > 1 else ""

    def _in_float64(self, watched: list[nn.Module], narrow: tuple[float, str]) -> tuple[float, str]:
        """The same with copies in float64: that rounding grows into large errors, as in the last
        layers for a small image, must not hide a mistake."""
        example = pytree.tree_map(_widened, self.example)
        try:
            factor, what = self._on_copies(watched, example, wide=True)
        except Exception:  # a model that insists on its dtype: the first verdict stays
            return narrow
        return factor, f"{what}, in float64,"

    def _was_a_flip(self, watched: list[nn.Module]) -> bool:
        """Float64 agrees, and so does this dtype on an example whose values are a little different.

        A mistake of a kernel would be there, too; a value that rounding moved over the edge of a
        ReLU is not.
        """
        if self._in_float64(watched, (float("inf"), ""))[0] > 1:
            return False
        shifted = pytree.tree_map(_shifted, self.example)
        try:
            return self._on_copies(watched, shifted, wide=False)[0] <= 1
        except Exception:  # a model that insists on certain numbers
            return False

    def _on_copies(self, watched: list[nn.Module], example: Any, wide: bool) -> tuple[float, str]:
        """`excess` of another example, by copies of the model, in float64 where they are wide."""
        converted = _copied(self.model, wide)
        if wide not in self._stock_runs:
            self.conversion.uninstall()
            try:
                stock = _copied(self.model, wide)
            finally:
                self.conversion.install()
            copies = dict(zip(map(id, self.model.modules()), stock.modules()))
            places = [copies[id(module)] for module in watched]
            reference, _ = run(stock, example, places)
            _, noise = run(stock, example, places, reference, noise=True)
            self._stock_runs[wide] = reference, noise
        reference, noise = self._stock_runs[wide]
        _, errors = run(converted, example, (), reference)
        return excess(errors, noise)

    def result(self) -> Proof:
        conversion, plan = self.conversion, self.conversion.plan
        layers = []
        for site in plan.sites:
            error = self.errors.layers.get(id(site.place), 0.0)
            before, after = self._saved(self.stock, site), self._saved(self.after, site)
            layers.append(Layer(site.name, before, after, error))
        taken = {id(part) for site in plan.sites for part in site.parts}
        taken |= {id(part) for site in plan.sites for part in site.module.modules()}
        for entry in conversion.swapped:
            if id(entry.module) not in taken:
                error = self.errors.layers.get(id(entry.module), 0.0)
                before = self.stock.bytes_of(entry.module)
                after = self.after.bytes_of(entry.module)
                layers.append(Layer(entry.names[0], before, after, error))
        return Proof(
            self.errors.outputs,
            self.errors.gradient,
            self.noise.outputs,
            self.noise.gradient,
            self.stock.saved.total(),
            self.after.saved.total(),
            layers,
            len(self.after.outputs),
            len(self.after.gradients),
        )

    @staticmethod
    def _saved(done: Run, site: Site) -> int:
        total = sum(done.bytes_of(part) for part in site.module.modules())
        for step in site.steps:
            if step.is_call and step.module is not None:
                total += done.saved[(id(step.module), id(step.trace.module), _ordinal(step))]
        return total


def _ordinal(step: Step) -> int:
    """Number of a step among the calls of its module, in the forward that makes it."""
    nodes = step.trace.graphs[0].nodes
    calls = [node for node in nodes if step.trace.callee(node) is step.module]
    return calls.index(step.nodes[0])


def _copied(model: nn.Module, wide: bool) -> nn.Module:
    duplicate = copy.deepcopy(model)
    return duplicate.double() if wide else duplicate


def _widened(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().to(torch.float64).requires_grad_(value.requires_grad)
    return value


def _shifted(value: Any) -> Any:
    """Every number of a tensor is moved by up to 1 %."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    generator = torch.Generator(value.device).manual_seed(0)
    factor = torch.rand(value.shape, generator=generator, device=value.device).mul_(0.02).add_(0.99)
    return (value.detach() * factor).to(value.dtype).requires_grad_(value.requires_grad)
