"""Where a training loop's time goes: `fusedtrain.profile`, and the engine of the command."""

from __future__ import annotations

from ._families import FAMILIES, family_of, uses_tensor_cores
from ._profile import profile
from ._records import Kernel, Record, Recording
from ._summary import summary, top_operators

__all__ = [
    "FAMILIES",
    "Kernel",
    "Record",
    "Recording",
    "family_of",
    "profile",
    "summary",
    "top_operators",
    "uses_tensor_cores",
]
