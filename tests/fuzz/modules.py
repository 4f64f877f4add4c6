"""Programs that call the modules of fusedtrain.nn, as functions of input and parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st

from fusedtrain import nn as fused_nn
from fusedtrain.reference import ACTIVATIONS

from . import chains, convolutions, norms, ops
from .calls import CHAINED, Call, Context, Generator
from .tensors import Pick, in_memory, shape

# Lives of a module before it is called.
_LIVES = (
    "m = {made}",
    "m = copy.deepcopy({made})",
    "m = pickle.loads(pickle.dumps({made}))",
    "m = {made}; m.load_state_dict(copy.deepcopy(m).state_dict())",
)
# Class -> arguments that are drawn.
ARGUMENTS: dict[str, tuple[str, ...]] = {
    "CELU": ("", "0.5"), "ELU": ("", "2.0"), "GELU": ("", "'tanh'"), "Hardshrink": ("", "2.0"),
    "Hardtanh": ("", "0.0, 6.0"), "LeakyReLU": ("", "0.25"), "Softplus": ("", "2.0"),
    "Softshrink": ("", "0.25"), "Threshold": ("0.5, -1.0",),
}  # fmt: skip


def _setup(pick: Pick, made: str) -> tuple[str, ...]:
    life = pick(*_LIVES).format(made=f"fusedtrain.nn.{made}")
    imports = [f"import {name}" for name in ("copy", "pickle") if f"{name}." in life]
    return (*imports, "import fusedtrain", "from torch.func import functional_call", "", life)


# Activations by their class, in small letters.
FUNCTIONS = {name.replace("_", ""): name for name in ACTIVATIONS}


def activation(name: str, pick: Pick, context: Context) -> Call:
    """A call of a class without parameters."""
    function = FUNCTIONS[name.lower()]
    listed = pick(*ARGUMENTS.get(name, ("",)))
    call = ops.activation(function, pick, context)
    if hasattr(torch.nn, name):
        call.plain = f"torch.nn.{name}({listed})(x)"
    else:  # with the defaults
        defaults = "".join(f", {value}" for value in ACTIVATIONS[function].example)
        call.plain = ops.plain_of(function, defaults)[0]
    call.ours, call.inplace = "m(x)", ""
    call.setup += _setup(pick, f"{name}({listed})")
    return call


def prelu(pick: Pick, context: Context) -> Call:
    call = ops.prelu(pick, context)
    call.setup = _setup(pick, "PReLU(1)")
    call.ours = "functional_call(m, {'weight': weight}, x)"
    return call


def star_relu(pick: Pick, context: Context) -> Call:
    call = ops.star_relu(pick, context)
    call.setup = _setup(pick, "StarReLU()")
    call.ours = "functional_call(m, {'scale': scale, 'bias': bias}, x)"
    return call


def gated_unit(name: str, pick: Pick, context: Context) -> Call:
    function = {"BilinearGLU": "bilinear_glu"}.get(name, name.lower())
    call = chains.gated_unit(function, pick, context, halves=True)
    call.setup = _setup(pick, f"{name}({call.ours.partition('(x, ')[2]}")
    call.ours = "m(x)"
    return call


def bias_act_dropout(pick: Pick, context: Context) -> Call:
    sizes = shape(pick, (2, 3, 4, 1))
    dim = pick(*range(len(sizes)))
    act, form = chains.an_activation(pick, context)
    around = [1] * len(sizes)
    around[dim] = -1
    x, bias = (
        in_memory(pick, s, "3 * torch.randn({shape}, dtype=torch.float64)", context.dtype)
        for s in (sizes, (sizes[dim],))
    )
    return Call(
        "functional_call(m, {'bias': bias}, x)", form.format(z=f"(x + bias.reshape({around}))"),
        {"x": x, "bias": bias}, ("x", "bias"), backward=20.0,
        setup=_setup(pick, f"BiasActDropout({sizes[dim]}, {act!r}, dim={dim})"),
    )  # fmt: skip


def group_norm(name: str, pick: Pick, context: Context) -> Call:
    call = norms.group_norm_act(pick, context, name)
    call.setup = _setup(pick, call.setup[0])
    return call


def batch_norm(name: str, pick: Pick, context: Context) -> Call:
    """The BatchNormAct classes, in training or not, with a residual or without."""
    rank = {"1": pick(2, 3), "2": 4, "3": 5}.get(name[-2], 4)
    sizes = (pick(4, 2, 6), pick(3, 1, 5), *(pick(3, 2, 5) for _ in range(rank - 2)))
    call = norms.batch_norm(pick, context, sizes, name)
    call.setup = _setup(pick, *call.setup)
    return call


def conv_bn_act(pick: Pick, context: Context) -> Call:
    """ConvBnAct, whose norm is a BatchNormAct2d."""
    act, form = chains.an_activation(pick, context)
    training = pick(True, False)
    n, c = pick(4, 6), 3
    values = "3 * torch.randn({shape}, dtype=torch.float64)"
    vector = "float64" if context.dtype == "float64" else "float32"
    tensors = {
        "x": in_memory(pick, (n, 2, 5, 4), values, context.dtype),
        "kernel": f"torch.randn({c}, 2, 3, 3).to(torch.{context.dtype})",
        **dict.fromkeys(("weight", "bias", "mean"), f"torch.randn({c}, dtype=torch.{vector})"),
        "var": f"0.5 + torch.rand({c}, dtype=torch.{vector})",
    }
    names = {"conv.weight": "kernel", "bn.weight": "weight", "bn.bias": "bias",
             "bn.running_mean": "mean", "bn.running_var": "var"}  # fmt: skip
    state = ", ".join(f"{k!r}: {v}" for k, v in names.items())
    z = "N.conv2d(x, kernel, padding=1)"
    z = f"N.batch_norm({z}, mean, var, weight, bias, {training}, 0.1, 1e-5)"
    made = f"ConvBnAct(2, {c}, 3, padding=1, act_layer=torch.nn.{norms.ACT_LAYERS[act]})"
    moved = ("mean", "var") if training and context.mode != "checkpoint" else ()
    return Call(
        f"functional_call(m, {{{state}}}, x)", form.format(z=z), tensors,
        ("x", "kernel", "weight", "bias"), moved, _setup(pick, f"{made}.train({training})"),
        forward=20.0, backward=400.0,
    )  # fmt: skip


def max_pool2d(pick: Pick, context: Context) -> Call:
    call = norms.max_pool2d(pick, context)
    call.setup = _setup(pick, f"MaxPool2d({call.ours.partition('(x, ')[2]}")
    call.ours = "m(x)"
    return call


def row_norm(name: str, pick: Pick, context: Context) -> Call:
    sizes = (2, 3, 5, 4)
    if context.mode == "gradient":
        sizes = pick(sizes, (4, 8, 64, 32))
    made, plain = f"RMSNorm({sizes[-1]}, 1e-2, False)", f"N.rms_norm(x, [{sizes[-1]}], eps=1e-2)"
    if name == "LayerNorm":
        made, plain = made.replace("RMS", "Layer"), plain.replace("rms", "layer")
    if name.endswith("2d"):
        made = f"{name}({sizes[1]}, 1e-2, False)"
        kind = "rms" if name == "RmsNorm2d" else "layer"
        plain = f"N.{kind}_norm(x.movedim(1, -1), [{sizes[1]}], eps=1e-2).movedim(-1, 1)"
        plain += ".relu()" * (name == "LayerNormAct2d")
    return Call(
        "m(x)", plain, {"x": context.random(pick, sizes, "normal")}, ("x",), forward=5.0,
        backward=50.0, setup=_setup(pick, made),
    )  # fmt: skip


_DROP_PATH = """\
import torch
import fusedtrain

torch.manual_seed({seed})
x = torch.randn({shape}, dtype=torch.{dtype})
m = fusedtrain.nn.DropPath({p}, scale_by_keep={scale})
torch.manual_seed({seed})
y = m(x)
torch.manual_seed({seed})
kept = x.new_empty([len(x)] + [1] * (x.dim() - 1)).bernoulli_(1 - {p})
torch.testing.assert_close(y, x * (kept / (1 - {p}) if {scale} else kept))
assert torch.equal(m.eval()(x), x)
"""


@st.composite
def drop_path(draw: Callable[..., Any]) -> str:
    pick = Pick(draw)
    return _DROP_PATH.format(
        seed=pick(*range(20)), shape=list(shape(pick, (2, 1, 3, 4))), p=pick(0.25, 0.5),
        dtype=pick("float64", "float32"), scale=pick(True, False),
    )  # fmt: skip


@st.composite
def normalize_images(draw: Callable[..., Any]) -> str:
    source: str = draw(norms.normalize_images())
    call = "F.normalize_images(x, mean, std, "
    return source.replace("import fusedtrain.functional as F", "import fusedtrain").replace(
        call, "fusedtrain.nn.NormalizeImages(mean, std, "
    ).replace(")\nmean, std = (torch", ")(x)\nmean, std = (torch")  # fmt: skip


@st.composite
def sync_batch_norm(draw: Callable[..., Any]) -> str:
    """On one rank, the module that convert_sync_batchnorm makes of a norm computes the same."""
    pick = Pick(draw)
    return f"""\
import copy, torch
import fusedtrain

torch.manual_seed({pick(*range(20))})
act = {pick("torch.nn.ReLU", "torch.nn.SiLU", "torch.nn.Identity")}
norm = fusedtrain.nn.BatchNormAct2d(3, act_layer=act).double().train({pick(True, False)})
synced = fusedtrain.nn.convert_sync_batchnorm(torch.nn.Sequential(copy.deepcopy(norm)))[0]
assert type(synced) is fusedtrain.nn.SyncBatchNormAct
x = torch.randn({pick(4, 2)}, 3, {pick(5, 2)}, 2, dtype=torch.float64)
results = []
for m in (norm, synced):
    y = m(x.requires_grad_())
    grad = torch.linspace(-1, 2, y.numel(), dtype=torch.float64).reshape(y.shape)
    grads = torch.autograd.grad(y, [x, *m.parameters()], grad)
    results.append([y, *grads, *m.buffers()])
for a, b in zip(*results, strict=True):
    torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
"""


_GLUS = ("GLU", "SwiGLU", "GEGLU", "ReGLU", "BilinearGLU")
_NORMS = ("BatchNormAct1d", "BatchNormAct2d", "BatchNormAct3d", "BatchNormAddAct")
_GROUP_NORMS = ("GroupNorm", "GroupNormAct", "GroupNorm1Act")
_TRAINED = ("gradient", "second", "checkpoint", "recompute")
_MAKERS = {
    "PReLU": Generator(prelu, CHAINED),
    "StarReLU": Generator(star_relu, CHAINED),
    "MaxPool2d": Generator(max_pool2d, CHAINED),
    **{
        f"DepthwiseConv{dims}d": Generator(partial(convolutions.module, dims), _TRAINED)
        for dims in (1, 2, 3)
    },
    **{
        name: Generator(partial(row_norm, name), CHAINED)
        for name in ("LayerNorm", "LayerNorm2d", "LayerNormAct2d", "RMSNorm", "RmsNorm2d")
    },
    "BiasActDropout": Generator(bias_act_dropout, CHAINED),
    "ConvBnAct": Generator(conv_bn_act, _TRAINED, ("float64", "float32")),
    **{name: Generator(partial(gated_unit, name), CHAINED) for name in _GLUS},
    **{name: Generator(partial(batch_norm, name), _TRAINED) for name in _NORMS},
    **{name: Generator(partial(group_norm, name), _TRAINED) for name in _GROUP_NORMS},
    **{
        name: Generator(partial(activation, name), CHAINED)
        for name, cls in vars(fused_nn.activation).items()
        if name in fused_nn.__all__ and name not in ("PReLU", "StarReLU") and inspect.isclass(cls)
        and issubclass(cls, torch.nn.Module)
    },
}  # fmt: skip
PROGRAMS: dict[str, Callable[[], st.SearchStrategy[str]]] = {
    **{f"nn.{name}": generator.programs for name, generator in _MAKERS.items()},
    "nn.Dropout": partial(chains.dropout, module=True),
    "nn.DropPath": drop_path,
    "nn.NormalizeImages": normalize_images,
    "nn.SyncBatchNormAct": sync_batch_norm,
    "nn.convert_sync_batchnorm": sync_batch_norm,
}
_MISSING = {f"nn.{name}" for name in fused_nn.__all__} - PROGRAMS.keys()
assert not _MISSING, f"no programs call {_MISSING}"
