"""A plan of what backward recomputes: one decision for each output that can be recomputed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from .._text import column_lines

_FORMAT = 1  # of the file
_ROWS = 12  # of the table


class PlannedStep(NamedTuple):
    """An output that can be recomputed. `op`: the function that makes the output; `module`: the
    module whose forward calls the function; `bytes` of the output; `milliseconds` of the op on the
    example."""

    op: str
    module: str
    bytes: int
    milliseconds: float
    recompute: bool


@dataclass(repr=False)
class MemoryPlan:
    """Decisions of :func:`fusedtrain.plan_memory`. Prints as a table.

    Bytes are those of one training step beside parameters, buffers and inputs: tensors kept for
    backward, recomputed outputs, gradients of activations and parameters. `peak`: measured under
    the plan; `predicted`: simulated; `eager_peak` and `store_peak`: measured of the stock model,
    and of `convert(model)`. `milliseconds`: of a forward and backward of `convert(model)`;
    `extra_milliseconds`: predicted for what is recomputed.
    """

    model: str  # the fingerprint of the model
    budget: int
    peak: int
    predicted: int
    eager_peak: int
    store_peak: int
    milliseconds: float
    extra_milliseconds: float
    device: str
    steps: list[PlannedStep] = field(default_factory=list)

    def __repr__(self) -> str:
        return (
            f"MemoryPlan(budget={self.budget}, peak={self.peak}, "
            f"recompute={self.recomputed} of {len(self.steps)})"
        )

    @property
    def recomputed(self) -> int:
        """The number of outputs that backward recomputes."""
        return sum(step.recompute for step in self.steps)

    def __str__(self) -> str:
        extra = self.extra_milliseconds / self.milliseconds if self.milliseconds else 0.0
        lines = [
            f"peak of a step {_megabytes(self.peak)} of {_megabytes(self.budget)} allowed: "
            f"{self.peak / max(self.eager_peak, 1):.2f}x of eager's {_megabytes(self.eager_peak)}",
            f"backward recomputes {self.recomputed} of {len(self.steps)} outputs, "
            f"{extra:.0%} more time ({self.extra_milliseconds:.1f} ms)",
        ]
        kinds: dict[str, list[float]] = {}
        for step in self.steps:
            row = kinds.setdefault(step.op, [0, 0, 0, 0.0])
            row[0] += 1
            if step.recompute:
                row[1] += 1
                row[2] += step.bytes
                row[3] += step.milliseconds
        largest = sorted(kinds.items(), key=lambda item: -item[1][2])
        rows = [("op", "recomputed", "bytes", "time")]
        for op, (count, chosen, size, ms) in largest[:_ROWS]:
            if chosen:
                rows.append((op, f"{chosen:.0f} of {count:.0f}", _megabytes(size), f"{ms:.1f} ms"))
        return "\n".join([*lines, *(column_lines(rows, words=(0,)) if len(rows) > 1 else ())])

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON."""
        content = {"fusedtrain_memory_plan": _FORMAT, **asdict(self)}
        content["steps"] = [list(step) for step in self.steps]
        Path(path).write_text(json.dumps(content, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> MemoryPlan:
        """Reads a plan that :meth:`save` wrote.

        Raises:
            ValueError: the file is no plan, or one of another format.
        """
        try:
            content = json.loads(Path(path).read_text())
            version = content.pop("fusedtrain_memory_plan")
            steps = [PlannedStep(*step) for step in content.pop("steps")]
            plan = cls(**content, steps=steps)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"path: {path} has no memory plan ({error})") from error
        if version != _FORMAT:
            raise ValueError(
                f"path: {path} has a memory plan of format {version}, not {_FORMAT}: plan once more"
            )
        return plan


def _megabytes(size: float) -> str:
    return f"{size / 1e6:.1f} MB"


def fingerprint(model: nn.Module) -> str:
    """The names of a model's parameters and buffers, their shapes, dtypes, and what is trained."""
    import hashlib

    rows = [
        (name, tuple(p.shape), str(p.dtype), p.requires_grad)
        for name, p in (*model.named_parameters(), *model.named_buffers())
    ]
    return hashlib.sha256(repr(rows).encode()).hexdigest()[:16]


OP_NAMES: dict[Callable[..., Any], str] = {}  # of this package's ops, which have no name themselves


def op_name(function: Callable[..., Any]) -> str:
    """The name of a step's function: `conv2d` of torch, `silu` of this package."""
    name: str = OP_NAMES.get(function, "")
    if not name:
        name = getattr(function, "__name__", "") or getattr(function, "name", "")
    return name.strip("_")
