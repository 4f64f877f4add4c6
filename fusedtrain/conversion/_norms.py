"""Batch norms that become one op with the steps after them: drop, residual add, activation.

A site starts at the call of a norm and follows the value as long as nobody else reads it, out of
the forward that called the norm where the value is what that forward returns.
"""

from __future__ import annotations

import operator
from typing import NamedTuple

from torch import fx, nn

from .._graph.flow import Trace, Value, is_sum
from .._graph.hooks import is_hooked
from .._graph.modules import STOCHASTIC_DEPTH, package_and_name
from .._graph.tracer import IN_PLACE
from ..nn.parts import activation_of, is_stochastic_depth
from ._formulas import Match, call_of, is_activation, matches_of, module_of, name_of_call
from ._rules import Rules, no_kernel
from ._sites import EpilogueStep, Site

_ORDER = ("drop", "add", "act")
_ARGUMENTS = " with these arguments"


class _Walk(NamedTuple):
    steps: list[EpilogueStep]
    returned: bool  # whether the value is what the forward returns
    blocked: str = ""  # by what


class Finder:
    """Finds the sites of a model."""

    def __init__(self, rules: Rules) -> None:
        self.rules, self.flow = rules, rules.flow

    def find(self, norm: nn.Module) -> Site:
        """The site of a norm, with the reason if nothing becomes part of it; '' where nothing of
        the kind follows."""
        calls = self.flow.calls(norm)
        site = Site(name=self.flow.names[id(norm)], module=norm, calls=calls)
        if not calls:
            for owner in self.flow.untraced(norm):
                if id(owner) in self.flow.failed:
                    where = self.flow.names[id(owner)] or "the model"
                    site.reason = f"torch.fx cannot trace {where} ({self.flow.failed[id(owner)]})"
            return site
        trace, node = calls[0]
        walk = self._agreed(trace, [self._walk(*call, []) for call in calls])
        site.levels = [(trace, node)]
        while walk.returned and not trace.inexact:
            above = self._above(trace.module)
            if above is None:
                break
            trace, node = above
            site.levels.append((trace, node))
            walk = self._walk(trace, node, walk.steps)
        graphs = {call.graph for _, call in calls}
        several = len(graphs) < len(calls) or any(owner is not calls[0][0] for owner, _ in calls)
        if not walk.steps or several:
            site.reason = f"called {len(calls)} times" if walk.steps else walk.blocked
            return site
        site.steps = tuple(walk.steps)
        reasons = ((step, self._obstacle(site, step)) for step in site.steps)
        site.barred = next(((step, reason) for step, reason in reasons if reason), None)
        return site

    def _obstacle(self, site: Site, step: EpilogueStep) -> str:
        """Reason why the forwards between a norm and a step cannot be rewritten for the step."""
        level = site.level_of(step)
        traces = [trace for trace, _ in site.levels[: level + 1]]
        inner = [node for trace in traces[:-1] for node in trace.graphs[0].nodes]
        if any(node.op == "placeholder" and str(node.target).startswith("*") for node in inner):
            return "a forward on the way to it takes any number of arguments"
        if step.overwrites:
            return "the sum is written over its other operand"
        for trace in traces:
            several_ways = step.kind != "add" and level == 0 and trace.is_known
            exact = several_ways or not trace.inexact
            reason = self.rules.of_source(trace, "" if exact else trace.inexact)
            if reason:
                return reason
        return ""

    def _above(self, module: nn.Module) -> Value | None:
        """The only call of a module, of which nothing else than its value is known."""
        calls = self.flow.calls(module)
        if len(calls) != 1 or self.flow.places.get(id(module), 0) != 1:
            return None
        if id(module) in self.rules.excluded or is_hooked(module):
            return None
        return calls[0]

    def _agreed(self, trace: Trace, walks: list[_Walk]) -> _Walk:
        """The steps that follow on every way through the forward, or why these are not known."""
        if not trace.inexact:
            return walks[0]
        # In a forward with several ways, only steps that all ways share.
        kept = [[s for s in walk.steps if s.kind != "add"] for walk in walks]
        first = all(steps == walk.steps[: len(steps)] for walk, steps in zip(walks, kept))
        if not first or len({tuple(s.work for s in steps) for steps in kept}) > 1:
            return _Walk([], False, trace.inexact)
        merged = [
            s._replace(
                nodes=tuple(steps[i].nodes[0] for steps in kept),
                matches=tuple(match for steps in kept for match in steps[i].matches),
            )
            for i, s in enumerate(kept[0])
        ]
        lost = len(walks[0].steps) > len(kept[0])
        return _Walk(merged, False, trace.inexact if lost else walks[0].blocked)

    def _walk(self, trace: Trace, node: fx.Node, before: list[EpilogueStep]) -> _Walk:
        value, steps = node, list(before)
        if not (len(node.args) == 1 and not node.kwargs):
            return _Walk(steps, False)
        while True:
            if trace.is_kept(value):
                return _Walk(steps, False, "its output is stored, too")
            users = list(value.users)
            formula = next((m for m in matches_of(value.graph).values() if m.computes(value)), None)
            if formula is not None and formula.widens and len(users) > 1:
                return _Walk(steps, False, f"under autocast {formula.name} is in float32 here")
            if formula is not None and not formula.widens:
                users = [formula.root]
            if len(users) != 1:
                kinds = [self._step(trace, value, user) for user in users]
                shared = any(isinstance(kind, EpilogueStep) for kind in kinds)
                return _Walk(steps, False, _why_shared(value) if shared else "")
            user = users[0]
            if user.op == "output":
                return _Walk(steps, user.args[0] is value)
            if formula is not None and users == [formula.root]:
                step: EpilogueStep | str | None = _activation(trace, formula)
            else:
                step = self._step(trace, value, user)
            if step is not None and not trace.are_alike(node, user):
                step = "what follows it is under another no_grad, autocast or checkpoint"
            if isinstance(step, str):
                return _Walk(steps, False, step)
            if step is not None:
                rank = _ORDER.index(step.kind)
                if steps and rank <= _ORDER.index(steps[-1].kind):
                    return _Walk(steps, False)
                steps.append(step)
                if step.kind == "act":
                    return _Walk(steps, False)
            value = user

    def _step(self, trace: Trace, value: fx.Node, user: fx.Node) -> EpilogueStep | str | None:
        """The use of a value by a call: a step, nothing (None), or something else (why not)."""
        module = trace.callee(user)
        if module is not None:
            if user.args != (value,) or user.kwargs:
                return ""
            return self._module_step(trace, user, module)
        if user.op not in ("call_function", "call_method"):
            return ""
        if is_sum(user):
            return _addition(trace, value, user)
        name = name_of_call(user)
        if not name or user.args[:1] != (value,) or user.all_input_nodes != [value]:
            return ""
        match = call_of(user)
        return _activation(trace, match) if match else no_kernel(name, _ARGUMENTS)

    def _module_step(
        self, trace: Trace, user: fx.Node, module: nn.Module
    ) -> EpilogueStep | str | None:
        reason = self.rules.of_part(module, self.flow.names[id(module)])
        if type(module) is nn.Identity and not reason:
            return None
        fused = self.rules.fused(module)
        known = is_activation(fused)
        if not known and package_and_name(module) not in STOCHASTIC_DEPTH:
            return ""
        if reason:
            return reason
        if known and activation_of(fused) is not None:
            return EpilogueStep("act", trace, (user,), module, True)
        if not known and is_stochastic_depth(module):
            return EpilogueStep("drop", trace, (user,), module, True)
        return no_kernel(type(fused).__name__)


def _activation(trace: Trace, match: Match) -> EpilogueStep | str:
    made = module_of(match)
    if made is None:
        return no_kernel(match.name, _ARGUMENTS)
    return EpilogueStep("act", trace, (match.root,), made, matches=(match,))


def _why_shared(value: fx.Node) -> str:
    for user in value.users:
        name = str(getattr(user.target, "__name__", user.target))
        if user.args[:1] == (value,) and (name.endswith("_") or name in IN_PLACE):
            return f"{name} writes over its output"
    return "its output is used elsewhere, too"


def _addition(trace: Trace, value: fx.Node, user: fx.Node) -> EpilogueStep | str:
    if len(user.args) != 2 or not set(user.kwargs) <= {"alpha"} or user.kwargs.get("alpha", 1) != 1:
        return ""
    first, second = user.args
    other = second if first is value else first
    if not isinstance(other, fx.Node) or other is value:
        return ""
    in_place = user.target in (operator.iadd, "add_")
    return EpilogueStep("add", trace, (user,), None, False, int(first is not value), in_place)
