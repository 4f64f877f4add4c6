"""The calls of `apex.amp`, over torch.autocast and the fused optimizers."""

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
