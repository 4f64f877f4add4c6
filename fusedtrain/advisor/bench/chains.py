"""Chains of pointwise operators, norms of rows: fusedtrain's call, eager torch's, and the gate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as T
from torch import Tensor

from ... import functional as F
from ..._text import shape_text
from ._match import COMPILE, LAYOUTS, Contest, Entry, Options, call_of, duel, match_of
from .clock import Function
from .gate import CHAIN, NotTheJob, agrees, first_call

IMAGE = 96 * 56 * 56
P = 0.1  # of dropout
DROPPED = 2**14  # elements that tell the rate; of small tensors many calls are made


@dataclass(frozen=True)
class Chain:
    """A chain of pointwise operators. `shapes`: of its tensors, for so many elements of the first;
    the last `constants` of them get no gradient. `tensors`: how many of the first one's size must
    be read and written, forward, and backward more."""

    ours: Function
    eager: Function
    shapes: Callable[[int], tuple[tuple[int, ...], ...]]
    tensors: tuple[float, float]
    constants: int = 0
    image: bool = False  # [N, C, H, W], in both layouts
    undropped: Function | None = None  # of a chain that drops elements at random
    adds: bool = False  # and then adds its last tensor

    def shapes_for(self, numel: int) -> tuple[tuple[int, ...], ...]:
        """Shapes with at least one image or row."""
        return self.shapes(max(numel, IMAGE if self.image else 4096))


def _tokens(numel: int) -> tuple[int, ...]:
    return (numel // 4096, 4096)


def _images(numel: int) -> tuple[int, ...]:
    return (numel // (96 * 56 * 56), 96, 56, 56)


def _packed(function: Callable[[Tensor], Tensor]) -> Function:
    def run(x: Tensor) -> Tensor:
        gate, value = x.chunk(2, -1)
        return function(gate) * value

    return run


def _patches(numel: int) -> tuple[int, ...]:
    return (max(1, numel // (196 * 768)), 196, 768)


def _residual(r: Tensor, x: Tensor, gamma: Tensor, keep: Tensor) -> Tensor:
    return r + x * gamma * keep.view(-1, 1, 1)


def _first(results: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    return results if isinstance(results, Tensor) else results[0]


def _norm_of_channels(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    y = T.layer_norm(x.movedim(1, -1), [96], w, b, 1e-6).movedim(-1, 1)
    return y.contiguous() if x.is_contiguous() else y


# Packed: reads the two halves and writes one; backward reads them and the gradient, writes both.
CHAINS = {
    "swiglu": Chain(
        F.swiglu, _packed(T.silu), lambda n: (_tokens(n),), (1.5, 2.5)
    ),
    "geglu": Chain(
        F.geglu, _packed(T.gelu), lambda n: (_tokens(n),), (1.5, 2.5)
    ),
    "bias_gelu": Chain(
        lambda x, b: F.bias_act_dropout(x, b, "gelu"),
        lambda x, b: T.gelu(x + b),
        lambda n: (_tokens(n), (4096,)),
        (2, 3),
    ),
    "bias_gelu_dropout": Chain(
        lambda x, b: F.bias_act_dropout(x, b, "gelu", P),
        lambda x, b: T.dropout(T.gelu(x + b), P),
        lambda n: (_tokens(n), (4096,)),
        (2, 3),
        undropped=lambda x, b: T.gelu(x + b),
    ),
    "dropout": Chain(
        lambda x: F.dropout(x, P), lambda x: T.dropout(x, P), lambda n: (_tokens(n),), (2, 2),
        undropped=torch.clone,
    ),
    "dropout_add": Chain(
        lambda x, r: F.dropout_add(x, r, P),
        lambda x, r: r + T.dropout(x, P),
        lambda n: (_tokens(n), _tokens(n)),
        (3, 2),
        undropped=lambda x, r: x,
        adds=True,
    ),
    "se_gate": Chain(
        lambda x, s: F.gated(x, s, "sigmoid"),
        lambda x, s: x * s.sigmoid(),
        lambda n: (_images(n), (*_images(n)[:2], 1, 1)),
        (2, 3),
        image=True,
    ),
    "layer_scale_drop_path_add": Chain(
        F.residual_add,
        _residual,
        lambda n: (_patches(n), _patches(n), (768,), _patches(n)[:1]),
        (3, 3),
        constants=1,
    ),
    "stylegan_lrelu": Chain(
        lambda x, b: F.bias_act(x, b, dim=1, act="lrelu", clamp=256.0),
        lambda x, b: (T.leaky_relu(x + b.view(1, -1, 1, 1), 0.2) * 2**0.5).clamp(-256, 256),
        lambda n: (_images(n), (96,)),
        (2, 3),
        image=True,
    ),
    "rms_norm": Chain(
        lambda x, w: _first(F.rms_norm(x, [4096], w)),
        lambda x, w: T.rms_norm(x, [4096], w),
        lambda n: (_tokens(n), (4096,)),
        (2, 3),
    ),
    "add_layer_norm": Chain(
        lambda x, r, w, b: _first(F.layer_norm(x, [4096], w, b, residual=r)),
        lambda x, r, w, b: T.layer_norm(x + r, [4096], w, b),
        lambda n: (_tokens(n), _tokens(n), (4096,), (4096,)),
        (4, 3),
    ),
    "layer_norm_channels": Chain(
        F.layer_norm_channels,
        _norm_of_channels,
        lambda n: (_images(n), (96,), (96,)),
        (2, 3),
        # torch 2.13 adds up their gradients in bfloat16: 4.5 % off for an image, ours 0.2 %
        constants=2,
        image=True,
    ),
    "rms_norm_channels": Chain(
        F.rms_norm_channels,
        lambda x, w: x * (x.pow(2).mean(1, True) + 1e-6).rsqrt() * w.view(1, -1, 1, 1),
        lambda n: (_images(n), (96,)),
        (2, 3),
        constants=1,
        image=True,
    ),
}  # fmt: skip


def check(chain: Chain, function: Function, tensors: tuple[Tensor, ...], grad: Tensor) -> None:
    """Raise NotTheJob unless forward and gradients are those of eager torch in float64."""
    wide = tuple(t.double() for t in tensors)
    if chain.undropped is not None:
        _check_dropping(chain, chain.undropped, function, tensors, grad)
        return
    truth = first_call(chain.eager, wide, grad.double(), constants=chain.constants)
    _compare(first_call(function, tensors, grad, constants=chain.constants), truth, grad.dtype)


def _compare(results: Sequence[Tensor], truth: Sequence[Tensor], dtype: torch.dtype) -> None:
    for number, (actual, expected) in enumerate(zip(results, truth, strict=True)):
        what = f"gradient {number}" if number else "output"
        agrees(what, actual, expected, CHAIN[dtype])


def _check_dropping(
    chain: Chain, undropped: Function, function: Function, tensors: Sequence[Tensor], grad: Tensor
) -> None:
    """Checks whatever mask is drawn: the rate, and that forward and backward have the same one."""
    wide = tuple(t.double() for t in tensors)
    whole = undropped(*wide)
    # Where it is 0, an output of 0 does not tell whether it was dropped.
    grad = torch.where(whole == 0, 0, grad)
    calls = max(1, DROPPED // grad.numel())
    rate = 0.0
    for _ in range(calls):
        results = first_call(function, tensors, grad)
        # A sum may be the residual by rounding: there the gradient tells.
        kept = (results[chain.adds] != 0) | (whole == 0)
        rate += (1 - float(kept.double().mean())) / calls
        mask = kept.double() / (1 - P)

        def masked(*arguments: Tensor, mask: Tensor = mask) -> Tensor:
            left = undropped(*arguments) * mask
            return left + arguments[-1] if chain.adds else left

        if calls > 1 or abs(rate - P) <= 0.01:
            _compare(results, first_call(masked, wide, grad.double()), grad.dtype)
    if abs(rate - P) > 0.01:
        raise NotTheJob(f"drops {rate:.3f} of the elements, not {P}")


# --- the command `bench` ---

PASSES = ("forward", "forward+backward")
GATE = 2**19  # elements that the gate looks at


def entries(options: Options) -> Iterator[Entry]:
    """The rows of the family."""
    numel = options.elements(2**22, 2**26, 2**16)
    for op in ("swiglu", "bias_gelu") if options.quick else CHAINS:
        shape = CHAINS[op].shapes_for(numel)[0]
        for layout in LAYOUTS if CHAINS[op].image else ("",):
            for part in PASSES[options.quick :]:
                make = partial(match_of, part, contest, options, op, numel, layout)
                yield Entry("chains", op, part, shape_text(shape), make, layout)


def contest(options: Options, op: str, numel: int, layout: str) -> Contest:
    """The chain on so many elements of its first tensor."""
    return contest_of(options, CHAINS[op], numel, layout)


def contest_of(
    options: Options, chain: Chain, numel: int, layout: str, *, trains: bool = False
) -> Contest:
    """The same for any chain; see `call_of` for `trains`."""
    kind, shapes = layout or "contiguous", chain.shapes_for(numel)
    tensors = tuple(options.random(*s, seed=n, layout=kind) for n, s in enumerate(shapes))
    output = chain.eager(*tensors)
    gradient = options.random(*output.shape, seed=len(shapes), layout=kind)
    batch, trained = len(tensors[0]), len(tensors) - chain.constants
    few = max(1, GATE // (tensors[0].numel() // batch))
    # Biases are not split, even if they are as many as the rows. Stochastic depth's numbers are.
    part_of = tuple(
        t[:few] if len(t) == batch and (t.dim() > 1 or i >= trained) else t
        for i, t in enumerate(tensors)
    )

    def gate(who: str, function: Function) -> None:
        whole = who == COMPILE  # which compiles for one size
        check(chain, function, tensors if whole else part_of, gradient if whole else gradient[:few])

    def moved(part: str) -> float:
        return tensors[0].nbytes * sum(chain.tensors[: 1 if part == "forward" else 2])

    call = partial(
        call_of, tensors=tensors, gradient=gradient, constants=chain.constants, trains=trains
    )
    return Contest(duel(options, chain.ours, chain.eager), gate, call, moved, tensors[0])
