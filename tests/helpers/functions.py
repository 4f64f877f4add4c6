"""Calls of every public function with a gradient: the table of properties that all have."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import fusedtrain
from fusedtrain import functional as F
from fusedtrain.ops import group_norm, row_norm
from fusedtrain.reference import ACTIVATIONS
from helpers.activations import INPLACE, POINTWISE, public

Case = tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]  # and the shapes of its tensors
IMAGE, VECTOR, SPREAD = (2, 4, 2, 3), (4,), (2, 4, 1, 1)


class Seeded:
    """A function that draws the same random numbers in each call."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function = function

    def __call__(self, *tensors: Tensor) -> Tensor:
        torch.manual_seed(3)
        return self.function(*tensors)


class AnySize:
    """A norm whose kernels take tensors too small to gain, where no compiler looks on."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function = function

    def __call__(self, *tensors: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return self.function(*tensors)
        with mock.patch.object(row_norm, "_LEAST", {}):
            return self.function(*tensors)


def _drops(like: Tensor) -> Tensor:
    return torch.tensor([0.0, 2.0]).to(like)


def _norm(activation: str, training: bool) -> Callable[..., Tensor]:
    def run(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None = None) -> Tensor:
        mean, var = weight.detach() * 0, weight.detach() * 0 + 1
        return F.batch_norm_act(
            x, mean, var, weight, bias, training, activation=activation, residual=residual,
            branch_scale=None if residual is None else _drops(x),
        )  # fmt: skip

    return run


def _in_place(name: str) -> Callable[..., Tensor]:
    function, arguments = getattr(F, name), ACTIVATIONS[name].arguments
    return lambda x: function(x * 1, *arguments, inplace=True)


def _recomputed(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(*tensors: Tensor) -> Tensor:
        with fusedtrain.recompute():
            return function(*tensors)

    return run


def group_norm_act(x: Tensor, w: Tensor, b: Tensor, *modulation: Tensor) -> Tensor:
    """The op, for which these tensors are too small."""
    compiles = torch.compiler.is_compiling()
    with nullcontext() if compiles else mock.patch.object(group_norm, "_gains", return_value=True):
        return F.group_norm_act(x, 2, w, b, 1e-5, "silu", *modulation)


def _glus() -> dict[str, Case]:
    """Gates of halves, of two tensors, and with the gate last."""
    named: dict[str, Case] = {"glu": (partial(F.glu, dim=1), (IMAGE,))}
    for name in ("swiglu", "geglu", "reglu", "bilinear_glu"):
        function = getattr(F, name)
        named[name] = (partial(function, dim=1), (IMAGE,))
        named[f"{name}, apart"] = (function, (IMAGE, IMAGE))
        named[f"{name}, gate last"] = (partial(function, dim=-3, gate_last=True), (IMAGE,))
    named["geglu, tanh"] = (partial(F.geglu, dim=1, approximate="tanh"), (IMAGE,))
    return named


def _biased() -> dict[str, Case]:
    def call(*options: Any) -> Callable[..., Tensor]:
        return lambda x, b: F.bias_act_dropout(x, b, *options, dim=-3)

    acts = ("linear", "relu", "lrelu", "tanh", "sigmoid", "elu", "selu", "softplus", "swish")
    functions = {f"bias_act, {act}": partial(F.bias_act, dim=1, act=act) for act in acts}
    functions |= {f"{k}, clamp": partial(f, clamp=0.6) for k, f in functions.items()}
    functions |= {
        "bias_act, gain": partial(F.bias_act, dim=1, gain=2.0),
        "bias_act_dropout": Seeded(call("gelu", 0.3)),
        "bias_act_dropout, relu": Seeded(call("relu", 0.3)),
        "bias_act_dropout, bounded": Seeded(call("relu6", 0.3)),
        "bias_act_dropout, eval": call("silu", 0.3, False),
        "bias_act_dropout, 0": call("gelu"),
    }
    return {
        **{name: (function, (IMAGE, VECTOR)) for name, function in functions.items()},
        "bias_act_dropout, no bias": (
            Seeded(lambda x: F.bias_act_dropout(x, None, "silu", 0.3)), (IMAGE,),
        ),
        "dropout": (Seeded(partial(F.dropout, p=0.25)), (IMAGE,)),
        "dropout_add": (Seeded(partial(F.dropout_add, p=0.25)), (IMAGE, IMAGE)),
    }  # fmt: skip


NORMS: dict[str, Case] = {
    f"norm, {activation}, {mode}{added}": (
        _norm(activation, mode == "training"),
        (IMAGE, VECTOR, VECTOR) if not added else (IMAGE, VECTOR, VECTOR, IMAGE),
    )
    for activation in ("identity", "relu", "silu", "elu")
    for mode in ("training", "eval")
    for added in ("", ", residual")
}
# Calls whose nodes are in C++ where these are loaded: activations and chains. Norms have them, too.
NODES: dict[str, Case] = {
    **{name: (public(ACTIVATIONS[name]), (IMAGE,)) for name in POINTWISE},
    **_glus(),
    "gated": (F.gated, (IMAGE, IMAGE)),
    "gated, slope": (partial(F.gated, activation="leaky_relu", negative_slope=0.2), (IMAGE, IMAGE)),
    "gated, spread": (F.gated, (IMAGE, SPREAD)),
    "gated, spread, silu": (partial(F.gated, activation="silu"), (IMAGE, SPREAD)),
    "gated, spread, identity": (partial(F.gated, activation=None), (IMAGE, SPREAD)),
    "residual_add, scale": (
        lambda r, x, s: F.residual_add(r, x, s, dim=1), (IMAGE, IMAGE, VECTOR),
    ),
    "residual_add, drops": (
        lambda r, x: F.residual_add(r, x, None, _drops(r)), (IMAGE, IMAGE),
    ),
    **_biased(),
}  # fmt: skip
POOLS: dict[str, dict[str, Any]] = {
    "2 x 2": {"kernel_size": 2},
    "of ResNet": {"kernel_size": 3, "stride": 2, "padding": 1},
    "pairs": {"kernel_size": (2, 3), "stride": [1, 2], "padding": (1, 0)},
    "ceil": {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True},
}
CONVOLUTIONS: dict[str, Case] = {
    "depthwise_conv1d": (
        lambda x, w, b: F.depthwise_conv1d(x.flatten(2), w.flatten(2), b, 2, 1),
        (IMAGE, (4, 1, 1, 3), VECTOR),
    ),
    "depthwise_conv2d": (partial(F.depthwise_conv2d, padding=1), (IMAGE, (4, 1, 3, 3), VECTOR)),
    "depthwise_conv2d, pairs": (
        lambda x, w, b: F.depthwise_conv2d(x, w, b, (1, 2), (0, 2), (1, 2)),
        (IMAGE, (8, 1, 2, 3), (8,)),
    ),
    "depthwise_conv2d, two a channel": (
        lambda x, w: F.depthwise_conv2d(x, w, padding="same"), (IMAGE, (8, 1, 2, 2)),
    ),
    "depthwise_conv3d": (
        lambda x, w, b: F.depthwise_conv3d(x.unsqueeze(2), w.unsqueeze(2), b, (1, 2, 1)),
        (IMAGE, (4, 1, 2, 2), VECTOR),
    ),
}  # fmt: skip
CASES: dict[str, Case] = {
    **NODES,
    **NORMS,
    **CONVOLUTIONS,
    "residual_add": (
        lambda r, x, s: F.residual_add(r, x, s, _drops(r), 1), (IMAGE, IMAGE, VECTOR),
    ),
    "depthwise_conv2d, one sample": (
        lambda x, w: F.depthwise_conv2d(x[0], w, padding=1), (IMAGE, (4, 1, 3, 3)),
    ),
    "residual_add, scale last": (lambda r, x, s: F.residual_add(r, x, s), (IMAGE, IMAGE, (3,))),
    "swiglu, rows": (F.swiglu, ((4, 6),)),
    "layer_norm": (
        AnySize(lambda x, w, b: F.layer_norm(x, [2, 3], w, b)), (IMAGE, (2, 3), (2, 3)),
    ),
    "layer_norm, residual": (
        AnySize(lambda x, r, w: torch.cat(F.layer_norm(x, [3], w, residual=r))),
        (IMAGE, IMAGE, (3,)),
    ),
    "rms_norm": (AnySize(lambda x, w: F.rms_norm(x, [3], w, 0.1)), (IMAGE, (3,))),
    "layer_norm_channels": (
        AnySize(lambda x, w, b: F.layer_norm_channels(x, w, b, 0.1)), (IMAGE, VECTOR, VECTOR),
    ),
    "rms_norm_channels": (
        AnySize(lambda x, w: F.rms_norm_channels(x, w, 0.1)), (IMAGE, VECTOR),
    ),
    "scaled_dot_product_attention": (
        Seeded(partial(F.scaled_dot_product_attention, dropout_p=0.25)), (IMAGE, IMAGE, IMAGE),
    ),
    "prelu": (F.prelu, (IMAGE, VECTOR)),
    "star_relu": (F.star_relu, (IMAGE, (1,), (1,))),
    **{
        f"max_pool2d, {kind}": (partial(F.max_pool2d, **options), (IMAGE,))
        for kind, options in POOLS.items()
    },
    "group_norm_act": (group_norm_act, (IMAGE, VECTOR, VECTOR)),
    "group_norm_act, modulated": (group_norm_act, (IMAGE, VECTOR, VECTOR, IMAGE[:2], IMAGE[:2])),
    "mean": (partial(F.mean, dim=(2, 3)), (IMAGE,)),
    "adaptive_avg_pool2d": (partial(F.adaptive_avg_pool2d, output_size=1), (IMAGE,)),
    **{f"{name}, in place": (_in_place(name), (IMAGE,)) for name in INPLACE},
}  # fmt: skip
# Their derivatives are few numbers, of an input that is gone, or computed again.
ONCE: dict[str, Case] = {
    "relu, save": (partial(F.relu, save="q1"), (IMAGE,)),
    "silu, in place, save": (lambda x: F.silu(x * 1, True, save="q4"), (IMAGE,)),
    **{
        f"{name}, save": (partial(getattr(F, name), save="q8"), (IMAGE,))
        for name in ("silu", "mish", "quick_gelu", "hardswish", "gelu")
    },
    "norm, overwrite_input": (
        lambda x, w: F.batch_norm_act(
            x * 1, None, None, w, None, True, activation="leaky_relu", overwrite_input=True
        ),
        (IMAGE, VECTOR),
    ),
    **{
        f"{name}, recomputed": (_recomputed(CASES[name][0]), CASES[name][1])
        for name in (
            "silu",
            "swiglu",
            "max_pool2d, 2 x 2",
            "norm, relu, training",
            "depthwise_conv2d",
        )
    },
}


def tensors(case: Case, dtype: torch.dtype = torch.float64, last: bool = False) -> list[Tensor]:
    """Leaves of the same numbers each time, in the range where activations bend."""
    generator = torch.Generator().manual_seed(5)
    leaves = []
    for shape in case[1]:
        numbers = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
        leaf = (2.5 * numbers).to(torch.get_default_device(), dtype)
        if last and leaf.dim() == 4:
            leaf = leaf.contiguous(memory_format=torch.channels_last)
        leaves.append(leaf.requires_grad_())
    return leaves
