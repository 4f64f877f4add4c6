"""The ops of the optimizer step: fake kernels, fallbacks.

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
from ._library import define, library


def _fake_sums(rule: int, params: list[Tensor], *rest: Any) -> Tensor:
    scalars: Tensor = rest[5]
    return scalars.new_empty((len(params), 3), dtype=torch.float64)


def _define(name: str, sums: dict[str, str], writes: tuple[str, ...] = ()) -> None:
    types = {**optimizers.OptimizerCall.__annotations__, **sums, "return": "Tensor"}
    define(name, getattr(optimizers, name), _fake_sums, writes, types)


_define("measure_gradients", {})
_define("try_update", {"sums": "Tensor"})
_define(
    "optimizer_step",
    {"sums": "Tensor | None", "trial_sums": "Tensor | None"},
    ("params", "grads", "states", "masters", "averages", "scalars", "control"),
)


def _materialise(name: str) -> None:
    """Copies gradients that are known to be 0 and have no memory, as torch.sgn gives them."""

    def run(rule: int, params: list[Tensor], grads: list[Tensor], *rest: Any) -> Tensor:
        grads = [grad.clone() if grad._is_zerotensor() else grad for grad in grads]
        sums: Tensor = getattr(torch.ops.fusedtrain, name)(rule, params, grads, *rest)
        return sums

    library.impl(name, run, "ZeroTensor")


for _name in ("measure_gradients", "try_update", "optimizer_step"):
    _materialise(_name)
_TRACKERS = ("growth_tracker", "hysteresis_tracker")
define("update_scale", scaling.update_scale, lambda *_: None, ("scale", *_TRACKERS))
define("zero_tensors", scaling.zero_tensors, lambda *_: None, ("tensors",))
