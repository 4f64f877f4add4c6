"""Instructions of a kernel for each byte that it moves, read from its machine code.

A multiprocessor starts four instructions of a warp a clock, so a kernel of many instructions waits
for these and not for memory. Branches depend on flags that the code does not show: of the ways
that move the most bytes, as with all options, the one with the fewest instructions counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from _sass import Instruction, is_load, is_store, jump_target, pieces


@dataclass(frozen=True)
class Route:
    """Instructions of one thread along a way, and the bytes that memory moves for it."""

    instructions: float
    bytes: float
    chosen: float = 0.0  # instructions of the kind that the way was chosen by

    @property
    def each(self) -> float:
        """Instructions a byte."""
        return self.instructions / self.bytes


class Flow:
    """Control flow of one kernel.

    Args:
        code: its instructions.
        moved: bytes that memory moves for each stored byte, where loads meet the caches; 0: a
            load is as many bytes as it says.
        by: names of instructions, a pattern from their beginning; of the ways that move the most
            bytes those with the most of these count. "": any.
    """

    def __init__(self, code: list[Instruction], moved: float = 0.0, by: str = "") -> None:
        graph = pieces(code)
        self.follows = _without_foreign_cases(code, graph)
        self.order, self.back = _depth_first(self.follows)
        begins = {code[begin].address: k for k, (begin, _, _) in enumerate(graph)}
        self.cost = [0.0] * len(graph)
        self.bytes = [0.0] * len(graph)
        self.chosen = [0.0] * len(graph)
        self.ends = {k for k, (_, end, _) in enumerate(graph) if code[end - 1].name == "EXIT"}
        returns = {k for k, (_, end, _) in enumerate(graph) if code[end - 1].name.startswith("RET")}
        calls: list[tuple[int, int]] = []
        for k, (begin, end, _) in enumerate(graph):
            for one in code[begin:end]:
                self.cost[k] += one.name != "NOP"
                if is_store(one):
                    self.bytes[k] += one.bytes * (moved or 1.0)
                elif is_load(one) and not moved:
                    self.bytes[k] += one.bytes
                self.chosen[k] += bool(by) and re.match(by, one.name) is not None
                called = jump_target(one) if one.name.startswith("CALL") else None
                if called in begins:
                    calls.append((k, begins[called]))
        for k, begin in calls:
            order, _ = _depth_first(self.follows, begin)
            way = _busiest(self, begin, returns, order)
            self.cost[k] += way.instructions if way else 0.0

    def body(self, header: int) -> set[int]:
        """The pieces of the loop that begins with this one."""
        sources = [k for k, to in self.back if to == header]
        before: dict[int, list[int]] = {}
        for k, follows in enumerate(self.follows):
            for to in follows:
                before.setdefault(to, []).append(k)
        inside, work = {header}, sources
        while work:
            k = work.pop()
            if k not in inside:
                inside.add(k)
                work += before.get(k, [])
        return inside


def _without_foreign_cases(
    code: list[Instruction], graph: list[tuple[int, int, list[int]]]
) -> list[list[int]]:
    """The pieces that follow each; of a jump by a table those alone that lie before the next one.

    pieces() lets all such jumps go to all of their targets: so there would be no loop.
    """
    tables = [k for k, (_, end, _) in enumerate(graph) if code[end - 1].name.startswith("BRX")]
    reached = {to for k, (_, _, all) in enumerate(graph) if k not in tables for to in all}
    follows = [all for _, _, all in graph]
    for k, later in zip(tables, [*tables[1:], len(graph)]):
        cases = [to for to in follows[k] if to in reached or k < to <= later]
        follows[k] = cases or follows[k]
    return follows


def _depth_first(
    follows: list[list[int]], start: int = 0
) -> tuple[list[int], set[tuple[int, int]]]:
    """Pieces in an order in which jumps go forward, and the jumps that go back."""
    order: list[int] = []
    back: set[tuple[int, int]] = set()
    state = {start: 1}
    stack = [(start, iter(follows[start]))]
    while stack:
        k, rest = stack[-1]
        to = next(rest, None)
        if to is None:
            state[k] = 2
            order.append(k)
            stack.pop()
        elif to not in state:
            state[to] = 1
            stack.append((to, iter(follows[to])))
        elif state[to] == 1:
            back.add((k, to))
    return order[::-1], back


def _busiest(flow: Flow, start: int, ends: set[int], inside: Iterable[int]) -> Route | None:
    """The way of fewest instructions among those that move the most bytes.

    Args:
        flow: the kernel's; of such ways those with the most of its ``chosen`` instructions count.
        start: the piece where the ways begin.
        ends: pieces that may be the last one.
        inside: all pieces of the ways, in an order in which jumps go forward.
    """
    # Bytes and chosen instructions (less is more), and instructions, up to a piece.
    best = {start: (0.0, 0.0, 0.0)}
    result: tuple[float, float, float] | None = None
    allowed = set(inside)
    for k in inside:
        if k not in best:
            continue
        bytes, chosen, cost = best[k]
        total = (bytes - flow.bytes[k], chosen - flow.chosen[k], cost + flow.cost[k])
        if k in ends and (result is None or total < result):
            result = total
        for to in flow.follows[k]:
            if (k, to) not in flow.back and to in allowed and total < best.get(to, (1.0,)):
                best[to] = total
    return Route(result[2], -result[0], -result[1]) if result else None


def _cheapest(flow: Flow) -> dict[int, float]:
    """Instructions before each piece, along the way of the fewest."""
    before = {0: 0.0}
    for k in flow.order:
        for to in flow.follows[k]:
            if k in before and (k, to) not in flow.back:
                cost = before[k] + flow.cost[k]
                before[to] = min(before.get(to, cost), cost)
    return before


def route(
    code: list[Instruction], moved: float = 0.0, by: str = "", inner: int = 1,
    turns: int | None = None, fewest: int = 0, silent: int = 1,
    turn: float = 0.0,
) -> Route:  # fmt: skip
    """Instructions and bytes of a thread.

    Args:
        code, moved, by: as in :class:`Flow`.
        inner: how often a thread goes through a loop that lies in another one.
        turns: how often a thread goes through the loop in a usual call; what lies before and
            behind the loop counts then. None: so often that the loop alone counts. 0: the loop is
            for what is left over, and does not count.
        fewest: how often a thread goes through the loop at least, on a small tensor: these share
            what the cheapest way to the loop costs. 0: so often that the way does not count.
        silent: how often a thread goes through an innermost loop that has chosen instructions, and
            moves no byte.
        turn: bytes that memory moves for a turn of the loop with the most chosen instructions,
            which alone counts.

    Raises:
        LookupError: no way moves a byte.
    """
    flow = Flow(code, moved or float(turn > 0), by)
    best: Route | None = None
    known: set[int] = set()
    sums: Route | None = None
    before = _cheapest(flow)
    bodies = {to: flow.body(to) for _, to in flow.back} if turns != 0 else {}
    for header, body in sorted(bodies.items(), key=lambda item: len(item[1])):
        ends = {k for k, to in flow.back if to == header}
        loop = _busiest(flow, header, ends, [k for k in flow.order if k in body])
        if loop is None or not loop.bytes:
            if loop is not None and loop.chosen:
                if silent > 1 and not body & known:
                    known |= body
                    flow.cost[header] += (silent - 1) * loop.instructions
                    flow.chosen[header] += (silent - 1) * loop.chosen
                elif turn and (sums is None or loop.chosen >= sums.chosen):
                    sums = Route(loop.instructions, turn, loop.chosen)
            continue
        if best is None or (loop.bytes, -loop.instructions) > (best.bytes, -best.instructions):
            best, lead = loop, before[header] / fewest if fewest else 0.0
        # The loops around this one, which come later, go through it more than once.
        flow.cost[header] += (inner - 1) * loop.instructions
        flow.bytes[header] += (inner - 1) * loop.bytes
    if sums is not None:
        return sums
    if best is not None and turns is None:
        return Route(best.instructions + lead, best.bytes)
    whole = _busiest(flow, 0, flow.ends, flow.order)
    if whole is None or not whole.bytes:
        raise LookupError("no way through the kernel moves a byte")
    if best is None:
        return whole
    more = (turns or 1) - 1
    return Route(whole.instructions + more * best.instructions, whole.bytes + more * best.bytes)
