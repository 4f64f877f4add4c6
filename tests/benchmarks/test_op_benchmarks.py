"""Benchmarks of ops on tensors: right contestants pass, mistakes do not, rows read back."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as T
from torch import Tensor

import fusedtrain.functional as F
from benchmarks import bench_batch_norm, bench_depthwise, bench_few_bit, bench_pool
from benchmarks.harness.cases import LAYOUTS, Options, Work
from benchmarks.harness.race import contest_of
from benchmarks.harness.shapes import NORM_NETWORKS, norms
from fusedtrain.advisor.bench import COMPILE, EAGER, OURS, Contest, activations
from fusedtrain.advisor.bench.chains import CHAINS
from fusedtrain.advisor.bench.gate import NotTheJob
from fusedtrain.advisor.bench.norms import OPS, Contestant
from fusedtrain.reference import ACTIVATIONS
from helpers.benchmarks import Off, measured, mistakes

pytestmark = pytest.mark.filterwarnings("ignore:no torchvision rival")
HALVES = (torch.float32, torch.bfloat16, torch.float16)
BOTH = "forward+backward"
POOLS = (*bench_pool.QUICK, bench_pool.Layer(8, 14, 2, 2), bench_pool.Layer(8, 7, 3, 1, 1))
CONVS = (bench_depthwise.Layer(16, 15, 5), bench_depthwise.Layer(8, 32, 7, dims=1))
SAVES = [(op, save) for op, saves in bench_few_bit.SAVES.items() for save in saves]


class Grid(NamedTuple):
    """Contests of a family: arguments of each, and dtypes of all and of those with mistakes."""

    arguments: list[tuple[Any, ...]]
    dtypes: tuple[torch.dtype, ...] = HALVES
    wrong: tuple[tuple[Any, ...], ...] = ()  # arguments; (): all
    wrong_dtypes: tuple[torch.dtype, ...] = HALVES


GRIDS = {
    "activations": Grid(
        [(op, 4097) for op in ACTIVATIONS], (torch.float64, *HALVES), (("mish", 4097),),
        (torch.float64, *HALVES),
    ),
    "batch_norm": Grid(
        [(op, (4, 6, 9, 7), layout) for op in OPS for layout in LAYOUTS],
        wrong=(("bn_relu", (4, 6, 9, 7), "channels_last"),),
    ),
    # Few, but enough to tell the rate of dropout; an image has 96 channels of 56 x 56.
    "chains": Grid(
        [(op, 2**14, "") for op in CHAINS], HALVES[:2], wrong_dtypes=(torch.float32,)
    ),
    "depthwise": Grid(
        [(CONVS[0], 2, "contiguous"), (CONVS[0], 2, "channels_last"), (CONVS[1], 2, "contiguous")],
        HALVES[:2], wrong_dtypes=(torch.float32,),
    ),
    "few_bit": Grid(
        [(op, save, 2**16) for op, save in SAVES],
        wrong=(("gelu", "q2", 2**16), ("silu", "q8", 2**16), ("relu", "q1", 2**16)),
    ),
    "images": Grid(
        [(1, read, written) for read in LAYOUTS for written in LAYOUTS], HALVES[:1],
        wrong_dtypes=(torch.float32,),
    ),
    "pool": Grid([(layer, 2, layout) for layer in POOLS for layout in LAYOUTS]),
}  # fmt: skip


def family(name: str) -> Any:
    return importlib.import_module(f"benchmarks.bench_{name}")


def contest(name: str, dtype: torch.dtype, *arguments: Any) -> Contest:
    bench = family(name)
    make = bench._contest if name == "depthwise" else bench.contest
    made: Contest = make(Work("cpu", dtype), *arguments)
    return made


def each(*, wrong: bool) -> Iterator[Any]:
    for name, grid in GRIDS.items():
        for arguments in (wrong and grid.wrong) or grid.arguments:
            for dtype in grid.wrong_dtypes if wrong else grid.dtypes:
                words = " ".join(str(getattr(a, "name", a)) for a in arguments)
                yield pytest.param(name, arguments, dtype, id=f"{name} {words} {dtype}")


@pytest.mark.parametrize(("name", "arguments", "dtype"), [*each(wrong=False)])
def test_right_ones_pass(name: str, arguments: tuple[Any, ...], dtype: torch.dtype) -> None:
    made = contest(name, dtype, *arguments)
    assert {OURS, EAGER} <= set(made.functions) <= {OURS, EAGER, "exact", "torchvision"}
    for who in made.functions:
        made.gate(who)


# --- planted mistakes: what is done, what the gate says ---

Wrong = Mapping[str, tuple[Callable[..., Tensor], str]]
SAID = {
    "output": "wrong (output|forward)",
    "gradient": "wrong gradient",
    "sign": "wrong (output|forward)",
    "nan": "wrong (output|forward)|drops 0.000",
    "dtype": "returned torch.float",
    "no graph": "does not require a gradient",
    "no gradient": "wrong gradient",
}


def _without_gradient_of_statistics(norm: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        mean, var = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), keepdim=True, correction=0)
        norm(x)
    weight, bias = (p.view(1, -1, 1, 1) for p in (norm.weight, norm.bias))
    return ((x - mean) * torch.rsqrt(var + norm.eps) * weight + bias).relu().to(x.dtype)


def _stale_variance(norm: Any, x: Tensor) -> Tensor:
    kept = norm.running_var.clone()
    output = norm(x).relu()
    norm.running_var.data = kept
    return output


NORMS: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "no-op": (lambda norm, x: x * 1, "wrong output"),
    "no activation": (lambda norm, x: norm(x), "wrong output"),
    "another one": (lambda norm, x: T.silu(norm(x)), "wrong output"),
    "gradient of the input": (lambda norm, x: norm(x.detach()).relu(), "no gradient of input"),
    "fixed statistics": (_without_gradient_of_statistics, "wrong gradient of input"),
    "layout": (lambda norm, x: norm(x).relu().contiguous(), "returned"),
    "statistics": (lambda norm, x: norm.eval()(x).relu(), "wrong output"),
    "running variance": (_stale_variance, "wrong running_var"),
}


def more(name: str, arguments: tuple[Any, ...], right: Any) -> Wrong:
    """Mistakes of a family alone."""
    if name == "activations":
        return {
            "no-op": (lambda x: x * 1, "wrong"),
            "another op": (T.silu, "wrong"),
            "gradient of one": (lambda x: T.mish(x).detach() + x - x.detach(), "wrong"),
            "shape": (lambda x: T.mish(x)[:-1], "returned"),
        }
    if name == "chains" and CHAINS[arguments[0]].undropped:
        return {
            "rate": (lambda *t: T.dropout(right(*t), 0.05), "drops 0.1"),
            "nothing dropped": (lambda *t: T.gelu(sum(t)), "drops 0.000"),  # type: ignore[arg-type]
        }
    if name == "depthwise":
        return {"off by 1e-4": (lambda x, w: right(x, w) * 1.0001, "wrong output")}
    if name == "few_bit":
        return {"another op": (T.elu, "wrong")}
    if name == "images":
        return {
            "output": (lambda x: right(x) * 1.02, "wrong output"),
            "channels": (lambda x: right(x.flip(1)), "wrong output"),
            "dtype": (lambda x: right(x).double(), "returned torch.float64"),
            "layout": (lambda x: right(x).transpose(2, 3).contiguous().transpose(2, 3), "returned"),
        }
    if name == "pool":
        window = arguments[0].window
        return {
            "average": (lambda x: T.avg_pool2d(x, *window), "wrong output"),
            "layout": (lambda x: right(x).transpose(2, 3), "returned|wrong output"),
        }
    return {}


def refused(made: Contest, who: str, wrong: Any, message: str) -> None:
    """The gate stops this one in the place of the contestant."""
    with pytest.raises(NotTheJob, match=message):
        replace(made, functions={who: wrong}, _passed=set()).gate(who)


@pytest.mark.parametrize(("name", "arguments", "dtype"), [*each(wrong=True)])
def test_wrong_ones_do_not(name: str, arguments: tuple[Any, ...], dtype: torch.dtype) -> None:
    made = contest(name, dtype, *arguments)
    for who in (OURS,) if name == "few_bit" else (OURS, EAGER):
        right = made.functions[who]
        function = right.function if name == "batch_norm" else right
        planted = {} if name == "images" else mistakes(function)
        wrong: Wrong = {key: (spoiled, SAID[key]) for key, spoiled in planted.items()}
        for mistake, (spoiled, message) in {**wrong, **more(name, arguments, function)}.items():
            # Two percent are what rounding may do to a rival in bfloat16.
            rounding = name == "activations" and who == EAGER and dtype == torch.bfloat16
            if rounding and mistake in ("output", "gradient"):
                continue
            one = Contestant(right.norm, spoiled) if name == "batch_norm" else spoiled
            refused(made, who, one, message)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("mistake", NORMS)
def test_wrong_norms_do_not(mistake: str, dtype: torch.dtype) -> None:
    made = contest("batch_norm", dtype, "bn_relu", (4, 6, 9, 7), "channels_last")
    norm = made.functions[EAGER].norm
    function, message = NORMS[mistake]
    refused(made, OURS, Contestant(norm, lambda x: function(norm, x)), message)


def test_a_norm_that_adds_too_much() -> None:
    made = contest("batch_norm", torch.bfloat16, "bn_add_relu", (4, 6, 9, 7), "contiguous")
    right = made.functions[EAGER]
    wrong = Contestant(right.norm, lambda x, residual: right.function(x, 1.02 * residual))
    refused(made, OURS, wrong, "wrong output")


def test_pooling_has_torchs_bits() -> None:
    """One ulp in one element is refused."""
    made = contest("pool", torch.float32, POOLS[0], 2, "contiguous")

    class Ulp(Off):
        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            grad = grad.clone()
            grad.view(-1)[grad.abs().argmax()] *= 1 + 2**-23
            return grad

    def function(x: Tensor) -> Tensor:
        return POOLS[0].eager(Ulp.apply(x))

    replace(made, functions={EAGER: function}, _passed=set()).gate(EAGER)
    refused(made, OURS, function, "wrong gradient")


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_few_bits_are_not_exact(dtype: torch.dtype) -> None:
    """As exact ones only ReLU's bits pass; too many bits kept are refused."""
    tensors = [Work("cpu", dtype).random(2**16, seed=seed) for seed in (0, 1)]
    for op in set(bench_few_bit.SAVES) - {"relu"}:
        with pytest.raises(NotTheJob, match="wrong gradient"):
            bench_few_bit.check(op, partial(getattr(F, op), save="q4"), *tensors)
    made = contest("few_bit", dtype, "gelu", "q8", 2**16)
    bits = 8 * dtype.itemsize
    refused(made, OURS, F.gelu, f"keeps {bits} bits an element, not 8")


def test_errors_are_those_of_the_docstrings() -> None:
    stated = bench_few_bit.stated_error
    assert (stated("gelu", "q8"), stated("relu", "q1")) == ((0.0025, 0.0015), (0.0, 0.0))
    assert all(stated(op, save)[1] for op, save in SAVES if op != "relu")


def test_who_is_wrong_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = family("activations")
    case = replace(bench.select(Options(quick=True))[0], compiled=True)
    right = activations.duel

    def spoiled(*who: str) -> None:
        def duel(*arguments: Any) -> dict[str, Any]:
            return right(*arguments) | dict.fromkeys(who, lambda x: x * 1)

        monkeypatch.setattr(activations, "duel", duel)

    monkeypatch.setattr("fusedtrain.advisor.bench._match.compiled", lambda function: function)
    spoiled(COMPILE)
    with pytest.warns(UserWarning, match="compile left out: wrong forward"):
        assert list(measured(bench, case).ns)[:2] == [OURS, EAGER]
    spoiled(OURS)
    with pytest.raises(pytest.fail.Exception, match=r"wrong forward.*\. Not timed"):
        measured(bench, case)


# --- bytes, cases and rows ---

STEM, HALVED = bench_pool.Layer(64, 112, 3, 2, 1), bench_pool.Layer(8, 14, 2, 2)
IMAGES = (2, 8, 14, 14)


@pytest.mark.parametrize(
    ("name", "arguments", "dtype", "forward", "both"),
    [
        ("activations", ("mish", 64), torch.float32, 2, 5),
        ("batch_norm", ("bn_relu", IMAGES, "contiguous"), torch.float32, 3, 8),
        ("batch_norm", ("bn_silu", IMAGES, "contiguous"), torch.bfloat16, 3, 8),
        ("batch_norm", ("bn_add_relu", IMAGES, "contiguous"), torch.float32, 4, 11),
        ("batch_norm", ("bn_add", IMAGES, "contiguous"), torch.float32, 4, 9),
        ("batch_norm", ("bn", IMAGES, "contiguous"), torch.float32, 3, 8),
        ("batch_norm", ("frozen_bn_relu", IMAGES, "contiguous"), torch.float32, 2, 5),
        ("chains", ("swiglu", 2**14, ""), torch.float32, 1.5, 4),
        ("depthwise", (bench_depthwise.Layer(8, 14, 3, 2), 2, "contiguous"), torch.float32,
         1.25, 3.5),
        ("few_bit", ("gelu", "q8", 64), torch.float32, 2.25, 4.5),
        # Input, a quarter as many outputs, and 2 or 4 bits of each.
        ("pool", (HALVED, 2, "contiguous"), torch.float32, 1 + 0.25 + 0.25 * 2 / 32, 2.53125),
        ("pool", (STEM, 1, "contiguous"), torch.bfloat16, 1 + 0.25 + 0.25 * 4 / 16, 2.625),
        ("images", (1, "contiguous", "contiguous"), torch.float32, 1.25, 1.25),
    ],
)  # fmt: skip
def test_least_bytes(
    name: str, arguments: tuple[Any, ...], dtype: torch.dtype, forward: float, both: float
) -> None:
    made = contest(name, dtype, *arguments)
    size = made.source.nbytes
    assert (made.bytes("forward") / size, made.bytes(BOTH) / size) == (forward, both)


@pytest.mark.parametrize(
    ("name", "cpu", "compiled", "cuda", "quick"),
    [
        ("activations", 290, 72, 308, 4),
        ("batch_norm", 208, 6, 144, 4),
        ("chains", 80, 10, 80, 20),
        ("depthwise", 264, 132, 396, 6),
        ("few_bit", 156, 39, 234, 6),
        ("images", 16, 16, 16, 4),
        ("pool", 60, 30, 90, 6),
    ],
)
def test_selection(name: str, cpu: int, compiled: int, cuda: int, quick: int) -> None:
    select = family(name).select
    cases = select(Options())
    numbers = [len(cases), sum(case.compiled for case in cases)]
    numbers += [len(select(Options("cuda"))), len(select(Options(quick=True)))]
    assert numbers == [cpu, compiled, cuda, quick]


def test_every_op_is_selected() -> None:
    cases = {name: family(name).select(Options()) for name in GRIDS}
    ops = {name: {case.op for case in of} for name, of in cases.items()}
    with_compile = {name: {c.op for c in of if c.compiled} for name, of in cases.items()}
    assert (ops["activations"], with_compile["activations"]) == (
        *(set(ACTIVATIONS), set(activations.CHOSEN)),
    )
    assert ops["chains"] == with_compile["chains"] == set(CHAINS)
    labels = {case.label for case in cases["few_bit"] if case.compiled}
    assert labels == {f"{op} {save}" for op, save in SAVES}
    for name, bench in (("pool", bench_pool), ("depthwise", bench_depthwise)):
        assert {c.arguments[0] for c in cases[name] if c.compiled} == set(bench.LAYERS)
    assert len(set(bench_depthwise.LAYERS)) == len(bench_depthwise.LAYERS) == 23
    doubles = {c.dtype for c in family("activations").select(Options(float64=True))}
    assert doubles == {torch.float64, *HALVES}
    assert {c.op for c in bench_few_bit.select(Options(ops=("silu",)))} == {"silu"}


def test_selection_of_norms() -> None:
    cases = bench_batch_norm.select(Options())
    assert {c.op for c in cases if not c.model} == set(bench_batch_norm.STANDARD)
    of_networks = [case for case in cases if case.model]
    assert not any(case.compiled for case in of_networks)
    assert {case.layout for case in of_networks} == set(LAYOUTS)
    for network in NORM_NETWORKS:
        layers = {(c.op, *c.shape[1:]) for c in of_networks if c.model == network}
        assert layers == set(norms(network))
    # Where ratios to torch.compile are quoted.
    trained = ("bn_relu", "bn_silu", "bn_add_relu")
    rivalled = {(c.op, c.layout) for c in cases if c.compiled}
    assert rivalled == {(op, layout) for op in trained for layout in LAYOUTS}
    some = bench_batch_norm.select(Options(models=("resnet50",)))
    assert {c.model for c in some} == {"resnet50"}
    on_cuda = [case for case in bench_batch_norm.select(Options("cuda")) if case.model]
    assert {(c.shape[0], c.dtype) for c in on_cuda} == {(256, torch.bfloat16)}
    assert len(bench_batch_norm.select(Options(quick=True, models=("resnet50",)))) == 2


QUICK_OPS = {
    "activations": ("mish",),
    "batch_norm": ("bn_add_relu",),
    "chains": ("se_gate", "geglu"),
}


@pytest.mark.parametrize("name", GRIDS)
def test_rows(name: str) -> None:
    bench = family(name)
    options = Options(quick=True, compiled=False, ops=QUICK_OPS.get(name, ()))
    for case in bench.select(options):
        row = measured(bench, case)
        assert (row.op, row["pass"], row.dtype, row.layout) == (
            *(case.label or case.op, case.part, "float32", case.layout),
        )
        assert row.get("shape", [row.numel]) == [*case.shape]
        made = contest_of(case.contest, case.arguments, Work("cpu", case.dtype))
        assert row["bytes"] == made.bytes(case.part)
        assert row["gb_per_s"][OURS] == row["bytes"] / row.ns[OURS]
        copy = 2 * 4 * row.numel / row.ns["copy_fresh"]
        assert row["percent_of_copy"] == pytest.approx(100 * row["gb_per_s"][OURS] / copy)
        rivals = set(made.functions) - {OURS}
        assert rivals >= {EAGER}
        assert set(row.ratio) == rivals
    contest_of.cache_clear()


def test_rows_say_what_is_kept() -> None:
    """A quarter as many outputs as inputs, of 4 bits; eager: the input and 8 bytes an output."""
    few, pools = ([measured(b, c) for c in b.select(Options(quick=True, compiled=False))]
                  for b in (bench_few_bit, bench_pool))  # fmt: skip
    assert {row.op: row["kept"] for row in few} == {
        "gelu q8": {OURS: 1, EAGER: 4, "exact": 4},
        "relu q1": {OURS: 0.125, EAGER: 4, "exact": 4},
    }
    for row in pools:
        assert (row["kept"][OURS], row["kept"][EAGER]) == (pytest.approx(0.125, rel=0.04), 6)
