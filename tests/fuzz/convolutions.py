"""Programs that call depthwise convolutions, and their modules."""

from __future__ import annotations

from .calls import Call, Context
from .tensors import Pick

# Our kernels, where torch's are faster, too.
_SETUP = ("from fusedtrain.ops import depthwise as _depthwise", "_depthwise._EVERYWHERE = True")


def depthwise(dims: int, pick: Pick, context: Context) -> Call:
    """Sizes are at least what the dilated kernel needs."""
    channels, multiplier = pick(3, 1, 2, 17), pick(1, 1, 2)
    kernel = tuple(pick(3, 1, 2, 5) if dims < 3 else pick(2, 1, 3) for _ in range(dims))
    dilation, stride = pick(1, 1, 2), pick(1, 2, 3)
    padding = pick("0", "1", "2", "'valid'", *["'same'"] * (stride == 1))
    sizes = tuple((k - 1) * dilation + pick(1, 2, 4, 9 // dims) for k in kernel)
    batch = () if pick.chance(4) else (pick(2, 1, 3),)
    tensors = {
        "x": context.random(pick, (*batch, channels, *sizes)),
        "weight": context.random(pick, (channels * multiplier, 1, *kernel)),
    }
    bias = pick(True, False)
    if bias:
        tensors["bias"] = context.random(pick, (channels * multiplier,))
    listed = f"x, weight, {'bias' if bias else None}, {stride}, {padding}, {dilation}"
    return Call(
        f"F.depthwise_conv{dims}d({listed})", f"N.conv{dims}d({listed}, {channels})", tensors,
        tuple(tensors), setup=_SETUP, forward=20.0, backward=100.0,
    )  # fmt: skip


def module(dims: int, pick: Pick, context: Context) -> Call:
    """The module with these arguments."""
    call = depthwise(dims, pick, context)
    shape = call.ours.partition("weight, ")[2].removesuffix(")")
    bias, stride, padding, dilation = shape.split(", ")
    names = ["weight"] + ["bias"] * (bias == "bias")
    state = ", ".join(f"'{name}': {name}" for name in names)
    channels = call.plain.rpartition(", ")[2].removesuffix(")")
    call.setup = (
        *_SETUP, "import fusedtrain", "from torch.func import functional_call", "",
        "def module(weight):",
        f"    return fusedtrain.nn.DepthwiseConv{dims}d({channels}, len(weight),"
        f" weight.shape[2:], {stride}, {padding}, {dilation}, bias={bias == 'bias'})",
    )  # fmt: skip
    call.ours = f"functional_call(module(weight), {{{state}}}, (x,))"
    return call
