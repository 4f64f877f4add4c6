"""A converted model follows every edit after `convert`: each row fails without one kind of
guard, or without the mend of a defect that `make fuzz ARGS="--only edits"` has found.
"""

from __future__ import annotations

import copy
import importlib
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fusedtrain
from fusedtrain._graph.forward import rewritten_of
from fusedtrain._graph.modules import has_own_forward
from fuzz import changes, zoo
from fuzz.pairs import Pair
from helpers.models import timm

pytestmark = pytest.mark.usefixtures("one_thread")

# A block, the path of a part `m`, a line about it.
LINES: dict[str, tuple[str, str, str]] = {
    "child: another one": ("Unit", "", "m.act = nn.Tanh()"),
    "child: another of its class": ("Asking", "", "m.bn = nn.BatchNorm2d(4).double()"),
    "child: gone": ("Asking", "", "del m.bn"),
    "child: asked for its class": ("Asking", "", "m.conv = nn.Sequential(m.conv)"),
    "child: None": ("Down", "", "m.old = m.downsample; m.downsample = None"),
    "still: writes over its input": ("Moved", "", "m.short.insert(0, nn.ReLU(inplace=True))"),
    "still: draws": (
        "Moved", "", "m.body.append(nn.Dropout(0.5)); m.short[1] = nn.Dropout(0.5)"
    ),
    "children: one more": ("Asking", "parts", "m.append(nn.Tanh())"),
    "children: another order": ("chain", "", "m._modules = dict(reversed(m._modules.items()))"),
    "children: of a Sequential": ("chain", "", "m.insert(2, nn.Tanh())"),
    "children: a name among them": ("Asking", "", "m.extra = nn.Tanh()"),
    "tensor: a number in its place": ("Dropped", "", "del m.gamma; m.gamma = 0.5"),
    "tensor: none": ("Dropped", "", "m.gamma = None"),
    "value: a number": ("Calls", "", "m.slope = 0.5"),
    "value: a flag": ("Asking", "", "m.deploy = True"),
    "value: a string": ("Asking", "", "m.mode = 'difference'"),
    "value: in a list": ("Asking", "", "m.weights[0] = 0.25"),
    "value: in a dictionary": ("Asking", "", "m.plain['bias'] = 0.5"),
    "value: of an object": ("Asking", "", "m.options.scale = 0.25"),
    "value: deep in an object": ("Asking", "", "m.options.sizes['b'][0] = 0.25"),
    "value: among many": ("Asking", "", "m.long['69'] = 0.5"),
    "value: a tensor among many": ("Asking", "", "m.long['69'] = torch.ones(4, 1, 1).double()"),
    "value: of a method's object": ("Asking", "", "m.bound.__self__.scale = 0.5"),
    "value: of a partial's object": ("Asking", "", "m.partial.args[0].scale = 0.5"),
    "value: of a list itself": ("Asking", "", "m.listed.gain = 0.5"),
    "tensor: another shape": ("Asking", "", "m.bare = torch.ones(3).double()"),
    "tensor: one more": ("Asking", "", "m.register_buffer('more', torch.ones(1).double())"),
    "value: in a slot": ("Asking", "", "m.slotted.gain = 0.5"),
    "class: a flag in front of it": ("Asking", "", "m.wide = True"),
    "class: a method in front of it": ("Asking", "", "m.mixed = lambda x: x * 0.25"),
    "class: of a part": ("Unit", "bn", "m.__class__ = zoo.OtherNorm"),
    "class: of an activation": ("Unit", "act", "m.__class__ = nn.Tanh"),
    "absent: a number": ("Asking", "", "m.scale = 0.5"),
    "absent: a parameter": ("Asking", "", "m.scale = nn.Parameter(torch.ones(1).double())"),
    "absent: a child": ("Deployed", "", "m.reparam = nn.Tanh()"),
    "names: in a dictionary": ("Reading", "", "zoo.SETTINGS['gain'] = 0.5"),
    "names: in a list": ("Reading", "", "zoo.SIZES[0] = 0.5"),
    "passed: a forward of its own": ("Unit", "bn", "m.forward = lambda x: x * 0.5"),
    "passed: a method": ("Unit", "", "m.switch = m.fuse; m.switch()"),
}  # fmt: skip
# A block, what has something else by a name, the name, and the value.
PATCHES: dict[str, tuple[str, Any, str, Any]] = {
    "class: a flag": ("Asking", zoo.Asking, "wide", True),
    "class: a number by its name": ("Asking", zoo.Asking, "deep", 0.5),
    "class: a method": ("Asking", zoo.Asking, "mixed", lambda self, x: x * 0.5),
    "class: a property": ("Asking", zoo.Asking, "half", 0.25),
    "absent: of the class": ("Asking", zoo.Asking, "scale", 0.5),
    "own forward": ("Unit", zoo.Unit, "forward", lambda self, x: self.act(x)),
    "names: a flag": ("Asking", zoo, "BOOSTED", True),
    "names: a number of a function": ("Reading", zoo, "FACTOR", 0.25),
    "names: a function": ("Reading", zoo, "boost", lambda x: x * 4),
    "names: one of torch's": ("Reading", zoo, "silu", torch.tanh),
    "names: one in C": ("Reading", zoo, "sigmoid", torch.tanh),
    "names: an object": ("Reading", zoo, "OPTIONS", zoo.Options(0.5)),
    "names: an attribute of an object": ("Reading", zoo.OPTIONS, "scale", 0.5),
    "names: a class": ("Reading", zoo, "Defaults", zoo.Options(0.5)),
    "names: an attribute of a class": ("Reading", zoo.Defaults, "scale", 0.5),
    "passed: the forward of torch's norm": (
        "Unit", nn.BatchNorm2d, "forward", lambda self, x: x * 0.5,
    ),
}  # fmt: skip
BOTH: dict[str, tuple[str, Callable[[Pair], None]]] = {
    **{
        name: (block, lambda pair, p=path, line=line: pair.edit(changes.run, p, line))
        for name, (block, path, line) in LINES.items()
    },
    **{
        name: (block, lambda pair, row=row: pair.patch(*row))
        for name, (block, *row) in PATCHES.items()
    },
}


def made(block: str) -> nn.Module:
    if block == "Down":
        return zoo.Basic(nn.SiLU(), zoo.chain(nn.Identity()))
    module: nn.Module = getattr(zoo, block)(nn.SiLU())
    return module


def stands_in(model: nn.Module) -> bool:
    rewritten = rewritten_of(model)
    assert rewritten is not None
    return rewritten.stands_in()


@pytest.mark.filterwarnings("ignore:.*fusedtrain.convert found")
@pytest.mark.parametrize("name", BOTH)
def test_an_edit_is_seen(name: str) -> None:
    block, edit = BOTH[name]
    with Pair(lambda: made(block)) as pair:
        assert stands_in(pair.sides[1].model)
        pair.call(changes.whole)
        edit(pair)
        pair.call(changes.whole)
        for copied in (changes.deepcopied, changes.pickled):  # copies know it, too
            pair.edit(copied)
            pair.call(changes.whole)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.parametrize("block", ["Unit", "Nested", "Dropped", "Asking", "Reading", "Switching"])
def test_copies_are_fused_and_guarded(block: str, copied: Callable[[Any], nn.Module]) -> None:
    model = made(block)
    fusedtrain.convert(model)
    twin = copied(model)
    assert stands_in(twin)
    twin.register_module("act", nn.Tanh())
    if block not in ("Reading",):
        assert stands_in(model)
        with pytest.warns(UserWarning, match="is not what fusedtrain.convert found"):
            assert not stands_in(twin)


HOOKED = {
    "the block itself": ("Unit", ""),
    "a norm": ("Unit", "bn"), "an activation": ("Unit", "act"), "a drop": ("Dropped", "drop"),
    "a gate": ("Gate", "gate"), "a part that ends with a norm": ("Nested", "body"),
    "the last of such a part": ("Nested", "body.1"), "its norm": ("Nested", "body.1.1"),
    "Identity behind a norm": ("Deployed", "one.2"), "a factor of a product": ("Glu", "up"),
    "an operand of a sum": ("Deployed", "dense"),
}  # fmt: skip


@pytest.mark.parametrize("effect", ["", "changes", "raises"])
@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
@pytest.mark.parametrize("place", HOOKED)
def test_hooks_see_what_they_saw(place: str, kind: str, effect: str) -> None:
    block, path = HOOKED[place]
    with Pair(lambda: made(block)) as pair:
        pair.edit(changes.hook, path, kind, effect)
        pair.call(changes.whole)
        pair.edit(changes.unhook)
        pair.call(changes.whole)
        assert stands_in(pair.sides[1].model)


def test_hooks_below_parts_that_change_places() -> None:
    with Pair(lambda: made("Moved")) as pair:
        assert stands_in(pair.sides[1].model)
        for path in ("body.0", "short.0"):
            pair.edit(changes.hook, path, "forward")
        pair.call(changes.whole)


class _Short(nn.Module):
    writes = False

    def __init__(self) -> None:
        super().__init__()
        self.act, self.conv = nn.LeakyReLU(0.1), nn.Conv2d(4, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.writes:
            x = x.mul_(0.5)
        y: torch.Tensor = self.conv(self.act(x))
        return y


class _Writing(_Short):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.mul_(0.5))


class _Crossing(nn.Module):
    """The fused call moves a read of x past the shortcut."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.short, self.act = kind, _Short(), nn.SiLU()
        upsample = nn.Upsample(scale_factor=1)  # so that backward does not need x
        self.body = nn.Sequential(upsample, nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))

    def forward(self, x: torch.Tensor) -> Any:
        if self.kind == "norm":
            branch = self.body(x)
            return self.act(branch + self.short(x))
        gate = self.act(x) if self.kind == "gate" else torch.sigmoid(x)
        other = self.short(x)
        return gate * other if self.kind == "gate" else x * gate + other


WRITES: dict[str, Callable[[nn.Module], object]] = {
    "flag of a layer": lambda m: setattr(m.short.act, "inplace", True),
    "flag of the gate": lambda m: setattr(m.act, "inplace", True),
    "flag that a forward reads": lambda m: setattr(m.short, "writes", True),
    "own forward": lambda m: setattr(m.short, "forward", lambda x: x.mul_(0.5)),
    "class": lambda m: setattr(m.short, "__class__", _Writing),
    "forward of the class": lambda m: None,
}


@pytest.mark.filterwarnings("ignore:.*fusedtrain.convert found")
@pytest.mark.parametrize("change", WRITES)
@pytest.mark.parametrize("kind", ["norm", "gate", "formula"])
def test_a_part_writes_over_what_a_call_behind_it_reads(kind: str, change: str) -> None:
    with Pair(lambda: _Crossing(kind)) as pair:
        assert stands_in(pair.sides[1].model)
        pair.edit(lambda side: WRITES[change](side.model))
        if change == "forward of the class":
            pair.patch(_Short, "forward", lambda self, x: x.mul_(0.5))
        pair.call(changes.whole)
        pair.call(changes.without_gradient)


PARTS_OF_A_NORM: dict[str, Callable[[Any], object]] = {
    "another module": lambda norm: setattr(norm, "act", nn.Tanh()),
    "another drop": lambda norm: setattr(norm, "drop", nn.Tanh()),
    "a hook": lambda norm: norm.act.register_forward_hook(lambda *args: args[2] * 0.5),
    "a forward": lambda norm: setattr(norm.drop, "forward", torch.tanh),
}


@pytest.mark.filterwarnings("ignore:.*fusedtrain.convert found")
@pytest.mark.parametrize("change", PARTS_OF_A_NORM)
@pytest.mark.parametrize("memory", ["store", "recompute"])
@pytest.mark.parametrize("followed", [False, True])
def test_the_idle_parts_of_timms_norm(followed: bool, memory: str, change: str) -> None:
    timm()
    norm = importlib.import_module("timm.layers").BatchNormAct2d
    tail = [nn.SiLU()] if followed else []
    with Pair(
        lambda: nn.Sequential(nn.Conv2d(4, 4, 1), norm(4, apply_act=False), *tail), memory
    ) as pair:
        pair.call(changes.whole)
        for side in pair.sides:
            side.spare.update(old=side.part("1").act)
            PARTS_OF_A_NORM[change](side.part("1"))
        pair.call(changes.whole)


@pytest.mark.filterwarnings("ignore:.*fusedtrain.convert found")
@pytest.mark.parametrize("is_sync", [False, True])
@pytest.mark.parametrize("name", ["freeze_batch_norm_2d", "convert_sync_batchnorm"])
def test_timms_functions_keep_the_activation_of_a_norm(name: str, is_sync: bool) -> None:
    """They ask with `isinstance` whether it is a norm of timm's."""
    timm()
    layers = importlib.import_module("timm.layers")
    norm = layers.BatchNormAct2d(4)
    norm = layers.convert_sync_batchnorm(norm) if is_sync else norm
    with Pair(lambda: nn.Sequential(nn.Conv2d(4, 4, 1), norm)) as pair:
        assert type(pair.sides[1].part("1")).__module__ == "fusedtrain.conversion"
        for change in (changes.deepcopied, changes.pickled):
            pair.edit(change)
        pair.edit(lambda side: getattr(layers, name)(side.model).eval())
        pair.call(changes.whole)


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
@pytest.mark.parametrize("block", ["Unit", "Nested", "", "Gate", "Glu", "Dropped", "Deployed"])
def test_hooks_of_all_modules_see_what_they_saw(block: str, kind: str) -> None:
    with Pair(lambda: made(block) if block else deeper()) as pair:
        pair.edit(changes.hook_all, kind)
        pair.call(changes.whole)


@pytest.mark.parametrize("owner", [nn.Module, nn.SiLU])
@pytest.mark.parametrize("block", ["Unit", "Gate", "Glu", "Moved"])
def test_another_call_of_a_class_sees_what_it_saw(block: str, owner: type) -> None:
    """torchview and others put their own `__call__` into nn.Module while they record."""
    call, names = nn.Module.__call__, list[str]()

    def noted(module: nn.Module, *args: Any) -> Any:
        names.append(type(module).__name__)
        return call(module, *args)

    with Pair(lambda: made(block)) as pair:
        pair.patch(owner, "__call__", noted)
        pair.call(changes.whole)
    half = len(names) // 2
    assert half > 0
    assert names[:half] == names[half:]


def deeper() -> nn.Module:
    return zoo.Nested(nn.ReLU(), deeper=True)


HALVED = (
    "m.__class__ = type('Halved', (type(m),), "
    "{'forward': lambda self, *args: super(type(self), self).forward(*args) * 0.5})"
)


@pytest.mark.parametrize("edit", [(changes.rebind, "own"), (changes.run, HALVED)])
@pytest.mark.parametrize("place", [*HOOKED, "a part of such a part"])
def test_another_forward_of_a_part_runs(place: str, edit: tuple[Any, str]) -> None:
    """As accelerate sets it for a module whose weights are elsewhere."""
    block, path = HOOKED.get(place, ("", "body.1"))
    with Pair(lambda: made(block) if block else deeper()) as pair:
        pair.edit(edit[0], path, edit[1])
        pair.call(changes.whole)


class _Otherwise(zoo.Unit):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.bn(self.conv(self.act(x)))
        return y


def test_a_copy_runs_the_forward_of_the_class_that_the_module_has_now() -> None:
    for copied in (changes.deepcopied, changes.pickled):
        with Pair(lambda: made("Unit")) as pair:
            pair.edit(lambda side: setattr(side.model, "__class__", _Otherwise))
            pair.call(changes.whole)
            pair.edit(copied)
            pair.call(changes.whole)


def test_a_part_without_a_sum_around_it_returns_its_own_value() -> None:
    """The outer forward has fallen back, and calls the part for its own value; a hook is below."""
    with Pair(lambda: zoo.Nested(nn.ReLU(), deeper=True)) as pair:
        pair.edit(changes.hook, "body.1", "forward")
        pair.edit(changes.run, "act", "m.__class__ = nn.Tanh")
        pair.call(changes.whole)


def test_a_replica_of_a_forward_with_something_around_it() -> None:
    with Pair(lambda: made("Unit")) as pair:
        pair.edit(changes.rebind, "", "around")
        pair.call(changes.replica)


def test_a_shallow_copy_is_not_its_original() -> None:
    model = made("Calls").eval()
    fusedtrain.convert(model)
    twin, stock = copy.copy(model), made("Calls").eval()
    stock.load_state_dict(model.state_dict())
    twin.slope = stock.slope = 0.5
    x = torch.randn(2, 4, 3, 3)
    assert rewritten_of(twin) is None
    torch.testing.assert_close(twin(x), stock(x))
    assert rewritten_of(model) is not None
    assert fusedtrain.revert(model) > 0
    assert not has_own_forward(model)


def test_a_pickle_of_a_class_that_was_edited_since(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made("Unit")
    fusedtrain.convert(model)
    pickled = pickle.dumps(model)
    monkeypatch.setattr(zoo.Unit, "forward", lambda self, x: self.act(self.conv(x)))
    loaded = pickle.loads(pickled)
    x = torch.randn(2, 4, 3, 3)
    with pytest.warns(UserWarning, match="`forward` of the class is not what"):
        got = loaded(x)
    torch.testing.assert_close(got, zoo.Unit.forward(loaded, x))


def test_stock_synchronisation_takes_norms_that_have_no_activation() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1))
    fusedtrain.convert(model, memory="recompute")
    assert type(model[1]) is fusedtrain.nn.BatchNormAct2d
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    assert type(model[1]) is nn.SyncBatchNorm


def test_torch_fx_traces_a_lone_norm_that_is_recomputed() -> None:
    with Pair(lambda: nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)), "recompute") as pair:
        assert type(pair.sides[1].model[0]) is fusedtrain.nn.BatchNormAct2d
        pair.call(changes.traced)
        pair.sides[1].model[0].register_forward_hook(lambda *_: None)  # then as a function
        pair.call(changes.traced)


def test_an_edit_of_a_part_leaves_the_forwards_around_it() -> None:
    """Guards look at what a forward looks at, and no deeper."""
    model = nn.Sequential(*zoo.chain(nn.SiLU()), made("Unit"))
    fusedtrain.convert(model)
    model[3].act = nn.Tanh()
    assert stands_in(model)
    with pytest.warns(UserWarning, match="`act` of a Unit is not what"):
        assert not stands_in(model[3])


_PASSES_ON = False


def _switched(function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    def wrapper(x: torch.Tensor) -> torch.Tensor:
        return x if _PASSES_ON else function(x)

    wrapper.func = function
    return wrapper


class _Settings(dict[str, Any]):
    """Raises KeyError for attributes that it lacks."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # pytest looks for some
            raise AttributeError(name)
        return self[name]


_activation = _switched(torch.nn.functional.silu)
_settings = _Settings(scale=2.0)


class _Switching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = _activation(self.norm(self.conv(x))) * _settings.scale
        return y


def test_a_global_of_a_wrapper_with_an_attribute_func(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a wrapper is read itself, and so is what its attribute holds."""
    model, x = _Switching(), torch.randn(2, 3, 8, 8)
    stock = copy.deepcopy(model)
    assert len(fusedtrain.convert(model).norms) == 1
    torch.testing.assert_close(model(x), stock(x))
    monkeypatch.setitem(globals(), "_PASSES_ON", True)
    with pytest.warns(UserWarning, match="_PASSES_ON"):
        changed = model(x)
    torch.testing.assert_close(changed, stock(x))
