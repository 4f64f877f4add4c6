"""For scripts written for NVIDIA Apex: its names, over torch and this package.

==================================  ==========================================================
``apex.parallel``                   :mod:`fusedtrain.apex.parallel`
``apex.parallel.LARC``              :mod:`fusedtrain.apex.larc`
``apex.optimizers``                 :mod:`fusedtrain.apex.optimizers`
``apex.amp``                        :mod:`fusedtrain.apex.amp`
``apex.fp16_utils``                 :mod:`fusedtrain.apex.fp16_utils`
``apex.normalization``              :mod:`fusedtrain.apex.normalization`
``apex.multi_tensor_apply``         :mod:`fusedtrain.apex.multi_tensor_apply` (not available)
==================================  ==========================================================

Write these names in place of Apex's, or call :func:`install_apex` before the first import of Apex.
To run a script unchanged: ``python -m fusedtrain.apex script.py ...``, or with torchrun
``torchrun ... -m fusedtrain.apex script.py ...``.
"""

from __future__ import annotations

import importlib
from typing import Any

from .install import install_apex

_MODULES = ("amp", "fp16_utils", "larc", "multi_tensor_apply", "normalization", "optimizers",
            "parallel")  # fmt: skip

__all__ = ["install_apex"]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES, *(name for name in globals() if name.startswith("__"))})
