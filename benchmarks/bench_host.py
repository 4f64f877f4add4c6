"""Host time: calls on tensors of 64 numbers, optimizer steps on small tensors, networks on small
images, all on one thread. Each row has the most that fusedtrain may take of its rival's time.
Rivals take turns within one test."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as T
from torch import nn

import fusedtrain
from benchmarks.harness import calls, networks
from benchmarks.harness.cases import LAYOUTS, Options, Work
from benchmarks.harness.guards import admit, refuse_the_reference
from benchmarks.harness.race import Race, in_graph
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
