"""Programs that call the functions of fusedtrain.functional."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial

import torch.nn.functional as N
from hypothesis import strategies as st

from fusedtrain import functional
from fusedtrain.reference import ACTIVATIONS
from helpers.activations import INPLACE, at_infinities, backward_scale

from . import chains, compare, convolutions, norms
from .calls import CHAINED, EVERY, STRAIGHT, Call, Context, Generator
from .tensors import OTHER_DTYPES, VALUES, Pick, in_memory, shape

# Parameters that every dtype holds exactly: bounds are where derivatives jump.
PARAMETERS: dict[str, tuple[tuple[float, ...], ...]] = {
    "leaky_relu": ((0.01,), (0.25,), (1.5,), (0.0,), (-0.5,)),
    "elu": ((1.0,), (0.5,), (2.0,), (0.0,)),
    "celu": ((1.0,), (0.5,), (4.0,)),
    "softplus": ((1.0, 20.0), (2.0, 20.0), (0.5, 30.0), (1.0, 2.0)),
    "hardtanh": ((-1.0, 1.0), (0.0, 6.0), (-0.5, 0.5), (1.0, 1.0)),
    "hardshrink": ((0.5,), (0.0,), (2.0,)),
    "softshrink": ((0.5,), (0.0,), (2.0,)),
    "threshold": ((0.5, -1.0), (0.0, 0.0), (-1.0, 4.0)),
    "squareplus": ((4.0,), (0.25,), (1.0,)),
}
# torch's own float64 kernels of these have 1/6 rounded to float32.
COARSE = ("hardsigmoid", "hardswish")
# Shape of tensors whose sums must not overflow float16.
SMALL = (2, 1, 3, 7)
# Whose derivative may be kept in few bits.
FEW_BITS = {
    "relu": "q1",
    **dict.fromkeys(("silu", "mish", "gelu", "quick_gelu", "hardswish"), "q8"),
}


def special(pick: Pick, name: str, dtype: str) -> str:
    """Special values; without infinities where fusedtrain returns a limit and torch nan."""
    values = ["-0.0", "0.0", "tiny", "-tiny", "tiny / 4", "-tiny / 4", "1.0", "-1.0"]
    if pick(False, True):
        infinities = [] if at_infinities(name).isnan().any() else ["torch.inf", "-torch.inf"]
        values += ["torch.nan", *infinities]
    listed = ", ".join(values)
    return (
        f"(lambda tiny: torch.tensor([{listed}] * 7, dtype=torch.{dtype}))"
        f"(torch.finfo(torch.{dtype}).smallest_normal)"
    )


def argument(pick: Pick, context: Context, name: str, sizes: tuple[int, ...]) -> str:
    """The input of an activation."""
    if context.mode == "special":
        return special(pick, name, context.dtype)
    if context.mode == "other dtype":
        return OTHER_DTYPES[context.dtype].format(shape=list(sizes))
    kinds = ["normal", "normal", "kinks", "small"] + ["large"] * (context.dtype != "float16")
    values = VALUES["normal" if context.smooth else pick(*kinds)]
    return in_memory(pick, sizes, values, context.dtype)


def plain_of(name: str, listed: str) -> tuple[str, tuple[str, ...]]:
    """The call in plain torch, and an import: for functions that torch lacks, the reference."""
    if hasattr(N, name):
        return f"N.{name}(x{listed})", ()
    imported = "from fusedtrain.reference import ACTIVATIONS"
    return f"ACTIVATIONS[{name!r}].forward(x{listed})", (imported,)


def activation(name: str, pick: Pick, context: Context) -> Call:
    """A call of a function of one tensor."""
    row = ACTIVATIONS[name]
    values = pick(*PARAMETERS.get(name, (row.example,)))
    listed = "".join(f", {v}" for v in values)
    extra = ""
    if name == "gelu" and pick(False, True):
        extra = ", approximate='tanh'"
    plain, setup = plain_of(name, listed + extra)
    coarse = 1e3 if context.dtype == "float64" else 1.0
    scale = 1e7 if name in COARSE and context.dtype == "float64" else 1.0
    if context.smooth and name not in COARSE:
        scale *= coarse
    backward = scale * backward_scale(row)
    if name in FEW_BITS and context.mode == "gradient" and pick(False, False, True):
        extra += f", save={FEW_BITS[name]!r}"
        if name != "relu":  # derivatives rounded to 256 levels
            backward = max(backward, 0.03 / compare.pointwise(context.dtype, 1.0))
    inplace = f"F.{name}(x{listed}, inplace=True)" if name in INPLACE else ""
    return Call(
        f"F.{name}(x{listed}{extra})", plain, {"x": argument(pick, context, name, shape(pick))},
        ("x",), setup=setup, inplace=inplace, tolerance=compare.pointwise, forward=scale,
        backward=backward,
    )  # fmt: skip


def prelu(pick: Pick, context: Context) -> Call:
    sizes = shape(pick, (2, 1, 3, 4), SMALL)
    channels = sizes[1] if len(sizes) > 1 and sizes[1] else 1
    count = pick(1, channels)
    x = argument(pick, context, "prelu", sizes)
    if context.mode == "special":
        count = 1
    weight = f"torch.rand({count}).to(torch.{_kind(context)})"
    return Call("F.prelu(x, weight)", "N.prelu(x, weight)", {"x": x, "weight": weight},
                ("x", "weight"), backward=20.0, forward=1.0)  # fmt: skip


def star_relu(pick: Pick, context: Context) -> Call:
    x = argument(pick, context, "star_relu", shape(pick, (2, 1, 3, 4), SMALL))
    kind = _kind(context)
    return Call(
        "F.star_relu(x, scale, bias)", "scale * N.relu(x) ** 2 + bias",
        {"x": x, **dict.fromkeys(("scale", "bias"), f"torch.rand(1).to(torch.{kind})")},
        ("x", "scale", "bias"), backward=20.0, forward=2.0,
    )  # fmt: skip


def _kind(context: Context) -> str:
    return context.dtype if context.mode != "other dtype" else "float32"


_MAKERS: dict[str, Generator] = {
    "prelu": Generator(prelu, STRAIGHT),
    "star_relu": Generator(star_relu, STRAIGHT[:-2]),
    "gated": Generator(chains.gated, CHAINED),
    "residual_add": Generator(chains.residual_add, CHAINED),
    "batch_norm_act": Generator(
        norms.batch_norm_act, ("gradient", "second", "checkpoint", "recompute", "batched")
    ),
    "group_norm_act": Generator(norms.group_norm_act, CHAINED),
    "max_pool2d": Generator(norms.max_pool2d, EVERY),
    **{
        name: Generator(partial(norms.row_norm, name), CHAINED)
        for name in ("layer_norm", "layer_norm_channels", "rms_norm", "rms_norm_channels")
    },
    **{
        name: Generator(partial(norms.mean, name), CHAINED)
        for name in ("adaptive_avg_pool2d", "mean")
    },
    **{
        f"depthwise_conv{dims}d": Generator(partial(convolutions.depthwise, dims), CHAINED)
        for dims in (1, 2, 3)
    },
    **{name: Generator(partial(chains.gated_unit, name), CHAINED) for name in chains.GLUS},
    **{
        name: Generator(partial(chains.biased, name), CHAINED)
        for name in ("bias_act", "bias_act_dropout")
    },
}
for _name, _row in ACTIVATIONS.items():
    if not _row.tensors and _name != "gelu_tanh":
        _modes = STRAIGHT + (("in place", "in place") if _name in INPLACE else ())
        _MAKERS[_name] = Generator(partial(activation, _name), _modes)


PROGRAMS: dict[str, Callable[[], st.SearchStrategy[str]]] = {
    **{name: generator.programs for name, generator in _MAKERS.items()},
    "dropout": chains.dropout,
    "dropout_add": chains.dropout,
    "scaled_dot_product_attention": chains.attention,
    "normalize_images": norms.normalize_images,
}
_PUBLIC = {name for name, f in vars(functional).items() if inspect.isfunction(f) and name[0] != "_"}
assert PROGRAMS.keys() >= _PUBLIC, f"no programs call {_PUBLIC - PROGRAMS.keys()}"
