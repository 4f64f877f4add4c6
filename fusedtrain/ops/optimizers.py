"""The ops of the optimizer step: schemas, fake kernels, fallbacks.

The first three take the same arguments. ``rule`` counts the lines of ``FT_RULES``
(csrc/optimizer_rules.h); ``table`` (float64, CPU) holds the options of the step and of each group
(`StepOptions` and `GroupOptions` of reference/optimizers.py); ``rows`` (int64, CPU) says for every
parameter its group, its column of ``scalars``, and where in ``states``, ``masters`` and
``averages`` its companions are (-1: none). ``scalars`` [3, n] and ``control`` [8] (`Control`) are
float32 on the device, and so is everything that a step decides: nothing is read back.
`optim/_engine.py` makes the arguments.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..reference import optimizers, scaling
from ._library import define

_ARGUMENTS = (
    "int rule, Tensor{a}[] params, Tensor{b}[] grads, Tensor{c}[] states, Tensor{d}[] masters, "
    "Tensor{e}[] averages, Tensor[] lrs, Tensor{f} scalars, Tensor{g} control, Tensor table, "
    "Tensor rows, Tensor? scale, Tensor? found_inf"
)
_READ = _ARGUMENTS.format(**dict.fromkeys("abcdefg", ""))
_WRITTEN = _ARGUMENTS.format(**{letter: f"({letter}!)" for letter in "abcdefg"})

SCHEMAS = {
    "measure_gradients": f"({_READ}) -> Tensor",
    "try_update": f"({_READ}, Tensor sums) -> Tensor",
    "optimizer_step": f"({_WRITTEN}, Tensor? sums, Tensor? trial_sums) -> Tensor",
    "update_scale": (
        "(Tensor(a!) scale, Tensor(b!) growth_tracker, Tensor(c!) hysteresis_tracker, "
        "Tensor found_inf, float growth_factor, float backoff_factor, int growth_interval, "
        "int hysteresis, float min_scale, float max_scale) -> ()"
    ),
    "zero_tensors": "(Tensor(a!)[] tensors) -> ()",
}


def _fake_sums(rule: int, params: list[Tensor], *rest: Any) -> Tensor:
    scalars: Tensor = rest[5]
    return scalars.new_empty((len(params), 3), dtype=torch.float64)


_SUMMED = ("measure_gradients", "try_update", "optimizer_step")
for _name, _schema in SCHEMAS.items():
    _formula = getattr(optimizers, _name, None) or getattr(scaling, _name)
    define(_name, _schema, _formula, _fake_sums if _name in _SUMMED else lambda *_: None)
