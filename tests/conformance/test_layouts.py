"""Outputs have the strides of torch's, whatever the input's are."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as T
from _functions import CASES, ours_of, same_layout, theirs_of
from torch import Tensor, nn

import fusedtrain

pytestmark = pytest.mark.usefixtures("one_thread")


def layouts(sizes: tuple[int, ...]) -> Iterator[Tensor]:
    """Every order of the dimensions in memory: dense, each second element of one dimension, and one
    dimension expanded."""
    dims = range(len(sizes))
    for order in itertools.permutations(dims):
        back = [order.index(d) for d in dims]
        whole = torch.randn([sizes[d] for d in order]).permute(back)
        yield whole
        yield whole.narrow(dims[-1], 0, 1).expand(sizes)
        for d in (dims[0], dims[-1]):
            doubled = torch.randn([sizes[i] * (1 + (i == d)) for i in order]).permute(back)
            yield doubled[(slice(None),) * d + (slice(None, None, 2),)]


SIZES = [(6,), (4, 6), (4, 1), (4, 2, 6), (4, 1, 6), (4, 2, 3, 6), (4, 2, 6, 1), (1, 2, 3, 6),
         (4, 2, 3, 2, 6)]  # fmt: skip
LAYOUTS = [x for sizes in SIZES for x in layouts(sizes)]
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "dropout": (0.0,), "max_pool2d": (2, 2, 1), "prelu": (torch.tensor([0.25]),),
    "threshold": (0.5, -1.0), "group_norm": (1,),
}  # fmt: skip


def arguments(case: str, x: Tensor) -> list[tuple[Any, ...]]:
    """Arguments behind the input, for each call."""
    if case == "layer_norm":
        return [(x.shape[-1:],), (x.shape[-2:],)]
    if not case.startswith("batch_norm"):
        return [ARGUMENTS.get(case, ())]
    mean, var, weight, bias = torch.rand(4, x.shape[1] if x.dim() > 1 else 0)
    return [
        (mean, var, weight, bias, True),
        (mean, var, weight, bias, False),
        (None,) * 4 + (True,),
    ]


# RMS norm is contiguous, as on GPUs; torch's on a CPU is only where the input is.
@pytest.mark.parametrize("case", [case for case in CASES if case != "rms_norm"])
def test_outputs_of_functions(case: str) -> None:
    ours, theirs, count = ours_of(case), theirs_of(case), 0
    for x, trains in itertools.product(LAYOUTS, (False, True)):
        for args in arguments(case, x):
            input = x.detach().requires_grad_(trains)
            try:
                want = theirs(input, *args)
            except (IndexError, RuntimeError, ValueError):  # a size that the function does not take
                continue
            output = ours(input, *args)
            assert same_layout(output, want), f"{x.shape} {x.stride()} {output.stride()}"
            count += 1
    assert count > 300


class Transposed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, -1)


class Flat(nn.Module):
    """Raises for an output that is not contiguous."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], -1)


MODELS: dict[str, tuple[list[Any], tuple[int, ...]]] = {
    "norm1d": ([nn.Linear(4, 6), Transposed(), nn.BatchNorm1d(6), nn.ReLU(), Flat()], (3, 5, 4)),
    "norm2d": ([nn.Linear(4, 6), Transposed(), nn.BatchNorm2d(6), Flat()], (3, 5, 4, 4)),
    "norm without weight": (
        [nn.Linear(4, 6), Transposed(), nn.BatchNorm2d(6, affine=False), nn.SiLU(), Flat()],
        (3, 5, 4, 4),
    ),
    "pool": ([nn.Linear(4, 6), Transposed(), nn.MaxPool2d(2), Flat()], (3, 6, 4, 4)),
    "norm, logsigmoid": ([nn.Conv2d(4, 6, 1), nn.BatchNorm2d(6), nn.LogSigmoid(), Flat()],
                         (3, 4, 5, 4)),
    "logsigmoid": ([nn.Conv2d(4, 6, 1), nn.LogSigmoid(), Flat()], (3, 4, 5, 4)),
}  # fmt: skip


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("memory", ["store", "recompute", "plan"])
@pytest.mark.parametrize("name", MODELS)
def test_converted_models(name: str, memory: Any, autocast: bool) -> None:
    """`view` works where it does in the stock model."""
    parts, shape = MODELS[name]
    stock = nn.Sequential(*parts)
    model, x = copy.deepcopy(stock), torch.randn(shape)
    if name.endswith("logsigmoid"):
        x = x.contiguous(memory_format=torch.channels_last)
        stock, model = (m.to(memory_format=torch.channels_last) for m in (stock, model))

    def output(module: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return module(x)

    if memory == "plan":
        memory = fusedtrain.plan_memory(model, lambda: x, 10**6)
    fusedtrain.convert(model, memory=memory)
    y, want = output(model), output(stock)
    assert same_layout(y, want)
    torch.testing.assert_close(y, want, atol=2e-2 if autocast else 1e-5, rtol=2e-2)
    y.sum().backward()


OPERANDS: dict[str, Any] = {
    "norm first": lambda m, x, y: T.relu(m.norm(x) + y),
    "norm second": lambda m, x, y: T.relu(y + m.norm(x)),
    "branch first": lambda m, x, y: x * m.scale + y,
    "branch second": lambda m, x, y: y + x * m.scale,
    "gate first": lambda m, x, y: m.gate(x) * y,
    "gate second": lambda m, x, y: x * m.gate(y),
    "function first": lambda m, x, y: T.silu(x) * y,
    "formula first": lambda m, x, y: (x * torch.sigmoid(1.702 * x)) * y,
}


class Two(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.norm, self.scale = nn.BatchNorm2d(2), nn.Parameter(torch.ones(2, 1, 1))
        self.gate = nn.SiLU()
        self.name = name

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        output: Tensor = OPERANDS[self.name](self, x, y)
        return output


@pytest.mark.parametrize("name", OPERANDS)
def test_the_first_operand_decides(name: str) -> None:
    stock = Two(name)
    model = copy.deepcopy(stock)
    report = fusedtrain.convert(model)
    assert report.norms or report.branches or report.products
    some = list(layouts((4, 2, 3, 6)))[::3]
    if report.products:  # an expanded factor does not decide
        some = [x for x in some if 0 not in x.stride()]
    for x, y in itertools.product(some, some):
        assert same_layout(model(x, y), stock(x, y)), (x.stride(), y.stride())
