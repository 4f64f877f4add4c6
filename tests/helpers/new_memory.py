"""Memory that holds no values yet."""

from __future__ import annotations

import ctypes
from pathlib import Path

import fusedtrain


def fill_new_memory(fills: bool) -> None:
    """Whether the bindings of the CPU fill fresh outputs with NaN, as torch does where algorithms
    are to be deterministic."""
    if fusedtrain.backend_info().backends["cpu"].loaded:
        path = Path(fusedtrain.__file__).parent / "_C.so"
        ctypes.CDLL(str(path)).fusedtrain_fill_new_memory(ctypes.c_bool(fills))
