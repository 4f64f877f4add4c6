"""Programs that call the pointwise chains: gated units, residual sums, bias and dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from . import compare
from .calls import Call, Context
from .tensors import DTYPES, VALUES, Pick, in_memory, shape

GLUS = {
    "glu": "torch.sigmoid({gate})", "swiglu": "N.silu({gate})", "geglu": "N.gelu({gate})",
    "reglu": "torch.relu({gate})", "bilinear_glu": "{gate}",
}  # fmt: skip


def gated_unit(name: str, pick: Pick, context: Context, halves: bool = False) -> Call:
    """The GLU family: of halves, or of gate and value."""
    sizes = shape(pick, (2, 1, 3, 4))
    opened = GLUS[name]
    if name != "glu" and not halves and pick(False, True):
        tensors = {"x": context.random(pick, sizes), "value": context.random(pick, sizes)}
        plain = f"{opened.format(gate='x')} * value"
        return Call(f"F.{name}(x, value)", plain, tensors, ("x", "value"), backward=2.0)
    dim = pick(-1, *range(len(sizes)))
    sizes = tuple(2 * n if i == dim % len(sizes) else n for i, n in enumerate(sizes))
    last = name == "glu" or pick(False, True)
    order = "[::-1]" if last else ""
    plain = f"(lambda gate, value: {opened.format(gate='gate')} * value)(*x.chunk(2, {dim}){order})"
    keyword = "" if name == "glu" else f", gate_last={last}"
    ours, tensors = f"F.{name}(x, dim={dim}{keyword})", {"x": context.random(pick, sizes)}
    return Call(ours, plain, tensors, ("x",), backward=2.0)


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
    return pick(*table.items())


def bends(name: str) -> bool:
    """Whether a first or second derivative of this activation jumps somewhere."""
    return name in KINKED or name == "elu"


def gated(pick: Pick, context: Context) -> Call:
    sizes = shape(pick, (2, 3, 4))
    name, opened = an_activation(pick, context)
    small = (*sizes[:2], *[1] * (len(sizes) - 2)) if pick(False, True) else sizes
    tensors = {"x": context.random(pick, sizes), "gate": context.random(pick, small)}
    ours, plain = f"F.gated(x, gate, {name!r})", f"x * {opened.format(z='gate')}"
    return Call(ours, plain, tensors, ("x", "gate"), backward=20.0)


def residual_add(pick: Pick, context: Context) -> Call:
    sizes = shape(pick, (2, 3, 4, 1))
    dim = pick(-1, *range(len(sizes)))
    tensors = {"residual": context.random(pick, sizes), "x": context.random(pick, sizes)}
    arguments, plain = "residual, x", "x"
    if pick(True, False):
        tensors["scale"] = context.random(pick, (sizes[dim],))
        around = [1] * len(sizes)
        around[dim] = -1
        arguments, plain = arguments + ", scale", f"{plain} * scale.reshape({around})"
    if pick(True, False):
        tensors["branch"] = context.random(pick, (sizes[0],))
        arguments += ", branch_scale=branch"
        plain = f"{plain} * branch.detach().reshape({[-1] + [1] * (len(sizes) - 1)})"
    # In 16 bits eager rounds the products, where the fused op does not fit; they may cancel.
    forward = 4.0 if len(tensors) == 4 else 1.0
    trained = tuple(n for n in tensors if n != "branch")
    return Call(f"F.residual_add({arguments}, dim={dim})", f"residual + {plain}", tensors, trained,
                forward=forward, backward=20.0)  # fmt: skip


def biased(name: str, pick: Pick, context: Context) -> Call:
    """bias_act and bias_act_dropout (without its dropout: that is below)."""
    sizes = shape(pick, (2, 3, 4, 1))
    dim = pick(*range(len(sizes)))
    tensors = {"x": context.random(pick, sizes)}
    z, bias = "x", "None"
    if pick(True, False):
        tensors["bias"] = context.random(pick, (sizes[dim],))
        around = [1] * len(sizes)
        around[dim] = -1
        z, bias = f"(x + bias.reshape({around}))", "bias"
    if name == "bias_act_dropout":
        act, form = an_activation(pick, context)
        ours, plain = f"F.bias_act_dropout(x, {bias}, {act!r}, dim={dim})", form.format(z=z)
    else:
        table = {
            "linear": ("{z}", 1.0), "swish": ("N.silu({z})", 2**0.5),
            "tanh": ("torch.tanh({z})", 1.0), "softplus": ("N.softplus({z})", 1.0),
        }  # fmt: skip
        exact = context.dtype == "float64" and not context.smooth
        if exact:
            table["lrelu"] = ("N.leaky_relu({z}, 0.2)", 2**0.5)
            table["relu"] = ("N.relu({z})", 2**0.5)
        act = pick(*table)
        form, standard = table[act]
        gain, clamp = pick(None, 0.5), pick(None, *([1.25] if exact else []))
        factor = standard if gain is None else gain
        ours = f"F.bias_act(x, {bias}, dim={dim}, act={act!r}, gain={gain}, clamp={clamp})"
        plain = f"{factor!r} * {form.format(z=z)}"
        if clamp:
            plain = f"({plain}).clamp(-{clamp}, {clamp})"
    return Call(ours, plain, tensors, tuple(tensors), backward=20.0)


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
        f"F.dropout_add(x, torch.zeros_like(x), {p}, training)",
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


_ATTENTION = """\
import torch
import fusedtrain.functional as F

torch.manual_seed({seed})
q, k, v = (torch.randn({batch}, n, {heads}, {width}).to(torch.{dtype}) for n in ({m}, {n}, {n}))
q, k, v = (t.transpose(1, 2).detach().requires_grad_() for t in (q, k, v))
named = {named}

def run(function, tensors, grad, **named):
    torch.manual_seed({seed})
    y = function(*tensors, **named)
    return y, *torch.autograd.grad(y, tensors, grad)

eye = torch.eye({n}).to(q.dtype).expand({batch}, {heads}, {n}, {n})
torch.manual_seed({seed})
dropped = F.scaled_dot_product_attention(q, k, eye, dropout_p={p}, **named)
factor = (dropped != 0).double() / (1 - {p})

def exact(q, k, v, **named):
    if named.get("attn_mask") is not None and named["attn_mask"].is_floating_point():
        named = named | dict(attn_mask=named["attn_mask"].double())
    weights = torch.nn.functional.scaled_dot_product_attention(q, k, eye.double(), **named)
    return (weights * factor) @ v

grad = torch.randn({batch}, {heads}, {m}, {width}).to(q.dtype)
wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
want = run(exact, wide, grad.double(), **named)
got = run(F.scaled_dot_product_attention, (q, k, v), grad, dropout_p={p}, **named)
for one, other in zip(got, want):
    assert one.dtype is q.dtype
    assert (one.double() - other).norm() <= {limit} * other.norm() + {limit}
"""


@st.composite
def attention(draw: Callable[..., Any]) -> str:
    """With dropout the mask is seen through a value of ones on the diagonal."""
    pick = Pick(draw)
    batch, heads, m, n = pick(1, 2), pick(1, 3), pick(1, 4, 9), pick(1, 5, 8)
    dtype = pick(*DTYPES)
    masks = (
        "{}",
        "dict(is_causal=True)",
        f"dict(attn_mask=torch.rand({m}, {n}) > 0.3)",
        f"dict(attn_mask=torch.randn({batch}, 1, {m}, {n}).to(torch.{dtype}))",
        "dict(scale=0.3)",
    )
    return _ATTENTION.format(
        seed=pick(*range(20)), batch=batch, heads=heads, width=pick(1, 4, 16), m=m, n=n,
        dtype=dtype, named=pick(*masks), p=pick(0.0, 0.25, 0.5),
        limit=30 * compare.chained(dtype, 1),
    )  # fmt: skip
