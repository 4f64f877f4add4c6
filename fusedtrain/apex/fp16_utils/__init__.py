"""The functions of `apex.fp16_utils`: manual mixed precision, for scripts that still use it."""

from ..amp._casts import convert_module, convert_network
from .convert import BN_convert_float, FP16Model, network_to_half, tofp16
from .fp16_optimizer import FP16_Optimizer
from .loss_scaler import DynamicLossScaler, LossScaler
from .master_params import (
    clip_grad_norm,
    master_params_to_model_params,
    model_grads_to_master_grads,
    prep_param_lists,
    to_python_float,
)

__all__ = [
    "BN_convert_float",
    "DynamicLossScaler",
    "FP16Model",
    "FP16_Optimizer",
    "LossScaler",
    "clip_grad_norm",
    "convert_module",
    "convert_network",
    "master_params_to_model_params",
    "model_grads_to_master_grads",
    "network_to_half",
    "prep_param_lists",
    "to_python_float",
    "tofp16",
]
