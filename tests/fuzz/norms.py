"""Programs that call norms, max pooling, means and the normalisation of images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from . import compare
from .calls import Call, Context
from .chains import an_activation, bends
from .tensors import Pick, shape

# Class of the activation of a module.
ACT_LAYERS = {
    "identity": "Identity", "elu": "ELU", "gelu": "GELU", "mish": "Mish", "relu": "ReLU",
    "relu6": "ReLU6", "selu": "SELU", "sigmoid": "Sigmoid", "silu": "SiLU", "softplus": "Softplus",
    "tanh": "Tanh", "hardtanh": "Hardtanh", "leaky_relu": "LeakyReLU",
}  # fmt: skip


def batch_norm_act(pick: Pick, context: Context) -> Call:
    return batch_norm(pick, context, shape(pick, (4, 2, 3, 5), (3, 2, 4, 7, 8)))


def batch_norm(pick: Pick, context: Context, sizes: tuple[int, ...], module: str = "") -> Call:
    """A call of the function; or of a module of that class, which its setup is to make."""
    training = pick(True, False) and (not sizes or _many(sizes))
    name, form = an_activation(pick, context)
    vector = "float64" if context.dtype == "float64" else "float32"
    channels = sizes[1]
    # A constant channel becomes zeros up to rounding: an activation may not bend there.
    repeats = not (training and bends(name))
    tensors = {"x": context.random(pick, sizes, repeats=repeats)}
    moved: tuple[str, ...] = ()
    if module or not training or pick(True, False):
        tensors["running_mean"] = f"torch.randn({channels}, dtype=torch.{vector})"
        tensors["running_var"] = f"0.5 + torch.rand({channels}, dtype=torch.{vector})"
        moved = ("running_mean", "running_var") if training else ()
    statistics = "running_mean, running_var" if "running_mean" in tensors else "None, None"
    affine = "None, None"
    if pick(True, False):
        tensors["weight"] = f"torch.randn({channels}, dtype=torch.{vector})"
        tensors["bias"] = f"torch.randn({channels}, dtype=torch.{vector})"
        affine = "weight, bias"
    state = ", ".join(f"{n!r}: {n}" for n in tensors if n != "x")
    z = f"N.batch_norm(x, {statistics}, {affine}, {training}, 0.25, 1e-3)"
    more = f", activation={name!r}"
    if not module and pick(False, True):
        tensors["branch"] = f"torch.rand({sizes[0]}, dtype=torch.{vector})"
        more += ", branch_scale=branch"
        z = f"{z} * branch.detach().reshape({[-1] + [1] * (len(sizes) - 1)})"
    x = "x"
    if module == "BatchNormAddAct" or pick(False, True):
        tensors["residual"] = context.random(pick, sizes)
        more += ", residual=residual"
        z = f"({z} + residual)"
    wide = context.mode == "gradient" and context.dtype in ("float64", "float32")
    if wide and more.count("=") == 1 and name in ("identity", "leaky_relu") and pick(False, True):
        x, more = "x * 1", more + ", overwrite_input=True"
    trained = tuple(n for n in ("x", "weight", "bias", "residual") if n in tensors)
    ours, setup = f"F.batch_norm_act({x}, {statistics}, {affine}, {training}, 0.25, 1e-3{more})", ()
    if module:
        called = "(x, residual)" if "residual" in tensors else "x"
        ours = f"functional_call(m, {{{state}}}, {called})"
        made = f"{channels}, 1e-3, 0.25, {affine != 'None, None'}"
        setup = (f"{module}({made}, act_layer=torch.nn.{ACT_LAYERS[name]}).train({training})",)
        # The module does not move them again in a recomputation.
        moved = () if context.mode == "checkpoint" else moved
    return Call(
        ours, form.format(z=z), tensors, trained, moved, setup, forward=5.0, backward=50.0,
    )  # fmt: skip


def group_norm_act(pick: Pick, context: Context, module: str = "") -> Call:
    """A call with sizes that run the op in channels_last, or torch's norm; of a module of
    that class, which its setup is to make. torch's backward of channels_last may crash."""
    sizes = pick((2, 4, 3, 5), (2, 32, 64, 64)) if context.mode == "gradient" else (2, 4, 3, 5)
    groups = 1 if module == "GroupNorm1Act" else pick(1, 2, 4)
    name, form = an_activation(pick, context)
    vector = "float64" if context.dtype == "float64" else "float32"
    tensors = {"x": context.random(pick, sizes, repeats=False)}
    vector = f"torch.randn({sizes[1]}, dtype=torch.{vector})"
    affine, z = "None, None", f"N.group_norm(x.contiguous(), {groups}, {{}}, 1e-3)"
    if pick(True, False):
        tensors |= dict.fromkeys(("weight", "bias"), vector)
        affine = "weight, bias"
    more, z = f"activation={name!r}", z.format(affine)
    if module in ("", "GroupNorm") and pick(False, True):
        tensors |= {n: context.random(pick, sizes[:2], repeats=False) for n in ("scale", "shift")}
        more += ", scale=scale, shift=shift"
        z = f"({z} * (1 + scale[..., None, None]) + shift[..., None, None])"
    ours, setup = f"F.group_norm_act(x, {groups}, {affine}, 1e-3, {more})", ()
    if module:
        state = ", ".join(f"{n!r}: {n}" for n in ("weight", "bias") if n in tensors)
        inputs = "(x, scale, shift)" if "scale" in tensors else "x"
        ours = f"functional_call(m, {{{state}}}, {inputs})"
        sizes_of = {"GroupNorm": f"{groups}, {sizes[1]}", "GroupNormAct": f"{sizes[1]}, {groups}"}
        made = f"{sizes_of.get(module, sizes[1])}, 1e-3, {bool(state)}"
        act = "activation" if module == "GroupNorm" else "act_layer"
        setup = (f"{module}({made}, {act}=torch.nn.{ACT_LAYERS[name]})",)
    backward = 50.0 if sizes[1] == 4 else 1000.0  # sums of 8192 elements
    return Call(
        ours, form.format(z=z), tensors, tuple(tensors), (), setup, forward=5.0, backward=backward
    )


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
    x = context.random(pick, sizes, "normal" if context.smooth else pick("kinks", "normal"))
    return Call(f"F.max_pool2d(x, {listed})", f"N.max_pool2d(x, {listed})", {"x": x}, ("x",),
                backward=2.0)  # fmt: skip


def mean(name: str, pick: Pick, context: Context) -> Call:
    """A mean beside another reader; some are of sizes that run our node."""
    sizes = pick((2, 3, 5, 7), (2, 32, 64, 64)) if context.mode == "gradient" else (2, 3, 5, 7)
    x = context.random(pick, sizes, "normal")
    rest = ("1",) if name == "adaptive_avg_pool2d" else ("(2, 3)", "(2, 3), True", "-1", "(0, 1)")
    listed = pick(*rest)
    theirs = "torch.mean" if name == "mean" else f"N.{name}"
    return Call(f"F.{name}(x, {listed})", f"{theirs}(x, {listed})", {"x": x}, ("x",),
                backward=2.0)  # fmt: skip


def row_norm(name: str, pick: Pick, context: Context) -> Call:
    """A norm of the last dimensions, or over channels; some with a residual, or of sizes that run
    our kernels."""
    channels, name = name.endswith("_channels"), name.removesuffix("_channels")
    sizes = pick((2, 3, 6), (3, 5, 2, 4), (64, 600) if not channels else (2, 8, 40, 60))
    if context.mode != "gradient":
        sizes = sizes if len(sizes) == 3 else (3, 5, 2, 4)
    dims = 1 if channels or len(sizes) == 2 else pick(1, 2)
    normalised = sizes[1:2] if channels else sizes[-dims:]
    tensors = {"x": context.random(pick, sizes, "normal")}
    kind, affine = context.dtype, []
    for what in ("weight",) if name == "rms_norm" else ("weight", "bias"):
        affine.append(what if pick(True, False) else "None")
        if affine[-1] == what:
            tensors[what] = f"torch.randn({list(normalised)}, dtype=torch.{kind})"
    rest = ", ".join([*affine, "1e-2"])
    if channels:
        plain = f"N.{name}(x.movedim(1, -1), {list(normalised)}, {rest}).movedim(-1, 1)"
        ours = f"F.{name}_channels(x, {rest})"
    elif pick(False, True):
        tensors["r"] = context.random(pick, sizes, "normal")
        ours = f"sum(F.{name}(x, {list(normalised)}, {rest}, residual=r))"
        plain = f"N.{name}(x + r, {list(normalised)}, {rest}) + (x + r)"
    else:
        ours, plain = (f"{m}.{name}(x, {list(normalised)}, {rest})" for m in "FN")
    return Call(ours, plain, tensors, tuple(tensors), forward=5.0, backward=50.0)


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
