"""The clock and the gate of every comparison: rivals take turns, and who is wrong is not timed."""

from __future__ import annotations

from ._clock import (
    NORMAL,
    QUICK,
    Call,
    Clock,
    Effort,
    FlushingCudaClock,
    Function,
    compare,
    compiled,
    cpu_clock,
    cuda_clock,
    device_name,
    device_slug,
    interleave,
    median_interval,
)
from ._gate import (
    ANY,
    CHAIN,
    FORWARD,
    GRADIENT,
    NotTheJob,
    Tolerance,
    agrees,
    first_call,
    same_kind,
)

__all__ = [
    "ANY",
    "CHAIN",
    "FORWARD",
    "GRADIENT",
    "NORMAL",
    "QUICK",
    "Call",
    "Clock",
    "Effort",
    "FlushingCudaClock",
    "Function",
    "NotTheJob",
    "Tolerance",
    "agrees",
    "compare",
    "compiled",
    "cpu_clock",
    "cuda_clock",
    "device_name",
    "device_slug",
    "first_call",
    "interleave",
    "median_interval",
    "same_kind",
]
