"""The keyword arguments that all optimizers of fusedtrain share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypedDict

import torch

from ..reference.split_weights import CORRECTIONS
from ._codes import Q8

WRITE_BACK = {"none": 0.0, "unscaled": 1.0, "zero": 2.0}  # as csrc/ops/optimizers.h numbers them


class SharedOptions(TypedDict, total=False):
    """Options of `FusedOptions` that no optimizer has as an argument of its own."""

    agc: float | None
    agc_eps: float
    ema_decay: float | None
    gradient_writeback: str
    state_dtype: torch.dtype | Literal["q8"] | None
    stochastic_rounding: bool


class OtherOptions(SharedOptions, total=False):
    """`FusedOptions` of an optimizer that has a ``max_grad_norm`` of its own."""

    master_weights: bool | Literal["split24", "split32"]


class FusedOptions(OtherOptions, total=False):
    """Keyword arguments of every optimizer of fusedtrain, besides its own.

    max_grad_norm: clips the norm of all gradients together, as ``clip_grad_norm_`` does.
    agc: clips unit by unit (adaptive gradient clipping), to this fraction of the weights' norm.
    agc_eps: least norm that a unit's weights count with.
    ema_decay: keeps an exponential moving average of the weights, with this decay.
    gradient_writeback: the values that a step, also a skipped one, leaves in ``.grad``: "none"
        (unchanged), "unscaled" (divided by the loss scale, and clipped unless the step is skipped;
        the default of `fusedtrain.apex.optimizers`) or "zero".
    state_dtype: dtype of the states that are as large as the parameter; None: the parameter's.
        "q8": codes of 8 bits with a float32 scale for each 32 of them, 1.125 bytes an element. A
        step computes with the numbers of the codes, and rounds at random, without bias, those that
        it stores: a momentum m, in a group with the largest magnitude s, to within
        (s + |m|)^2 / (250 s), and the root of an average of squares to within 1/255 of its group's
        largest root. Where 31 of 32 neighbours have gradients 1e5 times smaller than the 32nd,
        AdamW moves them 0.013 times as far, and LAMB, whose trust ratio makes up for them, the 32nd
        5 to 17 times as far: take float32 states there. Parameters of fewer than 4096 elements,
        float64 parameters, and the squares of ``amsgrad`` and ``centered`` keep states of float32
        or float64.
    master_weights: keeps float32 weights of float16 and bfloat16 parameters. "split32" keeps, in
        their place, corrections of 16 bits to the parameters: with bfloat16 the same weights bit
        for bit. "split24" keeps corrections of 8 bits.
    stochastic_rounding: rounds bfloat16 parameters up or down at random, without bias; with
        "split24" the 24 bits of their weights.
    """

    max_grad_norm: float | None


DEFAULTS: FusedOptions = {
    "max_grad_norm": None,
    "agc": None,
    "agc_eps": 1e-3,
    "ema_decay": None,
    "gradient_writeback": "none",
    "state_dtype": None,
    "master_weights": False,
    "stochastic_rounding": False,
}


def check_options(options: Mapping[str, Any]) -> None:
    """Raises TypeError or ValueError, which names the first wrong option."""
    for name in ("max_grad_norm", "agc", "agc_eps", "ema_decay"):
        value = options[name]
        if value is None and name != "agc_eps":
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{name} must be a number, got {value!r}")
    if not isinstance(options["stochastic_rounding"], bool):
        raise TypeError(
            f"stochastic_rounding must be True or False, got {options['stochastic_rounding']!r}"
        )
    masters = options["master_weights"]
    if not isinstance(masters, bool) and not (isinstance(masters, str) and masters in CORRECTIONS):
        raise ValueError(
            f"master_weights must be True, False, 'split24' or 'split32', got {masters!r}"
        )
    for name in ("max_grad_norm", "agc"):
        if options[name] is not None and not options[name] > 0:
            raise ValueError(f"Invalid {name} value: {options[name]}")
    if options["max_grad_norm"] is not None and options["agc"] is not None:
        raise ValueError("max_grad_norm and agc cannot be used together")
    if not options["agc_eps"] >= 0:
        raise ValueError(f"Invalid agc_eps value: {options['agc_eps']}")
    if options["ema_decay"] is not None and not 0 <= options["ema_decay"] < 1:
        raise ValueError(f"Invalid ema_decay value: {options['ema_decay']}")
    if options["gradient_writeback"] not in WRITE_BACK:
        raise ValueError(
            f"gradient_writeback must be one of {', '.join(map(repr, WRITE_BACK))}, got "
            f"{options['gradient_writeback']!r}"
        )
    if options["state_dtype"] not in (None, torch.float32, torch.bfloat16, Q8):
        raise ValueError(
            "state_dtype must be torch.float32, torch.bfloat16 or 'q8', got "
            f"{options['state_dtype']}"
        )
    if options["stochastic_rounding"] and masters not in (False, "split24"):
        raise ValueError("master_weights and stochastic_rounding cannot be used together")
