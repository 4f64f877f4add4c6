"""The options of each opt_level of Apex's amp, and their changes by the caller."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch


@dataclass
class Options:
    """The properties of Apex's amp, by its names; all disabled before `initialize`."""

    enabled: bool = False
    opt_level: str | None = None
    cast_model_type: torch.dtype | None = None
    patch_torch_functions: bool = False
    keep_batchnorm_fp32: bool | None = None
    master_weights: bool | None = None
    loss_scale: float | str = 1.0

    @property
    def options(self) -> dict[str, Any]:
        """All options as a dictionary; the name is Apex's."""
        return asdict(self)


BRIEFS = {
    "O0": "float32 training",
    "O1": "float16 by autocast, float32 weights",
    "O2": "float16 model, float32 batch norm and master weights",
    "O3": "float16 training",
}
_LEVELS: dict[str, dict[str, Any]] = {
    "O0": {"cast_model_type": torch.float32, "master_weights": False, "loss_scale": 1.0},
    "O1": {"patch_torch_functions": True, "loss_scale": "dynamic"},
    "O2": {
        "cast_model_type": torch.float16,
        "keep_batchnorm_fp32": True,
        "master_weights": True,
        "loss_scale": "dynamic",
    },
    "O3": {
        "cast_model_type": torch.float16,
        "keep_batchnorm_fp32": False,
        "master_weights": False,
        "loss_scale": 1.0,
    },
}


def choose(opt_level: str, overrides: dict[str, Any]) -> Options:
    """The options of a level, replaced by the overrides that are not None.

    Raises:
        RuntimeError: for an unknown level, and for options that make no sense under it.
        TypeError, ValueError: for values that an option does not take.
    """
    if opt_level not in _LEVELS:
        raise RuntimeError(
            f"Unexpected optimization level {opt_level}. Options are 'O0', 'O1', 'O2', 'O3'. Note "
            "that in `O0`, `O1`, etc., the prefix O is the letter O, not the number zero."
        )
    options = Options(enabled=True, opt_level=opt_level, **_LEVELS[opt_level])
    for name, value in overrides.items():
        if value is not None:
            setattr(options, name, _checked(opt_level, name, value))
    if options.keep_batchnorm_fp32 is False and opt_level == "O0":
        options.keep_batchnorm_fp32 = None  # the whole model is float32
    return options


def _checked(level: str, name: str, value: Any) -> Any:
    if name == "cast_model_type" and value is not False:
        if not isinstance(value, torch.dtype) or not value.is_floating_point:
            raise TypeError(f"cast_model_type must be a floating-point dtype, got {value!r}")
        if level == "O1" and value is not torch.float32:
            raise RuntimeError(
                "O1 casts the arguments of functions and leaves the weights float32, so "
                f"cast_model_type should be None, got {value}. For a model of another dtype use "
                "opt_level='O2' or 'O3'; for bfloat16 by autocast use torch.autocast(device_type, "
                "torch.bfloat16)."
            )
    if name == "cast_model_type":
        return None if level == "O1" or value is False else value
    if name == "patch_torch_functions":
        if value and level != "O1":
            raise RuntimeError(
                "patch_torch_functions=True means opt_level='O1'; "
                f"{level} does not take it. Today's form is torch.autocast."
            )
        return bool(value)
    if name == "keep_batchnorm_fp32":
        value = {"True": True, "False": False}.get(value, value)
        if not isinstance(value, bool):
            raise TypeError(
                "keep_batchnorm_fp32 must be a boolean, the string 'True' or 'False', or None, "
                f"got {value!r}"
            )
        if level == "O1":
            raise RuntimeError(
                "With opt_level O1 batch norms run in float32 anyway, so "
                f"keep_batchnorm_fp32 should be None, got {value}"
            )
        return value
    if name == "master_weights":
        if level == "O1":
            raise RuntimeError(
                "It makes no sense to use master_weights with O1: the model's weights are float32"
            )
        return bool(value)
    if value == "dynamic":
        return "dynamic"
    try:
        scale = float(value)
    except (TypeError, ValueError):
        scale = float("nan")
    if not 0 < scale < float("inf"):
        raise ValueError(
            "loss_scale must be a number above 0 and finite, or the string 'dynamic', got "
            f"{value!r}"
        )
    return scale
