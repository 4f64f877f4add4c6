"""One run of `convert` on a model: chooses, swaps, takes back, and reports."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import fx, nn

from .._graph.effects import Effects
from .._graph.flow import Flow, Value
from .._graph.forward import (
    assign,
    assigned,
    install,
    record_of,
    remove,
    restore,
    rewritten_of,
    set_recomputing,
)
from .._graph.modules import is_quantized
from .._graph.report import Unchanged, title
from .._torch_private import BatchNormBase
from ..nn.depthwise import DEPTHWISE
from ..nn.norm import BatchNormActBase
from ..nn.parts import ROW_OF, activation_of
from ..nn.saving import SavingActivation
from ..reference.pointwise import POINTWISE
from ._attention import attends, find_attention
from ._branches import find_branches
from ._calls import (
    KEEP_OUTPUT,
    Candidates,
    find_calls,
    find_modules,
    left_modules,
    target_of,
)
from ._classes import Decision, is_swapped
from ._gates import find_products
from ._group_norms import find_group_norms
from ._in_place import can_overwrite, idle_biases
from ._norms import Finder
from ._reordering import OVERWRITTEN_LATER
from ._report import ConversionReport, Converted, LookedAt
from ._rewrite import FusionPlan
from ._row_norms import find_row_norms
from ._rules import GAINS_NOTHING, Rules, gains
from ._sites import EpilogueStep, Site, has_own_steps
from ._units import Unit


class Conversion:
    """The swaps of a model: found once, chosen as far as they are right, installed and taken back
    any number of times. Only `install`, `uninstall` and `keep_few_bits` change the model."""

    def __init__(
        self,
        model: nn.Module,
        entries: list[Decision],
        excluded: set[int],
        memory: str,
        dropout: bool,
        layer_norms: bool,
    ) -> None:
        self.model, self.entries, self.excluded, self.memory = model, entries, excluded, memory
        self.dropout = dropout  # with our random numbers
        # `layer_norms`: ours, whose outputs need not be kept.
        norms = [module for module in model.modules() if isinstance(module, BatchNormBase)]
        # Forwards and classes of an earlier conversion: all is found anew.
        self.earlier = {
            module: now
            for module in model.modules()
            if (now := rewritten_of(module)) is not None and not is_swapped(module)
        }
        self.classes: dict[nn.Module, tuple[type, dict[str, Any]]] = {
            norm: assigned(norm) for norm in norms if record_of(norm) is not None
        }
        self._take_earlier_back()
        self.undone: dict[int, str] = {}  # id of a module: why
        self.norms = [norm for norm in norms if not _is_done(norm)]
        self.done = len(norms) - len(self.norms)
        candidates = Candidates(dropout, layer_norms)
        self.flow = Flow(model, candidates.tracing)
        known = {id(part) for entry in entries for part in entry.module.modules()}
        entries += find_modules(self.flow, known)
        for entry in entries:
            if entry.fused is not None and id(entry.module) in excluded:
                entry.reason = "excluded"
        order = {id(module): place for place, module in enumerate(model.modules())}
        entries.sort(key=lambda entry: order[id(entry.module)])
        known |= {id(entry.module) for entry in entries}
        self.activations = [entry for entry in entries if entry.fused and not entry.reason]
        self.sources = {id(module): title(type(module)) for module in model.modules()}
        twins = {id(entry.module): entry.twin() for entry in self.activations}
        self.rules = Rules(self.flow, excluded, twins, self.undone)
        self.effects = Effects(self.flow, self.rules.fused)
        for entry in self.activations:
            if self._is_overwritten(entry.module, twins[id(entry.module)]):
                entry.reason = OVERWRITTEN_LATER
        self.activations = [entry for entry in self.activations if not entry.reason]
        finder = Finder(self.rules)
        sites = [self._site(finder, norm) for norm in self.norms]
        # In the order in which they choose their calls.
        self.all_units: list[Unit] = [
            *(site for site in sites if site is not None),
            *find_group_norms(self.rules),
            *find_row_norms(self.rules),
            *find_products(self.rules),
            *find_branches(self.rules, dropout),
            *find_calls(self.rules, candidates, known, memory),
        ]
        self.left = list(left_modules(self.flow, candidates, known | {id(n) for n in self.norms}))
        self.choose()

    def attend(self, callers: Iterable[nn.Module]) -> None:
        """Takes in the modules that call torch's attention, those of an earlier conversion, too."""
        earlier = (module for module, forward in self.earlier.items() if attends(forward))
        callers = dict.fromkeys((*callers, *earlier))
        entries = find_attention(self.flow, callers, self.excluded, self.dropout)
        fresh = [e for e in entries if all(e.module is not old.module for old in self.entries)]
        self.entries += fresh
        self.activations += [entry for entry in fresh if not entry.reason]

    def _take_earlier_back(self) -> None:
        for module in (*self.earlier, *self.classes):
            restore(module) if module in self.classes else remove(module)

    def choose(self, only: Callable[[nn.Module], bool] = lambda _: True) -> None:
        """Decides which swaps and units to install, of those that were not found to be wrong.
        Nothing may be installed meanwhile."""

        def chosen(module: nn.Module) -> bool:
            return id(module) not in self.undone and only(module)

        self.units = [copy.copy(unit) for unit in self.all_units]
        for unit in self.units:
            unit.reason = unit.reason or self.undone.get(id(unit.module), "")
            unit.leave_out(self.undone)
        units = [unit for unit in self.units if not unit.reason and chosen(unit.module)]
        # The activations of a unit are swapped with it.
        parts = {id(part) for unit in units for part in unit.parts}
        self.plan = FusionPlan(self.effects, units)
        for site in self.plan.sites:
            site.overwrites = self._overwrites(site.module, site.steps)
        for unit in self.plan.units[:]:
            if unit.idle is not None:
                unit.reason = unit.idle
                self.plan.units.remove(unit)
        swapped = [
            entry
            for entry in self.activations
            if id(entry.module) not in self.undone
            and (id(entry.module) in parts or chosen(entry.module))
        ]
        self.idle = self._idle(swapped)  # ids of activations
        self.swapped = [entry for entry in swapped if id(entry.module) not in self.idle]

    def _idle(self, swapped: Iterable[Decision]) -> set[int]:
        """Activations that are part of nothing and gain nothing."""
        parts = {id(part) for unit in self.plan.units for part in unit.parts}
        ours = [m for m in self.model.modules() if isinstance(m, BatchNormActBase)]
        for norm in (*ours, *(site.module for site in self.plan.sites)):
            parts.update(map(id, norm.children()))
        return {
            id(entry.module)
            for entry in swapped
            if id(entry.module) not in parts and not _gains(entry, self.memory)
        }

    def install(self) -> None:
        """Installs the chosen swaps and units."""
        self._take_earlier_back()
        try:
            for entry in self.swapped:
                entry.swap()
            self.rewritten = self.plan.apply()
            set_recomputing(self.model, self.memory == "recompute")
        except BaseException:
            self.uninstall()
            raise

    def _is_overwritten(self, module: nn.Module, twin: nn.Module) -> bool:
        """Whether somebody writes over the output of an activation that torch's does not keep."""
        point = activation_of(twin)
        if point is None or not point.saves_output or getattr(module, "inplace", False):
            return False
        if POINTWISE[point.op].name in KEEP_OUTPUT:
            return False
        return any(self.effects.is_overwritten(*value, True) for value in self._values(module))

    def _values(self, module: nn.Module) -> Iterator[Value]:
        """Calls of a module, or of a Sequential that ends with it and has no trace."""
        yield from self.flow.calls(module)
        for owner in self.flow.untraced(module):
            if type(owner) is nn.Sequential and owner[-1] is module:
                yield from self._values(owner)

    def _site(self, finder: Finder, norm: nn.Module) -> Site | None:
        site = finder.find(norm)
        if has_own_steps(norm):
            site.steps = ()
        site.alone = has_own_steps(norm) or self._is_recomputed(norm)
        of_use = site.steps or site.alone or self._overwrites(norm, ())
        if of_use or (site.reason and is_quantized(norm)):
            site.reason = self.rules.of_norm(norm)
        elif not site.reason:
            return None
        if id(norm) in self.excluded and not is_quantized(norm):
            site.reason = "excluded"
        return site

    def _is_recomputed(self, norm: nn.Module) -> bool:
        """Whether the output of a norm that nothing follows need not be kept; its numbers are those
        of torch with any `memory`."""
        return self.memory == "recompute" and not isinstance(norm, nn.SyncBatchNorm)

    def _overwrites(self, norm: nn.Module, steps: Sequence[EpilogueStep]) -> bool:
        """Whether a norm that is followed by these steps is to write over its input."""
        wanted = self.memory == "inplace" and id(norm) not in self.excluded
        return wanted and can_overwrite(self.effects, norm, steps)

    def compared_convolutions(self) -> list[nn.Module]:
        """Depthwise layers that stay if torch's kernels are faster: where `memory` asks for time
        alone, since recomputed outputs need our forward."""
        modules = (entry.module for entry in self.activations if self.memory == "store")
        return [module for module in modules if type(module) in DEPTHWISE]

    def dropouts(self) -> list[nn.Module]:
        """Dropouts with torch's random numbers, which ours could replace."""
        return [
            module
            for module in self.model.modules()
            if type(module) is nn.Dropout and not module.inplace and id(module) not in self.excluded
        ]

    def keep_few_bits(self) -> None:
        """Activations that `convert` gave their class save what `memory` says. Last of all: the
        comparison with the stock model is of exact derivatives."""
        save, gone = ("q8" if self.memory == "q8" else None), self.plan.gone()
        for module in self.model.modules():
            cls = type(module)
            if (
                record_of(module) is None
                or not issubclass(cls, SavingActivation)
                or not cls.takes("q8")
            ):
                continue
            runs = id(module) not in self.excluded and not self.plan.is_passed(module, gone)
            if runs and vars(module).get("save") != save:
                vars(module)["save"] = save

    def uninstall(self) -> None:
        """Restores the model as it was before, installed or not."""
        for site in self.plan.sites:
            restore(site.module)
        for module in (*self.plan.owners(), self.model):
            remove(module)
        for entry in self.swapped:
            restore(entry.module)
        self._take_earlier_back()
        for rewritten in self.earlier.values():
            install(rewritten)
        for norm, (fused, attributes) in self.classes.items():
            assign(norm, fused, attributes)

    def watched(self) -> list[nn.Module]:
        """Modules whose outputs are what they were, if all is right."""
        gone = self.plan.gone()
        modules = [entry.module for entry in self.swapped]
        acts = [m for m in modules if not any(n in gone for _, n in self.flow.calls(m))]
        places = [unit.place for unit in self.plan.units]
        return [*places, *acts, *self.plan.owners(), self.model]

    def report(self) -> ConversionReport:
        report = ConversionReport(already=self.done, memory=self.memory)
        swapped = {id(entry.module) for entry in self.swapped}
        done = self._done_before()
        for entry in self.entries:
            module, name = entry.module, entry.names[0]
            source = self.sources[id(module)]
            reason = entry.reason or self.undone.get(id(module), "")
            reason = reason or (GAINS_NOTHING if id(module) in self.idle else "")
            if reason:
                report.left.append(Unchanged(name, source, reason))
            elif entry.fused is None or module in done:
                report.already += 1
            elif id(module) in swapped:
                report.converted.append(Converted(name, source, target_of(entry)))
                if len(entry.names) > 1:
                    report.shared[name] = entry.names
        for unit in _of_one_way(self.plan.units):
            earlier = self.classes.get(unit.module, (None, {}))[0] is type(unit.module)
            if done.issuperset(unit.owners) if unit.owners else earlier:
                report.already += isinstance(unit, Site)
            else:
                getattr(report, unit.lines).append(unit.line(self.sources[id(unit.module)]))
        stay = [u for u in self.units if u.reason and u.left and u not in self.plan.units]
        # One line for all ways through a forward.
        rows = ((u.left, u.name, u.title or self.sources[id(u.module)], u.reason) for u in stay)
        for left, *line in dict.fromkeys(rows):
            getattr(report, left).append(Unchanged(*line))
        report.left += self.left
        report.looked_at = LookedAt(
            len(self.flow.names), len(self.flow.traces), len(self.flow.failed)
        )
        report.overwriting = [site.name for site in self.plan.sites if site.overwrites]
        report.idle_biases = idle_biases(self.flow, self.norms)
        report.rewritten = [self.flow.names[id(m)] for m in self.rewritten if m not in done]
        return report

    def _done_before(self) -> set[nn.Module]:
        """Modules that an earlier conversion gave the forward that they have now."""
        now = {module: rewritten_of(module) for module in self.earlier}
        return {m for m, one in now.items() if one and one.source == self.earlier[m].source}


def _of_one_way(units: Iterable[Unit]) -> Iterator[Unit]:
    """Units of one way through a forward with several: the first way that has most of a kind."""
    groups: dict[tuple[Any, ...], dict[fx.Graph | None, list[Unit]]] = {}
    for unit in units:
        graph = None if unit.change is None else unit.change.graph
        ways = groups.setdefault((type(unit), id(unit.module), unit.title), {})
        ways.setdefault(graph, []).append(unit)
    for ways in groups.values():
        yield from max(ways.values(), key=len)


def _is_done(norm: nn.Module) -> bool:
    return type(norm).__module__.startswith("fusedtrain.") and has_own_steps(norm)


def _gains(entry: Decision, memory: str) -> bool:
    """Whether an activation module with its fused class is worth it; all but torch's are."""
    function = entry.attributes.get("activation")  # of torch's transformer layers
    if function is not None:
        return gains(function.__name__, False, memory)
    row = ROW_OF.get(type(entry.module))  # which is not swapped yet
    return row is None or gains(row.name, getattr(entry.module, "inplace", False), memory)
