"""Triton's interpreter, with what would show put right; and its programs in other orders."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from helpers.faster_interpreter import make_faster
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
