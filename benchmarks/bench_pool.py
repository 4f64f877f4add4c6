"""Max pooling that keeps places of maxima against eager torch, which keeps indices and the input,
and torch.compile. Rivals take turns within one test."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as T
from torch import Tensor

import fusedtrain.functional as F
from benchmarks._guards import NotTheJob, admit, refuse_the_reference
from benchmarks._measure import (
    GRADIENT_TOLERANCE,
    Clock,
    Effort,
    ReplayClock,
    TensorFunction,
    dtype_name,
)
from benchmarks._race import PASSES, call_of, kept_bytes, race

FAMILY = "pool"
OP = "max_pool2d"
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
BATCH = {"cpu": 8, "cuda": 64}
DTYPES = {
    "cpu": (torch.float32, torch.bfloat16),
    "cuda": (torch.float16, torch.bfloat16, torch.float32),
}
REPLAY = ReplayClock()


@dataclass(frozen=True)
class Layer:
    """Square images and windows."""

    channels: int
    side: int
    kernel: int
    stride: int
    padding: int = 0

    @property
    def window(self) -> tuple[int, int, int]:
        return self.kernel, self.stride, self.padding

    def ours(self, x: Tensor) -> Tensor:
        return F.max_pool2d(x, *self.window)

    def eager(self, x: Tensor) -> Tensor:
        return T.max_pool2d(x, *self.window)

    @property
    def name(self) -> str:
        """The op, with its window."""
        return f"{OP} {self.kernel}x{self.kernel}/{self.stride}"

    def tensors(self, pass_name: str, dtype: torch.dtype) -> float:
        """Of the input's size, read and written at least: input, output and the codes of 2 or 4
        bits, and the same of gradients."""
        side = (self.side + 2 * self.padding - self.kernel) // self.stride + 1
        codes = (2 if self.kernel == 2 else 4) / 8 / dtype.itemsize
        each = 1 + (1 + codes) * side**2 / self.side**2
        return each * (1 + (pass_name == "forward+backward"))


LAYERS = (
    Layer(64, 112, 3, 2, 1),  # the stem of ResNets
    Layer(128, 56, 2, 2),  # VGGs
    Layer(512, 14, 2, 2),
    Layer(512, 14, 3, 1, 1),  # GoogLeNet's branches
    Layer(512, 7, 3, 1, 1),
)
QUICK = (Layer(16, 28, 3, 2, 1),)


@dataclass(frozen=True)
class Case:
    """One row."""

    layer: Layer
    batch: int
    dtype: torch.dtype
    layout: str
    pass_name: str
    compiled: bool
    op: str = OP

    def __str__(self) -> str:
        layer = self.layer
        size = f"{self.batch}x{layer.channels}x{layer.side}x{layer.side}"
        window = f"{layer.kernel}x{layer.kernel}s{layer.stride}"
        return "-".join((window, self.pass_name, dtype_name(self.dtype), self.layout, size))


def select(
    device: str = "cpu", *, full: bool = False, quick: bool = False, compiled: bool = True
) -> list[Case]:
    """The cases of a run; those of a layer together. torch.compile takes part in the first dtype;
    --full has it everywhere."""
    first = DTYPES[device][0]
    return [
        Case(
            layer, BATCH[device], dtype, layout, pass_name,
            compiled and not quick and (full or dtype == first),
        )
        for dtype in ((first,) if quick else DTYPES[device])
        for layer in (QUICK if quick else LAYERS)
        for layout in LAYOUTS
        for pass_name in PASSES
    ]  # fmt: skip


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    option = metafunc.config.getoption
    cases = select(
        option("--device"),
        full=option("--full"),
        quick=option("--quick"),
        compiled=not option("--no-compile"),
    )
    others = option("--model") or (option("--op") and OP not in option("--op"))
    metafunc.parametrize("case", [] if others else cases, ids=str)


def tensors(
    layer: Layer, batch: int, dtype: torch.dtype, layout: str, device: str
) -> tuple[Tensor, Tensor]:
    """The input and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, layer.channels, layer.side, layer.side, generator=generator)
    gradient = torch.randn(T.max_pool2d(x, *layer.window).shape, generator=generator)
    kind = LAYOUTS[layout]
    x, gradient = (t.to(device, dtype).contiguous(memory_format=kind) for t in (x, gradient))
    return x, gradient


def _run(function: TensorFunction, x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    leaf = x.detach().requires_grad_()
    y = function(leaf)
    # torch.compile makes a backward that can be repeated where the first call asks for it.
    (dx,) = torch.autograd.grad(y, leaf, gradient, retain_graph=True)
    return y.detach(), dx


def check(
    function: TensorFunction, layer: Layer, x: Tensor, gradient: Tensor, *, bits: bool
) -> None:
    """Raise NotTheJob unless the output is eager torch's bit for bit, and the gradient what eager
    torch finds on the CPU in float32: with ``bits`` bit for bit, rounded once, else to within the
    rounding of every addition."""
    wide, grad = x.cpu().float(), gradient.cpu().float()
    want_y, want_dx = _run(layer.eager, wide, grad)
    y, dx = _run(function, x, gradient)
    if (y.dtype, y.shape, y.stride()) != (x.dtype, gradient.shape, gradient.stride()):
        raise NotTheJob(f"returned {y.dtype} {tuple(y.shape)} {y.stride()}")
    if not y.cpu().float().equal(want_y):
        raise NotTheJob("wrong output")
    if bits:
        right = dx.cpu().equal(want_dx.to(x.dtype))
    else:
        # Eight additions at most, half an ulp of the sum so far each: that is this rtol.
        allowed = GRADIENT_TOLERANCE[x.dtype].rtol * _run(layer.eager, wide, grad.abs())[1]
        right = bool(((dx.cpu().float() - want_dx).abs() <= allowed).all())  # NaN is wrong
    if not right:
        raise NotTheJob("wrong gradient")


@lru_cache(maxsize=1)
def _prepared(
    layer: Layer, batch: int, dtype: torch.dtype, layout: str, device: str, compiled: bool
) -> tuple[Tensor, Tensor, dict[str, TensorFunction]]:
    """Input, gradient and who passed the gate: of all passes, which compile once."""
    x, gradient = tensors(layer, batch, dtype, layout, device)
    found: dict[str, TensorFunction] = {"fusedtrain": layer.ours, "eager": layer.eager}
    if compiled:
        torch.compiler.reset()
        found["compile"] = torch.compile(layer.eager, fullgraph=True, dynamic=False)

    def gate(who: str, function: TensorFunction) -> None:
        check(function, layer, x, gradient, bits=who == "fusedtrain")

    where = f"{layer.name}, {dtype_name(dtype)}, {layout}, {list(x.shape)}"
    return x, gradient, admit(found, gate, where)


@pytest.mark.benchmark(timer=REPLAY)
def test_pool(benchmark: Any, clock: Clock, effort: Effort, device: str, case: Case) -> None:
    """One row of the results."""
    refuse_the_reference(OP, device)
    x, gradient, entrants = _prepared(
        case.layer, case.batch, case.dtype, case.layout, device, case.compiled
    )
    if benchmark.disabled:
        benchmark.pedantic(lambda: None)
        return
    leaf = x.detach().requires_grad_()
    kept = {who: kept_bytes(partial(f, leaf)) / x.numel() for who, f in entrants.items()}
    benchmark.group = f"{dtype_name(case.dtype)} {case.layer.name} {case.pass_name}"
    race(
        benchmark,
        REPLAY,
        {who: call_of(f, case.pass_name, x, gradient) for who, f in entrants.items()},
        x,
        clock,
        effort,
        op=case.layer.name,
        pass_name=case.pass_name,
        tensors=case.layer.tensors(case.pass_name, case.dtype),
        family=FAMILY,
        shape=list(x.shape),
        layout=case.layout,
        kept=kept,
    )
