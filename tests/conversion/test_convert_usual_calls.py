"""A forward that looks at its optional arguments is rewritten for calls that leave them out."""

from __future__ import annotations

import copy
import functools
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedtrain
from fusedtrain._graph.forward import rewritten_of


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act, self.project = nn.GroupNorm(2, 4), nn.SiLU(), nn.Linear(4, 4)

    def body(self, x: Tensor) -> Tensor:
        return self.act(self.norm(x))


class Diffusers(Block):
    """The arguments of ResnetBlock2D."""

    def forward(self, x: Tensor, temb: Any, *args: Any, **kwargs: Any) -> Tensor:
        if len(args) > 0 or kwargs.get("scale") is not None:
            x = x * 2
        if temb is not None:
            temb = self.project(self.act(temb))[:, :, None, None]
        x = x if temb is None else x + temb
        return self.body(x)


class Default(Block):
    def forward(self, x: Tensor, mask: Any = None, factor: float = 1.5, mode: str = "a") -> Tensor:
        if mask is not None:
            x = x * mask
        if mode == "a":
            x = x * factor
        return self.body(x)


class ByTraining(Block):
    def forward(self, x: Tensor, mask: Any = None) -> Tensor:
        if self.training:
            x = x.contiguous() * 2
        return self.body(x if mask is None else x * mask)


def masked(x: Tensor, mask: Any) -> Tensor:
    return x if mask is None else x * 2


class AskedByMethod(Block):
    """A method asks for a required argument, so the code of the forward does not show it."""

    def forward(self, x: Tensor, mask: Any) -> Tensor:
        return self.masked(self.body(x), mask)

    def masked(self, x: Tensor, mask: Any) -> Tensor:
        return masked(x, mask)


class AskedInClosure(Block):
    def forward(self, x: Tensor, mask: Any, extra: Any = None) -> Tensor:
        def masked(y: Tensor) -> Tensor:
            return y if mask is None else y * mask

        return masked(self.body(x if extra is None else x + extra))


class AskedByParent(AskedByMethod):
    def forward(self, x: Tensor, mask: Any) -> Tensor:
        return super().forward(x, mask)


class AskedForTheFirst(Block):
    def forward(self, mask: Any, x: Tensor) -> Tensor:
        return masked(self.body(x), mask)


class NamesOfOurs(Block):
    """Our functions on the way to a forward have arguments of these names."""

    def forward(self, x: Tensor, module: Any = None, function: Any = None) -> Tensor:
        x = x if module is None else x * module
        return self.body(x if function is None else x * function)


class SignedZero(Block):
    def forward(self, x: Tensor, shift: float = 0.0) -> Tensor:
        return self.body(x) * math.copysign(1.0, shift)


class CodeInText(Block):
    def forward(self, x: Tensor, mode: str = "\ndef forward('\"") -> Tensor:
        return self.body(x) * len(mode)


X, T = torch.randn(2, 4, 5, 5), torch.randn(2, 4)
# Usual calls, then others.
CALLS: dict[type[Block], tuple[list[tuple[tuple[Any, ...], dict[str, Any]]], ...]] = {
    Diffusers: ([((X, T), {}), ((X,), {"temb": T})],
                [((X, None), {}), ((X, T, 1), {}), ((X, T), {"scale": 2.0})]),
    Default: ([((X,), {}), ((), {"x": X}), ((X, None, 1.5), {"mode": "a"})],
              [((X, X), {}), ((X,), {"mode": "b"}), ((X,), {"factor": 2.0})]),
    ByTraining: ([((X,), {})], [((X, X), {}), ((X,), {"mask": X})]),
    AskedByMethod: ([((X, X), {})], [((X, None), {})]),
    AskedInClosure: ([((X, X), {})], [((X, None), {}), ((X, X, X), {})]),
    AskedByParent: ([((X, X), {})], [((X, None), {})]),
    AskedForTheFirst: ([((X, X), {})], [((None, X), {})]),
    NamesOfOurs: ([((X,), {"module": None})], [((X,), {"module": X}), ((X,), {"function": X})]),
    SignedZero: ([((X,), {}), ((X, 0.0), {})], [((X, -0.0), {}), ((X, 1.0), {})]),
    CodeInText: ([((X,), {})], [((X, "a"), {})]),
}  # fmt: skip


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("training", [True, False])
def test_every_call_gives_what_the_stock_forward_gives(kind: type[Block], training: bool) -> None:
    stock = kind().train(training)
    model = copy.deepcopy(stock)
    usual, other = CALLS[kind]
    report = fusedtrain.convert(model, usual[0][0])
    assert [unit.parts for unit in report.group_norms] == [("SiLU",)]
    for twin in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for args, kwargs in (*usual, *other):
            torch.testing.assert_close(twin(*args, **kwargs), stock(*args, **kwargs))
    rewritten = rewritten_of(model)
    assert rewritten is not None
    for calls, declined in ((usual, False), (other, True)):
        for args, kwargs in calls:
            value = rewritten.function(model, *args, **kwargs)
            assert (value is NotImplemented) is declined
    with pytest.raises(TypeError, match="forward"):
        model()
    assert fusedtrain.revert(model) >= 1


class MayBeNone(Block):
    """The result of a module of the user's may be None, which a stand-in is not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Nothing()

    def forward(self, x: Tensor, mask: Any = None) -> Tensor:
        y = self.inner(x)
        x = x if y is None else y
        return self.body(x if mask is None else x * mask)


class Nothing(nn.Module):
    def forward(self, x: Tensor) -> None:
        return None


class OnlyByName(Block):
    def forward(self, x: Tensor, *, mask: Any = None) -> Tensor:
        return self.body(x if mask is None else x * mask)


class Shape(Block):
    """A default that is no plain value."""

    def forward(self, x: Tensor, sizes: Any = (1, 2)) -> Tensor:
        return self.body(x if sizes == (1, 2) else x * 2)


def tells_defaults(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        y = function(self, *args, **kwargs)
        return y * 2 if "mask" in kwargs else y

    return wrapper


class Decorated(Block):
    @tells_defaults
    def forward(self, x: Tensor, mask: Any = None) -> Tensor:
        return self.body(x if mask is None else x * mask)


class NameOfABuiltin(Block):
    """The condition of usual calls could not ask for types."""

    def forward(self, x: Tensor, type: str = "a") -> Tensor:
        return self.body(x) if type == "a" else x


class OwnName(Block):
    def forward(self, x: Tensor, _usual: Any = None) -> Tensor:
        return self.body(x) if _usual is None else x


class AsksForType(Block):
    """A required argument may be something else than a tensor."""

    def forward(self, x: Any) -> Tensor:
        return self.body(x["image"] if isinstance(x, dict) else x)


@pytest.mark.parametrize(
    "kind", [MayBeNone, OnlyByName, Shape, Decorated, NameOfABuiltin, OwnName, AsksForType]
)
def test_forwards_that_stay(kind: type[Block]) -> None:
    model = kind()
    report = fusedtrain.convert(model, X)
    assert not report.group_norms
    assert rewritten_of(model) is None


class InPlace(Block):
    def forward(self, x: Tensor, shortcut: Tensor) -> Tensor:
        shortcut += x
        return self.body(x) + shortcut


def test_operators_with_none_are_no_answer() -> None:
    model = InPlace()
    fusedtrain.convert(model, (X, X.clone()))
    rewritten = rewritten_of(model)
    assert rewritten is not None
    assert "NotImplemented" not in rewritten.source
