"""Functions that rewritten forwards call for batch norms and for what follows these."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from torch import Tensor, nn

from .._graph.forward import rewritten_of
from .._graph.hooks import OBSERVERS, announced, is_hooked
from ..nn.norm import BatchNormActBase, norm_act
from ..ops.activations import pointwise
from ..ops.batch_norm import activated
from ..reference.pointwise import Pointwise

THEN = "fusedtrain_then"  # the argument by which a rewritten forward is handed a `Then`
_ABSENT: Any = object()
_NOTHING = nn.Identity()
Act = nn.Module | tuple[Any, ...] | None  # a module, or name and parameters of a function


@functools.lru_cache
def _point(name: str, *parameters: float) -> Pointwise:
    point = pointwise(name, *parameters)
    assert point is not None
    return point


class Then(NamedTuple):
    """The calls of a forward behind a part that ends with a batch norm."""

    residual: Any = _ABSENT
    drop: nn.Module | None = None
    act: Act = None
    in_place: bool = False  # the sum
    residual_first: bool = False

    def apply(self, z: Tensor) -> Tensor:
        """The same as calls of their own."""
        if self.drop is not None:
            z = self.drop(z)
        if self.residual is not _ABSENT:
            if self.residual_first:
                z = self.residual + z
            else:
                z = z.add_(self.residual) if self.in_place else z + self.residual
        if isinstance(self.act, tuple):
            return activated(z, _point(*self.act))
        return z if self.act is None else self.act(z)


def norm_then(
    norm: nn.Module,
    input: Tensor,
    residual: Any = _ABSENT,
    drop: nn.Module | None = None,
    act: Act = None,
    in_place: bool = False,
    overwrite_input: bool = False,
    then: Then | None = None,
    residual_first: bool = False,
) -> Tensor:
    """``act(drop(norm(input)) + residual)``, or what `then` adds to it, as one op. The guards of
    the forward have seen that the modules may be passed over."""
    if then is not None:
        if residual is _ABSENT:
            residual, in_place = then.residual, then.in_place
            residual_first = then.residual_first
        drop = then.drop if drop is None else drop
        act = then.act if act is None else act
    if residual is None:  # torch's error
        return Then(residual, None, act, in_place).apply(norm_then(norm, input, drop=drop))
    if isinstance(norm, BatchNormActBase) and drop is None and act is None:
        drop, act = norm.drop, norm.act
    last: nn.Module | Pointwise
    if isinstance(act, tuple):
        last = _point(*act)
    else:
        last = _NOTHING if act is None else act
    added = None if residual is _ABSENT else residual
    drop = _NOTHING if drop is None else drop
    args = (norm, input, added, drop, last, in_place, overwrite_input, residual_first)
    if OBSERVERS:
        output: Tensor = announced(norm, (input,), lambda: norm_act(*args))
        return output
    return norm_act(*args)


def handed(module: nn.Module, then: Then | None, *args: Any, **kwargs: Any) -> Tensor:
    """``then.apply(module(*args, **kwargs))``, where the module can do it within its batch norm.
    `then` is None where the forward itself was called for its own value."""
    rewritten = rewritten_of(module)
    if (
        rewritten is not None
        and THEN in rewritten.arguments
        and not is_hooked(module)
        and module.__dict__.get("_compiled_call_impl") is None
        and rewritten.stands_in()
    ):
        output: Tensor = rewritten.function(module, *args, **kwargs, **{THEN: then})
        return output
    z: Tensor = module(*args, **kwargs)
    return z if then is None else then.apply(z)


for _function in (Then, norm_then, handed):
    _function.__module__ = "fusedtrain.conversion"  # the name in pickles
