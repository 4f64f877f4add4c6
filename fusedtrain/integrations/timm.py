"""timm's optimizer factory: ``create_optimizer_v2(model, opt="fusedtrain-adamw")``."""

from __future__ import annotations

import sys
from typing import Any

from .. import optim

__all__ = ["register"]

# Name after "fusedtrain-": class, and its facts for timm.
_OPTIMIZERS: dict[str, tuple[type[optim.FusedOptimizer], dict[str, Any]]] = {
    "sgd": (optim.SGD, {"has_eps": False, "has_momentum": True, "defaults": {"nesterov": True}}),
    "momentum": (
        optim.SGD,
        {"has_eps": False, "has_momentum": True, "defaults": {"nesterov": False}},
    ),
    "sgdw": (optim.SGDW, {"has_eps": False, "has_momentum": True, "defaults": {"nesterov": True}}),
    "adam": (optim.Adam, {"has_betas": True}),
    "adamw": (optim.AdamW, {"has_betas": True}),
    "nadamw": (optim.NAdamW, {"has_betas": True}),
    "lion": (optim.Lion, {"has_eps": False, "has_betas": True}),
    "rmsprop": (optim.RMSprop, {"has_momentum": True, "defaults": {"alpha": 0.9}}),
    "rmsproptf": (optim.RMSpropTF, {"has_momentum": True, "defaults": {"alpha": 0.9}}),
    "adagrad": (optim.Adagrad, {"defaults": {"eps": 1e-8}}),
    "lars": (optim.LARS, {"has_momentum": True}),
    "larc": (optim.LARS, {"has_momentum": True, "defaults": {"trust_clip": True}}),
    "lamb": (optim.LAMB, {"has_betas": True}),
    "lambc": (optim.LAMB, {"has_betas": True, "defaults": {"trust_clip": True}}),
    "novograd": (optim.NovoGrad, {"has_betas": True}),
}


def register() -> list[str]:
    """Registers every optimizer with timm's factory, and returns the names.

    If timm is imported before fusedtrain, importing fusedtrain registers them.

    Raises:
        ModuleNotFoundError: timm is not installed.
    """
    from timm.optim._optim_factory import OptimInfo, default_registry

    names = []
    known = set(map(str, default_registry.list_optimizers()))
    for name, (kind, facts) in _OPTIMIZERS.items():
        full = f"fusedtrain-{name}"
        names.append(full)
        if full not in known:
            description = f"fusedtrain.optim.{kind.__name__}: the whole step in one call"
            info = OptimInfo(name=full, opt_class=kind, description=description, **facts)
            default_registry.register(info)
    return names


if "timm.optim" in sys.modules:
    register()
