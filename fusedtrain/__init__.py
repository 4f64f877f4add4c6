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
        advisor as advisor,
        apex as apex,
        conversion as conversion,
        folding as folding,
        memory as memory,
        planning as planning,
    )
    from .advisor.diagnosis import Diagnosis, doctor
    from .advisor.fitting import FitReport, fit
    from .advisor.profiling import profile
    from .advisor.tuning import TuneReport, tune
    from .conversion import ConversionReport, convert, revert
    from .folding import FoldReport, drop_redundant_bias, fold_conv_bn, fold_frozen_norms
    from .memory import MemoryReport, memory_report
    from .planning import MemoryPlan, plan_memory

# Imported on first use: of the 50 ms that importing the package may take after torch, 47 are used.
_LATER = {
    "advisor": (),
    "advisor.diagnosis": ("Diagnosis", "doctor"),
    "advisor.fitting": ("FitReport", "fit"),
    "advisor.profiling": ("profile",),
    "advisor.tuning": ("TuneReport", "tune"),
    "apex": (),
    "conversion": ("ConversionReport", "convert", "revert"),
    "folding": ("FoldReport", "drop_redundant_bias", "fold_conv_bn", "fold_frozen_norms"),
    "memory": ("MemoryReport", "memory_report"),
    "planning": ("MemoryPlan", "plan_memory"),
}

__all__ = [
    "BackendInfo",
    "ConversionReport",
    "Diagnosis",
    "FitReport",
    "FoldReport",
    "MemoryPlan",
    "MemoryReport",
    "TuneReport",
    "__version__",
    "amp",
    "apex",
    "backend_info",
    "convert",
    "doctor",
    "drop_redundant_bias",
    "fit",
    "fold_conv_bn",
    "fold_frozen_norms",
    "functional",
    "integrations",
    "memory_report",
    "nn",
    "optim",
    "plan_memory",
    "profile",
    "recompute",
    "revert",
    "tune",
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
    modules = {name for name in _LATER if "." not in name}
    return sorted({*__all__, *modules, *(name for name in globals() if name.startswith("__"))})
