"""The source of a program that compares two functions of tensors: ours, and plain torch's in
float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import strategies as st

from . import compare
from .tensors import DTYPES, OTHER_DTYPES, VALUES, Pick, gradient, in_memory


@dataclass
class Context:
    """Requirements of a call before it is drawn."""

    mode: str
    dtype: str

    @property
    def smooth(self) -> bool:
        """Whether values stay away from kinks, where derivatives of derivatives do not exist."""
        return self.mode in ("second", "jvp")

    def random(
        self, pick: Pick, shape: tuple[int, ...], values: str = "normal", repeats: bool = True
    ) -> str:
        """The source of a tensor of this shape; `repeats` as in `in_memory`."""
        if self.mode == "other dtype":
            return OTHER_DTYPES[self.dtype].format(shape=list(shape))
        return in_memory(pick, shape, VALUES[values], self.dtype, repeats)


@dataclass
class Call:
    """A call as two expressions of the same tensors."""

    ours: str
    plain: str
    tensors: dict[str, str]  # name -> source
    trained: tuple[str, ...]  # which may need gradients
    moved: tuple[str, ...] = ()  # which the call changes, running statistics
    setup: tuple[str, ...] = ()
    inplace: str = ""  # as `ours`, which writes over x
    tolerance: Callable[[str, float], float] = compare.chained
    forward: float = 1.0  # factors of the tolerance
    backward: float = 1.0


@dataclass
class Generator:
    """Calls of one function, and what may be done with them."""

    make: Callable[[Pick, Context], Call]
    modes: tuple[str, ...]
    dtypes: tuple[str, ...] = DTYPES
    precise: tuple[str, ...] = ("float64",)  # for derivatives of functions of derivatives

    def programs(self) -> st.SearchStrategy[str]:
        @st.composite
        def program(draw: Callable[..., object]) -> str:
            pick = Pick(draw)
            mode = pick("gradient", "gradient", *self.modes)
            if mode == "other dtype":
                dtype = pick(*OTHER_DTYPES)
            elif mode in ("second", "batched", "jvp", "vmap", "recompute"):
                dtype = pick(*self.precise)
            else:
                dtype = pick(*self.dtypes)
            call = self.make(pick, Context(mode, dtype))
            return source(pick, call, mode, dtype)

        return program()


EVERY = ("gradient", "second", "checkpoint", "recompute", "batched", "vmap", "jvp", "other dtype")
STRAIGHT = (*EVERY, "special")
# No other dtype: integers times floats are floats, of which torch's operators each think their own.
CHAINED = EVERY[:-1]

_HEAD = """\
import torch
import torch.nn.functional as N
import fusedtrain.functional as F
"""


def source(pick: Pick, call: Call, mode: str, dtype: str) -> str:
    names = ", ".join(call.tensors)
    lines = [_HEAD.rstrip(), *call.setup, "", f"torch.manual_seed({pick(*range(20))})"]
    lines += [f"{name} = {made}" for name, made in call.tensors.items()]
    ours, plain = call.ours, call.plain
    if mode == "in place":
        ours, plain = call.inplace, f"x.copy_((lambda x: {plain})(x.clone()))"
    lines += ["", f"def ours({names}):", f"    return {ours}", ""]
    lines += [f"def plain({names}):", f"    return {plain}", ""]
    wide = ", ".join(f"{name}.double()" for name in call.tensors)
    limit = call.tolerance(dtype, call.forward) if dtype in DTYPES else 0.0
    backward = call.tolerance(dtype, call.backward) if dtype in DTYPES else 0.0
    if mode == "other dtype":
        lines += _outcomes(names)
    elif mode in ("vmap", "jvp"):
        lines += _transformed(mode, names, wide, max(limit, backward) * 8)
    else:
        lines += _run(pick, call, mode, dtype)
        arguments = f"{names}" if mode == "special" else wide
        lines += [f"want = run(plain, {arguments})", f"results = run(ours, {names})"]
        factor = {"recompute": 8, "second": 64, "special": 4}.get(mode, 1)
        lines += _comparison(limit * factor, backward * factor)
    return "\n".join(lines) + "\n"


def _comparison(forward: float, backward: float) -> list[str]:
    rest = "" if forward == backward else f" if i == 0 else {backward:.2g}"
    return [
        "for i, (a, b) in enumerate(zip(results, want, strict=True)):",
        f"    limit = {forward:.2g}{rest}",
        "    a, b = a.double(), b.double()",
        "    torch.testing.assert_close(a, b, rtol=limit, atol=limit, equal_nan=True)",
    ]


# Parts of a tensor for an in-place call; the last two only where the tensor has dimensions.
_PARTS = (
    "whole",
    "whole[...]",
    "whole.transpose(0, -1)",
    "whole.unsqueeze(0)",
    "whole[:1]",
    "whole[..., ::2]",
)


def _run(pick: Pick, call: Call, mode: str, dtype: str) -> list[str]:
    names = ", ".join(call.tensors)
    trained = [name for name in call.trained if pick(True, True, False)]
    if "nan" in call.tensors["x"]:
        trained = []  # a slope at nan or infinity is nobody's promise
    if mode not in ("gradient", "special") and not trained:
        trained = [call.trained[0]]
    if mode == "in place" and "x" not in trained:
        trained = ["x", *trained]
    lines = [f"def run(f, {names}):"]
    lines += [f"    {name} = {name}.detach().requires_grad_()" for name in trained]
    wrt = f"[{', '.join(trained)}]"
    if mode == "in place":
        part = pick(*_PARTS[: None if "[]" not in call.tensors["x"] else -2])
        rest = ", ".join(name for name in call.tensors if name != "x")
        lines += [
            "    whole = x * 1",
            f"    f({', '.join(filter(None, [part, rest]))})",
            "    y = whole",
        ]
    elif mode == "recompute":
        lines += ["    import fusedtrain", "    with fusedtrain.recompute():"]
        lines += [f"        y = f({names}).square()"]
    else:
        checkpointed = f"torch.utils.checkpoint.checkpoint(f, {names}, use_reentrant=False)"
        lines.append(f"    y = {checkpointed if mode == 'checkpoint' else f'f({names})'}")
    if mode in ("gradient", "checkpoint", "in place"):
        lines.append(f"    assert y.dtype is {next(iter(call.tensors))}.dtype")
    results = ["y.detach()", *call.moved]
    if trained:
        lines.append(f"    grad = ({gradient(pick)}).to(torch.{dtype}).to(y.dtype)")
    if trained and mode == "second":
        lines += [
            "    grad.requires_grad_()",
            f"    first = torch.autograd.grad(y, {wrt}, grad, create_graph=True)",
            "    ramps = [torch.linspace(0.5, 1.5, t.numel()).reshape(t.shape) for t in first]",
            "    total = sum((t * ramp.to(t)).sum() for t, ramp in zip(first, ramps))",
            f"    others = [grad, {', '.join(trained)}]",
            "    second = torch.autograd.grad(total, others, materialize_grads=True)",
        ]
        results.append("*first, *second")
    elif trained and mode == "batched":
        lines.append("    grads = torch.stack([grad, 0.5 - grad])")
        results.append(f"*torch.autograd.grad(y, {wrt}, grads, is_grads_batched=True)")
    elif trained:
        results.append(f"*torch.autograd.grad(y, {wrt}, grad)")
    return [*lines, f"    return [{', '.join(results)}]", ""]


def _transformed(mode: str, names: str, wide: str, limit: float) -> list[str]:
    lines = [f"tensors, wide = [{names}], [{wide}]"]
    if mode == "vmap":
        lines += [
            "tensors, wide = ([torch.stack([t, 0.5 * t]) for t in s] for s in (tensors, wide))",
            "want = torch.vmap(plain)(*wide)  # not all that torch computes can it batch",
            "results = torch.vmap(ours)(*tensors)",
            "want = torch.stack([plain(*some) for some in zip(*wide, strict=True)])",
            "results, want = [results], [want]",
        ]
    else:
        lines += [
            "tensors, wide = ([t.clone() for t in some] for some in (tensors, wide))",
            "tangents, others = ([t.cos() for t in some] for some in (tensors, wide))",
            "want = torch.func.jvp(plain, tuple(wide), tuple(others))",
            "results = torch.func.jvp(ours, tuple(tensors), tuple(tangents))",
        ]
    return lines + _comparison(limit, limit)


def _outcomes(names: str) -> list[str]:
    return [
        "def outcome(f):",
        "    try:",
        f"        return f({names})",
        "    except Exception as error:",
        "        return type(error)",
        "",
        "results, want = outcome(ours), outcome(plain)",
        "assert isinstance(results, type) == isinstance(want, type), (results, want)",
        "if isinstance(want, type):",
        "    assert results is want, (results, want)",
        "else:",
        "    torch.testing.assert_close(results, want, equal_nan=True)",
    ]
