"""The arguments of an optimizer op as kernels take them; unchanged ones are kept for the next step.

The tables of 161 tensors take milliseconds of Python. They depend only on the facts below, above
all on addresses: they are valid whoever owns the memory now, and other facts have other tables. If
only the gradients have moved (``zero_grad`` has freed the old ones), their column is replaced.
"""

from __future__ import annotations

import ctypes
from array import array
from collections import OrderedDict
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ..reference.optimizer_rules import RULES
from ..reference.optimizers import SCALARS, WIDTH, GroupOptions, StepOptions
from . import _optimizer_tables as _tables
from ._optimizer_tables import Tables, send

_LR_INDEX = GroupOptions.column("lr_index")
_dtype = attrgetter("dtype")


class _Kept:
    """Tables and numbers on the device. Only kernels of one stream read them: they run after the
    copies that wrote the memory, and freed memory goes back to that stream."""

    def __init__(self, tables: Tables, gradients: tuple[int, ...]) -> None:
        self.tables = tables
        self.entries = OrderedDict({gradients: tables.entries})  # by the gradients' addresses
        self.numbers: tuple[bytes, list[Tensor]] | None = None

    def entries_of(self, gradients: tuple[int, ...]) -> Tensor:
        entries = self.entries.get(gradients)
        if entries is None:
            entries = self.entries[gradients] = self.tables.with_gradients(gradients)
            if len(self.entries) > _GRADIENTS:
                self.entries.popitem(last=False)
        return entries


# Number of kept tables, and of gradients' places in each. 256 bytes a tensor, 8 a chunk.
_TABLES, _GRADIENTS = 8, 4
_kept: OrderedDict[Any, _Kept] = OrderedDict()


def _facts(tensors: list[Tensor], of_size: Callable[[Tensor], Any]) -> tuple[Any, ...]:
    """The facts that tables depend on. An address determines the device, and the size of a
    contiguous tensor its strides, which take as long to read as all other facts."""
    contiguous = tuple(map(Tensor.is_contiguous, tensors))
    others = () if all(contiguous) else tuple(map(Tensor.stride, tensors))
    return (
        tuple(map(Tensor.data_ptr, tensors)), contiguous, others,
        tuple(map(of_size, tensors)), tuple(map(_dtype, tensors)),
    )  # fmt: skip


def _bytes_of(t: Tensor) -> bytes:
    """The bytes of a tensor in host memory."""
    t = t.contiguous()
    return ctypes.string_at(t.data_ptr(), t.numel() * t.itemsize)


class DeviceCall:
    """A call with its numbers on the device, and with tensors that kernels can walk."""

    def __init__(
        self, rule: int, params: list[Tensor], grads: list[Tensor], states: list[Tensor],
        masters: list[Tensor], averages: list[Tensor], lrs: list[Tensor], scalars: Tensor,
        control: Tensor, table: Tensor, rows: Tensor, scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:  # fmt: skip
        if not 0 <= rule < len(RULES):
            raise RuntimeError("fusedtrain: no such rule")
        self.rule, self.params, self.lrs = rule, params, lrs
        self.scalars, self.control, self.device = scalars, control, scalars.device
        self.columns = scalars.numel() // SCALARS
        self._check_number(scalars, "scalars")
        self._check_number(control, "control")
        for maybe, name in ((scale, "scale"), (found_inf, "found_inf")):
            if maybe is not None:
                self._check_number(maybe, name, 1)
        numbers = table.flatten().tolist()
        self.option = StepOptions.of(numbers)
        self.measures = int(self.option.measures)
        self.clips_units = self.option.unit_factor != 0
        self.shadows: list[tuple[Tensor, Tensor]] = []
        if not params:
            return
        arguments = (
            rule, params, grads, states, masters, averages, lrs, scalars, control, table, rows,
            scale, found_inf,
        )  # fmt: skip
        kept = self._tables(arguments)
        tables = kept.tables
        self.launches, self.chunks = tables.launches, tables.chunks
        self.first_chunks, self.chunk_count = tables.first_chunks, tables.chunk_count
        self.unit_count, self.piece_count = tables.unit_count, tables.piece_count
        if self.clips_units:
            self.pieces, self.first_pieces = tables.pieces, tables.first_pieces
            self.first_units = tables.first_units
        rates = [self._rate(int(n)) for n in numbers[WIDTH + _LR_INDEX :: WIDTH]]
        self.options, self.rates, one, zero = self._numbers(kept, table, array("q", sum(rates, ())))
        # The defaults: a scale of 1, and no infinity.
        self.scale_or_one = one if scale is None else scale
        self.found_or_none = zero if found_inf is None else found_inf

    def _tables(self, arguments: tuple[Any, ...]) -> _Kept:
        rule, params, grads, states, masters, averages, _, _, _, table, rows, *_ = arguments
        interpreted = self.device == table.device
        if not interpreted and torch.cuda.is_current_stream_capturing():
            # A graph owns memory that is allocated during its capture, but not kept tables.
            return self._built(arguments, ())
        gradients, *of_gradients = _facts(grads, Tensor.size)
        key = (
            0 if interpreted else torch.cuda.current_stream(self.device).cuda_stream,
            self.device, rule, self.clips_units, self.option.masters_follow, self.columns,
            table.numel(), _tables.CHUNK,
            _bytes_of(rows), *of_gradients, tuple([a % 16 == 0 for a in gradients]),
            _facts(params, Tensor.size),
            *(_facts(t, Tensor.numel) for t in (states, masters, averages)),
        )  # fmt: skip
        kept = _kept.get(key)
        if kept is None:
            kept = self._built(arguments, gradients)
            if not self.shadows:
                _kept[key] = kept
                if len(_kept) > _TABLES:
                    _kept.popitem(last=False)
        else:
            _kept.move_to_end(key)
        self.entries = kept.entries_of(gradients)
        return kept

    def _built(self, arguments: tuple[Any, ...], gradients: tuple[int, ...]) -> _Kept:
        tables = Tables(*arguments)
        self.entries, self.shadows = tables.entries, tables.shadows
        tables.forget()
        return _Kept(tables, gradients)

    def _numbers(self, kept: _Kept, table: Tensor, rates: array[int]) -> list[Tensor]:
        """Options, rates, a one and a zero on the device."""
        options = _bytes_of(table)
        known = options + rates.tobytes()
        if kept.numbers is None or kept.numbers[0] != known:
            parts: list[array[Any]] = [
                array("d", options),
                rates,
                array("f", [1.0]),
                array("f", [0.0]),
            ]
            kept.numbers = known, send(parts, self.device)
        return kept.numbers[1]

    # --- checks, as in csrc/bindings/optimizers.h

    def _check_number(self, t: Tensor, what: str, count: int | None = None) -> None:
        """Raises unless `t` is contiguous float32 on the device, with `count` elements if set."""
        if (
            t.device != self.device
            or t.dtype != torch.float32
            or not t.is_contiguous()
            or (count is not None and t.numel() != count)
        ):
            raise RuntimeError(f"fusedtrain: {what}")

    def _rate(self, index: int) -> tuple[int, int]:
        """Address of a learning rate on the device, 0 for none; and whether it is float64."""
        if index < 0:
            return 0, 0
        lr = self.lrs[index]
        if (
            lr.device != self.device
            or lr.numel() != 1
            or lr.dtype not in (torch.float32, torch.float64)
        ):
            raise RuntimeError("fusedtrain: lr must be one float32 or float64 number")
        return lr.data_ptr(), int(lr.dtype is torch.float64)
