"""Tables for kernels of many tensors: the tensors' addresses, and each program's part.

One buffer in host memory holds all tables, and `_optimizer_calls.py` keeps a copy on the device.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._capture import pinned
from ..reference.optimizer_rules import RULES
from ..reference.optimizers import MAX_STATES, SCALARS, OptimizerCall
from ..reference.split_weights import CORRECTIONS
from ..reference.state_codes import SIGNED, SQUARES, group_count, is_codes
from ._layout import cdiv, is_dense
from .launch import STORED

CHUNK = 8192  # elements of a program
# Columns of the table of tensors: addresses of parameter, gradient, states, master, average; then
NUMEL, FIRST_CHUNK, TENSOR, SCALAR, GROUP, UNITS, INNER, FIRST_UNIT, FIRST_PIECE = range(7, 16)
SCALES = 16  # and the addresses of the states' scales
# A power of two: with lines of 19 numbers ptxas has other registers, and spills in try_kernel.
ENTRY = 32
# prepare_kernel writes rows of so many float64: one for the step, then one for each tensor.
NUMBERS = 16

_SENT = {"q": torch.int64, "d": torch.float64, "f": torch.float32}


def to_device(numbers: Tensor, device: torch.device) -> Tensor:
    """An asynchronous copy; torch keeps the pinned buffer until the copy has been made."""
    if device == numbers.device:  # interpreted
        return numbers
    with torch.cuda.device(device):
        return pinned(numbers).to(device, non_blocking=True)


def send(parts: Sequence[array[Any]], device: torch.device) -> list[Tensor]:
    """Vectors of int64 ("q"), float64 ("d") or float32 ("f") to the device, on 16 bytes each."""
    buffer, starts = bytearray(), []
    for part in parts:
        starts.append(len(buffer))
        buffer += part.tobytes()
        buffer += bytes(-len(buffer) % 16)
    sent = to_device(torch.frombuffer(buffer, dtype=torch.uint8), device)
    return [
        sent[start : start + len(part) * part.itemsize].view(_SENT[part.typecode])
        for start, part in zip(starts, parts, strict=True)
    ]


class Kind(NamedTuple):
    """The properties of tensors that a kernel is compiled for."""

    param: torch.dtype
    grad: torch.dtype
    states: tuple[torch.dtype | None, ...]
    master: torch.dtype | None
    average: torch.dtype | None
    aligned: bool  # all addresses are multiples of 16
    large: bool  # element numbers need 64 bits; set only if units are clipped


class Launch(NamedTuple):
    """The programs for all tensors of a kind."""

    kind: Kind
    first_chunk: int
    chunks: int
    first_piece: int
    pieces: int


def _same_strides(t: Tensor, model: Tensor) -> bool:
    strides, wanted = t.stride(), model.stride()
    return strides == wanted or all(
        s == w or n == 1 for s, w, n in zip(strides, wanted, t.size(), strict=True)
    )


class Tables(OptimizerCall):
    """Tables of a call's tensors, which kernels can walk. Of a step's options they depend only on
    whether units are clipped and masters follow."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.device = self.scalars.device
        self.shadows: list[tuple[Tensor, Tensor]] = []  # tensors with gaps, and their copies
        self.launches: list[Launch] = []
        self.clips_units = self.option.unit_factor != 0
        self.columns = self.scalars.numel() // SCALARS
        self._cut([self._entry(i) for i in range(len(self.params))])

    # --- checks, as in csrc/bindings/optimizers.h

    def _check(self, t: Tensor, what: str, dtypes: Collection[torch.dtype] = STORED) -> None:
        if t.device != self.device:
            raise RuntimeError(f"fusedtrain: every {what} of a call must be on one device")
        if t.dtype not in dtypes:
            raise RuntimeError(
                f"fusedtrain: {what} must be float32, float64, float16 or bfloat16, not {t.dtype}"
            )

    def _walkable(self, t: Tensor, model: Tensor) -> Tensor:
        """`t`, or a copy that is dense and laid out like `model`."""
        if is_dense(t) and _same_strides(t, model):
            return t
        copy = torch.empty_like(torch.empty_like(model), dtype=t.dtype).copy_(t)
        self.shadows.append((t, copy))
        return copy

    def _companion(
        self, t: Tensor | None, param: Tensor, what: str, dtypes: Collection[torch.dtype] = STORED
    ) -> Tensor | None:
        if t is not None:
            self._check(t, what, dtypes)
            if not is_dense(t) or not _same_strides(t, param):
                raise RuntimeError(
                    f"fusedtrain: {what} and parameter must have the same shape and strides"
                )
        return t

    def _master(self, t: Tensor | None, param: Tensor) -> Tensor | None:
        """Float32 weights, or the corrections of a 16-bit parameter."""
        if t is not None and t.dtype in CORRECTIONS.values():
            if param.dtype not in (torch.float16, torch.bfloat16):
                raise RuntimeError("fusedtrain: only 16-bit parameters have corrections")
            return self._companion(t, param, "master", CORRECTIONS.values())
        if t is not None and (t.dtype, param.dtype == torch.float64) != (torch.float32, False):
            raise RuntimeError(
                "fusedtrain: master weights are float32, or corrections of int16 or int8"
            )
        return self._companion(t, param, "master")

    def _master_kind(self, master: Tensor | None, param: Tensor) -> torch.dtype | None:
        """The dtype of a master; uint32: float32 weights that follow their 16-bit parameter."""
        follows = self.option.masters_follow != 0 and param.itemsize == 2
        return (
            None
            if master is None
            else torch.uint32
            if follows and master.itemsize == 4
            else master.dtype
        )

    def _state(self, i: int, k: int, param: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Floats; or codes and their scales, which follow in the list."""
        state = self.state[i][k]
        if not is_codes(state):
            return self._companion(state, param, "state"), None
        self._companion(state, param, "state", (SIGNED, SQUARES))
        if param.dtype is torch.float64:
            raise RuntimeError("fusedtrain: states of float64 parameters cannot be codes")
        place = self.places[i][k] + 1
        if place >= len(self.states):
            raise RuntimeError("fusedtrain: index of scales")
        scales = self.states[place]
        if (
            scales.device != self.device
            or scales.dtype != torch.float32
            or not scales.is_contiguous()
        ):
            raise RuntimeError("fusedtrain: scales")
        if scales.numel() != group_count(param.numel()):
            raise RuntimeError("fusedtrain: codes have a scale for each group of 32")
        return state, scales

    def _entry(self, i: int) -> tuple[Kind, list[int]]:
        """The kind of a tensor, and its line of the table, without numbers from other tensors."""
        self._check(self.params[i], "param")
        self._check(self.grads[i], "grad")
        param = self._walkable(self.params[i], self.params[i])
        grad = self._walkable(self.grads[i], param)
        states, scales = zip(*(self._state(i, k, param) for k in range(MAX_STATES)), strict=True)
        if any(s is not None for s in states[RULES[self.rule].most :]):
            raise RuntimeError("fusedtrain: too many states")
        master = self._master(self.master[i], param)
        average = self._companion(self.average[i], param, "average")
        if not 0 <= self.column[i] < self.columns or not 0 <= self.group[i] < len(self.groups):
            raise RuntimeError("fusedtrain: index of scalars or group")
        numel = param.numel()
        units, inner = 1, numel
        if self.clips_units and param.dim() > 1 and param.size(0) > 1 and numel:
            units, inner = param.size(0), param.stride(0)
        tensors = (param, grad, *states, master, average)
        addresses = [0 if t is None else t.data_ptr() for t in tensors]
        together = 0
        for address in addresses:
            together |= address
        kind = Kind(
            param.dtype,
            grad.dtype,
            tuple(None if s is None else s.dtype for s in states),
            self._master_kind(master, param),
            None if average is None else average.dtype,
            together % 16 == 0,
            self.clips_units and numel >= 2**30,
        )
        of_scales = [0 if t is None else t.data_ptr() for t in scales]
        numbers = [numel, 0, i, self.column[i], self.group[i], units, inner, 0, 0]
        line = [*addresses, *numbers, *of_scales]
        line += [0] * (ENTRY - len(line))
        return kind, line

    # --- the tables

    def _cut(self, entries: list[tuple[Kind, list[int]]]) -> None:
        kinds: dict[Kind, list[list[int]]] = {}
        for kind, line in entries:
            kinds.setdefault(kind, []).append(line)
        table = array("q")
        chunks, units, pieces = array("q", [0]), array("q", [0]), array("q", [0])
        line_of_chunk, line_of_piece, first_pieces = array("q"), array("q"), array("q")
        for kind, members in kinds.items():
            first_chunk, first_piece = chunks[-1], pieces[-1]
            for line in members:
                numel, number = line[NUMEL], array("q", [len(table) // ENTRY])
                line[FIRST_CHUNK], line[FIRST_UNIT] = chunks[-1], units[-1]
                line[FIRST_PIECE] = pieces[-1]
                table.extend(line)
                line_of_chunk += number * cdiv(numel, CHUNK)
                chunks.append(len(line_of_chunk))
                if self.clips_units:
                    of_unit = cdiv(numel // line[UNITS], CHUNK)
                    count = line[UNITS] if numel else 0
                    first_pieces.extend(
                        range(pieces[-1], pieces[-1] + count * of_unit, of_unit or 1)
                    )
                    line_of_piece += number * (count * of_unit)
                    units.append(units[-1] + count)
                    pieces.append(len(line_of_piece))
            self.launches.append(
                Launch(
                    kind, first_chunk, chunks[-1] - first_chunk,
                    first_piece, pieces[-1] - first_piece,
                )
            )  # fmt: skip
        first_pieces.append(pieces[-1])
        self.chunk_count, self.unit_count, self.piece_count = chunks[-1], units[-1], pieces[-1]
        self.lines, parts = table, [line_of_chunk, chunks]
        if self.clips_units:
            parts += [line_of_piece, first_pieces, units]
        self.entries, self.chunks, self.first_chunks, *rest = send([table, *parts], self.device)
        if self.clips_units:
            self.pieces, self.first_pieces, self.first_units = rest

    def forget(self) -> None:
        """Drops the arguments, whose memory must not be kept."""
        for field in fields(OptimizerCall):
            delattr(self, field.name)
        del self.state, self.master, self.average

    def with_gradients(self, addresses: Sequence[int]) -> Tensor:
        """The table's lines on the device, for gradients at other addresses in the same layout."""
        table = self.lines[:]
        table[1::ENTRY] = array("q", [addresses[i] for i in table[TENSOR::ENTRY]])
        return send([table], self.device)[0]
