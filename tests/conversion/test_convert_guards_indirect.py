"""Guards of what a forward finds in other ways than by a name in its own code: globals, variables
of enclosing functions and attributes of classes that only code reads which it calls on some way.
Each row changes one after `convert`, and the model has to follow.
"""

from __future__ import annotations

import copy
import cProfile
import functools
import logging
import pickle
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fusedtrain
from fusedtrain._graph.forward import rewritten_of

pytestmark = pytest.mark.usefixtures("one_thread")
_HERE = sys.modules[__name__]
GAIN = 0.5
ANOTHER = 2.0


def _of_gain(x: Tensor) -> Tensor:
    return x * GAIN


def _of_another(x: Tensor) -> Tensor:
    return x * ANOTHER


def _going(module: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = module.go(x)
    return y


def _number() -> float:
    return GAIN


def _scaled_by(gain: float) -> tuple[Callable[[Tensor], Tensor], Callable[[float], None]]:
    def scaled(x: Tensor) -> Tensor:
        return x * gain

    def change(value: float) -> None:
        nonlocal gain
        gain = value

    return scaled, change


def _wrapped(options: dict[str, float]) -> Any:
    def around(function: Any) -> Any:
        @functools.wraps(function)
        def wrapper(self: Any, x: Tensor) -> Any:
            return function(self, x) * options["gain"]

        return wrapper

    return around


class Caller:
    """An object with `__call__`, numbers of its own and of its class."""

    wide = 0.5

    def __init__(self) -> None:
        self.narrow = 0.5

    def __call__(self, x: Tensor) -> Tensor:
        return x * GAIN * self.narrow * self.wide


class Options:
    scale = 0.5

    def __init__(self, inner: Options | None = None) -> None:
        self.inner = inner

    @property
    def gain(self) -> float:
        return GAIN


class Special(Options):
    pass


def _scale_of(options: Options) -> float:
    return options.scale


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


settings = types.ModuleType("settings_of_indirect_guards")
settings.GAIN = 0.5
settings.Inner = Options
sys.modules[settings.__name__] = settings
package = types.ModuleType("package_of_indirect_guards")
package.settings = settings
TABLE: dict[str, Any] = {"act": _of_gain}
OPTIONS, SPECIAL = Options(Options()), Special()
scaled, change_gain = _scaled_by(0.5)
HELD = {"scaled": scaled}
DECORATED = {"gain": 0.5}
caller = Caller()


class Unit(nn.Module):
    """A norm and an activation to fuse, and whatever a subclass does after them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.SiLU()
        self.caller, self.options, self.table = Caller(), Options(), {"go": _of_gain}

    def go(self, x: Tensor) -> Tensor:
        return x * 0.5

    def fused(self, x: Tensor) -> Tensor:
        y: Tensor = self.act(self.norm(self.conv(x)))
        return y


class Base(Unit):
    def forward(self, x: Tensor) -> Tensor:
        return self.fused(x) * GAIN

    def go(self, x: Tensor) -> Tensor:
        return x * GAIN


class Between(Unit):
    pass


class Lower(Between):
    def forward(self, x: Tensor) -> Tensor:
        return super().go(self.fused(x)) * 2


class Super(Base):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Decorated(Base):
    @_wrapped(DECORATED)
    def forward(self, x: Tensor) -> Tensor:
        return self.fused(x)


class Masked(Base):
    def __init__(self) -> None:
        super().__init__()
        self.one = self.other = 0.5

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.fused(x) * (self.one if mask is None else self.other)


class Plain(Unit):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.fused(x)) * 2


SLOPE = 1.0
_logger = logging.getLogger(__name__)


class Logging(Base):
    def forward(self, x: Tensor) -> Tensor:
        _logger.debug("%s", type(x))
        return self.fused(x)


class Swish(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x * SLOPE)


class Named(Base):
    def forward(self, x: Tensor) -> Tensor:
        return Base.forward(self, x) * 2


def row(work: Callable[[Any, Tensor], Tensor], base: type = Base) -> type[nn.Module]:
    """A class whose forward does that after a fused part; pickle finds it by its name."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return work(self, self.fused(x))

    name = f"Row{len(ROWS)}"
    forward.__qualname__ = f"{name}.forward"
    made = type(name, (base,), {"forward": forward, "__module__": __name__})
    ROWS.append(made)
    setattr(_HERE, name, made)
    return made


ROWS: list[type] = []


def _imports(self: Any, x: Tensor) -> Tensor:
    from settings_of_indirect_guards import GAIN as gain

    return x * gain


def _imports_whole(self: Any, x: Tensor) -> Tensor:
    import settings_of_indirect_guards

    return x * settings_of_indirect_guards.GAIN


def _reads_module(module: Any, x: Tensor) -> Tensor:
    y: Tensor = x * module.GAIN
    return y


def _makes_closure(self: Any, x: Tensor) -> Tensor:
    def by(y: Tensor) -> Tensor:
        return y * GAIN + x

    return by(x)


# The way, the class; what changes, its name, and the value.
WAYS: dict[str, tuple[type[nn.Module], Any, Any, Any]] = {
    "super().forward": (Super, _HERE, "GAIN", 3.0),
    "super().forward itself": (Super, Base, "forward", lambda self, x: self.fused(x) * 3),
    "Base.forward": (Named, _HERE, "GAIN", 3.0),
    "Base.forward itself": (Named, Base, "forward", lambda self, x: self.fused(x) * 3),
    "super(): a class between": (Lower, Between, "go", lambda self, x: x * 3),
    "a helper that is given an object": (
        row(lambda self, x: x * _scale_of(OPTIONS)), Options, "scale", 3.0,
    ),
    "an object: a class in front": (
        row(lambda self, x: x * _scale_of(SPECIAL)), Special, "scale", 3.0,
    ),
    "a name that a module lacks": (
        row(lambda self, x: x * getattr(settings, "EXTRA", 0.5)), settings, "EXTRA", 3.0,
    ),
    "type(self).go": (row(lambda self, x: type(self).go(self, x)), _HERE, "GAIN", 3.0),
    "type(self).go itself": (
        row(lambda self, x: type(self).go(self, x)), Base, "go", lambda self, x: x * 3,
    ),
    "getattr": (row(lambda self, x: getattr(self, "g" + "o")(x)), _HERE, "GAIN", 3.0),
    "a helper that is given the module": (row(_going), _HERE, "GAIN", 3.0),
    "__call__": (row(lambda self, x: self.caller(x)), _HERE, "GAIN", 3.0),
    "__call__: itself": (
        row(lambda self, x: self.caller(x)), Caller, "__call__", lambda self, x: x * 3,
    ),
    "__call__: of the class": (row(lambda self, x: self.caller(x)), Caller, "wide", 3.0),
    "__call__: of a global": (row(lambda self, x: caller(x)), _HERE, "GAIN", 3.0),
    "__call__: a number of a global": (row(lambda self, x: caller(x)), caller, "narrow", 3.0),
    "a dictionary": (row(lambda self, x: TABLE["act"](x)), _HERE, "GAIN", 3.0),
    "a dictionary of the module": (row(lambda self, x: self.table["go"](x)), _HERE, "GAIN", 3.0),
    "a dictionary: another function": (
        row(lambda self, x: TABLE["act"](x)), TABLE, "act", _of_another,
    ),
    "a number without a call": (
        row(lambda self, x: x * {"n": _number}["n"]()), _HERE, "GAIN", 3.0,
    ),
    "a property": (row(lambda self, x: x * self.options.gain), _HERE, "GAIN", 3.0),
    "a property itself": (
        row(lambda self, x: x * self.options.gain), Options, "gain", property(lambda self: 3.0),
    ),
    "a class of an attribute": (
        row(lambda self, x: x * self.options.scale), Options, "scale", 3.0,
    ),
    "a class of a global": (row(lambda self, x: x * OPTIONS.scale), Options, "scale", 3.0),
    "a class deep in a global": (
        row(lambda self, x: x * OPTIONS.inner.scale), Options, "scale", 3.0,
    ),
    "a class in a module": (row(lambda self, x: x * settings.Inner.scale), Options, "scale", 3.0),
    "a module in a module": (row(lambda self, x: x * package.settings.GAIN), settings, "GAIN", 3.0),
    "a module handed on": (row(lambda self, x: _reads_module(settings, x)), settings, "GAIN", 3.0),
    "a name made at run time": (
        row(lambda self, x: x * getattr(settings, "".join(["GA", "IN"]))), settings, "GAIN", 3.0,
    ),
    "vars of a module": (
        row(lambda self, x: x * vars(settings)["".join(["GA", "IN"])]), settings, "GAIN", 3.0,
    ),
    "globals()": (
        row(lambda self, x: x * globals()["".join(["GA", "IN"])]), _HERE, "GAIN", 3.0,
    ),
    "an import in the forward": (row(_imports), settings, "GAIN", 3.0),
    "an import of a module": (row(_imports_whole), settings, "GAIN", 3.0),
    "a function in the forward": (row(_makes_closure), _HERE, "GAIN", 3.0),
    "a named tuple": (row(lambda self, x: Pair(x, x).first * GAIN), _HERE, "GAIN", 3.0),
    "a decorator's options of a forward": (Decorated, DECORATED, "gain", 3.0),
    "a decorator's options": (
        row(_wrapped(DECORATED)(lambda self, x: x + 1)), DECORATED, "gain", 3.0,
    ),
    "a decorator's function": (
        row(_wrapped({"gain": 1.0})(lambda self, x: x * GAIN)), _HERE, "GAIN", 3.0,
    ),
}  # fmt: skip


def _set(monkeypatch: pytest.MonkeyPatch, owner: Any, name: Any, value: Any) -> None:
    if isinstance(owner, dict):
        monkeypatch.setitem(owner, name, value)
    else:
        monkeypatch.setattr(owner, name, value, raising=False)


def _converted(cls: type[nn.Module]) -> tuple[nn.Module, nn.Module, Tensor]:
    torch.manual_seed(0)
    stock, x = cls(), torch.randn(2, 3, 5, 5)
    model = copy.deepcopy(stock)
    report = fusedtrain.convert(model)
    assert len(report.norms) == 1, report
    torch.testing.assert_close(model(x), stock(x))
    assert _stands_in(model)
    return model, stock, x


def _stands_in(model: nn.Module) -> bool:
    rewritten = rewritten_of(model)
    assert rewritten is not None
    return rewritten.stands_in()


@pytest.mark.filterwarnings("ignore:.*fusedtrain.convert found")
@pytest.mark.parametrize("way", WAYS)
def test_a_change_is_seen(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cls, owner, name, value = WAYS[way]
    model, stock, x = _converted(cls)
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    assert _stands_in(twins[0])
    _set(monkeypatch, owner, name, value)
    for one in (model, *twins):
        assert not _stands_in(one)
        torch.testing.assert_close(one(x), stock(x))
    monkeypatch.undo()
    assert _stands_in(model)
    assert _stands_in(twins[0])


@pytest.mark.filterwarnings("ignore:.*fusedtrain.convert found")
def test_a_variable_of_an_enclosing_function(monkeypatch: pytest.MonkeyPatch) -> None:
    model, stock, x = _converted(row(lambda self, x: HELD["scaled"](x)))
    twin = copy.deepcopy(model)
    change_gain(3.0)
    try:
        for one in (model, twin):
            assert not _stands_in(one)
            torch.testing.assert_close(one(x), stock(x))
    finally:
        change_gain(0.5)
    assert _stands_in(twin)


def test_pickles_find_what_has_a_name_and_run_the_own_forward_for_the_rest() -> None:
    lost = []
    for way, (cls, *_) in WAYS.items():
        loaded = pickle.loads(pickle.dumps(_converted(cls)[0]))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if not _stands_in(loaded):
                lost.append(way)
                assert "a name that no pickle finds" in str(caught[0].message)
    assert lost == ["a decorator's options", "a decorator's function"]  # of functions of no name


def test_other_ways_of_an_optional_argument_count() -> None:
    """Both ways of `mask` do the same, until one of the two numbers changes."""
    model, stock, x = _converted(Masked)
    model.one = stock.one = 3.0
    with pytest.warns(UserWarning, match="`one` of a Masked"):
        torch.testing.assert_close(model(x), stock(x))


def test_an_activation_that_reads_a_global_number_keeps_its_class(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x = nn.Sequential(nn.Linear(3, 3), Swish()), torch.randn(2, 3)
    stock = copy.deepcopy(model)
    fusedtrain.convert(model)
    assert type(model[1]) is Swish
    assert _stands_in(model[1])
    monkeypatch.setattr(_HERE, "SLOPE", 2.0)
    with pytest.warns(UserWarning, match="SLOPE"):
        torch.testing.assert_close(model(x), stock(x))


def test_a_profiler_goes_on_after_convert() -> None:
    calls = []

    def note(frame: types.FrameType, event: str, _: Any) -> None:
        calls.append((frame.f_code.co_name, event))

    sys.setprofile(note)
    try:
        fusedtrain.convert(Base())
        assert sys.getprofile() is note
        _number()
    finally:
        sys.setprofile(None)
    assert ("_number", "call") in calls
    profile = cProfile.Profile()
    profile.enable()
    report = fusedtrain.convert(Base())
    _number()
    profile.disable()
    assert len(report.norms) == 1
    assert any(getattr(row.code, "co_name", "") == "_number" for row in profile.getstats())


def test_another_profiler_of_c_is_not_disturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "getprofile", lambda: object())
    report = fusedtrain.convert(Base())
    assert not report.norms
    assert "a profiler that sees Python calls is at work" in str(report)


def test_library_code_has_no_guards() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.SiLU())
    fusedtrain.convert(model)
    assert not rewritten_of(model).guards._names
    unit, _, _ = _converted(Plain)
    assert not rewritten_of(unit).guards._names


def test_a_logger_is_no_container(caplog: pytest.LogCaptureFixture) -> None:
    model, _, _ = _converted(Logging)
    _logger.info("its cache of levels has a row more")
    assert _stands_in(model)


def test_a_function_that_lives_no_longer_than_the_forward_is_not_held() -> None:
    model, _, _ = _converted(WAYS["a function in the forward"][0])
    names = [row[1] for row in rewritten_of(model).guards._names]
    assert "x" not in names
