"""The source of one tensor: shapes, values and memory of every ugly kind."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

DTYPES = ("float64", "float32", "bfloat16", "float16")
OTHER_DTYPES = {
    "int64": "torch.randint(-3, 4, {shape})",
    "uint8": "torch.randint(0, 9, {shape}, dtype=torch.uint8)",
    "bool": "torch.randint(0, 2, {shape}).bool()",
    "complex64": "torch.randn({shape}, dtype=torch.complex64)",
}


class Pick:
    """Draws one of some choices; shrinking prefers the first."""

    def __init__(self, draw: Callable[[Any], Any]) -> None:
        self._draw = draw

    def __call__(self, *choices: Any) -> Any:
        return self._draw(st.sampled_from(choices))

    def chance(self, one_in: int) -> bool:
        """Whether something rare happens."""
        return bool(self(*[False] * (one_in - 1), True))

    def some(self, *choices: Any) -> list[Any]:
        """Any number of them, in order."""
        return [choice for choice in choices if self(True, False)]


def shape(
    pick: Pick, dims: tuple[int, ...] = (1, 2, 3, 4, 0, 5), sizes: Any = None
) -> tuple[int, ...]:
    """A shape of up to some thousand elements; now and then of none."""
    count = pick(*dims)
    sizes = sizes or ((2, 1, 3, 17, 64, 513) if count < 3 else (2, 1, 3, 4, 7))
    lengths = [pick(*sizes) for _ in range(count)]
    if lengths and pick.chance(20):
        lengths[pick(*range(count))] = 0
    return tuple(lengths)


# How values come about. "kinks" are exactly those where activations bend.
VALUES = {
    "normal": "3 * torch.randn({shape}, dtype=torch.float64)",
    "kinks": "torch.randint(-14, 15, {shape}) / 2",
    "small": "torch.randn({shape}, dtype=torch.float64) * 1e-3",
    "large": "80 * torch.randn({shape}, dtype=torch.float64)",
}


def in_memory(
    pick: Pick, shape: tuple[int, ...], values: str, dtype: str, repeats: bool = True
) -> str:
    """A tensor of this shape and dtype with the values (a text with {shape}), laid out somehow.

    Args:
        repeats: whether one element may stand at several places, as in an expanded tensor.
    """
    dims = len(shape)

    def made(*sizes: int) -> str:
        return f"({values.format(shape=list(sizes))}).to(torch.{dtype})"

    kinds = ["plain", "offset", "negative"]
    if dims:
        kinds += ["sliced", "flipped", "narrowed"]
    if repeats:
        kinds += ["overlapping"] + ["expanded"] * (dims > 0)
    if dims > 1:
        kinds += ["transposed", "transposed", "permuted"]
    if dims in (4, 5):
        kinds += ["channels_last"] * 3
    kind = pick("plain", *kinds)
    if kind == "offset":
        skipped = pick(1, 3, 4)
        return f"{made(skipped + math.prod(shape))}[{skipped}:].view({list(shape)})"
    if kind == "overlapping" and math.prod(shape):
        strides = [pick(1, 2, 0) for _ in shape]
        length = 1 + sum((n - 1) * s for n, s in zip(shape, strides))
        return f"{made(length)}.as_strided({list(shape)}, {strides})"
    if kind == "negative" and dtype in ("float32", "float64"):
        return f"torch.complex(*[{made(*shape)}] * 2).conj().imag"
    if kind == "sliced":
        return f"{made(*shape[:-1], 2 * shape[-1] + 1)}[..., 1::2]"
    if kind == "flipped":
        return f"{made(*shape)}.flip({pick(*range(dims))})"
    if kind == "expanded":
        dim = pick(*range(dims))
        return f"{made(*shape[:dim], 1, *shape[dim + 1 :])}.expand({list(shape)})"
    if kind == "narrowed":
        dim = pick(*range(dims))
        whole = made(*shape[:dim], shape[dim] + 2, *shape[dim + 1 :])
        return f"{whole}.narrow({dim}, 1, {shape[dim]})"
    if kind in ("transposed", "permuted"):
        if kind == "transposed":
            one, two = pick((0, dims - 1), (0, 1), (dims - 2, dims - 1))
            order = list(range(dims))
            order[one], order[two] = two, one
        else:
            order = [*range(1, dims), 0]
        sizes = [0] * dims
        for place, dim in enumerate(order):
            sizes[dim] = shape[place]
        return f"{made(*sizes)}.permute({order})"
    if kind == "channels_last":
        suffix = "_3d" if dims == 5 else ""
        return f"{made(*shape)}.to(memory_format=torch.channels_last{suffix})"
    return made(*shape)


def gradient(pick: Pick) -> str:
    """Gradient of an output y, in any memory, as an expression."""
    ramp = "torch.linspace(-1, 2, y.numel(), dtype=torch.float64)"
    return str(
        pick(
            f"{ramp}.reshape(y.shape)",
            f"{ramp}.reshape(y.shape)",
            "torch.full([1] * y.dim(), 0.75).expand(y.shape)",
            f"{ramp}.reshape(y.shape[::-1]).permute([*range(y.dim())][::-1])",
            "torch.randn(y.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))",
        )
    )
