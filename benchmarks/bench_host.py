"""Host time: calls on tensors of 64 numbers, optimizer steps on small tensors, networks on small
images, all on one thread. Each row has the most that fusedtrain may take of its rival's time.
Rivals take turns within one test."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as T
from torch import nn

import fusedtrain
from benchmarks.harness import calls, networks, ops
from benchmarks.harness.cases import LAYOUTS, Options, Work
from benchmarks.harness.guards import admit, refuse_the_reference
from benchmarks.harness.race import Race, in_graph
from benchmarks.harness.rows import Row
from benchmarks.harness.tables import Column, Limits, Report, counted, interval_text, pair
from fusedtrain.advisor.bench import amp_step, steps
from fusedtrain.advisor.bench.clock import Call

FAMILY = "host"
STEP = "clip"  # of steps.JOBS: GradScaler, clipping, step
RULES = ("adamw", "sgd")
TENSORS, SIZE = 161, 16  # as many tensors as a ResNet-50 has parameters
NETWORKS = ("resnet50", "efficientnet_b0")
# At batch 1 the last stage has one value a channel, which torch refuses in training.
BATCH, PIXELS = 2, 32
GATE_BATCH, GATE_PIXELS = 4, 64
TARGETS = {"step": 0.6, "train": 0.95}  # of other kinds of rows than `calls.CALLS`


@dataclass(frozen=True)
class Case:
    """One row."""

    op: str
    layout: str
    pass_name: str
    target: float
    model: str = ""

    def __str__(self) -> str:
        return "-".join(filter(None, (self.op, self.model, self.pass_name, self.layout)))


def select(options: Options) -> list[Case]:
    """The cases of a run."""
    cases = [
        Case(op, layout, pass_name, call.target(pass_name))
        for op, call in calls.CALLS.items()
        for layout in LAYOUTS
        for pass_name in calls.PASSES
    ]
    cases += [Case(f"{rule} step", "", STEP, TARGETS["step"]) for rule in RULES]
    cases += [
        Case("train", layout, calls.BOTH, TARGETS["train"], model)
        for model in NETWORKS
        for layout in LAYOUTS
    ]
    if options.quick:
        quick = ("bn_relu", "silu", "adamw step")
        cases = [c for c in cases if c.op in (options.ops or quick) and c.layout != "channels_last"]
    return [case for case in cases if options.wants(case.op, case.model)]


# --- who takes part: name -> call, those that passed the gate ---


def _calls(case: Case, device: str) -> dict[str, Call]:
    call = calls.CALLS[case.op]
    contest = call.contest(Work(device), case.layout)

    def gate(who: str, function: Any) -> None:
        calls.check(call, contest, who)

    part = case.pass_name if case.pass_name == calls.BOTH else "forward"
    functions = admit(contest.functions, gate, f"{case} on {device}")
    return {who: contest.call(function, part) for who, function in functions.items()}


def _steps(case: Case, device: str) -> dict[str, Call]:
    rule, kind = case.op.removesuffix(" step"), steps.KINDS["float32"]

    def gate(who: str, name: str) -> None:
        amp_step.check(who, rule, STEP, kind, device)

    names = admit({who: who for who in ("fusedtrain", "fused")}, gate, f"{case} on {device}")
    torch.manual_seed(0)
    values = [0.05 * torch.randn(SIZE, device=device) for _ in range(TENSORS)]
    grads = [0.01 * torch.randn_like(value) for value in values]
    return {
        who: steps.contestant(
            who, rule, STEP, kind, steps.parameters(values, grads), lr=steps.LR
        ).call
        for who in names
    }


@lru_cache(maxsize=1)
def _network(model: str, layout: str, device: str) -> dict[str, Any]:
    setup = networks.Setup("train", model, BATCH, PIXELS, layout)
    stock = networks.build(setup, device)
    gate = networks.Gate(stock, replace(setup, batch=GATE_BATCH, pixels=GATE_PIXELS), device)
    ours = copy.deepcopy(stock)
    fusedtrain.convert(ours)
    contestants: Mapping[str, nn.Module] = {"fusedtrain": ours, "eager": copy.deepcopy(stock)}
    return admit(contestants, gate.check, f"{model} {layout} on {device}")


def _networks(case: Case, device: str) -> dict[str, Call]:
    setup = networks.Setup("train", case.model, BATCH, PIXELS, case.layout)
    images, labels = networks.batch_of(setup, device)

    def call(model: Any) -> Call:
        parameters = list(model.parameters())
        return lambda: torch.autograd.grad(T.cross_entropy(model(images), labels), parameters)

    return {who: call(m) for who, m in _network(case.model, case.layout, device).items()}


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def entrants(case: Case, device: str) -> dict[str, Call]:
    """Contestants, each with its call to be timed."""
    kind: Callable[[Case, str], dict[str, Call]] = _calls
    if case.pass_name == STEP:
        kind = _steps
    elif case.model:
        kind = _networks
    return kind(case, device)


def test_host(race: Race, case: Case) -> None:
    """One row of the results."""
    refuse_the_reference("batch_norm_act", race.device)
    with _one_thread():
        by_name = entrants(case, race.device)
        if race.is_off:
            return
        recording = case.pass_name not in (calls.NO_GRADIENTS, STEP)
        with torch.set_grad_enabled(recording):
            samples = race.host().samples(by_name)
            counts = {who: race.count(call) for who, call in by_name.items()}
            on_cuda = by_name if race.device == "cuda" and case.pass_name != STEP else {}
            times = {who: in_graph(call) for who, call in on_cuda.items()}
            graphs = {who: ns for who, ns in times.items() if ns == ns}  # NaN is no JSON
        race.finish(
            FAMILY, samples, op=case.op, model=case.model,
            layout=case.layout, dtype="float32", counts=counts, at_most=case.target,
            graph_ns=graphs, **{"pass": case.pass_name},
        )  # fmt: skip


# --- report ---


def _rival(row: Row) -> str:
    return row.strongest() or ""


def _share(row: Row) -> float:
    """Time as a share of the rival's."""
    return 1 / row.ratio[_rival(row)] if row.ratio else 0.0


def is_met(row: Row) -> bool:
    """Whether fusedtrain takes no more than it may, by the median."""
    return _share(row) <= row["at_most"]


def _loses_to(row: Row, limits: Limits) -> str | None:
    """The rival, if fusedtrain surely takes more than it may and the tolerance."""
    rival = _rival(row)
    if not rival:
        return None
    share = row["at_most"]
    surely = row.ratio_interval[rival][1] * share < 1
    return rival if surely and _share(row) > share * (1 + limits.tolerance) else None


def _in_graph(row: Row) -> str:
    times = row.get("graph_ns", {})
    return pair(times, row, ".4g", 1e3) if times else ""


def _title(row: Row) -> str:
    if row.model:
        return f"host time, forward and backward of networks, batch {BATCH}, {PIXELS} px, float32"
    if row["pass"] == STEP:
        return f"host time, optimizer steps of {TENSORS} tensors of [{SIZE}], float32"
    return f"host time, calls at {list(calls.SHAPE)}, float32"


def _key(row: Row) -> Any:
    names = [*calls.CALLS, *(f"{rule} step" for rule in RULES), "train"]
    passes = [*calls.PASSES, STEP]
    return names.index(row.op), row.model, row.layout, passes.index(row["pass"])


def _name(row: Row) -> str:
    return " ".join(filter(None, (row.model or row.op, row.layout)))


def _notes(rows: Sequence[Row]) -> Iterator[str]:
    yield f"  targets met: {sum(map(is_met, rows))} of {len(rows)}"


def _label(row: Row) -> str:
    return f"{_name(row)} {row['pass']}"


REPORT = Report(
    "host time",
    _title,
    (
        Column("call", _name, left=True),
        Column("pass", lambda row: str(row["pass"]), left=True),
        Column("us", lambda r: pair(r.ns, r, ".4g", 1e3)),
        Column("in a graph, us", _in_graph, optional=True),
        Column("rival", _rival, left=True),
        Column("of the rival's", lambda row: f"{_share(row):.2f}x"),
        Column("at most", lambda row: f"{row['at_most']:.2f}x"),
        Column("target", lambda row: "met" if is_met(row) else "missed", left=True),
        Column("rival / ours, 99 %", lambda row: interval_text(_rival(row))(row)),
        Column("launches", lambda row: pair(row["counts"], row, "d") + counted(row)),
    ),
    key=_key,
    label=_label,
    legend=lambda rows: (
        "us: of one call on one thread, fusedtrain / rival. On CUDA the time between two events "
        "around calls back to back, which the host decides at such sizes; in a graph: of a CUDA "
        "graph of 50 calls, whose launches cost the host nothing. of the rival's: "
        "fusedtrain's time / the rival's, the median over rounds that time both; at most: the "
        "target. no gradients: under torch.no_grad; forward: inputs and parameters require "
        "gradients. fused: torch's fused optimizer with GradScaler and clip_grad_norm_. launches: "
        "of kernels on CUDA, on the CPU (ops) dispatched operators. SLOWER: the target is missed "
        "beyond noise."
    ),
    panels=ops.speed_ups(_label),
    loses_to=_loses_to,
    means=lambda row: {f"vs {who}": ratio for who, ratio in row.ratio.items()},
    notes=_notes,
    marked="us",
)
