"""The calls of `apex.amp`, over torch.autocast and the fused optimizers."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._functions import (
        disable_casts,
        float_function,
        half_function,
        promote_function,
        register_float_function,
        register_half_function,
        register_promote_function,
    )
    from ._initialize import initialize, load_state_dict, master_params, state_dict
    from ._scale_loss import scale_loss
    from ._state import _amp_state as _amp_state

__all__ = [
    "disable_casts",
    "float_function",
    "half_function",
    "initialize",
    "load_state_dict",
    "master_params",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "scale_loss",
    "state_dict",
]

# Imported on first use: the calls take 8 ms.
_WHERE = {
    "_amp_state": "_state",
    "disable_casts": "_functions",
    "float_function": "_functions",
    "half_function": "_functions",
    "initialize": "_initialize",
    "load_state_dict": "_initialize",
    "master_params": "_initialize",
    "promote_function": "_functions",
    "register_float_function": "_functions",
    "register_half_function": "_functions",
    "register_promote_function": "_functions",
    "scale_loss": "_scale_loss",
    "state_dict": "_initialize",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # All names at once: timm looks into ``amp.__dict__`` for state_dict.
    modules = {file: importlib.import_module(f".{file}", __name__) for file in _WHERE.values()}
    globals().update({each: getattr(modules[file], each) for each, file in _WHERE.items()})
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
