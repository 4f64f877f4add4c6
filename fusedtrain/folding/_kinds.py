"""Tests for convolutions and batch norms of known numbers, and for modules that only look so."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .._graph.forward import obstacle_of
from .._graph.hooks import is_hooked
from .._graph.modules import CONVOLUTIONS
from .._torch_private import BatchNormBase

# Writers of the forward of a norm that is one in eval mode: gamma (x - mean) / sqrt(var + eps) +
# beta; with "act" followed by its modules `drop` and `act`. "frozen": in training, too.
_NORMS = {
    "torch.nn.modules.batchnorm:_BatchNorm": "",
    "torch.nn.modules.batchnorm:SyncBatchNorm": "",
    "timm.layers.norm_act:BatchNormAct2d": "act",
    "timm.layers.norm_act:FrozenBatchNormAct2d": "frozen act",
    "torchvision.ops.misc:FrozenBatchNorm2d": "frozen",
}
_OURS = "fusedtrain.nn.norm:"
# Writer of another known forward of convolutions, with all that it does before F.conv2d.
_SAME = "timm.layers.conv2d_same:Conv2dSame"


def check_module(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")


def writer_of(module: nn.Module, method: str = "forward") -> str:
    """The class which defines a method, as `module:class`."""
    for cls in type(module).__mro__:
        if method in vars(cls):
            return f"{cls.__module__}:{cls.__qualname__}"
    return ""


def conv_kind(module: nn.Module | None) -> type | None:
    """The class of torch.nn that it is or is derived from."""
    return next((kind for kind in CONVOLUTIONS if isinstance(module, kind)), None)


def _norm_kind(module: nn.Module | None) -> str | None:
    if module is None:
        return None
    writer = writer_of(module)
    if writer.startswith(_OURS) and isinstance(module, BatchNormBase):
        return "act" if "act" in module._modules and "Add" not in writer else None
    return _NORMS.get(writer)


def is_norm(module: nn.Module | None) -> bool:
    """Whether a module is a batch norm, of a known kind or not."""
    return isinstance(module, BatchNormBase) or _norm_kind(module) is not None


def spatial(module: nn.Module) -> int:
    """Dimensions of the images of a convolution: 0 for Linear."""
    kind = conv_kind(module)
    return 0 if kind is None or kind is nn.Linear else int(kind.__name__[-2])


def is_transposed(module: nn.Module) -> bool:
    return bool(getattr(module, "transposed", False))


def _general_obstacle(module: nn.Module) -> str:
    if reason := obstacle_of(module):
        return reason
    if parametrize.is_parametrized(module):
        return "parametrized"
    if is_hooked(module):
        return "it has hooks"
    return ""


def conv_obstacle(conv: nn.Module) -> str:
    """Reason why the weight of a convolution cannot be scaled, or ''."""
    kind = conv_kind(conv)
    assert kind is not None
    if "weight" not in conv._parameters:
        return "its weight is computed anew at every call"
    if reason := _general_obstacle(conv):
        return reason
    weight = conv._parameters["weight"]
    if isinstance(weight, nn.UninitializedParameter):
        return "its weight is not initialised yet"
    if weight is None or not weight.is_floating_point() or weight.layout is not torch.strided:
        return "its weight is not a dense tensor of floats"
    methods = ["forward"] + ["_conv_forward"] * hasattr(kind, "_conv_forward")
    same = all(getattr(type(conv), m) is getattr(kind, m) for m in methods)
    if not same and writer_of(conv) != _SAME:
        return f"a {type(conv).__name__} has a forward of its own"
    return ""


class Statistics(NamedTuple):
    """Operands of a norm in eval mode."""

    gamma: Tensor | None
    beta: Tensor | None
    mean: Tensor
    var: Tensor
    eps: float


def norm_obstacle(norm: nn.Module, statistics: bool = True) -> str:
    """Reason why a norm in eval mode is not known to be multiplication and addition, or ''."""
    if _norm_kind(norm) is None:
        return f"a {type(norm).__name__} has a forward of its own"
    if reason := _general_obstacle(norm):
        return reason
    if isinstance(norm, nn.modules.lazy.LazyModuleMixin):
        return "it is not initialised yet"
    kept = all(getattr(norm, n, None) is not None for n in ("running_mean", "running_var"))
    if statistics and not kept:
        return "it keeps no running statistics"
    return ""


def is_frozen(norm: nn.Module) -> bool:
    """Whether a norm uses its running statistics in training, too."""
    return "frozen" in (_norm_kind(norm) or "")


def norm_trains(norm: nn.Module) -> bool:
    """Whether a norm uses the statistics of the batch."""
    return norm.training and not is_frozen(norm)


def statistics(norm: Any) -> Statistics:
    return Statistics(norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.eps)


def followers(norm: nn.Module) -> list[nn.Module]:
    """Modules that a norm with an activation applies to the normalised tensor."""
    if "act" not in (_norm_kind(norm) or ""):
        return []
    parts = (norm._modules.get("drop"), norm._modules.get("act"))
    return [m for m in parts if m is not None and type(m) is not nn.Identity]


def fits(conv: nn.Module, norm: nn.Module, norm_first: bool) -> str:
    """Reason why a norm cannot belong to a convolution: its dimensions or channels; or ''."""
    dims: dict[type, tuple[int, ...]] = {
        nn.BatchNorm1d: (0, 1),
        nn.BatchNorm3d: (3,),
        nn.SyncBatchNorm: (1, 2, 3),
    }
    wanted = next((d for kind, d in dims.items() if isinstance(norm, kind)), (2,))
    if spatial(conv) not in wanted:
        return f"{type(norm).__name__} does not fit {type(conv).__name__}"
    names = ("in_features", "in_channels") if norm_first else ("out_features", "out_channels")
    channels = getattr(conv, names[0], None) or getattr(conv, names[1], None)
    features: Any = getattr(norm, "num_features", None) or norm.running_mean.numel()  # type: ignore[operator]
    return "" if features == channels else f"the convolution has {channels} channels"
