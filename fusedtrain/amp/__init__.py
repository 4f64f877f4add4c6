"""Mixed precision: a GradScaler for the fused optimizers, and the calls of Apex's amp."""

from ._state import _amp_state as _amp_state
from .functions import (
    disable_casts,
    float_function,
    half_function,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from .grad_scaler import GradScaler
from .initialize import initialize, load_state_dict, master_params, state_dict
from .scale_loss import scale_loss

__all__ = [
    "GradScaler",
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
