"""The argument `act_layer` of modules that contain an activation."""

import contextlib
from collections.abc import Mapping
from typing import Any

from torch import nn

from . import activation as _activations
from .saving import SavingActivation

_CLASSES = {
    name.lower(): cls
    for name, cls in vars(_activations).items()
    if isinstance(cls, type) and issubclass(cls, nn.Module) and cls is not nn.Module
    if cls is not SavingActivation and name[0] != "_"
}
_TIMM = {"swish": "silu", "gelutanh": "gelu"}  # timm's names of these
_EXPECTED = "act_layer: expected a class of modules or a name"


def create_activation(
    act_layer: Any, act_kwargs: Mapping[str, Any] | None, inplace: bool
) -> nn.Module:
    """The activation module of a class, a name, or None, as in timm.

    Raises:
        TypeError: a module (an instance, not its class), or what makes no module.
        ValueError: an unknown name.
    """
    kwargs = dict(act_kwargs or {})
    if act_layer is None:
        return nn.Identity()
    if isinstance(act_layer, str):
        key = act_layer.lower().replace("_", "")
        key = _TIMM.get(key, key)
        if act_layer == "gelu_tanh":
            kwargs.setdefault("approximate", "tanh")
        if key not in _CLASSES:
            choices = ", ".join(sorted({*_CLASSES, "gelu_tanh", "swish"}))
            raise ValueError(f"act_layer: no activation {act_layer!r}; the names are {choices}")
        act_layer = _CLASSES[key]
    if isinstance(act_layer, nn.Module):
        name = type(act_layer).__name__
        raise TypeError(
            f"{_EXPECTED}, got the module {act_layer!r}: pass the class {name}, and its arguments "
            "as act_kwargs"
        )
    if not callable(act_layer):
        raise TypeError(f"{_EXPECTED}, got {act_layer!r}")
    module: Any = None
    if inplace:
        with contextlib.suppress(TypeError):  # of a class that has no argument `inplace`
            module = act_layer(**({"inplace": True} | kwargs))
    if module is None:
        try:
            module = act_layer(**kwargs)
        except TypeError as error:
            if isinstance(act_layer, type):
                raise
            raise TypeError(f"{_EXPECTED}, got {act_layer!r}, which says: {error}") from error
    if not isinstance(module, nn.Module):
        raise TypeError(f"{_EXPECTED}, got {act_layer!r}, which makes no module")
    return module
