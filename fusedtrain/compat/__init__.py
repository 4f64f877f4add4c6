"""For scripts written for NVIDIA Apex: its names, over torch and this package.

==================================  ==========================================================
``apex.parallel``                   :mod:`fusedtrain.compat.parallel`
``apex.parallel.LARC``              :mod:`fusedtrain.compat.larc`
``apex.optimizers``                 :mod:`fusedtrain.compat.optimizers`
``apex.amp``                        :mod:`fusedtrain.amp`
``apex.fp16_utils``                 :mod:`fusedtrain.fp16_utils`
``apex.multi_tensor_apply``         :mod:`fusedtrain.compat.multi_tensor_apply` (not available)
==================================  ==========================================================

Write these names in place of Apex's, or call :func:`install_apex` before the first import of Apex.
To run a script unchanged: ``python -m fusedtrain.compat script.py ...``, or with torchrun
``torchrun ... -m fusedtrain.compat script.py ...``.
"""

from __future__ import annotations

import importlib
from typing import Any

from .install import install_apex

_MODULES = ("larc", "multi_tensor_apply", "optimizers", "parallel")

__all__ = ["install_apex"]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES, *(name for name in globals() if name.startswith("__"))})
