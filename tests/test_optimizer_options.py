"""Every option of the optimizers beside torch's; scalers, schedulers, changes between steps."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import pickle
import random
import sys
import types
import unittest
import warnings
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from _models import timm
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, OneCycleLR, StepLR

import fusedtrain

NAMES = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad")
SHAPES = [(3, 5), (7,), (), (2, 0), (4, 3, 2, 2), (33,)]
EACH: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1},
    "SGDW": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "caution": True},
    "LARS": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "trust_coeff": 0.1},
    "Adam": {"lr": 0.1, "amsgrad": True},
    "AdamW": {"lr": 0.1, "weight_decay": 0.1},
    "NAdamW": {"lr": 0.1, "caution": True, "corrected_weight_decay": True},
    "LAMB": {"lr": 0.1, "caution": True, "max_grad_norm": None},
    "Lion": {"lr": 0.1, "weight_decay": 0.1, "caution": True},
    "RMSprop": {"lr": 0.1, "momentum": 0.9, "centered": True},
    "RMSpropTF": {"lr": 0.1, "momentum": 0.9, "centered": True, "weight_decay": 0.1},
    "Adagrad": {"lr": 0.1, "lr_decay": 0.1},
    "NovoGrad": {"lr": 0.1, "amsgrad": True, "weight_decay": 0.1},
}
ALL = pytest.mark.parametrize("name", EACH)
OF_TORCH = pytest.mark.parametrize("name", NAMES)


@cache
def options_of_torch() -> dict[str, Any]:
    """torch's own table: for each optimizer the arguments that it tests, and the errors."""
    kept = sys.modules.get("expecttest")
    if importlib.util.find_spec("expecttest") is None:
        # torch's test-suite needs it, and its table does not.
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stand_in
    try:
        module = importlib.import_module("torch.testing._internal.common_optimizers")
    finally:
        if kept is None:
            sys.modules.pop("expecttest", None)
        # The import forbids the whole process to set flags of torch.backends (which is a wrapper
        # of the module that holds the switch).
        held = torch.backends.flags_frozen.__globals__
        held["__allow_nonbracketed_mutation_flag"] = True
    return {i.optim_cls.__name__: i for i in module.optim_db if i.optim_cls.__name__ in NAMES}


def parameters(dtype: torch.dtype = torch.float64, shapes: Any = SHAPES) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(7)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


def give_gradients(params: Iterable[Tensor], seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = (torch.randn(p.shape, generator=generator) * scale).to(p.dtype)


def step(optimizer: torch.optim.Optimizer, params: Iterable[Tensor], seed: int) -> None:
    give_gradients(params, seed)
    optimizer.step()


def make(name: str, params: Iterable[Any], **options: Any) -> fusedtrain.optim.FusedOptimizer:
    optimizer = getattr(fusedtrain.optim, name)(params, **{**EACH[name], **options})
    assert isinstance(optimizer, fusedtrain.optim.FusedOptimizer)
    return optimizer


def assert_close(a: Any, b: Any, limit: float = 32) -> None:
    """Tensors, or lists of them, within `limit` eps of max(|b|, 1)."""
    if not isinstance(a, Tensor):
        for x, y in zip(a, b, strict=True):
            assert_close(x, y, limit)
        return
    a, b = a.detach(), b.detach()
    assert a.dtype == b.dtype
    assert ((a - b).abs() <= limit * torch.finfo(a.dtype).eps * b.abs().clamp_min(1)).all()


def same(a: Iterable[Tensor], b: Iterable[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def copies(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [t.detach().clone() for t in tensors]


def started(scaler: torch.amp.GradScaler) -> torch.amp.GradScaler:
    """With its scale in being."""
    scaler.scale(torch.zeros(()))
    return scaler


# --- torch's own table


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@OF_TORCH
def test_options_of_torchs_table(name: str, dtype: torch.dtype) -> None:
    items = options_of_torch()[name].optim_inputs_func(device="cpu")
    assert len(items) >= 5
    for item in items:
        p, q = parameters(dtype), parameters(dtype)
        ours = getattr(fusedtrain.optim, name)(p, **copy.deepcopy(item.kwargs))
        theirs = getattr(torch.optim, name)(q, **copy.deepcopy(item.kwargs))
        for seed in range(6):
            step(ours, p, seed)
            step(theirs, q, seed)
        assert_close(p, q)
        assert not same(p, parameters(dtype)), item.desc
        assert ours.param_groups[0].keys() == theirs.param_groups[0].keys(), item.desc


def outcome(module: Any, name: str, item: Any) -> tuple[type, str]:
    """Exception or warning, and what it says."""
    given = item.optimizer_error_input
    params = parameters() if given.params is None else copy.deepcopy(given.params)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            getattr(module, name)(params, **copy.deepcopy(given.kwargs))
        except Exception as error:
            return type(error), str(error)
    raise AssertionError("nothing was raised")


@OF_TORCH
def test_errors_of_torchs_table(name: str) -> None:
    items = options_of_torch()[name].optim_error_inputs_func(device="cpu", dtype=torch.float32)
    assert len(items) >= 7
    for item in items:
        ours, theirs = outcome(fusedtrain.optim, name, item), outcome(torch.optim, name, item)
        assert ours == theirs
        assert issubclass(ours[0], item.error_type)


@pytest.mark.parametrize("flag", ["foreach", "fused", "capturable"])
@OF_TORCH
def test_flags_are_accepted(name: str, flag: str) -> None:
    flags = {flag: True}
    if not flags.keys() <= getattr(torch.optim, name)(parameters()).defaults.keys():
        with pytest.raises(TypeError, match="unexpected keyword argument"):
            getattr(fusedtrain.optim, name)(parameters(), **flags)
        return
    p, q = parameters(), parameters()
    ours = getattr(fusedtrain.optim, name)(p, **flags)
    theirs = getattr(torch.optim, name)(q)
    for seed in range(3):
        step(ours, p, seed)
        step(theirs, q, seed)
    assert_close(p, q)


@OF_TORCH
def test_differentiable_is_refused(name: str) -> None:
    with pytest.raises(RuntimeError, match="does not support `differentiable`"):
        getattr(fusedtrain.optim, name)(parameters(), differentiable=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_grad_norm": 0.0}, "max_grad_norm"),
        ({"agc": -1.0}, "agc"),
        ({"agc": 0.1, "max_grad_norm": 1.0}, "together"),
        ({"agc_eps": float("nan")}, "agc_eps"),
        ({"ema_decay": 1.0}, "ema_decay"),
        ({"gradient_writeback": "all"}, "gradient_writeback"),
        ({"state_dtype": torch.float16}, "state_dtype"),
        ({"master_weights": True, "stochastic_rounding": True}, "together"),
    ],
    ids=str,
)
@ALL
def test_bad_options(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(name, parameters(), **options)


@ALL
def test_an_unknown_option(name: str) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'max_norm'"):
        make(name, parameters(), max_norm=1.0)


# --- the call


@ALL
def test_a_closure(name: str) -> None:
    """As for LBFGS: zeroes, computes, calls backward; its value is returned, whatever it is."""
    runs = [parameters(), parameters()]
    optimizers = [make(name, run) for run in runs]

    def closure() -> Tensor:
        assert torch.is_grad_enabled()
        optimizers[0].zero_grad()
        loss = torch.stack([p.square().sum() for p in runs[0]]).sum()
        loss.backward()
        return loss

    for _ in range(3):
        with torch.no_grad():
            value = optimizers[0].step(closure)
        assert isinstance(value, Tensor)
        assert value.requires_grad
        for p in runs[1]:
            p.grad = 2 * p.detach()
        assert optimizers[1].step() is None
    assert same(runs[0], runs[1])
    marker = object()
    assert optimizers[0].step(lambda: marker) is marker


@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
@ALL
def test_a_learning_rate_that_is_a_tensor(
    name: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    p, q = parameters(), parameters()
    rate = torch.full(shape, 0.125, dtype=dtype)
    ours, theirs = make(name, p, lr=rate), make(name, q, lr=0.125)
    for seed, value in enumerate((0.125, 0.25, 0.03125)):
        rate.fill_(value)
        theirs.param_groups[0]["lr"] = value
        if name == "NAdamW":  # "corrected" decay refers to the rate that it was made with
            ours.defaults["lr"] = theirs.defaults["lr"]
        step(ours, p, seed)
        step(theirs, q, seed)
        assert ours.param_groups[0]["lr"] is rate
    assert same(p, q)
    ours.param_groups[0]["lr"] = theirs.param_groups[0]["lr"] = 0.5
    step(ours, p, 9)
    step(theirs, q, 9)
    assert same(p, q)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: StepLR(o, 2, 0.5),
        lambda o: OneCycleLR(o, 0.2, total_steps=9),
        lambda o: CosineAnnealingLR(o, 5),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 1 / (n + 1)),
    ],
    ids=["StepLR", "OneCycleLR", "CosineAnnealingLR", "LambdaLR"],
)
@pytest.mark.parametrize("tensor", [False, True], ids=["", "tensor"])
@pytest.mark.parametrize(
    ("name", "options"),
    [("SGD", {"momentum": 0.9}), ("Adam", {}), ("AdamW", {}), ("RMSprop", {"momentum": 0.5})],
)
def test_schedulers_of_torch(
    name: str, options: dict[str, Any], tensor: bool, schedule: Any
) -> None:
    p, q = parameters(), parameters()
    runs = []
    for module, params in ((fusedtrain.optim, p), (torch.optim, q)):
        lr = torch.tensor(0.1, dtype=torch.float64) if tensor else 0.1
        groups = [{"params": params[:2], "lr": lr}, {"params": params[2:]}]
        optimizer = getattr(module, name)(groups, lr=0.05, **options)
        runs.append((optimizer, params, schedule(optimizer)))
    for seed in range(8):
        for optimizer, params, scheduler in runs:
            step(optimizer, params, seed)
            scheduler.step()
    assert_close(p, q)


@ALL
def test_hooks_around_the_step(name: str) -> None:
    p = parameters()
    optimizer = make(name, p)
    seen: list[Any] = []
    optimizer.register_step_pre_hook(lambda o, args, kwargs: seen.append((o, copies(p))))
    optimizer.register_step_post_hook(lambda o, args, kwargs: seen.append((o, copies(p))))
    step(optimizer, p, 0)
    assert [o for o, _ in seen] == [optimizer, optimizer]
    assert same(seen[0][1], parameters())
    assert same(seen[1][1], p)
    give_gradients(p, 1)
    started(fusedtrain.amp.GradScaler("cpu")).step(optimizer)
    assert len(seen) == 4


@pytest.mark.parametrize("set_to_none", [True, False])
@ALL
def test_zero_grad_of_the_optimizer(name: str, set_to_none: bool) -> None:
    p = parameters()
    optimizer = make(name, p)
    step(optimizer, p, 0)
    optimizer.zero_grad(set_to_none=set_to_none)
    for x in p:
        assert x.grad is None if set_to_none else (x.grad == 0).all()


def memory(optimizer: torch.optim.Optimizer, params: list[Any]) -> list[Any]:
    """What must be as it was after an error."""
    grads = [None if p.grad is None else p.grad.clone() for p in params]
    return [copies(params), grads, copy.deepcopy(optimizer.state_dict())]


def alike(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        if a.layout is not torch.strided:
            a, b = a.to_dense(), b.to_dense()
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(alike(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(alike, a, b))
    return bool(a == b)


@pytest.mark.parametrize("when", ["first", "later"])
@pytest.mark.parametrize("kind", ["sparse", "complex", "float8", "expanded"])
@ALL
def test_what_is_not_supported_raises_and_changes_nothing(name: str, kind: str, when: str) -> None:
    p: list[Any] = parameters(shapes=[(3, 5), (7,), (4, 2)])
    if kind == "complex":
        p[1] = nn.Parameter(torch.randn(7, dtype=torch.complex64))
    elif kind == "float8":
        p[1] = nn.Parameter(torch.ones(7).to(torch.float8_e4m3fn))
    elif kind == "expanded":
        p[1] = nn.Parameter(torch.ones(()).expand(7))
    optimizer = make(name, p, ema_decay=0.9, gradient_writeback="zero")
    if when == "later":
        give_gradients([p[0], p[2]], 0)
        optimizer.step()
    give_gradients([p[0], p[2]], 1)
    if kind == "sparse":
        p[1].grad = torch.eye(7)[0].to(p[1].dtype).to_sparse()
    else:
        p[1].grad = torch.ones(7).to(p[1].dtype)
    before = memory(optimizer, p)
    words = {"sparse": "sparse gradients", "complex": "complex", "float8": "float8",
             "expanded": "one place in memory"}  # fmt: skip
    with pytest.raises(RuntimeError, match=words[kind]):
        optimizer.step()
    assert alike(before, memory(optimizer, p))
    p[1].grad = None
    optimizer.step()


@ALL
def test_under_torch_compile(name: str) -> None:
    runs = [parameters(torch.float32), parameters(torch.float32)]
    optimizers = [make(name, run) for run in runs]

    def train(params: list[Tensor], optimizer: torch.optim.Optimizer) -> Tensor:
        optimizer.zero_grad()
        loss = torch.stack([p.sin().sum() for p in params]).sum()
        loss.backward()
        optimizer.step()
        return loss

    torch._dynamo.reset()
    compiled = torch.compile(train, backend="eager")
    for _ in range(3):
        assert torch.equal(compiled(runs[0], optimizers[0]), train(runs[1], optimizers[1]))
    assert same(runs[0], runs[1])
    assert not same(runs[0], parameters(torch.float32))


# --- loss scaling


def test_several_optimizers_with_one_scaler() -> None:
    """One finds an inf: it alone skips, and the scale backs off once."""
    runs = [parameters(torch.float32) for _ in range(3)]
    optimizers: list[Any] = [
        make("AdamW", runs[0]),
        make("SGD", runs[1]),
        torch.optim.Adagrad(runs[2]),
    ]
    scaler = started(fusedtrain.amp.GradScaler("cpu", init_scale=8.0))
    for params in runs:
        give_gradients(params, 0, 8.0)
    assert runs[1][0].grad is not None
    runs[1][0].grad[0, 0] = float("inf")
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    start = parameters(torch.float32)
    assert [same(params, start) for params in runs] == [False, True, False]
    scaler.step(optimizers[0])
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.step(optimizers[0])


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, fusedtrain.amp.GradScaler])
@pytest.mark.parametrize("unscale", [False, True], ids=["", "unscale_"])
@OF_TORCH
def test_several_losses_and_accumulation(name: str, unscale: bool, kind: Any) -> None:
    """As an ordinary run of torch without loss scaling."""
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)).double()]
    models.append(copy.deepcopy(models[0]))
    x = torch.randn(3, 4, 5, dtype=torch.float64)
    ours = getattr(fusedtrain.optim, name)(models[0].parameters(), lr=0.1)
    theirs = getattr(torch.optim, name)(models[1].parameters(), lr=0.1)
    scaler = kind("cpu", init_scale=4.0)
    for _ in range(3):
        for batch in x:
            y = models[0](batch)
            scaler.scale(y.square().mean()).backward(retain_graph=True)
            scaler.scale(y.sum()).backward()
            y = models[1](batch)
            (y.square().mean() + y.sum()).backward()
        if unscale:
            scaler.unscale_(ours)
            nn.utils.clip_grad_norm_(models[0].parameters(), 0.5)
            nn.utils.clip_grad_norm_(models[1].parameters(), 0.5)
            with pytest.raises(RuntimeError, match="already been called"):
                scaler.unscale_(ours)
        scaler.step(ours)
        scaler.update()
        theirs.step()
        ours.zero_grad()
        theirs.zero_grad()
    assert_close(list(models[0].parameters()), list(models[1].parameters()), 64)


@pytest.mark.parametrize("unscale", [False, True], ids=["", "unscale_"])
@pytest.mark.parametrize("bad", [False, True], ids=["finite", "inf"])
@ALL
def test_float16_gradients(name: str, bad: bool, unscale: bool) -> None:
    """Unscaled in the sweep, or beforehand: the same but for rounding to float16."""
    half = parameters(torch.float16)
    full = [nn.Parameter(p.detach().float()) for p in half]
    optimizers = [make(name, half, state_dtype=torch.float32), make(name, full)]
    scaler = started(fusedtrain.amp.GradScaler("cpu", init_scale=256.0))
    for seed in range(2):
        give_gradients(half, seed, 256.0)
        for p, q in zip(half, full, strict=True):
            assert p.grad is not None
            q.grad = p.grad.float() / 256
        if bad:
            assert half[0].grad is not None
            half[0].grad[1, 1] = float("inf")
        if unscale:
            scaler.unscale_(optimizers[0])
        scaler.step(optimizers[0])
        scaler.update(256.0)
        assert bool(optimizers[0].last_step_skipped) == bad
        if bad:
            assert same(half, parameters(torch.float16))
            continue
        optimizers[1].step()
        assert_close([p.float() for p in half], full, 2.0**14)
        for p, q in zip(half, full, strict=True):
            q.data.copy_(p.detach())


@ALL
def test_a_scaler_that_is_not_enabled(name: str) -> None:
    runs = [parameters(), parameters()]
    optimizers = [make(name, run) for run in runs]
    scaler = fusedtrain.amp.GradScaler("cpu", enabled=False)
    assert scaler.scale(torch.ones(())) == 1
    for seed in range(2):
        give_gradients(runs[0], seed)
        scaler.unscale_(optimizers[0])
        assert scaler.step(optimizers[0], lambda: 7) == 7  # a closure, as without a scaler
        scaler.update()
        step(optimizers[1], runs[1], seed)
    assert same(*runs)
    assert scaler.state_dict() == {}


def test_a_closure_with_an_enabled_scaler_raises() -> None:
    p = parameters()
    optimizer = make("Adam", p)
    give_gradients(p, 0)
    scaler = started(fusedtrain.amp.GradScaler("cpu"))
    with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
        scaler.step(optimizer, lambda: 1)
    with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
        scaler.step(optimizer, closure=lambda: 1)
    assert same(p, parameters())


def test_a_scale_of_ones_own_multiplies() -> None:
    """As torch has it: who sets ``grad_scale`` has scaled the gradients so."""
    p, q = parameters(), parameters()
    ours, theirs = make("Adam", p), make("Adam", q)
    scaler = started(fusedtrain.amp.GradScaler("cpu", init_scale=4.0))
    give_gradients(p, 0, 4.0 * 8.0)
    ours.grad_scale = torch.tensor(8.0)  # type: ignore[attr-defined]
    scaler.step(ours)
    assert not hasattr(ours, "grad_scale")
    step(theirs, q, 0)
    assert_close(p, q)


class Simulated:
    """The loss scale in plain Python."""

    def __init__(self, hysteresis: int, low: float, high: float) -> None:
        self.scale, self.good, self.left = 256.0, 0, hysteresis
        self.hysteresis, self.low, self.high = hysteresis, low, high

    def update(self, bad: bool) -> float:
        if bad:
            self.good = 0
            self.left = max(self.left - 1, 0)
            if self.left == 0:
                self.scale /= 2
        else:
            self.left = self.hysteresis
            self.good += 1
            if self.good == 3:
                self.good, self.scale = 0, self.scale * 4
        self.scale = min(max(self.scale, self.low), self.high)
        return self.scale


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("hysteresis", "low", "high"),
    [(1, 0.0, float("inf")), (1, 64.0, 2048.0), (2, 0.0, float("inf")), (3, 128.0, 1024.0)],
)
def test_the_scale_over_time(hysteresis: int, low: float, high: float, seed: int) -> None:
    choose = random.Random(seed)
    p = nn.Parameter(torch.ones(3))
    optimizer = make("SGD", [p])
    options = {"init_scale": 256.0, "growth_factor": 4.0, "growth_interval": 3}
    options |= {"hysteresis": hysteresis, "min_scale": low or None}
    options |= {"max_scale": None if high == float("inf") else high}
    scaler = started(fusedtrain.amp.GradScaler("cpu", **options))
    simulated = Simulated(hysteresis, low, high)
    for number in range(60):
        bad = choose.random() < 0.45
        p.grad = torch.full_like(p, float("nan") if bad else 1.0)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == simulated.update(bad)
        if number % 7 == 3:
            scaler = pickle.loads(pickle.dumps(scaler))
        elif number % 7 == 5:
            saved = scaler.state_dict()
            scaler = fusedtrain.amp.GradScaler("cpu", **{**options, "init_scale": 2.0})
            if number % 2:
                started(scaler)
            scaler.load_state_dict(saved)
        started(scaler)
        assert scaler.get_scale() == simulated.scale


def test_the_scalers_state_dict_is_torchs() -> None:
    ours, theirs = (
        kind("cpu", init_scale=64.0) for kind in (fusedtrain.amp.GradScaler, torch.amp.GradScaler)
    )
    assert ours.state_dict() == theirs.state_dict()
    theirs.load_state_dict(fusedtrain.amp.GradScaler("cpu", hysteresis=2).state_dict())
    with_hysteresis = fusedtrain.amp.GradScaler("cpu", hysteresis=2)
    with_hysteresis.load_state_dict(theirs.state_dict())


@pytest.mark.parametrize(
    "options", [{"hysteresis": 0}, {"min_scale": 2.0, "max_scale": 1.0}, {"min_scale": -1.0}]
)
def test_bad_options_of_the_scaler(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        fusedtrain.amp.GradScaler("cpu", **options)


# --- counting applied steps

SCHEDULES: dict[str, Any] = {
    "StepLR": lambda o: StepLR(o, 2, 0.5),
    "OneCycleLR": lambda o: OneCycleLR(o, [0.2, 0.4], total_steps=200, cycle_momentum=False),
    "CosineAnnealingLR": lambda o: CosineAnnealingLR(o, 7),
    "SequentialLR": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.LinearLR(o, 0.1, 1.0, 5), StepLR(o, 3, 0.5)], [5]
    ),
}


class Scheduled:
    """An optimizer with an AppliedStepScheduler, and beside it one stepped by hand."""

    def __init__(self, schedule: Any) -> None:
        self.p = parameters(torch.float32, [(3,), (2,)])
        q = [torch.zeros(1), torch.zeros(1)]
        groups = [{"params": [self.p[0]]}, {"params": [self.p[1]], "lr": 0.05}]
        self.optimizer = fusedtrain.optim.SGD(groups, lr=0.1)
        self.scheduler = fusedtrain.optim.AppliedStepScheduler(self.optimizer, schedule)
        plain = torch.optim.SGD([{"params": [q[0]]}, {"params": [q[1]], "lr": 0.05}], lr=0.1)
        self.by_hand: LRScheduler = schedule(plain)
        self.choose = random.Random(0)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            kind = self.choose.choice(["applied", "applied", "skipped", "nothing"])
            for p in self.p:
                p.grad = torch.full_like(p, float("nan") if kind == "skipped" else 1.0)
                if kind == "nothing":
                    p.grad = None
            self.optimizer.found_inf = torch.tensor(float(kind == "skipped"))
            self.optimizer.step()
            self.scheduler.step()
            if kind == "applied":
                self.by_hand.optimizer.step()
                self.by_hand.step()
            self.check()

    def check(self) -> None:
        rates = [float(lr) for lr in self.scheduler.get_last_lr()]
        assert rates == pytest.approx(self.by_hand.get_last_lr(), rel=1e-6)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedulers_that_count_applied_steps(schedule: str) -> None:
    scheduled = Scheduled(SCHEDULES[schedule])
    scheduled.check()
    scheduled.run(80)


@pytest.mark.filterwarnings("ignore:Seems like `optimizer.step")  # of the copy made by hand
@pytest.mark.parametrize("order", ["optimizer first", "scheduler first"])
@pytest.mark.parametrize("onto", ["fresh", "live", "made after loading"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_such_schedulers_go_on_from_a_checkpoint(schedule: str, onto: str, order: str) -> None:
    make_schedule = SCHEDULES[schedule]
    first = Scheduled(make_schedule)
    first.run(11)
    saved = copy.deepcopy((first.optimizer.state_dict(), first.scheduler.state_dict()))
    by_hand = copy.deepcopy(first.by_hand)
    if onto == "live":
        first.run(9)
        second = first
    else:
        second = Scheduled(make_schedule)
    second.by_hand = by_hand
    if onto == "made after loading":
        second.optimizer.load_state_dict(saved[0])
        second.scheduler = fusedtrain.optim.AppliedStepScheduler(second.optimizer, make_schedule)
        second.scheduler.load_state_dict(saved[1])
    elif order == "optimizer first":
        second.optimizer.load_state_dict(saved[0])
        second.scheduler.load_state_dict(saved[1])
    else:
        second.scheduler.load_state_dict(saved[1])
        second.optimizer.load_state_dict(saved[0])
    second.check()
    second.run(30)


def test_such_a_scheduler_may_change_nothing_but_rates() -> None:
    optimizer = make("SGD", parameters())
    with pytest.raises(RuntimeError, match="momentum"):
        fusedtrain.optim.AppliedStepScheduler(optimizer, lambda o: OneCycleLR(o, 0.2, 9))
    with pytest.raises(TypeError, match="fusedtrain"):
        fusedtrain.optim.AppliedStepScheduler(torch.optim.SGD(parameters()), StepLR)  # type: ignore[arg-type]


def test_counts_of_steps() -> None:
    p = parameters()
    optimizer = make("Adam", p)
    assert (optimizer.applied_steps, optimizer.skipped_steps) == (0, 0)
    for seed in range(3):
        step(optimizer, p, seed)
    optimizer.found_inf = torch.tensor(1.0)  # type: ignore[attr-defined]
    optimizer.step()
    assert optimizer.last_step_skipped
    optimizer.zero_grad()
    optimizer.step()  # has nothing to do
    assert not optimizer.last_step_skipped
    assert optimizer.grad_norm is None
    assert (optimizer.applied_steps, optimizer.skipped_steps) == (3, 1)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    optimizer.load_state_dict(optimizer.state_dict())
    assert (optimizer.applied_steps, optimizer.skipped_steps) == (3, 1)
    assert optimizer.applied_steps.dtype is torch.int64


# --- zero_grad


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64], ids=str
)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_of_all_kinds(set_to_none: bool, dtype: torch.dtype) -> None:
    base = torch.ones(9, 14, dtype=dtype)
    grads = {
        "plain": torch.ones(40001, dtype=dtype),
        "empty": torch.ones(0, 3, dtype=dtype),
        "0-dim": torch.ones((), dtype=dtype),
        "sliced": base[1:7, 2:11:2],
        "transposed": torch.ones(5, 7, dtype=dtype).t(),
        "channels_last": torch.ones(2, 3, 4, 5, dtype=dtype).to(memory_format=torch.channels_last),
        "expanded": torch.ones(3, 1, dtype=dtype).expand(3, 4),
        "offset": torch.ones(1030, dtype=dtype)[3:],
        "sparse": torch.ones(4, dtype=dtype).to_sparse(),
    }
    params = [nn.Parameter(torch.ones(g.shape, dtype=dtype)) for g in grads.values()]
    params += [nn.Parameter(torch.ones(3, dtype=dtype))]  # no gradient
    for p, grad in zip(params, grads.values(), strict=False):
        p.grad = grad
    versions = [g._version for g in grads.values()]
    fusedtrain.zero_grad(iter(params), set_to_none=set_to_none)
    for p, (kind, grad), version in zip(params, grads.items(), versions, strict=False):
        if set_to_none:
            assert p.grad is None
            assert (grad.to_dense() == 1).all()
        else:
            assert p.grad is grad
            assert (grad.to_dense() == 0).all(), kind
            assert grad._version > version, kind
    outside = torch.ones(9, 14, dtype=torch.bool)
    outside[1:7, 2:11:2] = False
    assert (base[outside] == 1).all()


def test_zero_grad_detaches_gradients_with_a_graph() -> None:
    p = nn.Parameter(torch.ones(3))
    (g,) = torch.autograd.grad((p**3).sum(), p, create_graph=True)
    p.grad = g
    fusedtrain.zero_grad([p], set_to_none=False)
    assert p.grad is not None
    assert p.grad.grad_fn is None
    p.grad = torch.ones(3, requires_grad=True)
    fusedtrain.zero_grad(p, set_to_none=False)
    assert not p.grad.requires_grad
    assert (p.grad == 0).all()


# --- changes between steps


def replaced_data(p: list[Any]) -> None:
    for x in p:
        x.data = x.data.clone()


def turned(p: list[Any]) -> None:
    """Another stride at the same address."""
    for x in p:
        if x.dim() == 2:
            x.data = x.data.t().contiguous().t().as_strided(x.shape[::-1], (x.shape[0], 1)).t()


def same_address_turned(p: list[Any]) -> None:
    for x in p:
        if x.dim() == 2 and x.shape[0] == x.shape[1]:
            x.data = x.data.t()


def in_channels_last(p: list[Any]) -> None:
    for x in p:
        if x.dim() == 4:
            x.data = x.data.contiguous(memory_format=torch.channels_last)


def written_to(p: list[Any]) -> None:
    with torch.no_grad():
        for x in p:
            x.mul_(0.5)


@pytest.mark.parametrize(
    "change",
    [replaced_data, turned, same_address_turned, in_channels_last, written_to],
    ids=lambda f: f.__name__,
)
@OF_TORCH
def test_parameters_that_change_between_steps(name: str, change: Any) -> None:
    shapes = [*SHAPES, (6, 6)]
    p, q = parameters(shapes=shapes), parameters(shapes=shapes)
    options = {} if name == "Adagrad" else EACH[name]
    ours = getattr(fusedtrain.optim, name)(p, **options)
    theirs = getattr(torch.optim, name)(q, **options)
    for seed in range(5):
        if seed in (2, 4):
            change(p)
            change(q)
        step(ours, p, seed)
        step(theirs, q, seed)
    assert_close(p, q)


@pytest.mark.parametrize("how", ["half", "bfloat16", "double", "channels_last"])
@ALL
def test_a_model_that_is_converted_between_steps(name: str, how: str) -> None:
    """States follow the parameter; the result is that of an optimizer that was so from then on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))
    optimizer = make(name, model.parameters(), ema_decay=0.9)
    params = list(model.parameters())
    for seed in range(2):
        step(optimizer, params, seed)
    if how == "channels_last":
        model.to(memory_format=torch.channels_last)
    else:
        getattr(model, how)()
    other = copy.deepcopy(model)
    fresh = make(name, other.parameters(), ema_decay=0.9)
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert list(model.parameters()) == params
    for seed in range(2, 4):
        step(optimizer, params, seed)
        step(fresh, list(other.parameters()), seed)
    assert same(params, other.parameters())
    for p in params:
        assert p.isfinite().all()
        for key, value in optimizer.state[p].items():
            if value.shape == p.shape and key not in ("ema", "step"):
                assert value.dtype == p.dtype
                assert value.stride() == torch.empty_like(p).stride()


@ALL
def test_gradients_that_change_their_layout_and_dtype(name: str) -> None:
    p, q = parameters(torch.float32, [(4, 3, 2, 5)]), parameters(torch.float32, [(4, 3, 2, 5)])
    ours, theirs = make(name, p), make(name, q)
    layouts = [
        lambda g: g,
        lambda g: g.contiguous(memory_format=torch.channels_last),
        lambda g: g.flip(0).flip(0),
        lambda g: torch.stack([g, g], -1)[..., 0],
        lambda g: g.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    ]
    for seed, lay in enumerate(layouts):
        give_gradients(p, seed)
        give_gradients(q, seed)
        assert p[0].grad is not None
        p[0].grad = lay(p[0].grad)
        ours.step()
        theirs.step()
        assert_close(p, q, 4)


EDITS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("SGD", {}, {"momentum": 0.9}),
    ("SGD", {"dampening": 0.5}, {"momentum": 0.9}),
    ("SGD", {"momentum": 0.9, "dampening": 0.5}, {"momentum": 0}),
    ("SGD", {"momentum": 0.9}, {"nesterov": True, "weight_decay": 0.1, "maximize": True}),
    ("Adam", {}, {"betas": (0.5, 0.7), "eps": 1e-2, "weight_decay": 0.1}),
    ("Adam", {"amsgrad": True}, {"amsgrad": False}),
    ("AdamW", {}, {"weight_decay": 0.5, "maximize": True, "lr": 0.3}),
    ("RMSprop", {"momentum": 0.9}, {"momentum": 0, "alpha": 0.5}),
    ("RMSprop", {"centered": True}, {"centered": False, "weight_decay": 0.1}),
    ("Adagrad", {}, {"lr_decay": 0.5, "eps": 0.1, "weight_decay": 0.1}),
]


@pytest.mark.parametrize(("name", "options", "edit"), EDITS, ids=str)
def test_options_edited_between_steps(
    name: str, options: dict[str, Any], edit: dict[str, Any]
) -> None:
    """There and back again."""
    p, q = parameters(), parameters()
    ours = getattr(fusedtrain.optim, name)(p, lr=0.1, **options)
    theirs = getattr(torch.optim, name)(q, lr=0.1, **options)
    original = {key: theirs.param_groups[0][key] for key in edit}
    for seed in range(9):
        for optimizer in (ours, theirs):
            optimizer.param_groups[0].update(edit if 3 <= seed < 6 else original)
        step(ours, p, seed)
        step(theirs, q, seed)
        assert_close(p, q)


def test_amsgrad_turned_on_later() -> None:
    """torch raises KeyError; here the maximum starts from then."""
    p = parameters()
    optimizer = fusedtrain.optim.Adam(p)
    step(optimizer, p, 0)
    optimizer.param_groups[0]["amsgrad"] = True
    step(optimizer, p, 1)
    assert_close(optimizer.state[p[0]]["max_exp_avg_sq"], optimizer.state[p[0]]["exp_avg_sq"])


@OF_TORCH
def test_a_parameter_that_moves_between_groups(name: str) -> None:
    p, q = parameters(), parameters()
    runs = []
    for module, params in ((fusedtrain.optim, p), (torch.optim, q)):
        groups = [{"params": params[:3]}, {"params": params[3:], "lr": 0.01, "weight_decay": 0.1}]
        runs.append((getattr(module, name)(groups, **EACH[name]), params))
    for seed in range(6):
        for optimizer, params in runs:
            a, b = (group["params"] for group in optimizer.param_groups)
            if seed == 2:
                b.append(a.pop(0))
            if seed == 4:
                a.insert(1, b.pop(1))
            step(optimizer, params, seed)
    assert_close(p, q)


@pytest.mark.parametrize("how", ["tensors", "cleared", "one cleared", "dict", "step"])
@OF_TORCH
def test_states_that_the_user_replaces(name: str, how: str) -> None:
    if name == "Adagrad" and "cleared" in how:
        pytest.skip("torch's Adagrad makes its states only once")
    p, q = parameters(), parameters()
    ours = getattr(fusedtrain.optim, name)(p, **EACH[name])
    theirs = getattr(torch.optim, name)(q, **EACH[name])
    for seed in range(6):
        if seed == 3:
            for optimizer, params in ((ours, p), (theirs, q)):
                state = optimizer.state
                if how == "cleared":
                    state.clear()
                elif how == "one cleared":
                    del state[params[5]]
                elif how == "dict":
                    for x in params:
                        state[x] = {k: v.clone() * 0.5 for k, v in state[x].items()}
                for x in params:
                    own = state[x] if how in ("tensors", "step") else {}
                    for key in own:
                        if how == "tensors" and key not in ("step", "grad_avg"):
                            own[key] = own[key].abs() + 1
                        elif how == "step" and key == "step":
                            own[key] = torch.tensor(17.0)
        step(ours, p, seed)
        step(theirs, q, seed)
        assert_close(p, q)


@ALL
def test_which_parameters_have_gradients_may_vary(name: str) -> None:
    """More patterns than plans are kept; a parameter without is left alone."""
    choose = random.Random(0)
    p = parameters()
    alone = [parameters()[i] for i in range(len(SHAPES))]
    options = {"max_grad_norm": None}
    together, apart = make(name, p, **options), [make(name, [x], **options) for x in alone]
    for seed in range(30):
        chosen = [choose.random() < 0.5 for _ in SHAPES]
        give_gradients(p, seed)
        give_gradients(alone, seed)
        for x, y, optimizer, has in zip(p, alone, apart, chosen, strict=True):
            if not has:
                x.grad = y.grad = None
            optimizer.step()
        together.step()
    assert_close(p, alone, 4)


@ALL
def test_versions_tell_autograd_of_the_step(name: str) -> None:
    """A backward through what the step has overwritten raises."""
    p = nn.Parameter(torch.ones(3))
    optimizer = make(name, [p], gradient_writeback="zero")
    loss = p.square().sum()
    p.grad = torch.ones(3)
    used = (torch.ones(3, requires_grad=True) * p.grad).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        used.backward()


# --- clipping, averages, precision


@pytest.mark.parametrize("max_norm", [0.5, 1000.0])
@pytest.mark.parametrize("scale", [None, 1024.0])
@OF_TORCH
def test_max_grad_norm(name: str, scale: float | None, max_norm: float) -> None:
    p, q = parameters(), parameters()
    groups = [{"params": p[:2], "lr": 0.03}, {"params": p[2:]}]
    ours = getattr(fusedtrain.optim, name)(groups, lr=0.1, max_grad_norm=max_norm)
    theirs = getattr(torch.optim, name)([{"params": q[:2], "lr": 0.03}, {"params": q[2:]}], lr=0.1)
    scaler = started(fusedtrain.amp.GradScaler("cpu", init_scale=scale or 1.0))
    for seed in range(4):
        give_gradients(p, seed, scale or 1.0)
        give_gradients(q, seed)
        for params in (p, q):
            if seed == 2:
                params[1].grad = None
        norm = nn.utils.clip_grad_norm_(q, max_norm)
        theirs.step()
        if scale is None:
            ours.step()
        else:
            scaler.step(ours)
            scaler.update(scale)
        assert ours.grad_norm is not None
        assert float(ours.grad_norm) == pytest.approx(float(norm), rel=1e-6)
    assert_close(p, q, 64)
    ours.max_grad_norm = None
    theirs.step()
    give_gradients(p, 9)
    give_gradients(q, 9)


def test_max_grad_norm_may_change_between_steps() -> None:
    p = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    optimizer = fusedtrain.optim.SGD([p], lr=1.0)
    for max_norm, want in ((None, 2.0), (1.0, 1.0), (0.5, 0.5), (None, 2.0)):
        optimizer.max_grad_norm = max_norm
        p.data.zero_()
        p.grad = torch.ones_like(p)
        optimizer.step()
        assert float(p.detach().norm()) == pytest.approx(want, rel=1e-5)
    with pytest.raises(ValueError, match="max_grad_norm"):
        optimizer.max_grad_norm = -1.0
    assert optimizer.max_grad_norm is None


@pytest.mark.parametrize("factor", [0.01, 0.3])
@pytest.mark.parametrize("lay", ["contiguous", "reversed", "sliced"])
@OF_TORCH
def test_agc_is_timms(name: str, lay: str, factor: float) -> None:
    clip = importlib.import_module(timm().__name__ + ".utils.agc").adaptive_clip_grad
    shapes = [(4, 3, 2, 2), (5, 700), (7,), (), (1, 9), (6, 2, 3), (3, 1, 1, 1), (5, 4)]
    p, q = parameters(shapes=shapes), parameters(shapes=shapes)
    for x in (p[7], q[7]):
        x.data[2] = 0.0  # a unit whose weights count as eps
    for x in p:
        order = list(range(x.dim()))[::-1]
        if lay == "reversed":
            x.data = x.data.permute(order).contiguous().permute(order)
        elif lay == "sliced" and x.dim():
            x.data = torch.stack([x.data, x.data], -1)[..., 1]
    ours = getattr(fusedtrain.optim, name)(p, lr=0.1, agc=factor, agc_eps=1e-2)
    theirs = getattr(torch.optim, name)(q, lr=0.1)
    for seed in range(3):
        give_gradients(p, seed)
        give_gradients(q, seed)
        for x in (p[0], q[0]):
            assert x.grad is not None
            x.grad[1] *= 1e-8  # below timm's least norm
        clip(q, factor, eps=1e-2)
        ours.step()
        theirs.step()
    assert_close(p, q, 64)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@ALL
def test_averages_are_those_of_a_loop(name: str, dtype: torch.dtype) -> None:
    """timm's ModelEmaV3 after every step that is not skipped, also where gradients are missing."""
    p = parameters(dtype)
    optimizer = make(name, p, ema_decay=0.75)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    averages = [x.detach().to(wide, copy=True) for x in p]
    for seed in range(8):
        give_gradients(p, seed)
        if seed == 3:
            p[0].grad = p[4].grad = None
        elif seed == 5:
            optimizer.zero_grad()
        skip = seed == 4
        optimizer.found_inf = torch.tensor(float(skip))  # type: ignore[attr-defined]
        optimizer.step()
        if not skip:
            for average, x in zip(averages, p, strict=True):
                average.lerp_(x.detach().to(wide), 0.25)
    # Of 16-bit parameters the average takes the weights before they are rounded.
    limit = 8.0 if dtype is not torch.bfloat16 else 2.0**17
    for (x, average), want, own in zip(optimizer.averaged_parameters(), averages, p, strict=True):
        assert x is own
        assert_close(average, want, limit)


@ALL
def test_swap_averages(name: str) -> None:
    p = parameters(torch.float32)
    p.append(nn.Parameter(torch.ones(3)))  # never has a gradient
    optimizer = make(name, p, ema_decay=0.9)
    for seed in range(3):
        step(optimizer, p[:-1], seed)
    before, states = copies(p), copy.deepcopy(optimizer.state_dict())
    averages = [a.detach().clone() for _, a in optimizer.averaged_parameters()]
    addresses = [x.data_ptr() for x in p]
    with optimizer.swap_averages():
        assert same(p, averages)
        assert not same(p, before)
    assert same(p, before)

    class Stop(Exception):
        pass

    with pytest.raises(Stop), optimizer.swap_averages():
        raise Stop
    assert same(p, before)
    assert addresses == [x.data_ptr() for x in p]
    assert alike(states, optimizer.state_dict())
    with pytest.raises(RuntimeError, match="ema_decay"), make(name, p).swap_averages():
        pass


def test_ema_decay_may_change_between_steps() -> None:
    p = nn.Parameter(torch.zeros(1))
    optimizer = fusedtrain.optim.SGD([p], lr=1.0)
    want = 0.0
    for decay in (None, 0.5, 0.9, None, 0.5):
        optimizer.ema_decay = decay
        if "ema" not in optimizer.state[p]:
            want = p.item()
        p.grad = -torch.ones(1)
        optimizer.step()
        if decay is not None:
            want = decay * want + (1 - decay) * p.item()
            assert float(optimizer.state[p]["ema"]) == pytest.approx(want)


@ALL
def test_bfloat16_states(name: str) -> None:
    """They have that dtype, move, and the run stays near that of float32."""
    p, q = parameters(torch.float32), parameters(torch.float32)
    options = {"lr": 0.01, "caution": False} if "caution" in EACH[name] else {"lr": 0.01}
    if name.startswith("RMSprop"):
        options["centered"] = False  # a difference of two rounded averages
    ours = make(name, p, state_dtype=torch.bfloat16, **options)
    theirs = make(name, q, **options)
    for seed in range(4):
        step(ours, p, seed)
        step(theirs, q, seed)
    for x, y, start in zip(p, q, parameters(torch.float32), strict=True):
        moved = (y - start).detach().norm()
        assert float((x - y).detach().norm()) <= 0.1 * float(moved)
        for key, value in theirs.state[y].items():
            mine = ours.state[x][key]
            if key != "step" and not (name == "NovoGrad" and key.endswith("exp_avg_sq")):
                assert mine.dtype is torch.bfloat16
                assert float((mine.float() - value).norm()) <= 0.05 * float(value.norm()) + 1e-6


def test_stochastic_rounding_has_no_bias() -> None:
    """Steps of an eighth of an ulp: on average they arrive; without it nothing moves."""
    results = {}
    for rounding in (False, True):
        p = nn.Parameter(torch.ones(30000, dtype=torch.bfloat16))
        optimizer = fusedtrain.optim.SGD([p], lr=2.0**-11, stochastic_rounding=rounding)
        for _ in range(16):
            p.grad = torch.ones_like(p)
            optimizer.step()
        results[rounding] = p.detach().double()
    assert (results[False] == 1).all()
    # A step's error is at most half an ulp (2^-9) in standard deviation.
    error = 2.0**-9 * (16 / 30000) ** 0.5
    assert float(results[True].mean()) == pytest.approx(1 - 16 * 2.0**-11, abs=5 * error)
    assert results[True].std() > 0


@ALL
def test_stochastic_rounding_is_repeatable(name: str) -> None:
    results = []
    for seed, threads in ((1, 1), (1, 2), (2, 1)):
        torch.manual_seed(seed)
        generator = torch.Generator().manual_seed(7)
        p = [nn.Parameter(torch.randn(40000, generator=generator).bfloat16())]
        optimizer = make(name, p, stochastic_rounding=True, lr=0.01)
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            for number in range(2):
                step(optimizer, p, number)
        finally:
            torch.set_num_threads(before)
        results.append(p[0].detach())
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
    # By at most one ulp either way.
    assert ((results[0].float() - results[2].float()).abs() <= 2.0**-6 * 4).all()


@ALL
def test_master_weights_follow_the_run_in_float32(name: str) -> None:
    half = parameters(torch.bfloat16)
    full = [nn.Parameter(p.detach().float()) for p in half]
    ours = make(name, half, master_weights=True, state_dtype=torch.float32)
    theirs = make(name, full)
    for seed in range(5):
        give_gradients(half, seed)
        for p, q in zip(half, full, strict=True):
            assert p.grad is not None
            q.grad = p.grad.float()
        ours.step()
        theirs.step()
    for p, q in zip(half, full, strict=True):
        assert torch.equal(ours.state[p]["master_param"], q)
        assert torch.equal(p, q.bfloat16())


def test_master_weights_notice_that_the_parameter_was_written_to() -> None:
    """As by load_state_dict of the model, a weight constraint, pruning."""
    p = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = fusedtrain.optim.SGD([p], lr=0.1, master_weights=True)
    p.grad = torch.zeros_like(p)
    optimizer.step()
    with torch.no_grad():
        p.fill_(5.0)
    optimizer.step()
    assert (p == 5).all()


# --- two ranks

MODEL = [(7, 5), (3, 7), (3,), (1,)]  # the last one is empty on one of two ranks


def _on_a_rank(rank: int, folder: str) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    found: dict[str, Any] = {}
    for name in EACH:
        for kind in (ShardedGradScaler, fusedtrain.amp.GradScaler):
            values = [p.detach() for p in parameters(torch.float64, MODEL)]
            p = [nn.Parameter(distribute_tensor(v, mesh, [Shard(0)])) for v in values]
            optimizer = make(name, p, max_grad_norm=1.0, ema_decay=0.9)
            scaler = started(kind("cpu", init_scale=8.0, growth_interval=1000))
            scales = []
            for seed in range(4):
                whole = parameters(torch.float64, MODEL)
                give_gradients(whole, seed, scaler.get_scale())
                for x, y in zip(p, whole, strict=True):
                    assert y.grad is not None
                    x.grad = distribute_tensor(y.grad, mesh, [Shard(0)])
                if seed == 1 and rank == 1:
                    p[0].grad.to_local()[0, 0] = float("inf")
                scaler.step(optimizer)
                skipped = bool(optimizer.last_step_skipped)
                scaler.update()
                assert optimizer.grad_norm is not None
                scales.append((skipped, scaler.get_scale(), float(optimizer.grad_norm)))
            saved = optimizer.state_dict()["state"]
            found[f"{name} {kind.__module__}"] = {
                "params": [x.full_tensor().detach() for x in p],
                "averages": [saved[i]["ema"].full_tensor() for i in range(len(p))],
                "scales": scales,
            }
    found["FSDP2"] = _fully_sharded()
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def _small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def _train(model: nn.Module) -> list[float]:
    optimizer = make("AdamW", model.parameters(), max_grad_norm=0.1)
    scaler = started(fusedtrain.amp.GradScaler("cpu", init_scale=8.0))
    generator = torch.Generator().manual_seed(3)
    norms = []
    for number in range(4):
        x = torch.randn(4, 5, generator=generator, dtype=torch.float64)
        loss = model(x).square().mean()
        if number == 1:
            loss = loss * float("inf")
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert optimizer.grad_norm is not None
        norms.append(float(optimizer.grad_norm))
    assert optimizer.skipped_steps == 1
    return norms


def _fully_sharded() -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard

    model = _small_model()
    fully_shard(model[0])
    fully_shard(model)
    norms = _train(model)
    return {"params": [x.full_tensor().detach() for x in model.parameters()], "norms": norms}


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_two_ranks_agree_with_an_unsharded_run(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_on_a_rank, (str(tmp_path),), nprocs=2)  # type: ignore[no-untyped-call]
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for case in ranks[0]:
        assert alike(ranks[0][case]["params"], ranks[1][case]["params"]), case
    for name in EACH:
        p = parameters(torch.float64, MODEL)
        optimizer = make(name, p, max_grad_norm=1.0, ema_decay=0.9)
        for seed in (0, 2, 3):
            step(optimizer, p, seed)
        for kind in (
            "torch.distributed.fsdp.sharded_grad_scaler",
            "fusedtrain.amp.grad_scaler",
        ):
            found = ranks[0][f"{name} {kind}"]
            assert [skipped for skipped, _, _ in found["scales"]] == [False, True, False, False]
            assert [scale for _, scale, _ in found["scales"]] == [8.0, 4.0, 4.0, 4.0]
            assert_close(found["params"], p, 64)
            assert_close(found["averages"], [optimizer.state[x]["ema"] for x in p], 64)
            others = ranks[1][f"{name} {kind}"]["scales"]
            assert str(found["scales"]) == str(others)  # nan and all
    model = _small_model()
    norms = _train(model)
    assert_close(ranks[0]["FSDP2"]["params"], list(model.parameters()), 64)
    for ours, want in zip(ranks[0]["FSDP2"]["norms"], norms, strict=True):
        assert ours == pytest.approx(want, rel=1e-6, nan_ok=True)
