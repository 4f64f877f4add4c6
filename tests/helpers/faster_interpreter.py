"""Triton's interpreter in half of its time, with the same results.

For each operation of a kernel it makes types, shapes and tables anew, and follows each sum of
integers by a check for overflow whose result it throws away. Checked in triton 3.6; another version
in which something has another form is left as it is.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any


@functools.cache
def make_faster() -> None:
    """Once for all kernels of the process."""
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
