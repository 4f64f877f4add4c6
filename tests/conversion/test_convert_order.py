"""`convert` moves no read across a write: every kind of move, with every way to write in between.

Each model is a few lines of source: what is moved, with a write (or a random number) where the move
would pass. Converted without an example, it computes what it computed before.
"""

from __future__ import annotations

import copy
import itertools
import linecache
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fusedtrain
from fusedtrain import nn as fnn

pytestmark = pytest.mark.usefixtures("one_thread")


class Writes(nn.Module):
    """A module of the user's: nothing but its forward tells what it does."""

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(3)
        return x.sum()


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Writes()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x.view(-1))


class Untraceable(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        for row in x:
            row.mul_(2)
        return x


def hooked() -> nn.Module:
    module = nn.Identity()
    module.register_forward_hook(lambda *_: None)
    module.register_forward_pre_hook(lambda _, args: args[0].mul_(3) and None)
    return module


def triple_(x: Tensor) -> Tensor:
    return x.mul_(3)


fx.wrap("triple_")

# Statements that write the tensor {0}, and statements that do not.
WRITES = {
    "method": "{0}.mul_(3)",
    "method, value used": "w = {0}.mul_(3); self.seen = None if w is None else None",
    "function": "torch.relu_({0})",
    "functional": "F.relu({0}, inplace=True)",
    "functional, by place": "F.hardswish({0}, True)",
    "functional, underscore": "F.leaky_relu_({0}, 0.5)",
    "overload": "torch.ops.aten.relu_.default({0})",
    "packet": "torch.ops.aten.relu_({0})",
    "out": "torch.neg({0}, out={0})",
    "operator": "{0} *= 3",
    "setitem": "{0}[0] = 3.0",
    "setitem of a slice": "{0}[..., :1] *= 3",
    "view": "{0}.view(-1).mul_(3)",
    "reshape": "{0}.reshape(-1).mul_(3)",
    "detach": "{0}.detach().mul_(3)",
    "data": "{0}.data.mul_(3)",
    "alias of an alias": "{0}.transpose(0, -1)[:1].unsqueeze(0).clamp_(max=0.1)",
    "chunk": "{0}.flatten().chunk(2)[0].mul_(3)",
    "unbind": "torch.unbind({0})[0].mul_(3)",
    "dropout in eval mode": "F.dropout({0}, 0.5, training=False).mul_(3)",
    "contiguous": "{0}.contiguous().mul_(3)",
    "to": "{0}.to(torch.float64).mul_(3)",
    "einsum": "torch.einsum('...->...', {0}).mul_(3)",
    "copy_": "{0}.copy_({0} * 3)",
    "module": "self.relu_({0})",
    "module in a Sequential": "self.sequential({0})",
    "fusedtrain's module": "self.fused_({0})",
    "identity module, then a method": "self.identity({0}).mul_(3)",
    "dropout module": "self.dropout_({0})",
    "user's module": "self.writes({0})",
    "user's module around it": "self.inner({0})",
    "untraceable module": "self.untraceable({0})",
    "hook": "self.hooked({0})",
    "wrapped function": "triple_({0})",
    "foreach": "torch._foreach_mul_([{0}], 3.0)",
    "fused functional": "fusedtrain.functional.silu({0}, inplace=True)",
}
READS = {
    "nothing": "pass",
    "another tensor": "(x * 2).mul_(3)",
    "a copy": "{0}.clone().mul_(3)",
    "out of place": "F.relu({0})",
    "module": "self.relu({0})",
}
# Moves: lines before the write, lines after, and the tensor that is written.
MOVES = {
    "residual": ("i = self.c(x) * 1\no = self.bn(self.c2(x))", "return torch.relu(o + i)", "i"),
    "residual, no activation": ("i = self.c(x) * 1\no = self.bn(self.c2(x))", "return i + o", "i"),
    "residual of a view": (
        "i = self.c(x) * 1\nv = i.view(i.shape)\no = self.bn(self.c2(x))", "return v + o", "i"),
    "residual, an argument": ("o = self.bn(self.c2(x))", "return torch.relu(o + x)", "x"),
    "input of the norm": (
        "i = self.c2(x) * 1\no = self.bn(i.detach())\nr = self.c(x)", "return torch.relu(o + r)",
        "i"),
    "residual is made of statistics": (
        "o = self.bn(self.c2(x))", "return o + self.bn.running_mean.view(1, -1, 1, 1)", "x"),
    "statistics": (
        "o = self.bn(self.c2(x))", "r = self.c(x)\nreturn o + r", "self.bn.running_var"),
    "residual shares statistics": (
        "r = self.bn.running_mean\no = self.bn(self.c2(x))", "return o + r.view(1, -1, 1, 1)", "r"),
    "gate": ("s = self.c(x) * 1\ng = self.act(s)", "return self.c2(x) * g", "s"),
    "gate, parameter": (
        "g = self.act(self.c(x) * self.gamma)", "return self.c2(x) * g", "self.gamma.data"),
    "layer scale": ("b = self.c(x) * 1\nz = b.detach() * self.gamma", "return x + z", "b"),
    "layer scale, the scale": ("z = self.c(x) * self.gamma", "return x + z", "self.gamma.data"),
    "stochastic depth": ("b = self.c(x) * 1\nz = self.drop(b.detach())", "return x + z", "b"),
    "activation's parameter": (
        "o = self.bn(self.c2(x))", "return self.prelu(o)", "self.prelu.weight.data"),
}  # fmt: skip


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c, self.c2 = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
        self.bn, self.act, self.prelu = nn.BatchNorm2d(4), nn.SiLU(), nn.PReLU(4)
        self.gamma = nn.Parameter(torch.rand(4, 1, 1) + 0.5)
        self.drop = fnn.DropPath(0.3)
        self.relu, self.relu_, self.fused_ = (
            nn.ReLU(),
            nn.ReLU(inplace=True),
            fnn.ReLU(inplace=True),
        )
        self.sequential = nn.Sequential(nn.Identity(), nn.Sequential(nn.ReLU(inplace=True)))
        self.identity, self.dropout_ = nn.Identity(), nn.Dropout(0.5, inplace=True)
        self.writes, self.inner, self.untraceable = Writes(), Inner(), Untraceable()
        self.hooked = hooked()


def model_of(lines: str, name: str) -> nn.Module:
    source = "def forward(self, x):\n" + "\n".join(f"    {line}" for line in lines.split("\n"))
    file = f"<{name}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    scope: dict[str, Any] = {
        "torch": torch, "F": nn.functional, "fusedtrain": fusedtrain, "triple_": triple_,
    }  # fmt: skip
    exec(compile(source, file, "exec"), scope)
    torch.manual_seed(0)
    return type("Model", (Parts,), {"forward": scope["forward"], "__module__": __name__})().double()


def results(model: nn.Module, training: bool) -> tuple[list[Any], str]:
    torch.manual_seed(1)
    x = torch.randn(4, 4, 3, 3, dtype=torch.float64)
    model.zero_grad()
    values: list[Any] = []
    try:
        with torch.enable_grad():
            output = model.train(training)(x)
            values.append(output.detach().clone())
            output.square().sum().backward()
    except RuntimeError as error:
        return values, str(error)
    values += [p.grad for p in model.parameters()]
    return [*values, *(b.clone() for b in model.buffers()), torch.rand(())], ""


def check(model: nn.Module) -> fusedtrain.ConversionReport:
    """The converted model gives the same results, in training and in evaluation."""
    converted = copy.deepcopy(model)
    report = fusedtrain.convert(converted)
    for training in (True, False):
        expected, error = results(copy.deepcopy(model), training)
        values, failed = results(copy.deepcopy(converted), training)
        torch.testing.assert_close(values[:1], expected[:1], rtol=1e-9, atol=1e-9)
        assert not failed or error, failed  # raises only where torch does
        if not error:
            torch.testing.assert_close(values, expected, rtol=1e-7, atol=1e-7)
    return report


def fused(report: fusedtrain.ConversionReport) -> int:
    """How many calls became part of another one."""
    return sum(len(norm.parts) for norm in report.norms) + len(report.products + report.branches)


def lines_of(move: str, statement: str) -> str:
    before, after, tensor = MOVES[move]
    return "\n".join([before, *statement.format(tensor).split("; "), after])


@pytest.mark.slow
@pytest.mark.parametrize("move", MOVES)
def test_writes_in_between(move: str) -> None:
    """The first move meets every write, each other move a quarter of the writes in its turn."""
    number = list(MOVES).index(move)
    check_writes(move, list(WRITES)[number % 4 :: 4] if number else WRITES)


@pytest.mark.long
@pytest.mark.parametrize("move", MOVES)
def test_every_write_in_between(move: str) -> None:
    check_writes(move, WRITES)


def check_writes(move: str, writes: Iterable[str]) -> None:
    for write in writes:
        statement = WRITES[write]
        filled = lines_of(move, statement)
        try:
            check(model_of(filled, f"{move}, {write}"))
        except AssertionError as error:
            raise AssertionError(f"{move}, {write}:\n{filled}\n{error}") from error


@pytest.mark.parametrize(("move", "read"), list(itertools.product(MOVES, READS)))
def test_reads_in_between_change_nothing(move: str, read: str) -> None:
    """Caution costs no fusion where nothing is written."""
    if move in ("statistics", "residual is made of statistics", "residual shares statistics"):
        pytest.skip("not a case: the norm itself writes what is read")
    if move == "activation's parameter":
        pytest.skip("not a case: PReLU has no kernel inside of batch norm")
    assert fused(check(model_of(lines_of(move, READS[read]), f"{move}, {read}"))) > 0


@pytest.mark.parametrize(
    ("lines", "count"),
    [
        # The drop layer draws before the dropout in the original.
        ("o = self.drop(self.bn(self.c(x)))\nr = F.dropout(x, 0.5)\nreturn torch.relu(o + r)", 0),
        ("o = self.drop(self.bn(self.c(x)))\nr = torch.rand_like(x)\nreturn torch.relu(o + r)", 0),
        ("r = F.dropout(x, 0.5)\no = self.drop(self.bn(self.c(x)))\nreturn torch.relu(o + r)", 3),
        ("z = self.drop(self.c(x))\nr = F.dropout(x, 0.5)\nreturn r + z", 0),
        ("r = F.dropout(x, 0.5)\nz = self.drop(self.c(x))\nreturn r + z", 1),
    ],
)
def test_random_numbers_keep_their_order(lines: str, count: int) -> None:
    assert fused(check(model_of(lines, lines))) == count


@pytest.mark.parametrize(
    "lines",
    [
        "i = self.c(x) * 1\ny = self.act(self.bn(self.c2(x)) + i)\ni.mul_(3)\nreturn y + i.sum()",
        "g = torch.sigmoid(self.c(x))\ny = self.c2(x) * self.act(g)\ng.mul_(3)\nreturn y",
    ],
)
def test_written_later(lines: str) -> None:
    """torch's sum saves nothing of what it adds, the fused op may: backward must go on working."""
    check(model_of(lines, lines))


class Block(nn.Module):
    """Its norm's value leaves it; the sum and the activation are in the forward around it."""

    def __init__(self, counts: bool = False) -> None:
        super().__init__()
        self.c, self.bn, self.counts = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), counts
        self.register_buffer("table", torch.ones(1, 4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn(self.c(x))
        if self.counts:
            self.table.mul_(2)
        return y


class Around(Parts):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.block = how, Block(how == "written inside")

    def forward(self, x: Tensor) -> Tensor:
        i = self.c(x) * 1
        o = self.block(x)
        if self.how == "written":
            self.writes(i)
        if self.how == "written inside":
            i = self.block.table
        if self.how == "argument":
            o = self.block(x)
        return torch.relu(o + i)


@pytest.mark.parametrize(("how", "count"), [("plain", 2), ("written", 0), ("written inside", 0)])
def test_across_forwards(how: str, count: int) -> None:
    model = Around(how).double()
    assert fused(check(model)) == count
