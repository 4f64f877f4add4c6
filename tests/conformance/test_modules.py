"""Every module of fusedtrain.nn that is one of torch.nn's, on all inputs of torch's ModuleInfo."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from _tables import DTYPES, error, module_info, outcome, short, spread, tensors
from differences import judge, unknown_keys
from torch import Tensor, nn
from torch.testing import make_tensor
from torch.utils import _pytree as pytree

import fusedtrain.nn as fused_nn

# Name -> the class of torch.nn that it takes the place of.
BATCH_NORMS = {f"BatchNormAct{n}d": f"BatchNorm{n}d" for n in (1, 2, 3)}
SAME = [
    "CELU", "Dropout", "ELU", "GELU", "GLU", "GroupNorm", "Hardshrink", "Hardsigmoid", "Hardswish",
    "Hardtanh", "LayerNorm",
    "LeakyReLU", "LogSigmoid", "MaxPool2d", "Mish", "PReLU", "ReLU", "ReLU6", "SELU", "SiLU",
    "RMSNorm", "Sigmoid", "Softplus", "Softshrink", "Softsign", "Tanh", "Tanhshrink", "Threshold",
]  # fmt: skip
REPLACES = {**{name: name for name in SAME}, **BATCH_NORMS}
NAMES = list(REPLACES)
CHECKS = ("numbers", "constructor", "state", "mistakes")
LIMIT = {torch.float32: 8.0, torch.float64: 64.0, torch.float16: 2.0, torch.bfloat16: 2.0}

pytestmark = pytest.mark.usefixtures("one_thread")


class Case(NamedTuple):
    """How to construct and to call a module."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[Any, ...]

    def build(self, name: str, dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
        """Ours and torch's, with the same numbers."""
        extra: dict[str, Any] = {"apply_act": False} if name in BATCH_NORMS else {}
        ours = getattr(fused_nn, name)(*self.args, **self.kwargs, **extra).to(dtype)
        stock = getattr(nn, REPLACES[name])(*self.args, **self.kwargs).to(dtype)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for tensor in (*stock.parameters(), *stock.buffers()):
                if tensor.is_floating_point():
                    tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
        assert str(ours.load_state_dict(stock.state_dict())) == "<All keys matched successfully>"
        return ours, stock


def cases(name: str, dtype: torch.dtype, training: bool) -> Iterator[Case]:
    torch.manual_seed(0)
    info = module_info(REPLACES[name])
    if info is None:  # of these two torch has no entry
        x = make_tensor((3, 4, 5), device="cpu", dtype=dtype, requires_grad=True)
        yield Case((), {"p": 1.0} if name == "Dropout" else {}, (x,))
        return
    options = {"device": "cpu", "dtype": dtype, "requires_grad": True, "training": training}
    for item in info.module_inputs_func(info, **options):
        made, called = item.constructor_input, item.forward_input
        yield Case(made.args, made.kwargs, (*called.args, *called.kwargs.values()))


def run(module: nn.Module, inputs: tuple[Any, ...], dtype: torch.dtype) -> dict[str, Tensor]:
    """Output, gradients and buffers of a copy, computed in `dtype`."""
    module = copy.deepcopy(module).to(dtype)

    def fresh(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        new = torch.empty_strided(value.shape, value.stride(), dtype=dtype)
        return new.copy_(value.detach()).requires_grad_(value.requires_grad)

    inputs = tuple(pytree.tree_map(fresh, inputs))
    results = {f"output {i}": t for i, t in enumerate(tensors(module(*inputs)))}
    wanted = [t for t in results.values() if t.requires_grad]
    weights = []
    for t in wanted:
        generator = torch.Generator().manual_seed(2)
        weights.append(torch.randn(t.shape, generator=generator).bfloat16().to(t.dtype))
    torch.autograd.backward(wanted, weights)
    leaves = {f"input {i}": t for i, t in enumerate(tensors(inputs))} | dict(
        module.named_parameters()
    )
    results |= {f"gradient of {n}": t.grad for n, t in leaves.items() if t.grad is not None}
    return {n: t.detach() for n, t in results.items()} | dict(module.named_buffers())


def test_every_module_of_torch_is_here() -> None:
    public = set()
    for name in fused_nn.__all__:
        cls = getattr(fused_nn, name)
        bases = getattr(cls, "__mro__", ())[1:]
        public |= {name for b in bases if getattr(nn, b.__name__, None) is b is not nn.Module}
    # torch's samples are depthwise in few cases only: test_depthwise.py has more.
    depthwise = {f"DepthwiseConv{n}d" for n in (1, 2, 3)}
    # Other arguments than torch's.
    timm = {"GroupNormAct", "GroupNorm1Act", "LayerNorm2d", "LayerNormAct2d", "RmsNorm2d"}
    assert public == {*NAMES, *depthwise, *timm}
    assert not unknown_keys("modules", (f"{check}/{name}" for check in CHECKS for name in NAMES))


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("name", NAMES)
def test_numbers(name: str, dtype: torch.dtype, training: bool) -> None:
    differences, count = set(), 0
    for case in cases(name, dtype, training):
        ours, stock = case.build(name, dtype)
        ours.train(training)
        stock.train(training)
        gaps = tuple(torch.stack([t, t], -1)[..., 0] if tensors(t) else t for t in case.inputs)
        for inputs in (case.inputs, pytree.tree_map(_leaf, gaps)):
            truth = run(stock, inputs, torch.float64)
            mine, theirs = run(ours, inputs, dtype), run(stock, inputs, dtype)
            assert mine.keys() == theirs.keys() == truth.keys()
            for what, a in mine.items():
                b = theirs[what]
                assert a.dtype == b.dtype
                count += 1
                if not a.is_floating_point():
                    assert torch.equal(a, b)
                    continue
                measures = (error, spread) if torch.finfo(dtype).bits == 16 else (error,)
                for measure in measures:
                    allowed = max(LIMIT[dtype], 4 * measure(b, truth[what]))
                    if not measure(a, truth[what]) <= allowed:
                        differences.add(what)
    assert count
    judge(f"modules/numbers/{name}", differences, dtype)


def _leaf(value: Any) -> Any:
    return value.detach().requires_grad_() if isinstance(value, Tensor) else value


@pytest.mark.parametrize("name", NAMES)
def test_constructor(name: str) -> None:
    """torch's arguments in torch's order, with torch's defaults; kept as torch's attributes."""
    ours, stock = getattr(fused_nn, name), getattr(nn, REPLACES[name])
    mine, theirs = (inspect.signature(cls).parameters for cls in (ours, stock))
    differences = {f"{n} is missing" for n in theirs.keys() - mine.keys()}
    shared = [n for n in mine if n in theirs]
    if shared != [n for n in theirs if n in mine]:
        differences.add("another order")
    by_place = inspect.Parameter.POSITIONAL_OR_KEYWORD
    positions = zip(mine, [n for n, parameter in theirs.items() if parameter.kind is by_place])
    differences |= {f"{b} has another position" for a, b in positions if a != b}
    differences |= {f"the default of {n}" for n in shared if mine[n].default != theirs[n].default}
    case = next(cases(name, torch.float32, True))
    a, b = case.build(name, torch.float32)
    assert isinstance(a, stock)
    for attribute in set(vars(b)) - {"_modules", "_parameters", "_buffers"}:
        if getattr(a, attribute, None) != getattr(b, attribute):
            differences.add(f"the attribute {attribute}")
    if a.extra_repr() != b.extra_repr() or (name in SAME and repr(a) != repr(b)):
        differences.add("repr")
    if "device" in theirs:
        case = Case(case.args, {**case.kwargs, "device": "meta", "dtype": torch.float64}, ())
        made = ours(*case.args, **case.kwargs)
        assert {(p.device.type, p.dtype) for p in made.parameters()} == {("meta", torch.float64)}
    judge(f"modules/constructor/{name}", differences)


@pytest.mark.parametrize("name", NAMES)
def test_state(name: str) -> None:
    """state_dict and its loading both ways; pickle, torch.save, deepcopy; modes and dtypes."""
    differences = set()
    for case in cases(name, torch.float32, True):
        ours, stock = case.build(name, torch.float32)
        state = ours.state_dict()
        assert list(state) == list(stock.state_dict())
        assert state._metadata[""] == stock.state_dict()._metadata[""]
        stock.load_state_dict(state)
        assert [n for n, _ in ours.named_parameters()] == [n for n, _ in stock.named_parameters()]
        assert [n for n, _ in ours.named_buffers()] == [n for n, _ in stock.named_buffers()]
        if [n for n, _ in ours.named_children()]:
            differences.add("children")
        with pytest.raises(RuntimeError, match="Unexpected key"):
            ours.load_state_dict({**state, "other": torch.ones(1)})

        file = io.BytesIO()
        torch.save(ours, file)
        file.seek(0)
        copies = [
            pickle.loads(pickle.dumps(ours)), copy.deepcopy(ours),
            torch.load(file, weights_only=False),
        ]  # fmt: skip
        for training in (True, False):
            assert ours.train(training).training == training
            for again in copies:
                assert type(again) is type(ours)
                a = run(again.train(training), case.inputs, torch.float32)
                b = run(ours, case.inputs, torch.float32)
                assert all(torch.equal(a[k], b[k]) for k in b)
        for dtype in DTYPES:
            values = list(ours.to(dtype).state_dict().values())
            same = list(stock.to(dtype).state_dict().values())
            assert [v.dtype for v in values] == [v.dtype for v in same]
    judge(f"modules/state/{name}", differences)


@pytest.mark.parametrize("name", NAMES)
def test_mistakes(name: str) -> None:
    """The types of exceptions, for ModuleInfo's mistakes and for common ones."""
    ours, stock, differences = getattr(fused_nn, name), getattr(nn, REPLACES[name]), set()
    extra: dict[str, Any] = {"apply_act": False} if name in BATCH_NORMS else {}
    info = module_info(REPLACES[name])
    options = {"device": "cpu", "dtype": torch.float32, "requires_grad": True, "training": True}
    listed = info.module_error_inputs_func(info, **options) if _has_mistakes(info) else []
    for item in listed:
        made, called = (
            getattr(item.module_error_input, kind)
            for kind in ("constructor_input", "forward_input")
        )

        def call(made: Any = made, called: Any = called) -> Any:
            return ours(*made.args, **made.kwargs, **extra)(*called.args, **called.kwargs)

        mine = outcome(call)
        if mine is not item.error_type:
            differences.add(
                f"{item.error_regex}: {_kind(mine)} instead of {item.error_type.__name__}"
            )
    case = next(cases(name, torch.float32, True))
    constructors = {
        "a string": (("a",), {}),
        "an unknown keyword": (case.args, {**case.kwargs, "unknown": 1}),
        "None": ((None,) * 9, {}),
        "no such device": (case.args, {**case.kwargs, "device": "nowhere"}),
    }
    for what, (args, kwargs) in constructors.items():
        mine, theirs = outcome(ours, *args, **kwargs, **extra), outcome(stock, *args, **kwargs)
        if mine is not theirs and isinstance(theirs, type):
            differences.add(f"{what}: {_kind(mine)} instead of {_kind(theirs)}")
    inputs: dict[str, tuple[Any, ...]] = {
        "no input": (), "input None": (None,), "a list": ([1.0],), "0-dim": (torch.ones(()),),
        "1-dim": (torch.ones(3),), "6-dim": (torch.ones(2, 2, 2, 2, 2, 2),),
        "integers": (case.inputs[0].long(),),
    }  # fmt: skip
    for what, arguments in inputs.items():
        pair = case.build(name, torch.float32)
        mine, theirs = (outcome(module, *arguments) for module in pair)
        if mine is not theirs and not (tensors(mine) and tensors(theirs)):
            differences.add(f"{what}: {_kind(mine)} instead of {_kind(theirs)}")
    judge(f"modules/mistakes/{name}", differences)


def _has_mistakes(info: Any) -> bool:
    return info is not None and info.module_error_inputs_func is not None


def _kind(value: Any) -> str:
    return value.__name__ if isinstance(value, type) else type(value).__name__


@pytest.mark.parametrize(
    "name", [n for n in SAME if "inplace" in inspect.signature(getattr(nn, n)).parameters]
)
def test_in_place(name: str) -> None:
    for case in cases(name, torch.float32, True):
        kwargs = {k: v for k, v in case.kwargs.items() if k != "inplace"}
        ours = getattr(fused_nn, name)(*case.args[: len(case.args)], **kwargs, inplace=True)
        x = case.inputs[0] * 1
        version, expected = x._version, ours(case.inputs[0] * 1)
        y = ours(x)
        assert y is x
        assert x._version > version
        assert torch.equal(y, expected)


@pytest.mark.parametrize("name", ["BatchNormAct2d", "MaxPool2d", "ReLU", "GLU", "PReLU"])
def test_channels_last(name: str) -> None:
    case = next(c for c in cases(name, torch.float32, True))
    x = torch.randn(2, 4 if name == "GLU" else 3, 6, 6)
    if name == "GLU":
        case = Case((1,), {}, (x,))
    for part in case.build(name, torch.float32):
        module = part.to(memory_format=torch.channels_last)
        y = module(x.contiguous(memory_format=torch.channels_last))
        assert y.is_contiguous(memory_format=torch.channels_last)
