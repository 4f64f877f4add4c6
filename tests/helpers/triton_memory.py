"""Checks that Triton's interpreter does not make: an interpreted kernel touches the memory of its
arguments alone, and finds NaN in memory that nothing has written."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

Range = tuple[int, int]
# Constants of the kernels of many tensors that tell the dtypes of the columns of addresses.
_COLUMNS = ("P", "G", "S0", "S1", "S2", None, "A")


class OutOfBounds(Exception):
    """An access to memory that the kernel was not given."""


class _Known:
    """Ranges of addresses that kernels may touch; those that overlap are one."""

    def __init__(self, ranges: list[Range]) -> None:
        merged: list[list[int]] = []
        for start, end in sorted(r for r in ranges if r[0] < r[1]):
            if merged and start < merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], end)
            else:
                merged.append([start, end])
        self.starts = np.array([start for start, _ in merged], dtype=np.uint64)
        self.ends = np.array([end for _, end in merged], dtype=np.uint64)

    def check(self, pointers: Any, mask: Any, size: int, kernel: str, what: str) -> None:
        if np.shape(pointers) != np.shape(mask):
            pointers, mask = np.broadcast_arrays(pointers, mask)
        touched = np.asarray(pointers)[np.asarray(mask, bool)].astype(np.uint64)
        if not touched.size:
            return
        place = np.searchsorted(self.starts, touched, "right").astype(np.int64) - 1
        ends = self.ends[np.maximum(place, 0)] if self.ends.size else np.zeros(1, np.uint64)
        wrong = (place < 0) | (touched + np.uint64(size) > ends)
        wrong |= touched % np.uint64(size) != 0
        if wrong.any():
            raise OutOfBounds(
                f"{kernel} {what} {int(wrong.sum())} elements of {size} bytes elsewhere than in "
                f"its arguments, the first at {int(touched[wrong][0]):#x}"
            )


def _range(t: Tensor) -> Range:
    if not t.numel():
        return 0, 0
    last = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()


def _of_tables(arguments: dict[str, Any]) -> Iterator[Range]:
    """Memory behind tables of addresses: those of the optimizers (_optimizer_tables.py), of
    learning rates on the device, and of zero_tensors."""
    from fusedtrain.reference.optimizers import MAX_STATES
    from fusedtrain.reference.state_codes import group_count
    from fusedtrain.triton import _optimizer_tables as _tables

    table, rates = arguments.get("table_ptr"), arguments.get("rates_ptr")
    if table is not None and "part_ptr" in arguments and table.numel():
        if "G" in arguments:
            for row in table.view(-1, _tables.ENTRY).tolist():
                for column, name in enumerate(_COLUMNS):
                    dtype = arguments.get(name)
                    bits = 32 if name is None else getattr(dtype, "primitive_bitwidth", 0)
                    if row[column]:
                        yield row[column], row[column] + row[_tables.NUMEL] * bits // 8
                for scales in row[_tables.SCALES :][:MAX_STATES]:
                    if scales:
                        yield scales, scales + 4 * group_count(row[_tables.NUMEL])
        else:
            for address, size, _, _ in table.view(-1, 4).tolist():
                yield address, address + size
    if rates is not None:
        for address, wide in rates.view(-1, 2).tolist():
            if address:
                yield address, address + (8 if wide else 4)


@functools.cache
def watch() -> None:
    """Once for all kernels of the process."""
    import triton.runtime.interpreter as interpreter

    executor, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
    prepare, load, store = (
        executor._init_args_hst, builder.create_masked_load, builder.create_masked_store,
    )  # fmt: skip
    running: list[tuple[str, _Known]] = []

    def prepared(self: Any, arguments: Any, keywords: Any) -> Any:
        converted = prepare(self, arguments, keywords)
        named = {**dict(zip(self.arg_names, converted[0])), **converted[1]}
        tensors = [t for t in named.values() if isinstance(t, Tensor)]
        known = _Known([*map(_range, tensors), *_of_tables(named)])
        running[:] = [(self.fn.__name__, known)]
        return converted

    def size_of(pointers: Any) -> int:
        return max(1, int(pointers.get_element_ty().primitive_bitwidth) // 8)

    def checked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        kernel, known = running[0]
        known.check(pointers.data, mask.data, size_of(pointers), kernel, "reads")
        return load(self, pointers, mask, *rest)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        kernel, known = running[0]
        known.check(pointers.data, mask.data, size_of(pointers), kernel, "writes")
        return store(self, pointers, value, mask, *rest)

    executor._init_args_hst = prepared
    builder.create_masked_load = checked_load
    builder.create_masked_store = checked_store


@functools.cache
def fill_with_nan() -> None:
    """Memory that an op allocates is full of NaN, or of the largest integer."""
    import fusedtrain.triton as package

    load = package._load

    def filled(op: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(op)
        def call(*arguments: Any) -> Any:
            before = torch.are_deterministic_algorithms_enabled()
            warns = torch.is_deterministic_algorithms_warn_only_enabled()
            torch.use_deterministic_algorithms(True, warn_only=True)
            try:
                return op(*arguments)
            finally:
                torch.use_deterministic_algorithms(before, warn_only=warns)

        return call

    ops: dict[str, Callable[..., Any]] = {}

    def loaded() -> dict[str, Callable[..., Any]]:
        if not ops:
            ops.update((name, filled(op)) for name, op in load().items())
        return ops

    package._load = loaded
