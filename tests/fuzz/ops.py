"""Programs that call the functions of fusedtrain.functional."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from _cases import INPLACE, LIMITS, backward_scale
from hypothesis import strategies as st

from fusedtrain import functional
from fusedtrain.reference import ACTIVATIONS

from . import compare
from .calls import Call, Context, Generator
from .tensors import DTYPES, OTHER_DTYPES, VALUES, Pick, in_memory, shape

# Those without an equal in torch.nn.functional, as one writes them.
PLAIN = {
    "sigmoid": "torch.sigmoid(x)",
    "tanh": "torch.tanh(x)",
    "quick_gelu": "x * torch.sigmoid(1.702 * x)",
    "relu_squared": "torch.square(N.relu(x))",
    "hard_mish": "0.5 * x * (x + 2).clamp(min=0, max=2)",
    "squareplus": "0.5 * (x + torch.sqrt(x * x + {b}))",
}
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


def special(pick: Pick, name: str, dtype: str) -> str:
    """A tensor of special values; without infinities where fusedtrain returns a limit, torch nan."""
    values = ["-0.0", "0.0", "tiny", "-tiny", "tiny / 4", "-tiny / 4", "1.0", "-1.0"]
    if pick(False, True):
        values += ["torch.nan"] if name in LIMITS else ["torch.nan", "torch.inf", "-torch.inf"]
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


def activation(name: str, pick: Pick, context: Context) -> Call:
    """Of the functions of one tensor."""
    row = ACTIVATIONS[name]
    values = pick(*PARAMETERS.get(name, ((),)))
    listed = "".join(f", {v}" for v in values)
    extra = ""
    if name == "gelu" and pick(False, True):
        extra = ", approximate='tanh'"
    plain = PLAIN.get(name, f"N.{name}(x{listed}{extra})")
    if name == "squareplus":
        plain = plain.format(b=values[0])
    coarse = 1e3 if context.dtype == "float64" else 1.0
    scale = 1e7 if name in COARSE and context.dtype == "float64" else 1.0
    if context.smooth and name not in COARSE:
        scale *= coarse
    inplace = f"F.{name}(x{listed}, inplace=True)" if name in INPLACE else ""
    return Call(
        f"F.{name}(x{listed}{extra})", plain, {"x": argument(pick, context, name, shape(pick))},
        ("x",), inplace=inplace, tolerance=compare.pointwise, forward=scale,
        backward=scale * backward_scale(row),
    )  # fmt: skip


def prelu(pick: Pick, context: Context) -> Call:
    sizes = shape(pick, (2, 1, 3, 4))
    channels = sizes[1] if len(sizes) > 1 and sizes[1] else 1
    count = pick(1, channels)
    x = argument(pick, context, "prelu", sizes)
    if context.mode == "special":
        count = 1
    weight = f"torch.rand({count}).to(torch.{_kind(context)})"
    return Call("F.prelu(x, weight)", "N.prelu(x, weight)", {"x": x, "weight": weight},
                ("x", "weight"), backward=20.0, forward=1.0)  # fmt: skip


def star_relu(pick: Pick, context: Context) -> Call:
    x = argument(pick, context, "star_relu", shape(pick, (2, 1, 3, 4)))
    kind = _kind(context)
    return Call(
        "F.star_relu(x, scale, bias)", "scale * N.relu(x) ** 2 + bias",
        {"x": x, "scale": f"torch.rand(1).to(torch.{kind})", "bias": f"torch.rand(1).to(torch.{kind})"},
        ("x", "scale", "bias"), backward=20.0, forward=2.0,
    )  # fmt: skip


def _kind(context: Context) -> str:
    return context.dtype if context.mode != "other dtype" else "float32"


def _random(pick: Pick, context: Context, sizes: tuple[int, ...], values: str = "normal") -> str:
    if context.mode == "other dtype":
        return OTHER_DTYPES[context.dtype].format(shape=list(sizes))
    return in_memory(pick, sizes, VALUES[values], context.dtype)


GLUS = {
    "glu": "torch.sigmoid({gate})", "swiglu": "N.silu({gate})", "geglu": "N.gelu({gate})",
    "reglu": "torch.relu({gate})", "bilinear_glu": "{gate}",
}  # fmt: skip


def gated_unit(name: str, pick: Pick, context: Context, halves: bool = False) -> Call:
    """The GLU family: of halves, or of gate and value."""
    sizes = shape(pick, (2, 1, 3, 4))
    opened = GLUS[name]
    if name != "glu" and not halves and pick(False, True):
        tensors = {"x": _random(pick, context, sizes), "value": _random(pick, context, sizes)}
        return Call(f"F.{name}(x, value)", f"{opened.format(gate='x')} * value", tensors, ("x", "value"),
                    backward=2.0)  # fmt: skip
    dim = pick(-1, *range(len(sizes)))
    sizes = tuple(2 * n if i == dim % len(sizes) else n for i, n in enumerate(sizes))
    last = name == "glu" or pick(False, True)
    order = "[::-1]" if last else ""
    plain = f"(lambda gate, value: {opened.format(gate='gate')} * value)(*x.chunk(2, {dim}){order})"
    keyword = "" if name == "glu" else f", gate_last={last}"
    return Call(f"F.{name}(x, dim={dim}{keyword})", plain, {"x": _random(pick, context, sizes)}, ("x",),
                backward=2.0)  # fmt: skip


# Activations that a chain or a batch norm may apply: name, ours, plain torch's.
SMOOTH = {
    "identity": "{z}", "sigmoid": "torch.sigmoid({z})", "silu": "N.silu({z})",
    "tanh": "torch.tanh({z})", "mish": "N.mish({z})", "gelu": "N.gelu({z})",
    "softplus": "N.softplus({z})", "elu": "N.elu({z})",
}  # fmt: skip
KINKED = {
    "relu": "torch.relu({z})", "leaky_relu": "N.leaky_relu({z})", "relu6": "N.relu6({z})",
    "hardtanh": "N.hardtanh({z})", "selu": "N.selu({z})",
}  # fmt: skip


def an_activation(pick: Pick, context: Context) -> tuple[str, str]:
    """With kinks in float64 only, where rounding does not decide over the side of a kink."""
    table = dict(SMOOTH)
    if context.dtype == "float64" and not context.smooth:
        table.update(KINKED)
    return pick(*table.items())  # type: ignore[no-any-return]


def gated(pick: Pick, context: Context) -> Call:
    sizes = shape(pick, (2, 3, 4))
    name, opened = an_activation(pick, context)
    small = (*sizes[:2], *[1] * (len(sizes) - 2)) if pick(False, True) else sizes
    tensors = {"x": _random(pick, context, sizes), "gate": _random(pick, context, small)}
    return Call(f"F.gated(x, gate, {name!r})", f"x * {opened.format(z='gate')}", tensors, ("x", "gate"),
                backward=20.0)  # fmt: skip


def residual_add(pick: Pick, context: Context) -> Call:
    sizes = shape(pick, (2, 3, 4, 1))
    dim = pick(-1, *range(len(sizes)))
    tensors = {"residual": _random(pick, context, sizes), "x": _random(pick, context, sizes)}
    arguments, plain = "residual, x", "x"
    if pick(True, False):
        tensors["scale"] = _random(pick, context, (sizes[dim],))
        around = [1] * len(sizes)
        around[dim] = -1
        arguments, plain = arguments + ", scale", f"{plain} * scale.reshape({around})"
    if pick(True, False):
        tensors["branch"] = _random(pick, context, (sizes[0],))
        arguments += ", branch_scale=branch"
        plain = f"{plain} * branch.detach().reshape({[-1] + [1] * (len(sizes) - 1)})"
    return Call(f"F.residual_add({arguments}, dim={dim})", f"residual + {plain}", tensors,
                tuple(n for n in tensors if n != "branch"), backward=20.0)  # fmt: skip


def biased(name: str, pick: Pick, context: Context) -> Call:
    """bias_act and bias_act_dropout (whose mask `dropped` looks at)."""
    sizes = shape(pick, (2, 3, 4, 1))
    dim = pick(*range(len(sizes)))
    tensors = {"x": _random(pick, context, sizes)}
    z, bias = "x", "None"
    if pick(True, False):
        tensors["bias"] = _random(pick, context, (sizes[dim],))
        around = [1] * len(sizes)
        around[dim] = -1
        z, bias = f"(x + bias.reshape({around}))", "bias"
    if name == "bias_act_dropout":
        act, form = an_activation(pick, context)
        ours, plain = f"F.bias_act_dropout(x, {bias}, {act!r}, dim={dim})", form.format(z=z)
    else:
        table = {"linear": ("{z}", 1.0), "swish": ("N.silu({z})", 2**0.5),
                 "tanh": ("torch.tanh({z})", 1.0), "softplus": ("N.softplus({z})", 1.0)}  # fmt: skip
        exact = context.dtype == "float64" and not context.smooth
        if exact:
            table["lrelu"] = ("N.leaky_relu({z}, 0.2)", 2**0.5)
            table["relu"] = ("N.relu({z})", 2**0.5)
        act = pick(*table)
        form, standard = table[act]
        gain, clamp = pick(None, 0.5), pick(None, *([1.25] if exact else []))
        factor = standard if gain is None else gain
        ours = f"F.bias_act(x, {bias}, {dim}, {act!r}, gain={gain}, clamp={clamp})"
        plain = f"{factor!r} * {form.format(z=z)}"
        if clamp:
            plain = f"({plain}).clamp(-{clamp}, {clamp})"
    return Call(ours, plain, tensors, tuple(tensors), backward=20.0)


def batch_norm_act(pick: Pick, context: Context) -> Call:
    sizes = shape(pick, (4, 2, 3, 5), (3, 2, 4, 7, 8))
    training = pick(True, False) and (not sizes or _many(sizes))
    name, form = an_activation(pick, context)
    vector = "float64" if context.dtype == "float64" else "float32"
    channels = sizes[1]
    tensors = {"x": _random(pick, context, sizes)}
    moved: tuple[str, ...] = ()
    if not training or pick(True, False):
        tensors["mean"] = f"torch.randn({channels}, dtype=torch.{vector})"
        tensors["var"] = f"0.5 + torch.rand({channels}, dtype=torch.{vector})"
        moved = ("mean", "var") if training else ()
    given = "mean, var" if "mean" in tensors else "None, None"
    affine = "None, None"
    if pick(True, False):
        tensors["weight"] = f"torch.randn({channels}, dtype=torch.{vector})"
        tensors["bias"] = f"torch.randn({channels}, dtype=torch.{vector})"
        affine = "weight, bias"
    z = f"N.batch_norm(x, {given}, {affine}, {training}, 0.25, 1e-3)"
    more = ""
    if pick(False, True):
        tensors["branch"] = f"torch.rand({sizes[0]}, dtype=torch.{vector})"
        more += ", branch_scale=branch"
        z = f"{z} * branch.detach().reshape({[-1] + [1] * (len(sizes) - 1)})"
    if pick(False, True):
        tensors["residual"] = _random(pick, context, sizes)
        more += ", residual=residual"
        z = f"({z} + residual)"
    if name == "identity" and "residual" not in tensors and "branch" not in tensors:
        more += pick("", ", overwrite_input=False")
    trained = tuple(n for n in ("x", "weight", "bias", "residual") if n in tensors)
    return Call(
        f"F.batch_norm_act(x, {given}, {affine}, {training}, 0.25, 1e-3, activation={name!r}{more})",
        form.format(z=z), tensors, trained, moved, forward=5.0, backward=50.0,
    )  # fmt: skip


def _many(sizes: tuple[int, ...]) -> bool:
    """Whether statistics are of enough values to be no accident."""
    count = sizes[0]
    for n in sizes[2:]:
        count *= n
    return count >= 4 and sizes[1] > 0


def max_pool2d(pick: Pick, context: Context) -> Call:
    sizes = (*shape(pick, (2, 1), (2, 1, 3)), pick(5, 6, 9), pick(5, 8, 3))
    kernel = pick(2, 3, (2, 3), 1)
    options = [f"kernel_size={kernel}"] + [
        option for option in ("stride=1", "stride=2", "stride=(2, 1)") if pick(False, True)
    ][:1]
    if kernel in (2, 3):
        options += pick([], ["padding=1"])
    options += pick([], ["ceil_mode=True"])
    listed = ", ".join(options)
    if context.mode == "other dtype":
        x = OTHER_DTYPES[context.dtype].format(shape=list(sizes))
    else:
        values = VALUES["normal" if context.smooth else pick("kinks", "normal")]
        x = in_memory(pick, sizes, values, context.dtype)
    return Call(f"F.max_pool2d(x, {listed})", f"N.max_pool2d(x, {listed})", {"x": x}, ("x",),
                backward=2.0)  # fmt: skip


EVERY = ("gradient", "second", "checkpoint", "recompute", "batched", "vmap", "jvp", "other dtype")
STRAIGHT = (*EVERY, "special")
# No other dtype: integers times floats are floats, of which torch's operators each think their own.
CHAINED = EVERY[:-1]
_MAKERS: dict[str, Generator] = {
    "prelu": Generator(prelu, STRAIGHT),
    "star_relu": Generator(star_relu, STRAIGHT[:-2]),
    "gated": Generator(gated, CHAINED),
    "residual_add": Generator(residual_add, CHAINED),
    "batch_norm_act": Generator(
        batch_norm_act, ("gradient", "second", "checkpoint", "recompute", "batched")
    ),
    "max_pool2d": Generator(max_pool2d, EVERY),
    **{name: Generator(partial(gated_unit, name), CHAINED) for name in GLUS},
    **{
        name: Generator(partial(biased, name), CHAINED) for name in ("bias_act", "bias_act_dropout")
    },
}
for _name, _row in ACTIVATIONS.items():
    if not _row.tensors and _name != "gelu_tanh":
        _modes = STRAIGHT + (("in place", "in place") if _name in INPLACE else ())
        _MAKERS[_name] = Generator(partial(activation, _name), _modes)


_DROPOUT = """\
import torch
import {imported}

torch.manual_seed({seed})
x = {x}
x = x.detach().requires_grad_()

def run(training):
    torch.manual_seed({seed})
    y = {call}
    return y, torch.autograd.grad(y, x, torch.ones_like(y))[0]

y, slope = run(True)
assert torch.equal(y, run(True)[0]) and y.dtype is x.dtype and y.shape == x.shape
kept = slope != 0
assert torch.equal(slope[kept].double(), (slope[kept] * 0 + 1 / (1 - {p})).double())
torch.testing.assert_close(y, torch.where(kept, x / (1 - {p}), 0), rtol={limit}, atol={limit})
count = x.numel()
assert abs(kept.sum() - count * (1 - {p})) <= 6 * (count * {p} * (1 - {p})) ** 0.5, kept.sum()
assert torch.equal(run(False)[0], x)
"""


@st.composite
def dropout(draw: Callable[..., Any], module: bool = False) -> str:
    pick = Pick(draw)
    dtype, p = pick(*DTYPES), pick(0.5, 0.25, 0.125)
    x = in_memory(pick, shape(pick), VALUES["normal"], dtype)
    call = pick(
        f"F.dropout(x, {p}, training)",
        f"F.bias_act_dropout(x, None, 'identity', {p}, training)",
        f"F.dropout(x * 1, {p}, training, inplace=True)",
    )
    if module:
        call = f"fusedtrain.nn.Dropout({p}).train(training)(x)"
    imported = "fusedtrain" if module else "fusedtrain.functional as F"
    limit = compare.chained(dtype, 1)
    return _DROPOUT.format(
        seed=pick(*range(20)), x=x, call=call, p=p, limit=limit, imported=imported
    )


_IMAGES = """\
import torch
import fusedtrain.functional as F

torch.manual_seed({seed})
x = torch.randint(0, 256, {shape}, dtype=torch.uint8){memory}
mean, std = {mean}, {std}
y = F.normalize_images(x, mean, std, torch.{dtype}, torch.{format})
mean, std = (torch.tensor(t, dtype=torch.float64).reshape(-1, 1, 1) for t in (mean, std))
want = (x.double() / 255 - mean) / std
assert y.dtype is torch.{dtype}
torch.testing.assert_close(y.double(), want, rtol={limit}, atol={limit})
"""


@st.composite
def normalize_images(draw: Callable[..., Any]) -> str:
    pick = Pick(draw)
    channels, height, width = pick(3, 1, 4, 7), pick(2, 1, 17, 33), pick(3, 1, 16, 65)
    sizes = (
        (channels, height, width) if pick.chance(3) else (pick(2, 1, 0), channels, height, width)
    )
    memories = ["", ".flip(-1)", ".transpose(-1, -2)"]
    if len(sizes) == 4:
        memories.append(".to(memory_format=torch.channels_last)")
    dtype = pick("float32", "float16", "bfloat16", "float64")
    numbers = pick(0.5, [0.25 * (i + 1) for i in range(channels)])
    return _IMAGES.format(
        seed=pick(*range(20)), shape=list(sizes), memory=pick(*memories), dtype=dtype,
        mean=pick(0.5, 0.0, [0.125 * i for i in range(channels)]), std=numbers,
        format=pick("preserve_format", "contiguous_format", "channels_last"),
        limit=compare.chained(dtype, 1),
    )  # fmt: skip


PROGRAMS: dict[str, Callable[[], st.SearchStrategy[str]]] = {
    **{name: generator.programs for name, generator in _MAKERS.items()},
    "dropout": dropout,
    "normalize_images": normalize_images,
}
PUBLIC = {name for name, f in vars(functional).items() if inspect.isfunction(f) and name[0] != "_"}
assert PROGRAMS.keys() >= PUBLIC, f"no programs call {PUBLIC - PROGRAMS.keys()}"
