"""The accepted differences from torch: one list, each with its reason.

A conformance test collects what differs, and `judge` compares the collection with this list: what
is new fails, and so does an entry that no longer differs.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

_LIMIT = "torch has inf * 0 = nan where the function has a limit, which ours returns"
_SIXTH = "torch's float64 backward multiplies by 1/6 rounded to float32; ours by 1/6"
_POSITION = "torch takes `approximate` by keyword alone, ours also by position"
_METHOD = "the TypeError of torch.sigmoid and torch.tanh: torch.nn.functional's call a method"
_BELL = {  # silu, mish, gelu
    "output at -inf: -0 instead of nan": _LIMIT,
    "gradient at -inf: 0 instead of nan": _LIMIT,
    "gradient at inf: 1 instead of nan": _LIMIT,
}
_NO_METHOD = {
    "a list: TypeError instead of AttributeError": _METHOD,
    "no tensor: TypeError instead of AttributeError": _METHOD,
}
_ORDER = "timm's order: arguments of the activation come before device and dtype"
_TIMM = {"device has another position": _ORDER, "dtype has another position": _ORDER}
_CHILDREN = {"children": "drop and act, as timm's; they have no state"}
_CAPTURABLE = "torch asserts a GPU; ours is capturable everywhere, and says so"
_DIFFERENTIABLE = "one kernel call has no graph: torch's fused optimizers refuse it, too"
_GROUPS = "contiguous group norms run ours where outputs are recomputed: docs/group_norm.md"
_COMPLEX = "the kernels take real numbers: an error before anything has changed"
_SPARSE = "the kernels read dense gradients: an error before anything has changed"

# "file/check/case", or that and a dtype -> what differs -> why that is accepted.
ACCEPTED: dict[str, dict[str, str]] = {
    "models/family/timm:test_efficientnet_gn": {
        "bits of gradients": _GROUPS,
        "bits of outputs": _GROUPS,
    },
    "functions/infinities/gelu": _BELL,
    "functions/infinities/hardswish": {"output at -inf: -0 instead of nan": _LIMIT},
    "functions/infinities/mish": _BELL,
    "functions/infinities/silu": _BELL,
    "functions/infinities/softsign": {
        "output at -inf: -1 instead of nan": _LIMIT,
        "output at inf: 1 instead of nan": _LIMIT,
        "gradient at -inf: 0 instead of nan": _LIMIT,
        "gradient at inf: 0 instead of nan": _LIMIT,
    },
    "functions/mistakes/gelu": {"a string: RuntimeError instead of TypeError": _POSITION},
    "functions/mistakes/sigmoid": _NO_METHOD,
    "functions/mistakes/tanh": _NO_METHOD,
    "functions/numbers/batch_norm+hardsigmoid/float64": {"gradient": _SIXTH},
    "functions/numbers/hardsigmoid/float64": {"gradient": _SIXTH},
    "modules/constructor/BatchNormAct1d": _TIMM,
    "modules/constructor/BatchNormAct2d": _TIMM,
    "modules/constructor/BatchNormAct3d": _TIMM,
    "modules/numbers/Hardsigmoid/float64": {"gradient of input 0": _SIXTH},
    "modules/state/BatchNormAct1d": _CHILDREN,
    "modules/state/BatchNormAct2d": _CHILDREN,
    "modules/state/BatchNormAct3d": _CHILDREN,
    "modules/constructor/GroupNorm": {"repr": "the activation is a child, which torch lacks"},
    "modules/state/GroupNorm": _CHILDREN,
    "optimizers/keywords/Adagrad": {
        "differentiable: RuntimeError instead of list": _DIFFERENTIABLE
    },
    "optimizers/keywords/Adam": {
        "capturable: list instead of AssertionError": _CAPTURABLE,
        "differentiable: RuntimeError instead of list": _DIFFERENTIABLE,
    },
    "optimizers/keywords/AdamW": {
        "capturable: list instead of AssertionError": _CAPTURABLE,
        "differentiable: RuntimeError instead of list": _DIFFERENTIABLE,
    },
    "optimizers/keywords/RMSprop": {
        "capturable: list instead of AssertionError": _CAPTURABLE,
        "differentiable: RuntimeError instead of list": _DIFFERENTIABLE,
    },
    "optimizers/keywords/SGD": {"differentiable: RuntimeError instead of list": _DIFFERENTIABLE},
    "optimizers/parameters/Adagrad": {
        "complex: RuntimeError instead of Tensor": _COMPLEX,
        "sparse: RuntimeError instead of Tensor": _SPARSE,
    },
    "optimizers/parameters/Adam": {"complex: RuntimeError instead of Tensor": _COMPLEX},
    "optimizers/parameters/AdamW": {"complex: RuntimeError instead of Tensor": _COMPLEX},
    "optimizers/parameters/RMSprop": {"complex: RuntimeError instead of Tensor": _COMPLEX},
    "optimizers/parameters/SGD": {
        "complex: RuntimeError instead of Tensor": _COMPLEX,
        "sparse: RuntimeError instead of Tensor": _SPARSE,
    },
}


def judge(key: str, differences: Iterable[str], dtype: torch.dtype | None = None) -> None:
    """Raises AssertionError unless exactly the accepted differences of that key were found.

    Differences of one dtype alone have the dtype in their key.
    """
    listed = set(ACCEPTED.get(key, {}))
    if dtype is not None:
        listed |= set(ACCEPTED.get(f"{key}/{str(dtype).removeprefix('torch.')}", {}))
    differences = set(differences)
    new, gone = sorted(differences - listed), sorted(listed - differences)
    assert not new, f"{key} differs from torch: {new}"
    assert not gone, f"differences.py lists differences of {key} which are gone: {gone}"


def unknown_keys(file: str, known: Iterable[str]) -> set[str]:
    """Keys of a test file for which no test looks."""
    known = {f"{file}/{key}" for key in known}
    return {
        key
        for key in ACCEPTED
        if key.startswith(f"{file}/") and not {key, key.rpartition("/")[0]} & known
    }
