"""fusedtrain: fused activations, batch norm and optimizer steps for PyTorch training."""

from . import amp, functional, integrations, nn, optim
from ._backends import BackendInfo, backend_info
from ._version import __version__
from .convert import ConversionReport, convert, revert
from .optim import zero_grad

__all__ = [
    "BackendInfo",
    "ConversionReport",
    "__version__",
    "amp",
    "backend_info",
    "convert",
    "functional",
    "integrations",
    "nn",
    "optim",
    "revert",
    "zero_grad",
]
