"""Cases of a run: its options, and the rows of ops on tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fusedtrain.advisor.bench import LAYOUTS, Contest, Options as Work

__all__ = ["LAYOUTS", "PASSES", "Case", "Options", "Work", "dtype_name", "grid", "joined"]

# Passes of a function of one tensor, which in all of them requires a gradient.
PASSES = ("forward", "backward", "forward+backward")


@dataclass(frozen=True)
class Options:
    """Options of a run, from the command line."""

    device: str = "cpu"
    full: bool = False
    quick: bool = False
    float64: bool = False
    compiled: bool = True
    ops: tuple[str, ...] = ()
    models: tuple[str, ...] = ()

    def wants(self, op: str, model: str = "") -> bool:
        """Whether the names of a case are among those asked for; none asked for: all are."""
        return (not self.ops or op in self.ops) and (not self.models or model in self.models)


@dataclass(frozen=True)
class Case:
    """A row of an op on tensors: its rivals share the tensors and the measurement loop.

    Args:
        name: of the test, by which a stored row is replaced.
        op: the name that --op selects by.
        part: the pass.
        dtype: of the tensors.
        shape: of the first tensor.
        contest: makes the contestants from `Work` and the arguments; rows with the same ones
            share them.
        label: the op as the row has it; "": `op`.
        layout: as the row has it.
        model: the network that has this layer.
        compiled: torch.compile takes part.
        kept: the row says how many bytes forward keeps for backward.
    """

    name: str
    op: str
    part: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    contest: Callable[..., Contest]
    arguments: tuple[Any, ...]
    label: str = ""
    layout: str = ""
    model: str = ""
    compiled: bool = False
    kept: bool = False

    def __str__(self) -> str:
        return self.name


def grid(
    options: Options,
    row: Callable[..., Case],
    sizes: Sequence[int],
    dtypes: Sequence[torch.dtype],
    choices: Sequence[Sequence[Any]],
    rivalled: Collection[str] = PASSES,
) -> list[Case]:
    """The rows of each size, dtype (of a quick run only the first) and choice, in this order.

    torch.compile takes part in the first dtype at the last size, in the passes of ``rivalled``;
    with --full everywhere.
    """
    compiled = options.compiled and not options.quick
    cases = (
        (row(size, dtype, *choice), dtype == dtypes[0] and size == sizes[-1])
        for size in sizes
        for dtype in dtypes[: 1 if options.quick else None]
        for choice in choices
    )
    return [
        replace(case, compiled=compiled and (options.full or (usual and case.part in rivalled)))
        for case, usual in cases
        if options.wants(case.op)
    ]


def joined(*parts: object) -> str:
    """The name of a case, from its parts; empty ones are left out."""
    return "-".join(filter(None, map(str, parts)))


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.float32`` -> ``float32``."""
    return str(dtype).removeprefix("torch.")
