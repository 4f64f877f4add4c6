"""fusedtrain: fused activations, batch norm and optimizer steps for PyTorch training."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import amp, functional, integrations, nn, optim
from ._backends import BackendInfo, backend_info
from ._recompute import recompute
from ._version import __version__
from .optim import zero_grad

if TYPE_CHECKING:
    from . import (
        compat as compat,
        conversion as conversion,
        diagnosis as diagnosis,
        folding as folding,
        fp16_utils as fp16_utils,
        memory as memory,
        profiling as profiling,
        tuning as tuning,
    )
    from .conversion import ConversionReport, convert, revert
    from .diagnosis import Diagnosis, doctor
    from .folding import FoldReport, drop_redundant_bias, fold_conv_bn, tune_mode
    from .memory import MemoryReport, memory_report
    from .profiling import profile
    from .tuning import TuneReport, tune

# Imported on first use: of the 50 ms that importing the package may take after torch, 47 are used.
_LATER = {
    "compat": (),
    "conversion": ("ConversionReport", "convert", "revert"),
    "diagnosis": ("Diagnosis", "doctor"),
    "folding": ("FoldReport", "drop_redundant_bias", "fold_conv_bn", "tune_mode"),
    "fp16_utils": (),
    "memory": ("MemoryReport", "memory_report"),
    "profiling": ("profile",),
    "tuning": ("TuneReport", "tune"),
}

__all__ = [
    "BackendInfo",
    "ConversionReport",
    "Diagnosis",
    "FoldReport",
    "MemoryReport",
    "TuneReport",
    "__version__",
    "amp",
    "backend_info",
    "compat",
    "convert",
    "doctor",
    "drop_redundant_bias",
    "fold_conv_bn",
    "fp16_utils",
    "functional",
    "integrations",
    "memory_report",
    "nn",
    "optim",
    "profile",
    "recompute",
    "revert",
    "tune",
    "tune_mode",
    "zero_grad",
]


def __getattr__(name: str) -> Any:
    for module, names in _LATER.items():
        if name == module or name in names:
            loaded = importlib.import_module(f".{module}", __name__)
            globals().update((n, getattr(loaded, n)) for n in names)
            return loaded if name == module else globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_LATER, *(name for name in globals() if name.startswith("__"))})
