"""What kernels of many tensors are told: where these are, and which program has which part.

All of it is one buffer of int64 in host memory, and one copy to the device.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..reference.optimizer_rules import RULES
from ..reference.optimizers import SCALARS, WIDTH, _Call
from ._layout import cdiv, is_dense
from .launch import STORED

CHUNK = 8192  # elements of a program
# Columns of the table of tensors: addresses of parameter, gradient, states, master, average; then
NUMEL, FIRST_CHUNK, INDEX, SCALAR, UNITS, INNER, FIRST_UNIT, FIRST_PIECE = range(7, 15)
ENTRY = 16

# Buffers that captured CUDA graphs copy from whenever they are replayed. Nobody tells when a graph
# has gone, so they stay: 128 bytes a tensor and 8 a chunk for each step that was captured.
_OF_GRAPHS: list[Tensor] = []


def to_device(numbers: Tensor, device: torch.device) -> Tensor:
    """A copy that nothing waits for; torch keeps the pinned buffer until the copy has been made."""
    if device == numbers.device:  # interpreted
        return numbers
    pinned = numbers.pin_memory()
    with torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():
            _OF_GRAPHS.append(pinned)
        return pinned.to(device, non_blocking=True)


def send(parts: Sequence[array[Any]], device: torch.device) -> list[Tensor]:
    """Vectors of int64 ("q") or float64 ("d") to the device, each on 16 bytes there."""
    buffer = bytearray()
    for part in parts:
        buffer += part.tobytes()
        buffer += bytes(-len(buffer) % 16)
    sent = to_device(torch.frombuffer(buffer, dtype=torch.int64), device)
    found, start = [], 0
    for part in parts:
        n = len(part)
        vector = sent[start : start + n]
        found.append(vector if part.typecode == "q" else vector.view(torch.float64))
        start += n + n % 2
    return found


class Kind(NamedTuple):
    """What a kernel is compiled for."""

    param: torch.dtype
    grad: torch.dtype
    states: tuple[torch.dtype | None, ...]
    master: bool
    average: torch.dtype | None
    aligned: bool  # everything is on 16 bytes
    large: bool  # elements need 64 bits to be counted; told apart where units are clipped


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


class DeviceCall(_Call):
    """A call whose numbers are on the device, and whose tensors kernels can walk."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.rule < len(RULES):
            raise RuntimeError("fusedtrain: no such rule")
        self.device = self.scalars.device
        self.shadows: list[tuple[Tensor, Tensor]] = []  # tensors with gaps, and their copies
        self.launches: list[Launch] = []
        self.clips_units = self.option["unit_factor"] != 0
        if self.params:
            self._cut([self._entry(i) for i in range(len(self.params))])

    # --- checks, as in csrc/binding_optimizers.h

    def _check(self, t: Tensor, what: str) -> None:
        if t.device != self.device:
            raise RuntimeError(f"fusedtrain: every {what} of a call must be on one device")
        if t.dtype not in STORED:
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

    def _companion(self, t: Tensor | None, param: Tensor, what: str) -> Tensor | None:
        if t is not None:
            self._check(t, what)
            if not is_dense(t) or not _same_strides(t, param):
                raise RuntimeError(
                    f"fusedtrain: {what} and parameter must have the same shape and strides"
                )
        return t

    def _entry(self, i: int) -> tuple[Kind, list[int]]:
        """The kind of a tensor, and its line of the table but for what other tensors settle."""
        self._check(self.params[i], "param")
        self._check(self.grads[i], "grad")
        param = self._walkable(self.params[i], self.params[i])
        grad = self._walkable(self.grads[i], param)
        states = [self._companion(s, param, "state") for s in self.state[i]]
        if any(s is not None for s in states[RULES[self.rule].most :]):
            raise RuntimeError("fusedtrain: too many states")
        master = self._companion(self.master[i], param, "master")
        if master is not None and (master.dtype, param.dtype == torch.float64) != (
            torch.float32, False,
        ):  # fmt: skip
            raise RuntimeError("fusedtrain: master weights are float32")
        average = self._companion(self.average[i], param, "average")
        if not 0 <= self.column[i] < self.scalars.view(SCALARS, -1).size(1):
            raise RuntimeError("fusedtrain: index of scalars")
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
            master is not None,
            None if average is None else average.dtype,
            together % 16 == 0,
            self.clips_units and numel >= 2**30,
        )
        line = [*addresses, numel, 0, i, self.column[i], units, inner, 0, 0]
        return kind, line + [0] * (ENTRY - len(line))

    # --- the tables

    def _cut(self, entries: list[tuple[Kind, list[int]]]) -> None:
        kinds: dict[Kind, list[list[int]]] = {}
        for kind, line in entries:
            kinds.setdefault(kind, []).append(line)
        table, places = array("q"), array("q")
        chunks, units, pieces = array("q", [0]), array("q", [0]), array("q", [0])
        line_of_chunk, line_of_piece, first_pieces = array("q"), array("q"), array("q")
        for kind, members in kinds.items():
            first_chunk, first_piece = chunks[-1], pieces[-1]
            for line in members:
                numel, number = line[NUMEL], array("q", [len(places)])
                line[FIRST_CHUNK], line[FIRST_UNIT] = chunks[-1], units[-1]
                line[FIRST_PIECE] = pieces[-1]
                table.extend(line)
                places.append(line[INDEX])
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
        parts = [
            table, line_of_chunk, chunks, places, array("q", self.group), array("q", self.column),
            array("d", [p.numel() for p in self.params]),
            array("d", [number for row in self.groups for number in row]),
        ]  # fmt: skip
        if self.clips_units:
            parts += [line_of_piece, first_pieces, units]
        sent = send(parts, self.device)
        self.entries, self.chunks, self.first_chunks, self.places = sent[:4]
        self._groups, self._columns, self._numels, self._options = sent[4:8]
        if self.clips_units:
            self.pieces, self.first_pieces, self.first_units = sent[8:]

    def group_table(self) -> Tensor:
        return self._options.view(-1, WIDTH)

    def groups_of_tensors(self) -> Tensor:
        return self._groups

    def columns_of_tensors(self) -> Tensor:
        return self._columns

    def numels_of_tensors(self) -> Tensor:
        return self._numels
