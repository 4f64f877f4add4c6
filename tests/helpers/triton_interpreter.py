"""Triton's interpreter, with what would show put right; and its programs in other orders."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from helpers.triton_memory import fill_with_nan, watch

ORDERS = ("forward", "reverse", "shuffled")


def round_to_nearest() -> None:
    """Makes float32 to bfloat16 round, as on a GPU: the interpreter cuts off, denormals wrongly.

    And lets a kernel count up to a number that it has loaded, which numpy 2.4 takes ill; and does
    not patch triton.language again for every call of a kernel's functions, two thirds of the time.
    Checked in triton 3.6 and 3.9 (rounding), 3.6 (the others); once or many times, and of no
    consequence to compiled kernels. Interpreted ones are watched besides (triton_memory.py).
    """
    watch()
    fill_with_nan()
    make_faster()
    import numpy as np
    import triton.language as tl
    import triton.runtime.interpreter as interpreter

    convert, patch = interpreter._convert_float, interpreter._patch_lang_tensor
    if convert.__module__ == __name__:
        return

    def converted(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if source == tl.float32 and target == tl.bfloat16:
            rounded = torch.from_numpy(np.ascontiguousarray(data)).bfloat16()
            return rounded.view(torch.uint16).numpy()
        if source == tl.bfloat16 and target == tl.float32:
            return data.astype(np.uint32) << 16
        return convert(data, source, target, mode)

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    patch_modules, done, looked_at = interpreter._patch_lang, set(), set()
    nothing = interpreter._LangPatchScope()  # to take back

    def patched_once(function: Any) -> Any:
        if function in looked_at:
            return nothing
        looked_at.add(function)
        modules = {id(m) for m in function.__globals__.values() if m is tl or m is tl.core}
        if not modules <= done:
            done.update(modules)
            patch_modules(function)
        return nothing

    interpreter._patch_lang = patched_once
    interpreter._convert_float = converted
    interpreter._patch_lang_tensor = patched


@functools.cache
def make_faster() -> None:
    """Half of the time of a kernel, with the same results, once for all kernels of the process.

    For each operation the interpreter makes types, shapes and tables anew, and follows each sum of
    integers by a check for overflow whose result is thrown away. Checked in triton 3.6; another
    version in which something has another form is left as it is.
    """
    import triton.language as tl
    import triton.runtime.interpreter as interpreter

    _check_no_overflow_for_nothing(interpreter.interpreter_builder)
    _keep_block_types(tl.core.block_type, tl.core.dtype, tl.core.pointer_type)
    _keep_shapes(tl.core.tensor)
    _keep_dtypes(interpreter, tl.core.dtype)


def _check_no_overflow_for_nothing(builder: Any) -> None:
    """Drops the check without `debug`: only with `debug` is its result asserted."""
    options = builder.options
    if hasattr(options, "sanitize_overflow") and not getattr(options, "debug", True):
        builder.options = replace(options, sanitize_overflow=False)


def _keep_block_types(block_type: Any, dtype: Any, pointer_type: Any) -> None:
    """Keeps the attributes of a type by its name; nobody writes to a type."""
    construct, made = block_type.__init__, {}

    def constructed(self: Any, element_ty: Any, shape: Any) -> None:
        if type(element_ty) not in (dtype, pointer_type):
            construct(self, element_ty, shape)
            return
        of_pointer = (getattr(element_ty, "address_space", 0), getattr(element_ty, "const", False))
        key = (element_ty.name, of_pointer, *(getattr(n, "value", n) for n in shape))
        if key not in made:
            construct(self, element_ty, shape)
            made[key] = dict(vars(self))
        else:
            vars(self).update(made[key])

    block_type.__init__ = constructed


def _keep_shapes(tensor: Any) -> None:
    """A shape is a tuple of constants, each with a type of its own."""
    construct, made = tensor.__init__, {}

    def constructed(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape) if type.is_block() else ()
        if key not in made:
            construct(self, handle, type)
            assert vars(self).keys() == {"handle", "shape", "numel", "type", "dtype"}
            made[key] = (self.shape, self.numel)
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = made[key]

    tensor.__init__ = constructed


def _keep_dtypes(interpreter: Any, dtype: Any) -> None:
    """The dtype of numpy of a scalar is looked up in a table that is made for each look."""
    look_up, known = interpreter._get_np_dtype, {}

    def looked_up(kind: Any) -> Any:
        scalar = getattr(kind, "element_ty", kind) if kind.is_block() else kind
        if type(scalar) is not dtype:
            return look_up(kind)
        if scalar.name not in known:
            known[scalar.name] = look_up(scalar)
        return known[scalar.name]

    interpreter._get_np_dtype = looked_up


@contextmanager
def programs_in(order: str) -> Iterator[None]:
    """Runs the programs of interpreted launches of one dimension in one of ORDERS."""
    import triton.runtime.interpreter as interpreter

    builder = interpreter.interpreter_builder
    set_index = builder.set_grid_idx

    def moved(x: int, y: int, z: int) -> None:
        n = builder.grid_dim[0]
        if order == "reverse":
            x = n - 1 - x
        elif order == "shuffled":
            x = random.Random(n).sample(range(n), n)[x]
        set_index(x, y, z)

    builder.set_grid_idx = moved
    try:
        yield
    finally:
        del builder.set_grid_idx
