"""Host time: calls on tensors of 64 numbers, optimizer steps on small tensors, networks on small
images, all on one thread. Each row has the most that fusedtrain may take of its rival's time.
Rivals take turns within one test."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as T
from torch import Tensor

import fusedtrain.functional as F
from benchmarks.harness import networks
from benchmarks.harness.cases import LAYOUTS, Options, Work
from benchmarks.harness.race import Race, admit, in_graph, refuse_the_reference
from fusedtrain.advisor.bench import EAGER, OURS, Contest, amp_step, chains, norms, steps
from fusedtrain.advisor.bench.clock import Call, Function
from fusedtrain.advisor.bench.gate import FORWARD, NotTheJob, agrees

FAMILY = "host"
CHANNELS = 16
SHAPE = (1, CHANNELS, 2, 2)
NO_GRADIENTS, BOTH = "no gradients", "forward+backward"
PASSES = (NO_GRADIENTS, "forward", BOTH)
STEP = "clip"  # of steps.JOBS: GradScaler, clipping, step
RULES = ("adamw", "sgd")
TENSORS, SIZE = 161, 16  # as many tensors as a ResNet-50 has parameters
NETWORKS = ("resnet50", "efficientnet_b0")
# At batch 1 the last stage has one value a channel, which torch refuses in training.
BATCH, PIXELS = 2, 32
GATE_BATCH, GATE_PIXELS = 4, 64


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
        Case(op, layout, part, 1.35 if op in ACTIVATIONS and part == BOTH else 1.0)
        for op in CALLS
        for layout in LAYOUTS
        for part in PASSES
    ]
    cases += [Case(f"{rule} step", "", STEP, 0.6) for rule in RULES]
    cases += [Case("train", layout, BOTH, 0.95, model) for model in NETWORKS for layout in LAYOUTS]
    if options.quick:
        quick = ("bn_relu", "silu", "adamw step")
        cases = [c for c in cases if c.op in (options.ops or quick) and c.layout != "channels_last"]
    return [case for case in cases if options.wants(case.op, case.model)]


# --- calls, each a fused one and those that it replaces ---

Maker = Callable[[Work, str], Contest]


def _chain(
    ours: Function, eager: Function, *more: tuple[int, ...], undropped: Function | None = None
) -> Maker:
    """A function; `more`: shapes of the tensors behind the first."""
    chain = chains.Chain(ours, eager, lambda _: (SHAPE, *more), (2, 3), undropped=undropped)
    return lambda work, layout: chains.contest_of(work, chain, 0, layout, trains=True)


def _norm(name: str, makers: norms.Makers = norms.CONTESTANTS) -> Maker:
    return lambda work, layout: norms.contest(work, name, SHAPE, layout, makers, trains=True)


def _function(op: norms.NormOp, channels: int, device: str, *, fused: bool) -> norms.Contestant:
    """The layer's numbers, given to a function."""
    norm, act = norms.eager(op, channels, device).norm, op.act.lower()
    weight, bias, mean, var = norm.weight, norm.bias, norm.running_mean, norm.running_var
    activation = getattr(T, act)

    def ours(x: Tensor, residual: Tensor | None = None) -> Tensor:
        return F.batch_norm_act(x, mean, var, weight, bias, True, activation=act, residual=residual)

    def eager(x: Tensor, residual: Tensor | None = None) -> Tensor:
        out = T.batch_norm(x, mean, var, weight, bias, True)
        if residual is not None:
            out += residual
        result: Tensor = activation(out, inplace=True)
        return result

    return norms.Contestant(norm, ours if fused else eager)


def _biased(x: Tensor, bias: Tensor) -> Tensor:
    return T.gelu(x + bias.view(1, -1, 1, 1))


_FUNCTIONS = {OURS: partial(_function, fused=True), EAGER: partial(_function, fused=False)}
ACTIVATIONS = ("silu", "gelu", "mish", "hardswish", "leaky_relu")
CALLS: dict[str, Maker] = {
    **{name: _norm(name) for name in ("bn_relu", "bn_silu", "bn_add_relu")},
    **{
        f"batch_norm_act {name}": _norm(f"bn_{name.replace(' ', '_')}", _FUNCTIONS)
        for name in ("relu", "silu", "add relu")
    },
    **{name: _chain(getattr(F, name), getattr(T, name)) for name in ACTIVATIONS},
    "glu": _chain(partial(F.glu, dim=1), partial(T.glu, dim=1)),
    "gate": _chain(
        lambda x, gate: F.gated(x, gate, "sigmoid"),
        lambda x, gate: x * gate.sigmoid(),
        (1, CHANNELS, 1, 1),
    ),
    "bias_gelu_dropout": _chain(
        lambda x, bias: F.bias_act_dropout(x, bias, "gelu", chains.P, dim=1),
        lambda x, bias: T.dropout(_biased(x, bias), chains.P),
        (CHANNELS,),
        undropped=_biased,
    ),
}


def contest(work: Work, op: str, layout: str) -> Contest:
    """The contestants of a call; their numbers must be right without gradients, too."""
    made = CALLS[op](work, layout)

    def gate(who: str, function: Any) -> None:
        made.check(who, function)
        forward = made.call(function, "forward")
        with torch.no_grad():
            plain: Any = forward()
        output: Any = forward()
        if plain.requires_grad or not output.requires_grad:
            raise NotTheJob("the output requires a gradient where it must not, or has none")
        if "dropout" not in op:
            agrees("output without gradients", plain, output, FORWARD[torch.float32])

    return replace(made, check=gate)


# --- who takes part: name -> call, those that passed the gate ---


def _calls(case: Case, device: str) -> dict[str, Call]:
    made = contest(Work(device), case.op, case.layout)
    part = case.pass_name if case.pass_name == BOTH else "forward"
    functions = admit(made.functions, made.check, f"{case} on {device}")
    return {who: made.call(function, part) for who, function in functions.items()}


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
    contestants = {who: networks.contestant(who, setup, stock).model for who in (OURS, EAGER)}
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


def test_host(race: Race, case: Case) -> None:
    """One row of the results."""
    refuse_the_reference("batch_norm_act", race.device)
    entrants = _steps if case.pass_name == STEP else _networks if case.model else _calls
    with _one_thread():
        by_name = entrants(case, race.device)
        if race.is_off:
            return
        recording = case.pass_name not in (NO_GRADIENTS, STEP)
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
