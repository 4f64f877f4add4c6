"""Functions that rewritten forwards call for norms and the ops after them."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from .._graph.forward import rewritten_of
from .._graph.hooks import OBSERVERS, all_are_hooked, announced, is_hooked
from ..nn.norm import BatchNormAct2d, BatchNormActBase, norm_act
from ..nn.parts import activation_of
from ..nn.sync_norm import SyncBatchNormAct
from ..ops import group_norm
from ..ops.activations import pointwise
from ..ops.batch_norm import activated
from ..reference.group_norm import Affine, scaled
from ..reference.pointwise import Pointwise

INSTANCE_NORMS = {nn.InstanceNorm1d: 3, nn.InstanceNorm2d: 4, nn.InstanceNorm3d: 5}  # ranks
EPILOGUE = "fusedtrain_epilogue"  # the argument of a rewritten forward that takes an `Epilogue`
_ABSENT: Any = object()
_NOTHING = nn.Identity()
Act = nn.Module | tuple[Any, ...] | None  # a module, or name and parameters of a function


@functools.lru_cache
def _point(name: str, *parameters: float) -> Pointwise:
    point = pointwise(name, *parameters)
    assert point is not None
    return point


@functools.cache
def timms_norm(name: str) -> type:
    """Our norm that is one of timm's, too: timm's functions that freeze or synchronise norms ask
    with `isinstance` whether a norm has an activation."""
    ours = {"BatchNormAct2d": BatchNormAct2d, "SyncBatchNormAct": SyncBatchNormAct}[name]
    timms = getattr(importlib.import_module("timm.layers.norm_act"), name)
    names = {"__module__": "fusedtrain.conversion", "__qualname__": f"Timm{name}"}
    return type(name, (ours, timms), names)


class Epilogue(NamedTuple):
    """Ops to fuse after a norm: the calls of a forward behind a part that ends with the norm."""

    residual: Any = _ABSENT
    drop: nn.Module | None = None
    act: Act = None
    in_place: bool = False  # the sum
    residual_first: bool = False

    def apply(self, z: Tensor) -> Tensor:
        """The ops as calls of their own."""
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


def norm_act_of(
    norm: nn.Module,
    input: Tensor,
    residual: Any = _ABSENT,
    drop: nn.Module | None = None,
    act: Act = None,
    in_place: bool = False,
    overwrite_input: bool = False,
    epilogue: Epilogue | None = None,
    residual_first: bool = False,
) -> Tensor:
    """``act(drop(norm(input)) + residual)`` as one op; the epilogue has the steps that are not
    arguments. The guards of the forward have seen that the modules may be passed over."""
    if epilogue is not None:
        if residual is _ABSENT:
            residual, in_place = epilogue.residual, epilogue.in_place
            residual_first = epilogue.residual_first
        drop = epilogue.drop if drop is None else drop
        act = epilogue.act if act is None else act
    if residual is None:  # torch's error
        return Epilogue(residual, None, act, in_place).apply(norm_act_of(norm, input, drop=drop))
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


def with_epilogue(
    module: nn.Module, epilogue: Epilogue | None, *args: Any, **kwargs: Any
) -> Tensor:
    """``epilogue.apply(module(*args, **kwargs))``, within the batch norm of the module if that is
    possible. Without an epilogue the forward was called for its own value."""
    rewritten = rewritten_of(module)
    if (
        rewritten is not None
        and EPILOGUE in rewritten.arguments
        and rewritten.is_called(module)
        and not (is_hooked(module) or all_are_hooked())
        and rewritten.stands_in()
    ):
        output: Tensor = rewritten.function(module, *args, **kwargs, **{EPILOGUE: epilogue})
        return output
    z: Tensor = module(*args, **kwargs)
    return z if epilogue is None else epilogue.apply(z)


def group_normed(
    act: Act, input: Tensor, num_groups: int, weight: Tensor | None = None,
    bias: Tensor | None = None, eps: float = 1e-5, *, scale: Any = None, shift: Any = None,
) -> Tensor:  # fmt: skip
    """``act(group_norm(input, ...) * (1 + scale) + shift)`` as one op, where scale and shift have
    one value for each sample and channel, [N, C, 1, ...], else as it is written."""

    def run(affine: Affine, fused: Pointwise) -> Tensor:
        return group_norm.run(input, num_groups, affine, eps, fused)

    return _normed(run, act, input, weight, bias, scale, shift)


def _normed(
    run: Callable[[Affine, Pointwise], Tensor], act: Act, input: Tensor, weight: Any, bias: Any,
    scale: Any, shift: Any,
) -> Tensor:  # fmt: skip
    vectors = [_of_channels(scale, input), _of_channels(shift, input)]
    fits = all(v is not None or t is None for v, t in zip(vectors, (scale, shift)))
    point = _point(*act) if isinstance(act, tuple) else None if act is None else activation_of(act)
    fused = point if fits and point is not None else Pointwise()
    affine = Affine(weight, bias, *(vectors if fits else (None, None)))
    z = run(affine, fused)
    if not fits:
        z = z if scale is None else z * (1 + scale)
        z = z if shift is None else z + shift
    if act is None or (fits and point is not None):
        return z
    return act(z) if isinstance(act, nn.Module) else activated(z, _point(*act))


def _of_channels(values: Any, input: Tensor) -> Tensor | None:
    """[N, C, 1, ...] as [N, C]."""
    if not isinstance(values, Tensor) or values.dtype is not input.dtype:
        return None
    return (
        values.flatten(1) if values.shape == (*input.shape[:2], *[1] * (input.dim() - 2)) else None
    )


def group_norm_act_of(
    norm: Any, act: Act, input: Tensor, *, scale: Any = None, shift: Any = None
) -> Tensor:
    """:func:`group_normed` for a module, or the same for instance norm. The guards of the forward
    have seen that the modules may be passed over."""

    def run(affine: Affine, fused: Pointwise) -> Tensor:
        if isinstance(norm, nn.GroupNorm):
            return group_norm.run(input, norm.num_groups, affine, norm.eps, fused)
        batched = input.dim() == INSTANCE_NORMS.get(type(norm))
        tracks = norm.track_running_stats or norm.running_mean is not None
        takes = batched and not tracks and input.size(1) == norm.num_features
        stock = functools.partial(type(norm).forward, norm, input)
        if not takes:
            return activated(scaled(stock(), affine), fused)
        return group_norm.run_instances(input, affine, norm.eps, fused, stock)

    def compute() -> Tensor:
        return _normed(run, act, input, norm.weight, norm.bias, scale, shift)

    if OBSERVERS:
        output: Tensor = announced(norm, (input,), compute)
        return output
    return compute()


for _function in (Epilogue, group_norm_act_of, group_normed, norm_act_of, with_epilogue):
    _function.__module__ = "fusedtrain.conversion"  # the name in pickles
