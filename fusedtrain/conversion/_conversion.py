"""One run of `convert` on a model: chooses, swaps, takes back, and reports."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from torch import fx, nn

from .._graph.effects import Effects
from .._graph.flow import Flow
from .._graph.forward import install, remove, restore, rewritten_of, set_recomputing
from .._graph.modules import is_quantized
from .._graph.records import Decision, assign, assigned, record_of
from .._graph.report import Unchanged, title
from .._torch_private import BatchNormBase
from ..nn.norm import BatchNormActBase
from ..nn.parts import ROW_OF
from ..nn.saving import SavingActivation
from ._branches import Branch, find_branches
from ._calls import Call, find_calls, find_modules, left_calls, left_modules, target_of
from ._candidates import GAINS_NOTHING, Candidates, gains
from ._gates import Product, find_products
from ._in_place import can_overwrite
from ._norms import Finder, Site, Step, fused_class, has_own_steps, obstacle
from ._report import (
    Branched,
    Called,
    ConversionReport,
    Converted,
    FusedNorm,
    Gated,
    LookedAt,
)
from ._rewrite import Plan, apply, becomes_ours


class Conversion:
    """The swaps of a model, which can be installed and taken back any number of times."""

    def __init__(
        self, model: nn.Module, entries: list[Decision], excluded: set[int], memory: str
    ) -> None:
        self.model, self.entries, self.excluded, self.memory = model, entries, excluded, memory
        norms = [module for module in model.modules() if isinstance(module, BatchNormBase)]
        # Forwards and classes of an earlier conversion: all is found anew.
        self.earlier = {m: now for m in model.modules() if (now := rewritten_of(m)) is not None}
        self.classes: dict[nn.Module, tuple[type, dict[str, Any]]] = {
            norm: assigned(norm) for norm in norms if record_of(norm) is not None
        }
        self._take_earlier_back()
        self.undone: dict[int, str] = {}  # id of a module: why
        self.unfit: dict[int, str] = {}  # id of a norm: why
        self.swapped: list[Decision] = []
        self.left: dict[int, str] = {}
        self.idle: set[int] = set()  # ids of activations
        self.norms = [norm for norm in norms if not _is_done(norm)]
        self.done = len(norms) - len(self.norms)
        self.candidates = Candidates()
        self.flow = Flow(model, self.candidates.tracing)
        self.effects = Effects(self.flow)
        self.plan = Plan(self.effects, [])
        known = {id(part) for entry in entries for part in entry.module.modules()}
        entries += find_modules(self.flow, excluded, known)
        order = {id(module): place for place, module in enumerate(model.modules())}
        entries.sort(key=lambda entry: order[id(entry.module)])
        self.known = known | {id(entry.module) for entry in entries}
        self.activations = [entry for entry in entries if entry.fused and not entry.reason]
        self.sources = {id(module): title(type(module)) for module in model.modules()}
        self._find()

    def _take_earlier_back(self) -> None:
        for module in (*self.earlier, *self.classes):
            restore(module) if module in self.classes else remove(module)

    def _find(self) -> None:
        """All units of the model. Activations have their fused classes meanwhile, which are known
        by their parameters."""
        for entry in self.activations:
            assert entry.fused is not None
            assign(entry.module, entry.fused, entry.attributes)
        try:
            finder = Finder(self.flow, self.excluded)
            sites = [self._site(finder, norm) for norm in self.norms]
            self.sites = [site for site in sites if site is not None]
            self.products, self.left_products = find_products(self.flow, self.excluded)
            self.branches = find_branches(self.flow, self.excluded)
            calls = find_calls(self.flow, self.excluded | self.known)
            idle = [c for c in calls if not gains(c.match.name, c.match.in_place, self.memory)]
            self.idle_calls = {c.node for c in idle if not c.match.is_formula}
            self.calls = [call for call in calls if call.node not in self.idle_calls]
        finally:
            for entry in self.activations:
                restore(entry.module)

    def install(self, only: Callable[[nn.Module], bool] = lambda _: True) -> Plan:
        """Swaps what is chosen, as far as it was not found to be wrong."""

        def chosen(module: nn.Module | None) -> bool:
            return id(module) not in self.undone and (module is None or only(module))

        self._take_earlier_back()
        try:
            return self._install(chosen)
        except BaseException:
            self.uninstall()
            raise

    def _install(self, chosen: Callable[[nn.Module | None], bool]) -> Plan:
        sites = [copy.copy(site) for site in self.sites if chosen(site.norm)]
        for site in sites:
            site.steps = list(site.steps)
        products = [p for p in self.products if chosen(p.trace.module)]
        branches = [b for b in self.branches if chosen(b.trace.module)]
        calls = [call for call in self.calls if chosen(call.trace.module)]
        # The activations of a unit are swapped with it.
        parts = {id(step.module) for site in sites for step in site.steps}
        parts |= {id(product.module) for product in products}
        self.swapped = [
            entry
            for entry in self.activations
            if id(entry.module) not in self.undone
            and (id(entry.module) in parts or chosen(entry.module))
        ]
        for entry in self.swapped:
            assert entry.fused is not None
            assign(entry.module, entry.fused, entry.attributes)
        for site in sites:
            for step in site.steps[:]:
                if step in site.steps and step.is_call and id(step.module) in self.undone:
                    site.truncate(step)
        self.left = dict(self.unfit)
        products = [p for p in products if id(p.module) not in self.undone]
        self.plan = Plan(self.effects, sites, products, branches, calls)
        self.plan.left_products |= {
            p.node: Unchanged(p.name, p.title, why)
            for p in self.products
            if (why := self.undone.get(id(p.trace.module)) or self.undone.get(id(p.module)))
        }
        for site in sites:
            site.overwrites = self._overwrites(site.norm, site.steps)
            of_use = site.steps or has_own_steps(site.norm) or self._is_recomputed(site.norm)
            if not of_use and not site.overwrites:
                self.left[id(site.norm)] = self.plan.left.get(id(site.norm), "")
        self.plan.sites = [site for site in sites if id(site.norm) not in self.left]
        self._take_idle_back()
        self.rewritten = apply(self.plan)
        set_recomputing(self.model, self.memory == "recompute")
        return self.plan

    def _take_idle_back(self) -> None:
        """Gives activations their class back that are part of nothing and gain nothing."""
        parts = {id(step.module) for site in self.plan.sites for step in site.steps}
        parts |= {id(product.module) for product in self.plan.products}
        ours = [m for m in self.model.modules() if isinstance(m, BatchNormActBase)]
        for norm in (*ours, *(site.norm for site in self.plan.sites)):
            parts.update(map(id, norm.children()))
        self.idle = {
            id(entry.module)
            for entry in self.swapped
            if id(entry.module) not in parts and not _gains(entry, self.memory)
        }
        for entry in self.swapped:
            if id(entry.module) in self.idle:
                restore(entry.module)
        self.swapped = [entry for entry in self.swapped if id(entry.module) not in self.idle]

    def _site(self, finder: Finder, norm: nn.Module) -> Site | None:
        name, calls = self.flow.names[id(norm)], self.flow.calls(norm)
        plain = Site(norm, name, calls=calls)
        site = plain if has_own_steps(norm) else finder.find(norm)
        alone = self._is_recomputed(norm) or self._overwrites(norm, ())
        if isinstance(site, str) and alone:
            site = plain  # so that its output, or its input, need not be kept
        if site == "":
            return None
        reason = site if isinstance(site, str) else obstacle(norm)
        reason = "excluded" if id(norm) in self.excluded else reason
        reason = "quantised" if is_quantized(norm) else reason
        if reason or isinstance(site, str):
            self.unfit[id(norm)] = reason
            return None
        return site

    def _is_recomputed(self, norm: nn.Module) -> bool:
        """Whether the output of a norm that nothing follows need not be kept; its numbers are those
        of torch with any `memory`."""
        return self.memory == "recompute" and not isinstance(norm, nn.SyncBatchNorm)

    def _overwrites(self, norm: nn.Module, steps: Sequence[Step]) -> bool:
        """Whether a norm that is followed by these steps is to write over its input."""
        if self.memory != "inplace" or id(norm) in self.excluded:
            return False
        acts = [step.module for step in steps if step.kind == "act"]
        parts = [
            part for name in ("drop", "act") if (part := getattr(norm, name, None)) is not None
        ]
        acts += [part for part in parts if type(part) is not nn.Identity]
        if len(acts) > 1 or len(acts) < len(steps):
            return False
        ends = [(step.trace, node) for step in steps for node in step.nodes][-1:]
        return can_overwrite(self.effects, norm, acts[0] if acts else None, ends)

    def keep_few_bits(self) -> None:
        """Activations that `convert` gave their class save what `memory` says. Last of all: the
        comparison with the stock model is of exact derivatives."""
        save = "q8" if self.memory == "q8" else None
        for module in self.model.modules():
            cls = type(module)
            if (
                record_of(module) is None
                or not issubclass(cls, SavingActivation)
                or not cls.takes("q8")
            ):
                continue
            runs = id(module) not in self.excluded and self.plan.runs(module)
            if runs and vars(module).get("save") != save:
                vars(module)["save"] = save

    def uninstall(self) -> None:
        """Restores the model as it was before."""
        for site in self.plan.sites:
            if site.norm in self.norms:
                restore(site.norm)
        for module in (*self.plan.owners(), self.model):
            remove(module)
        for entry in self.swapped:
            restore(entry.module)
        for rewritten in self.earlier.values():
            install(rewritten)
        for norm, (fused, attributes) in self.classes.items():
            assign(norm, fused, attributes)

    def watched(self) -> list[nn.Module]:
        """Modules whose outputs are what they were, if all is right."""
        gone = self.plan.gone()
        modules = [entry.module for entry in self.swapped]
        acts = [m for m in modules if not any(n in gone for _, n in self.flow.calls(m))]
        after = [place_of(site) for site in self.plan.sites]
        return [*after, *acts, *self.plan.owners(), self.model]

    def report(self) -> ConversionReport:
        report = ConversionReport(already=self.done, memory=self.memory)
        swapped = {id(entry.module) for entry in self.swapped}
        for entry in self.entries:
            module, name = entry.module, entry.names[0]
            source = self.sources[id(module)]
            reason = entry.reason or self.undone.get(id(module), "")
            reason = reason or (GAINS_NOTHING if id(module) in self.idle else "")
            if reason:
                report.left.append(Unchanged(name, source, reason))
            elif entry.fused is None:
                report.already += 1
            elif id(module) in swapped:
                report.converted.append(Converted(name, source, target_of(entry)))
                if len(entry.names) > 1:
                    report.shared[name] = entry.names
        done = self._done_before()

        def fresh(units: Iterable[_Unit]) -> list[_Unit]:
            return [unit for unit in units if unit.trace.module not in done]

        for site in self.plan.sites:
            before = site.norm in self.classes and self.classes[site.norm][0] is type(site.norm)
            if done.issuperset(site.owners) if site.owners else before:
                report.already += 1
            else:
                report.norms.append(self._fused(site))
        for product in _of_one_way(fresh(self.plan.products)):
            kind = title(type(product.trace.module))
            report.products.append(Gated(product.name, kind, product.title))
        for branch in fresh(self.plan.branches):
            kind = title(type(branch.trace.module))
            report.branches.append(Branched(branch.name, kind, branch.parts))
        for call in _of_one_way(fresh(self.plan.calls)):
            kind = title(type(call.trace.module))
            report.calls.append(Called(call.name, kind, call.title))
        for norm in self.norms:
            why = self.undone.get(id(norm)) or self.left.get(id(norm))
            if why:
                report.left.append(
                    Unchanged(self.flow.names[id(norm)], self.sources[id(norm)], why)
                )
        known = self.known | {id(norm) for norm in self.norms}
        report.left += left_modules(self.flow, self.candidates, known)
        report.left_calls += left_calls(self.flow, self.candidates, known, self._reasons())
        left_products = self.left_products | self.plan.left_products
        # One line for all ways through a forward.
        report.left_products += dict.fromkeys(left_products.values())
        report.looked_at = LookedAt(
            len(self.flow.names), len(self.flow.traces), len(self.flow.failed)
        )
        report.overwriting = [site.name for site in self.plan.sites if site.overwrites]
        report.rewritten = [self.flow.names[id(m)] for m in self.rewritten if m not in done]
        return report

    def _done_before(self) -> set[nn.Module]:
        """Modules that an earlier conversion gave the forward that they have now."""
        now = {module: rewritten_of(module) for module in self.earlier}
        return {m for m, one in now.items() if one and one.source == self.earlier[m].source}

    def _reasons(self) -> dict[fx.Node, str]:
        """Reasons why the calls of all graphs stay; '' for those that are gone."""
        reasons = dict.fromkeys(self.idle_calls, GAINS_NOTHING) | self.plan.left_calls
        for trace in self.flow.traces:
            key = id(trace.module)
            why = "excluded" if key in self.excluded else self.undone.get(key, "")
            if why:
                reasons.update((node, why) for graph in trace.graphs for node in graph.nodes)
        return reasons | dict.fromkeys(self.plan.gone(), "")

    def _fused(self, site: Site) -> FusedNorm:
        parts = [
            "add" if step.module is None else type(step.module).__name__ for step in site.steps
        ]
        fused = fused_class(site.norm)
        assert fused is not None
        function = "fusedtrain.functional.batch_norm_act"
        target = title(fused) if becomes_ours(site) else function
        return FusedNorm(site.name, self.sources[id(site.norm)], target, tuple(parts))


_Unit = TypeVar("_Unit", Product, Branch, Call)
_Titled = TypeVar("_Titled", Product, Call)


def _of_one_way(units: Iterable[_Titled]) -> Iterator[_Titled]:
    """Units of one way through a forward with several: the first way that has most of a kind."""
    groups: dict[tuple[int, str], dict[fx.Graph, list[_Titled]]] = {}
    for unit in units:
        ways = groups.setdefault((id(unit.trace), unit.title), {})
        ways.setdefault(unit.node.graph, []).append(unit)
    for ways in groups.values():
        yield from max(ways.values(), key=len)


def _is_done(norm: nn.Module) -> bool:
    return type(norm).__module__.startswith("fusedtrain.") and has_own_steps(norm)


def _gains(entry: Decision, memory: str) -> bool:
    """Whether an activation module that has its fused class is worth it; all but torch's are."""
    function = entry.attributes.get("activation")  # of torch's transformer layers
    if function is not None:
        return gains(function.__name__, False, memory)
    record = record_of(entry.module)
    row = None if record is None else ROW_OF.get(record.original)
    return row is None or gains(row.name, getattr(entry.module, "inplace", False), memory)


def place_of(site: Site) -> nn.Module:
    """The module that returns what a site computes."""
    if not (site.steps or site.overwrites):
        return site.norm
    return (site.levels or site.calls)[site.last][0].module
