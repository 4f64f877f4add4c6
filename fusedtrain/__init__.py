"""fusedtrain: fused activations, batch norm and optimizer steps for PyTorch training."""

from . import functional, nn
from ._backends import BackendInfo, backend_info
from ._version import __version__
from .convert import ConversionReport, convert, revert

__all__ = [
    "BackendInfo",
    "ConversionReport",
    "__version__",
    "backend_info",
    "convert",
    "functional",
    "nn",
    "revert",
]
