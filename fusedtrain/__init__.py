"""fusedtrain: fused activations, batch norm and optimizer steps for PyTorch training."""

from . import amp, functional, integrations, nn, optim
from ._backends import BackendInfo, backend_info
from ._recompute import recompute
from ._version import __version__
from .convert import ConversionReport, convert, revert
from .fold import FoldReport, drop_redundant_bias, fold_conv_bn, tune_mode
from .memory import MemoryReport, memory_report
from .optim import zero_grad

__all__ = [
    "BackendInfo",
    "ConversionReport",
    "FoldReport",
    "MemoryReport",
    "__version__",
    "amp",
    "backend_info",
    "convert",
    "drop_redundant_bias",
    "fold_conv_bn",
    "functional",
    "integrations",
    "memory_report",
    "nn",
    "optim",
    "recompute",
    "revert",
    "tune_mode",
    "zero_grad",
]
