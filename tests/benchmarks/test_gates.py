"""Gates of the benchmarks of ops on tensors: right contestants pass, mistakes do not."""

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
from benchmarks import bench_depthwise, bench_few_bit, bench_host, bench_pool
from benchmarks.harness.cases import LAYOUTS, Work
from fusedtrain.advisor.bench import EAGER, OURS, Contest
from fusedtrain.advisor.bench.chains import CHAINS
from fusedtrain.advisor.bench.gate import NotTheJob
from fusedtrain.advisor.bench.norms import OPS, Contestant
from fusedtrain.reference import ACTIVATIONS
from helpers.benchmarks import Off, mistakes

pytestmark = pytest.mark.filterwarnings("ignore:no torchvision rival")
HALVES = (torch.float32, torch.bfloat16, torch.float16)
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
    "host": Grid(
        [(op, layout) for op in bench_host.CALLS for layout in LAYOUTS], HALVES[:1],
        (*((op, "contiguous") for op in ("bn_relu", "glu", "gate", "bias_gelu_dropout")),
         *(("silu", layout) for layout in LAYOUTS)),
        (torch.float32,),
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
    "no gradient": "wrong gradient|drops 1.000",  # that of dropout_add tells what was dropped
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


def _late(norm: Any, x: Tensor) -> Tensor:
    """Wrong from the second call on."""
    norm.calls = getattr(norm, "calls", 0) + 1
    return norm(x).relu() * (1.02 if norm.calls > 1 else 1.0)


def _late_statistics(norm: Any, x: Tensor) -> Tensor:
    """Stale from the third call on."""
    norm.calls = getattr(norm, "calls", 0) + 1
    output: Tensor = norm(x).relu()
    if norm.calls == 3:
        norm.running_mean.data.mul_(0.9)  # unseen by autograd
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
    "second call": (_late, "wrong output"),
    "third call": (_late_statistics, "wrong running_mean"),
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
    if name == "host" and arguments[0] == "silu":
        layout = {"layout": (lambda x: right(x).contiguous(), "strides")}
        return {
            "gradients": (torch.enable_grad()(right), "requires a gradient where it must not"),
            "without gradients": (
                lambda x: right(x) * (1.0 if torch.is_grad_enabled() else 1.02),
                "output without gradients",
            ),
            **(layout if arguments[1] == "channels_last" else {}),
        }
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
    for who in (OURS,) if name in ("few_bit", "host") else (OURS, EAGER):
        right = made.functions[who]
        function = getattr(right, "function", right)
        planted = {} if name == "images" else mistakes(function)
        wrong: Wrong = {key: (spoiled, SAID[key]) for key, spoiled in planted.items()}
        for mistake, (spoiled, message) in {**wrong, **more(name, arguments, function)}.items():
            # Two percent are what rounding may do to a rival in bfloat16.
            rounding = name == "activations" and who == EAGER and dtype == torch.bfloat16
            if rounding and mistake in ("output", "gradient"):
                continue
            one = Contestant(right.norm, spoiled) if hasattr(right, "norm") else spoiled
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
