"""Modules beside a norm or a gate whose work an op can do: activations and stochastic depth."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .._graph.hooks import all_are_hooked, is_untouched
from .._graph.modules import STOCHASTIC_DEPTH, package_and_name
from ..ops.activations import pointwise
from ..reference.pointwise import POINTWISE, Pointwise
from . import activation as _activations

_NOTHING = Pointwise()
_ROWS = {row.name.replace("_", ""): row for row in POINTWISE}


def _find_rows() -> dict[type, Any]:
    """Class of an activation module (torch.nn's and ours) -> its row in the table."""
    rows = {}
    for name, cls in vars(_activations).items():
        row = _ROWS.get(name.lower())
        if isinstance(cls, type) and row is not None:
            rows[cls] = row
            if hasattr(nn, name):
                rows[getattr(nn, name)] = row
    return rows


ROW_OF = _find_rows()
_WITHOUT_PARAMETERS = {
    cls: pointwise(row.name)
    for cls, row in ROW_OF.items()
    if not row.parameters and row.name != "gelu"
}


def activation_of(module: nn.Module) -> Pointwise | None:
    """A module's activation as the ops take it; None if the ops cannot replace the module.

    Ops cannot replace a class that is not in the table, parameters without an exact kernel, or a
    module with hooks.
    """
    cls = type(module)
    row = ROW_OF.get(cls)
    if row is None and cls is not nn.Identity:
        return None
    if not is_untouched(module, cls) or all_are_hooked():
        return None
    if row is None:
        return _NOTHING
    if module._modules and _activations.changed_relu(module) is not None:
        return None
    alone = _WITHOUT_PARAMETERS.get(cls)
    if alone is not None:
        return alone
    name = row.name
    if name == "gelu":
        if module.approximate not in ("none", "tanh"):
            return None
        name = "gelu" if module.approximate == "none" else "gelu_tanh"
    return pointwise(name, *(getattr(module, p) for p in row.parameters))


def branch_scale_of(module: nn.Module, input: Tensor) -> Tensor | None:
    """The samples' factors in a module of stochastic depth, drawn as the module draws them."""
    probability: float = getattr(module, STOCHASTIC_DEPTH[package_and_name(module)])
    if probability == 0.0 or not module.training:
        return None
    keep = 1 - probability
    scale = input.new_empty([input.shape[0]] + [1] * (input.dim() - 1)).bernoulli_(keep)
    if keep > 0.0 and getattr(module, "scale_by_keep", True):
        scale.div_(keep)
    return scale.flatten()


def hands_on(module: nn.Module) -> bool:
    """Whether a drop layer hands on its input as it is: none, or stochastic depth at rest."""
    if is_untouched(module, nn.Identity):
        return not all_are_hooked()
    name = STOCHASTIC_DEPTH.get(package_and_name(module))
    if name is None or (module.training and getattr(module, name) != 0.0):
        return False
    return is_stochastic_depth(module)


def is_stochastic_depth(module: nn.Module) -> bool:
    """Whether :func:`branch_scale_of` can take the module's place."""
    if package_and_name(module) not in STOCHASTIC_DEPTH or all_are_hooked():
        return False
    return is_untouched(module, type(module)) and getattr(module, "mode", "row") == "row"
