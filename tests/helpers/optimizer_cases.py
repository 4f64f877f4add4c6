"""Arguments of the optimizer ops in tests, from rows of a table, by name.

case = Case("adam", [Spec((3, 4)), Spec((5,), dtype=torch.bfloat16, master=True)],
            [dict(lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8)], max_norm=1.0, measures=3)
torch.ops.fusedtrain.optimizer_step(*case.arguments(), None, None)
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusedtrain.reference import RULES
from fusedtrain.reference.optimizers import (
    CONTROLS,
    MAX_STATES,
    SCALARS,
    WIDTH,
    GroupOptions,
    StepOptions,
)
from fusedtrain.reference.split_weights import split_weights
from fusedtrain.reference.state_codes import SIGNED, SQUARES, quantise
from helpers.optimizers import RULES as OF_RULES

RULE_NAMES = [rule.name for rule in RULES]
# States that are averages of squares, by rule.
SQUARE_SLOTS = {
    "adam": (1, 2), "nadamw": (1,), "lamb": (1,), "rmsprop": (0,), "rmsprop_tf": (0,),
    "adagrad": (0,),
}  # fmt: skip


@dataclass
class Spec:
    """One parameter, and what belongs to it."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    layout: str = "contiguous"  # or channels_last, transposed, offset, sliced
    grad_dtype: torch.dtype | None = None  # None: the parameter's
    grad_layout: str | None = None
    state_dtype: torch.dtype | None = None  # None: what the rule computes in; int8: codes
    states: Sequence[int] | None = None  # which there are; None: all
    master: bool | torch.dtype = False  # in float32; or the dtype of a correction
    average: torch.dtype | None = None
    group: int = 0


def in_layout(values: Tensor, layout: str) -> Tensor:
    """The values, laid out otherwise in memory."""
    if layout == "channels_last" and values.dim() == 4:
        return values.contiguous(memory_format=torch.channels_last)
    if layout == "transposed" and values.dim() > 1:
        return values.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "offset":
        memory = torch.empty(values.numel() + 1, dtype=values.dtype)
        return memory[1:].view(values.shape).copy_(values)
    if layout == "sliced" and values.dim() > 0:
        wide = torch.zeros((*values.shape[:-1], 2 * values.shape[-1] + 1), dtype=values.dtype)
        return wide[..., 1::2].copy_(values)
    return values


class Arguments:
    """The arguments that the three ops share, by name."""

    rule: int
    params: list[Tensor]
    grads: list[Tensor]
    states: list[Tensor]
    masters: list[Tensor]
    averages: list[Tensor]
    lrs: list[Tensor]
    scalars: Tensor
    control: Tensor
    table: Tensor
    rows: Tensor
    scale: Tensor | None
    found_inf: Tensor | None

    def arguments(self) -> tuple[Any, ...]:
        return (
            self.rule, self.params, self.grads, self.states, self.masters, self.averages, self.lrs,
            self.scalars, self.control, self.table, self.rows, self.scale, self.found_inf,
        )  # fmt: skip

    def written(self) -> Iterator[tuple[str, Tensor]]:
        """Everything that a step may write, by name."""
        for name in ("params", "grads", "states", "masters", "averages"):
            for i, t in enumerate(getattr(self, name)):
                yield f"{name}[{i}]", t
        yield "scalars", self.scalars
        yield "control", self.control


class Case(Arguments):
    """Arguments for parameters, each as its Spec says; ``step`` are options of the step by name."""

    def __init__(
        self,
        rule: str,
        specs: Sequence[Spec],
        groups: Sequence[dict[str, float]],
        *,
        lrs: Sequence[Tensor] = (),
        scale: float | None = None,
        found_inf: float | None = None,
        seed_of_values: int = 0,
        **step: float,
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed_of_values)
        self.rule, self.specs, self.lrs = RULE_NAMES.index(rule), list(specs), list(lrs)
        most = RULES[self.rule].most
        self.params, self.grads, self.states, self.masters, self.averages = [], [], [], [], []
        rows = []
        for column, spec in enumerate(self.specs):
            values = self._random(spec.shape)
            param = in_layout(values.to(spec.dtype), spec.layout)
            self.params.append(param)
            dense = torch.empty_like(param)
            wide = torch.promote_types(spec.dtype, torch.float32)
            row = [spec.group, column]
            wanted = range(most) if spec.states is None else spec.states
            for k in range(MAX_STATES):
                dtype = spec.state_dtype or wide
                codes = dtype == SIGNED
                state = torch.full_like(
                    dense, float(rule == "rmsprop_tf" and k == 0), dtype=wide if codes else dtype
                )
                row.append(len(self.states) if k in wanted else -1)
                if k in wanted:
                    self.states += in_codes(rule, k, state, spec.layout) if codes else [state]
            master = torch.empty_like(dense, dtype=torch.float32).copy_(values)
            if isinstance(spec.master, torch.dtype):
                split, correction = split_weights(master, spec.dtype, spec.master)
                param.copy_(split)
                master = torch.empty_like(dense, dtype=spec.master).copy_(correction)
            row.append(_append(self.masters, master, spec.master is not False))
            average = torch.empty_like(dense, dtype=spec.average).copy_(values)
            row.append(_append(self.averages, average, spec.average is not None))
            rows.append(row)
        count = len(self.specs)
        self.scalars = torch.zeros(SCALARS, count)
        self.control = torch.zeros(CONTROLS)
        self.rows = torch.tensor(rows, dtype=torch.int64).reshape(count, 4 + MAX_STATES)
        self.table = torch.zeros(1 + len(groups), WIDTH, dtype=torch.float64)
        for name, value in {"measures": 1, "norm_eps": 1e-6, "unit_eps": 1e-3, **step}.items():
            self.set(name, value)
        names = (*GroupOptions._fields[:-1], *OF_RULES[rule].options)
        for options, line in zip(groups, self.table[1:]):
            for name, value in {"lr": 0.1, "lr_index": -1.0, "sign": 1.0, **options}.items():
                line[names.index(name)] = value
        self.scale = None if scale is None else torch.tensor([scale])
        self.found_inf = None if found_inf is None else torch.tensor([found_inf])
        self.new_gradients()

    def set(self, name: str, value: float) -> None:
        """Changes an option of the step."""
        self.table[0, StepOptions._fields.index(name)] = value

    def _random(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def new_gradients(self) -> None:
        """Others, times the loss scale."""
        scale = 1.0 if self.scale is None else self.scale.item()
        self.grads = []
        for spec in self.specs:
            values = (self._random(spec.shape) * scale).to(spec.grad_dtype or spec.dtype)
            self.grads.append(in_layout(values, spec.grad_layout or spec.layout))

    def clone(self) -> Case:
        """The same numbers in the same layouts, elsewhere in memory."""
        other = copy.copy(self)
        for name in ("params", "grads", "states", "masters", "averages"):
            setattr(other, name, [_clone(t) for t in getattr(self, name)])
        other.scalars, other.control = self.scalars.clone(), self.control.clone()
        return other

    def to(self, device: str) -> Case:
        """On another device, but what belongs to the host."""
        other = copy.copy(self)
        for name in ("params", "grads", "states", "masters", "averages", "lrs"):
            setattr(other, name, [t.to(device) for t in getattr(self, name)])
        for name in ("scalars", "control", "scale", "found_inf"):
            value = getattr(self, name)
            setattr(other, name, None if value is None else value.to(device))
        return other


def in_codes(rule: str, slot: int, state: Tensor, layout: str) -> list[Tensor]:
    """A state as codes, laid out like its parameter, and their scales."""
    codes, scales = quantise(state, SQUARES if slot in SQUARE_SLOTS.get(rule, ()) else SIGNED)
    return [in_layout(codes, layout) if layout == "offset" else codes, scales]


def _append(tensors: list[Tensor], t: Tensor, wanted: bool) -> int:
    if not wanted:
        return -1
    tensors.append(t)
    return len(tensors) - 1


def _clone(t: Tensor) -> Tensor:
    """With gaps in memory where there are gaps."""
    storage = torch.empty(t.untyped_storage().nbytes() // t.element_size(), dtype=t.dtype)
    return storage.as_strided(t.shape, t.stride(), t.storage_offset()).copy_(t)


def bits(t: Tensor) -> int:
    """A checksum of every bit."""
    return zlib.crc32(t.contiguous().flatten().view(torch.uint8).numpy().tobytes())


F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
# Every kind of tensor in one call; two groups.
SPECS = [
    Spec((17, 31)),
    Spec((20000,), group=1),  # more than a chunk
    Spec((0,)),
    Spec((), F64),
    Spec((4, 0, 2), BF16),
    Spec((1, 1031), F64, group=1, average=F64),
    Spec((6, 3, 5, 4), layout="channels_last", grad_layout="contiguous", average=F32),
    Spec((6, 3, 5, 4), F16, "channels_last", average=F16),
    Spec((9, 40), BF16, "transposed", grad_layout="sliced", state_dtype=BF16, group=1),
    Spec((9, 40), BF16, grad_dtype=F32, master=True, average=F32, layout="transposed"),
    Spec((5, 21), F16, master=True, average=BF16, state_dtype=F32),
    Spec((5, 21), grad_dtype=F16, layout="sliced", grad_layout="contiguous"),
    Spec((33,), grad_dtype=F64, state_dtype=BF16),
    Spec((33,), F64, grad_dtype=BF16, state_dtype=F32),
    Spec((3, 4097), F32, states=[0], average=F64),
]


def specs_of(rule: str) -> list[Spec]:
    """Members of SPECS that have as many states as the rule needs."""
    least = RULES[RULE_NAMES.index(rule)].least
    return [s for s in SPECS if s.states is None or len(s.states) >= least]
