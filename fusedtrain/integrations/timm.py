"""timm's factories: ``create_optimizer_v2(model, opt="fusedtrain-adamw")`` and
``create_model(name, act_layer="fusedtrain-silu")``."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import functional, nn, optim

__all__ = ["register", "register_activations"]

_PREFIX = "fusedtrain-"

# Names in timm.optim of classes, and those that take their arguments and make their steps.
_OF_TIMM: dict[str, type[optim.FusedOptimizer]] = {
    "SGDW": optim.SGDW,
    "NAdamW": optim.NAdamW,
    "Lion": optim.Lion,
    "RMSpropTF": optim.RMSpropTF,
    "Lars": optim.LARS,
    "Lamb": optim.LAMB,
    "NvNovoGrad": optim.NovoGrad,
}
_OF_TORCH: dict[Any, type[optim.FusedOptimizer]] = {
    torch.optim.SGD: optim.SGD,
    torch.optim.Adam: optim.Adam,
    torch.optim.AdamW: optim.AdamW,
    torch.optim.RMSprop: optim.RMSprop,
    torch.optim.Adagrad: optim.Adagrad,
}


def register() -> list[str]:
    """Registers every optimizer and activation with timm, and returns the optimizers' names.

    If timm is imported before fusedtrain, importing fusedtrain registers them. A name is timm's
    after "fusedtrain-", with timm's defaults: of each optimizer of timm that fusedtrain has too.

    Raises:
        ModuleNotFoundError: timm is not installed.
    """
    import timm.optim
    from timm.optim._optim_factory import default_registry  # noqa: PLC2701

    register_activations()
    counterparts = {getattr(timm.optim, name): kind for name, kind in _OF_TIMM.items()}
    counterparts |= _OF_TORCH
    names = []
    known = {str(name) for name in default_registry.list_optimizers()}
    for name in sorted(name for name in known if not name.startswith(_PREFIX)):
        info = default_registry.get_optimizer_info(name)
        kind = counterparts.get(info.opt_class)
        if kind is None:
            continue
        names.append(_PREFIX + name)
        if names[-1] not in known:
            default_registry.register(
                dataclasses.replace(
                    info, name=names[-1], opt_class=kind,
                    description=f"fusedtrain.optim.{kind.__name__}: the whole step in one call",
                )
            )  # fmt: skip
    return names


def _layer(kind: Callable[..., torch.nn.Module], **fixed: Any) -> Callable[..., torch.nn.Module]:
    """A class without `inplace` as timm's models call its own, which ignore the argument."""

    def act_layer(*args: Any, inplace: bool = False, **kwargs: Any) -> torch.nn.Module:
        return kind(*args, **fixed, **kwargs)

    return act_layer


def _function(function: Callable[..., Tensor], **fixed: Any) -> Callable[..., Tensor]:
    def act_fn(x: Tensor, inplace: bool = False) -> Tensor:
        return function(x, **fixed)

    return act_fn


# timm's names; the last two are of models, not of timm's registry.
_LAYERS: dict[str, Callable[..., torch.nn.Module]] = {
    "silu": nn.SiLU,
    "swish": nn.SiLU,
    "mish": nn.Mish,
    "relu": nn.ReLU,
    "relu6": nn.ReLU6,
    "leaky_relu": nn.LeakyReLU,
    "elu": nn.ELU,
    "prelu": _layer(nn.PReLU),
    "celu": nn.CELU,
    "selu": nn.SELU,
    "gelu": _layer(nn.GELU),
    "gelu_tanh": _layer(nn.GELU, approximate="tanh"),
    "quick_gelu": nn.QuickGELU,
    "sigmoid": _layer(nn.Sigmoid),
    "tanh": _layer(nn.Tanh),
    "hard_sigmoid": nn.Hardsigmoid,
    "hardsigmoid": nn.Hardsigmoid,
    "hard_swish": nn.Hardswish,
    "hardswish": nn.Hardswish,
    "hard_mish": nn.HardMish,
    "star_relu": _layer(nn.StarReLU),
    "relu_squared": nn.ReLUSquared,
}
_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "silu": functional.silu,
    "swish": functional.silu,
    "mish": functional.mish,
    "relu": functional.relu,
    "relu6": functional.relu6,
    "leaky_relu": functional.leaky_relu,
    "elu": functional.elu,
    "celu": functional.celu,
    "selu": functional.selu,
    "gelu": _function(functional.gelu),
    "gelu_tanh": _function(functional.gelu, approximate="tanh"),
    "quick_gelu": functional.quick_gelu,
    "sigmoid": _function(functional.sigmoid),
    "tanh": _function(functional.tanh),
    "hard_sigmoid": functional.hardsigmoid,
    "hardsigmoid": functional.hardsigmoid,
    "hard_swish": functional.hardswish,
    "hardswish": functional.hardswish,
    "hard_mish": functional.hard_mish,
    "relu_squared": functional.relu_squared,
}


def register_activations() -> list[str]:
    """Registers every activation that timm has by name, and returns the names.

    A name is timm's after "fusedtrain-". `act_layer=` of models and layers takes such a name, and
    the classes of `fusedtrain.nn`, too.

    Raises:
        ModuleNotFoundError: timm is not installed.
    """
    from timm.layers import create_act

    layers: dict[str, Any] = create_act._ACT_LAYER_DEFAULT
    functions: dict[str, Any] = create_act._ACT_FN_DEFAULT
    layers.update({_PREFIX + name: layer for name, layer in _LAYERS.items()})
    functions.update({_PREFIX + name: function for name, function in _FUNCTIONS.items()})
    return [_PREFIX + name for name in _LAYERS]


if "timm.optim" in sys.modules:
    register()
