"""Bytes that forward passes keep for backward, and runs with and without `fusedtrain.recompute`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

import fusedtrain
from fusedtrain import _recompute
from fusedtrain.nn import BatchNormAct2d, BatchNormAddAct


@contextmanager
def counted(but: Iterable[Tensor] = ()) -> Iterator[dict[int, int]]:
    """Bytes by address of all that is kept for backward of what runs inside; no parameters."""
    kept: dict[int, int] = {}
    excluded = {t.untyped_storage().data_ptr() for t in but}

    def observe(tensor: Tensor, recipe: _recompute.Recipe | None) -> None:
        for one in (tensor,) if recipe is None else recipe.kept():
            if not isinstance(one if one._base is None else one._base, nn.Parameter):
                storage = one.untyped_storage()
                if storage.data_ptr() not in excluded:
                    kept[storage.data_ptr()] = storage.nbytes()

    with _recompute.observed(observe):
        yield kept


def kept_by(run: Callable[[], Tensor], large: int) -> float:
    """How many tensors of so many bytes a forward pass keeps; vectors do not count."""
    with counted() as kept:
        output = run()
    assert output.requires_grad
    return sum(size for size in kept.values() if size > large // 8) / large


def bytes_kept(model: nn.Module, x: Tensor) -> int:
    """Bytes that a forward pass keeps for backward, but for parameters and buffers."""
    with counted((*model.parameters(), *model.buffers())) as kept:
        model(x).sum()
    return sum(kept.values())


def run_both(
    model: nn.Module, x: Tensor, loss: Callable[[Tensor], Tensor] = lambda y: y.square().sum()
) -> list[list[Tensor]]:
    """Output and gradients without recompute, then with it."""
    runs = []
    for context in (nullcontext(), fusedtrain.recompute()):
        twin, input = copy.deepcopy(model), x.detach().clone().requires_grad_()
        with context:
            output = twin(input)
        loss(output).backward()
        gradients = [p.grad for p in twin.parameters() if p.grad is not None]
        assert input.grad is not None
        runs.append([output.detach(), input.grad, *gradients])
    return runs


def assert_same_bits(runs: list[list[Tensor]]) -> None:
    first, second = runs
    assert len(first) == len(second)
    assert all(map(torch.equal, first, second))


def recomputed(function: Callable[..., Tensor], *arguments: Tensor) -> Tensor:
    with fusedtrain.recompute():
        return function(*arguments)


class Blocks(nn.Module):
    """Residual blocks: conv, norm, ReLU, conv, norm + add + ReLU."""

    def __init__(self, count: int, act: str = "relu") -> None:
        super().__init__()
        self.stem = BatchNormAct2d(8, act_layer=act)
        self.blocks = nn.ModuleList(
            nn.ModuleList(
                [nn.Conv2d(8, 8, 1), BatchNormAct2d(8, act_layer=act), nn.Conv2d(8, 8, 1),
                 BatchNormAddAct(8, act_layer=act)]
            ) for _ in range(count)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for conv1, norm1, conv2, norm2 in self.blocks:
            x = norm2(conv2(norm1(conv1(x))), x)
        return x
