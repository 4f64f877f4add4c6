"""What `convert` does to one model: chooses, swaps, takes back, and reports."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from torch import fx, nn

from .._graph.effects import Effects
from .._graph.flow import Flow
from .._graph.forward import passes_on, restore, rewritten_of, set_recomputing
from .._graph.modules import is_quantized
from .._graph.records import Found, assign, record_of
from .._graph.report import Left, title
from .._torch_private import BatchNormBase
from ..nn.norm import BatchNormActBase
from ..nn.parts import ROW_OF
from ..nn.saving import SavingActivation
from ._branches import find_branches
from ._calls import Call, find_calls, find_modules, left_calls, left_modules, target_of
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
from ._rewrite import Plan, apply, undo
from ._worth import GAINS_NOTHING, Worth, gains


class Conversion:
    """The swaps of a model, which can be installed and taken back any number of times."""

    def __init__(
        self, model: nn.Module, entries: list[Found], excluded: set[int], memory: str
    ) -> None:
        self.model, self.entries, self.excluded, self.memory = model, entries, excluded, memory
        before = rewritten_of(model)
        self.recomputed = before is not None and before.recomputes
        set_recomputing(model, False)  # else the forward could not be traced
        try:
            self.worth = Worth()
            self.flow = Flow(model, self.worth.tracing)
            self.effects = Effects(self.flow)
            self.readers = self.effects  # of what a norm may overwrite
            if memory == "inplace" and any(map(rewritten_of, model.modules())):
                now = Flow(model, self.worth.tracing, converted=True)
                self.readers = Effects(now)
        finally:
            set_recomputing(model, self.recomputed)
        known = {id(part) for entry in entries for part in entry.module.modules()}
        entries += find_modules(self.flow, excluded, known)
        order = {id(module): place for place, module in enumerate(model.modules())}
        entries.sort(key=lambda entry: order[id(entry.module)])
        self.known = known | {id(entry.module) for entry in entries}
        self.activations = [entry for entry in entries if entry.fused and not entry.reason]
        norms = [module for module in model.modules() if isinstance(module, BatchNormBase)]
        self.norms = [norm for norm in norms if not _is_done(norm)]
        self.done = len(norms) - len(self.norms)
        # Norms that were converted before: `memory` may change this flag of theirs, nothing else.
        self.before = {n: n.overwrite_input for n in norms if isinstance(n, BatchNormActBase)}
        self.sources = {id(module): title(type(module)) for module in model.modules()}
        self.undone: dict[int, str] = {}  # id of a module: why
        self.swapped: list[Found] = []
        self.plan = Plan(self.effects, [])
        self.left: dict[int, str] = {}
        self.idle: set[int] = set()  # ids of activations
        self.idle_calls: set[fx.Node] = set()

    def install(self, only: Callable[[nn.Module], bool] = lambda _: True) -> Plan:
        """Swaps what is chosen, as far as it was not found to be wrong."""

        def chosen(module: nn.Module) -> bool:
            return id(module) not in self.undone and only(module)

        try:
            return self._install(chosen)
        except BaseException:
            self.uninstall()
            raise

    def _install(self, chosen: Callable[[nn.Module], bool]) -> Plan:
        self.swapped = [entry for entry in self.activations if chosen(entry.module)]
        for entry in self.swapped:
            assert entry.fused is not None
            assign(entry.module, entry.fused, entry.attributes)
        finder = Finder(self.flow, self.excluded)
        self.left = {}
        sites = [site for norm in self.norms if (site := self._site(finder, norm, chosen))]
        # Now that timm's activations have classes which are known.
        products, self.left_products = find_products(self.flow, self.excluded)
        for product in products:
            if reason := self.undone.get(id(product.trace.module), ""):
                self.left_products[product.node] = Left(product.name, product.title, reason)
        products = [p for p in products if chosen(p.trace.module)]
        branches = [b for b in find_branches(self.flow, self.excluded) if chosen(b.trace.module)]
        calls = [
            call
            for call in find_calls(self.flow, self.excluded | self.known)
            if chosen(call.trace.module)
        ]
        idle = [c for c in calls if not gains(c.match.name, c.match.in_place, self.memory)]
        self.idle_calls = {c.node for c in idle if not c.match.is_formula}
        calls = [call for call in calls if call.node not in self.idle_calls]
        self.plan = Plan(self.effects, sites, products, branches, calls)
        for site in sites:
            site.overwrites = self._overwrites(site.norm, site.steps)
            of_use = site.steps or has_own_steps(site.norm) or self._is_recomputed(site.norm)
            if not of_use and not site.overwrites:
                self.left[id(site.norm)] = self.plan.left.get(id(site.norm), "")
        self.plan.sites = [site for site in sites if id(site.norm) not in self.left]
        self.rewritten = apply(self.plan)
        self._take_idle_back()
        for norm in self.before:
            if record_of(norm) is not None and norm not in self.norms:
                norm.overwrite_input = not norm._adds and self._overwrites(norm, ())
        set_recomputing(self.model, self.memory == "recompute")
        return self.plan

    def _take_idle_back(self) -> None:
        """Gives activations their class back that are part of nothing and gain nothing."""
        parts = {id(step.module) for site in self.plan.sites for step in site.steps}
        parts |= {id(product.module) for product in self.plan.products} | self.plan.passing.keys()
        for module in self.model.modules():
            if isinstance(module, BatchNormActBase):
                parts.update(map(id, module.children()))
        self.idle = {
            id(entry.module)
            for entry in self.swapped
            if id(entry.module) not in parts and not _gains(entry, self.memory)
        }
        for entry in self.swapped:
            if id(entry.module) in self.idle:
                restore(entry.module)
        self.swapped = [entry for entry in self.swapped if id(entry.module) not in self.idle]

    def _site(
        self, finder: Finder, norm: nn.Module, chosen: Callable[[nn.Module], bool]
    ) -> Site | None:
        name = self.flow.names[id(norm)]
        site = Site(norm, name) if has_own_steps(norm) else finder.find(norm)
        alone = self._is_recomputed(norm) or self._overwrites(norm, ())
        if isinstance(site, str) and alone:
            site = Site(norm, name)  # so that its output, or its input, need not be kept
        if site == "" or not chosen(norm):
            return None
        reason = site if isinstance(site, str) else obstacle(norm)
        reason = "excluded" if id(norm) in self.excluded else reason
        reason = "quantised" if is_quantized(norm) else reason
        if reason or isinstance(site, str):
            self.left[id(norm)] = reason
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
        return can_overwrite(self.readers, norm, acts[0] if acts else None, ends)

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
            runs = id(module) not in self.excluded and not passes_on(module)
            if runs and vars(module).get("save") != save:
                vars(module)["save"] = save

    def uninstall(self) -> None:
        set_recomputing(self.model, self.recomputed)
        for norm, overwrites in self.before.items():
            norm.overwrite_input = overwrites
        undo(self.plan)
        for entry in self.swapped:
            restore(entry.module)

    def watched(self) -> list[nn.Module]:
        """Modules whose outputs are what they were, if all is right."""
        gone = {
            id(step.module)
            for site in self.plan.sites
            for step in site.steps
            if step.is_call and id(step.module) not in self.plan.passing
        }
        gone |= {id(p.module) for p in self.plan.products}
        after = [place_of(site, self.plan) for site in self.plan.sites]
        acts = [entry.module for entry in self.swapped if id(entry.module) not in gone]
        owners = self.plan.owners()
        return [*after, *acts, *owners, self.model]

    def report(self) -> ConversionReport:
        report = ConversionReport(already=self.done, memory=self.memory)
        swapped = {id(entry.module) for entry in self.swapped}
        for entry in self.entries:
            module, name = entry.module, entry.names[0]
            source = self.sources[id(module)]
            reason = entry.reason or self.undone.get(id(module), "")
            reason = reason or (GAINS_NOTHING if id(module) in self.idle else "")
            if reason:
                report.left.append(Left(name, source, reason))
            elif entry.fused is None:
                report.already += 1
            elif id(module) in swapped:
                report.converted.append(Converted(name, source, target_of(entry)))
                if len(entry.names) > 1:
                    report.shared[name] = entry.names
        for site in self.plan.sites:
            report.norms.append(self._fused(site))
        for product in _of_one_way(self.plan.products):
            kind = title(type(product.trace.module))
            report.products.append(Gated(product.name, kind, product.title))
        for branch in self.plan.branches:
            kind = title(type(branch.trace.module))
            report.branches.append(Branched(branch.name, kind, branch.parts))
        for call in _of_one_way(self.plan.calls):
            kind = title(type(call.trace.module))
            report.calls.append(Called(call.name, kind, call.title))
        for norm in self.norms:
            why = self.undone.get(id(norm)) or self.left.get(id(norm))
            if why:
                report.left.append(Left(self.flow.names[id(norm)], self.sources[id(norm)], why))
        known = self.known | {id(norm) for norm in self.norms}
        report.left += left_modules(self.flow, self.worth, known)
        report.left_calls += left_calls(self.flow, self.worth, known, self._reasons())
        passing = {id(module) for module in self.model.modules() if passes_on(module)}
        left_products = self.left_products | self.plan.left_products
        # One line for all ways through a forward.
        report.left_products += dict.fromkeys(left_products.values())
        report.looked_at = LookedAt(
            len(self.flow.names), len(self.flow.traces), len(self.flow.failed.keys() - passing)
        )
        report.overwriting = [
            self.flow.names[id(module)]
            for module in self.model.modules()
            if isinstance(module, BatchNormActBase) and module.overwrite_input
        ]
        report.rewritten = [self.flow.names[id(module)] for module in self.rewritten]
        return report

    def _reasons(self) -> dict[fx.Node, str]:
        """Of the calls of all graphs, why they stay; '' of those that are gone."""
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
        return FusedNorm(site.name, self.sources[id(site.norm)], title(fused), tuple(parts))


_Unit = TypeVar("_Unit", Product, Call)


def _of_one_way(units: Iterable[_Unit]) -> Iterator[_Unit]:
    """Of a forward with several ways those of one way: the first that has most of a kind."""
    groups: dict[tuple[int, str], dict[fx.Graph, list[_Unit]]] = {}
    for unit in units:
        ways = groups.setdefault((id(unit.trace), unit.title), {})
        ways.setdefault(unit.node.graph, []).append(unit)
    for ways in groups.values():
        yield from max(ways.values(), key=len)


def _is_done(norm: nn.Module) -> bool:
    ours = type(norm).__module__.startswith("fusedtrain.")
    return record_of(norm) is not None or (ours and has_own_steps(norm))


def _gains(entry: Found, memory: str) -> bool:
    """Whether an activation module that has its fused class is worth it; all but torch's are."""
    function = entry.attributes.get("activation")  # of torch's transformer layers
    if function is not None:
        return gains(function.__name__, False, memory)
    record = record_of(entry.module)
    row = None if record is None else ROW_OF.get(record.original)
    return row is None or gains(row.name, getattr(entry.module, "inplace", False), memory)


def place_of(site: Site, plan: Plan) -> nn.Module:
    """The module that returns what a site computes."""
    if not site.steps:
        return site.norm
    step = site.steps[-1]
    passes = step.is_call and step.module is not None and id(step.module) in plan.passing
    return step.module if passes and step.module is not None else step.trace.module
