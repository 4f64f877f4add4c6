"""Depthwise convolutions: fusedtrain's function, eager torch's, that compiled, and the gate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from torch import Tensor
from torch.nn import functional as T

from ... import functional as F
from ..._text import shape_text
from ._match import LAYOUTS, Contest, Entry, Options, call_of, duel, match_of
from .clock import Function
from .gate import GRADIENT, Tolerance, agrees, first_call

_OURS: Mapping[int, Function] = {
    1: F.depthwise_conv1d, 2: F.depthwise_conv2d, 3: F.depthwise_conv3d
}  # fmt: skip
_EAGER: Mapping[int, Function] = {1: T.conv1d, 2: T.conv2d, 3: T.conv3d}


@dataclass(frozen=True)
class Layer:
    """Images, rows or volumes of equal sides, a kernel of equal sides, padding of half of it."""

    channels: int
    side: int
    kernel: int
    stride: int = 1
    dims: int = 2

    @property
    def window(self) -> tuple[int, int]:
        return self.stride, self.kernel // 2

    def weight(self, options: Options) -> Tensor:
        shape = (self.channels, 1, *[self.kernel] * self.dims)
        return options.random(*shape, seed=2) / self.kernel ** (self.dims / 2)

    def ours(self, x: Tensor, weight: Tensor) -> Tensor:
        return _OURS[self.dims](x, weight, None, *self.window)

    def eager(self, x: Tensor, weight: Tensor) -> Tensor:
        return _EAGER[self.dims](x, weight, None, *self.window, 1, self.channels)

    @property
    def name(self) -> str:
        return f"{self.dims}-d {self.kernel}/{self.stride}"

    def tensors(self, pass_name: str) -> float:
        """Memory read and written at least, in sizes of the input."""
        out = (1 / self.stride) ** self.dims
        forward, backward = 1 + out, 2 + out
        return {"forward": forward, "forward+backward": forward + backward}.get(pass_name, backward)


def check(function: Function, layer: Layer, x: Tensor, weight: Tensor, gradient: Tensor) -> None:
    """Raise NotTheJob unless output and gradients are eager torch's of float64, to within rounding
    of the dtype, and float32's of the sums."""
    wide = [t.detach().cpu().double() for t in (x, weight)]
    exact = first_call(layer.eager, wide, gradient.cpu().double())
    got = first_call(function, [x, weight], gradient)
    # Sums of products, each term by its size.
    most = first_call(layer.eager, [t.abs() for t in wide], gradient.cpu().double().abs())
    for name, a, want, bound in zip(("output", "gradient", "gradient of the weight"), got, exact,
                                    most, strict=True):  # fmt: skip
        rtol = GRADIENT[x.dtype].rtol
        agrees(name, a, want, Tolerance(rtol=rtol, atol=rtol * bound.to(exact[0].device)))


def contest(
    options: Options, layer: Layer, batch: int, layout: str, gate_batch: int = 0
) -> Contest:
    """The layer on so many images; the gate looks at `gate_batch` of them, 0: at all."""
    x = options.random(batch, layer.channels, *[layer.side] * layer.dims, layout=layout)
    weight = layer.weight(options)
    gradient = options.random(*layer.eager(x, weight).shape, seed=1, layout=layout)
    few = batch if options.compiled else gate_batch or batch  # it compiles for one size

    def gate(who: str, function: Function) -> None:
        check(function, layer, x[:few], weight, gradient[:few])

    call = partial(call_of, tensors=[x, weight], gradient=gradient, trains=True)
    functions = duel(options, layer.ours, layer.eager)
    return Contest(functions, gate, call, lambda part: layer.tensors(part) * x.nbytes, x)


# --- the command `bench` ---

LAYERS = (Layer(240, 28, 5), Layer(96, 56, 7))  # EfficientNet-B0, ConvNeXt-T
SMALL = Layer(240, 14, 5)
PASSES = ("forward", "forward+backward")
GATE_BATCH = 2


def entries(options: Options) -> Iterator[Entry]:
    """The rows of the family."""
    for layer in (SMALL,) if options.quick else LAYERS:
        image = layer.channels * layer.side**2
        batch = max(1, options.elements(8 * image, 64 * image, 2 * image) // image)
        size = shape_text((batch, layer.channels, layer.side, layer.side))
        name = f"depthwise {layer.kernel}x{layer.kernel}"
        for layout in LAYOUTS:
            for part in PASSES[options.quick :]:
                make = partial(match_of, part, contest, options, layer, batch, layout, GATE_BATCH)
                yield Entry("depthwise", name, part, size, make, layout)
