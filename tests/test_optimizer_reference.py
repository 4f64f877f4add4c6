"""The optimizer step, in plain torch and in the CPU kernels, against torch, timm and Apex."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _apex_truth import TRUTHS
from _models import timm
from _optimizer_cases import BUSY, F32, F64, OPS, OPTIONS, RULE_NAMES, Case, Spec, busy, specs_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fusedtrain.reference import optimizers
from fusedtrain.reference.optimizer_rules import RULES, Facts, Trial, finish


@pytest.fixture(params=OPS)
def ops(request: pytest.FixtureRequest) -> Any:
    """Both implementations of the three ops."""
    return OPS[request.param]()


# --- in float64 against torch.optim and timm.optim

STATES = {
    "sgd": ("momentum_buffer",),
    "lars": ("momentum_buffer",),
    "adam": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    "nadamw": ("exp_avg", "exp_avg_sq"),
    "lamb": ("exp_avg", "exp_avg_sq"),
    "lion": ("exp_avg",),
    "rmsprop": ("square_avg", "momentum_buffer", "grad_avg"),
    "rmsprop_tf": ("square_avg", "momentum_buffer", "grad_avg"),
    "adagrad": ("sum",),
    "novograd": ("exp_avg",),
}

Options = dict[str, Any]
WD: Options = {"weight_decay": 0.05}
TORCH: list[tuple[str, str, Options]] = [
    *(("SGD", "sgd", o) for o in (
        {}, WD, {"maximize": True, **WD}, {"momentum": 0.9},
        {"momentum": 0.9, "dampening": 0.3, **WD},
        {"momentum": 0.9, "nesterov": True, **WD}, {"momentum": 0.8, "maximize": True},
    )),
    *((name, "adam", o) for name in ("Adam", "AdamW") for o in (
        WD, {"weight_decay": 0.0}, {"amsgrad": True, **WD}, {"maximize": True, **WD},
        {"betas": (0.5, 0.7), "eps": 1e-2}, {"betas": (0.0, 0.9), **WD},
        {"amsgrad": True, "maximize": True},
    )),
    ("Adam", "adam", {"decoupled_weight_decay": True, **WD}),
    *(("RMSprop", "rmsprop", o) for o in (
        {}, WD, {"centered": True}, {"momentum": 0.9, **WD},
        {"momentum": 0.9, "centered": True, **WD},
        {"alpha": 0.7, "eps": 1e-3, "maximize": True, **WD},
    )),
    *(("Adagrad", "adagrad", o) for o in (
        {}, WD, {"lr_decay": 0.3, **WD}, {"initial_accumulator_value": 0.4, "eps": 1e-3},
        {"maximize": True, **WD},
    )),
]  # fmt: skip
CAUTION: Options = {"caution": True, **WD}
CORRECTED: Options = {"corrected_weight_decay": True, **WD}
TIMM: list[tuple[str, str, Options]] = [
    *(("sgdw.SGDW", "sgd", o) for o in (
        WD, CAUTION, CORRECTED, {"momentum": 0.9, "dampening": 0.3, **WD},
        {"momentum": 0.9, **CAUTION},
        {"momentum": 0.9, "nesterov": True, **WD}, {"momentum": 0.9, "nesterov": True, **CAUTION},
        {"momentum": 0.9, "maximize": True, **CORRECTED, **CAUTION},
    )),
    *(("lars.Lars", "lars", o) for o in (
        {}, WD, {"always_adapt": True}, {"momentum": 0.9, **WD}, {"trust_clip": True, **WD},
        {"momentum": 0.9, "nesterov": True, "trust_clip": True, "trust_coeff": 3.0, **WD},
        {"momentum": 0.9, "dampening": 0.3, "always_adapt": True, "eps": 1e-2, **WD},
    )),
    *(("nadamw.NAdamW", "nadamw", o) for o in (
        WD, CAUTION, CORRECTED, {"maximize": True, **CAUTION}, {"betas": (0.5, 0.7), "eps": 1e-2},
    )),
    *(("lamb.Lamb", "lamb", o) for o in (
        {"weight_decay": 0.0}, WD, CAUTION, {"always_adapt": True, "weight_decay": 0.0},
        {"trust_clip": True, **WD}, {"bias_correction": False, **WD},
        {"grad_averaging": False, **WD},
        {"decoupled_decay": True, **WD}, {"decoupled_decay": True, **CORRECTED, **CAUTION},
        {"decoupled_decay": True, "weight_decay": 30.0}, {"max_grad_norm": None, **WD},
    )),
    *(("lion.Lion", "lion", o) for o in (
        {}, WD, CAUTION, CORRECTED, {"maximize": True, "betas": (0.5, 0.7), **CAUTION},
    )),
    *(("rmsprop_tf.RMSpropTF", "rmsprop_tf", o) for o in (
        {}, WD, CAUTION, {"centered": True, **WD}, {"momentum": 0.9, **WD},
        {"momentum": 0.9, **CAUTION},
        {"momentum": 0.9, "lr_in_momentum": False, **CAUTION}, {"decoupled_decay": True, **WD},
        {"momentum": 0.9, "decoupled_decay": True, "centered": True, "eps": 1e-3, **CORRECTED},
    )),
    *(("nvnovograd.NvNovoGrad", "novograd", o) for o in (
        {}, WD, {"grad_averaging": True, **WD}, {"amsgrad": True, **WD},
        {"betas": (0.5, 0.6), "eps": 0.1},
    )),
]  # fmt: skip


# Of _apex_truth.py.
MOMENTS: list[Options] = [
    {"weight_decay": 0.0}, WD, {"bias_correction": False, **WD}, {"adam_w_mode": 0, **WD},
    {"adam_w_mode": 0, "bias_correction": False, "betas": (0.5, 0.7), "eps": 1e-2, **WD},
]  # fmt: skip
APEX: list[tuple[str, str, Options]] = [
    *(("FusedAdam", "adam", o) for o in MOMENTS),
    *(("FusedSGD", "sgd", o) for o in (
        {"wd_after_momentum": True, **WD}, {"momentum": 0.9, "wd_after_momentum": True, **WD},
        {"momentum": 0.9, "nesterov": True, "wd_after_momentum": True, **WD},
        {"momentum": 0.9, "dampening": 0.3, **WD},
    )),
    *(("FusedLAMB", "lamb", {"max_grad_norm": 1.0, **o}) for o in (
        *MOMENTS, {"use_nvlamb": True, "weight_decay": 0.0},
        {"adam_w_mode": 0, "use_nvlamb": True, "grad_averaging": False, **WD},
    )),
    *(("FusedAdagrad", "adagrad", o) for o in (
        {}, WD, {"adagrad_w_mode": 1, **WD}, {"adagrad_w_mode": 1, "eps": 1e-2},
    )),
    *(("FusedNovoGrad", "novograd", {"moment_mode": mode, **o}) for mode in (0, 1) for o in (
        {}, WD, {"bias_correction": False, **WD}, {"init_zero": True, **WD},
        {"grad_averaging": False, "betas": (0.5, 0.6), "eps": 0.1, **WD},
    )),
]  # fmt: skip


def _id(row: tuple[str, str, Options]) -> str:
    return "-".join((row[0], *(f"{k}={v}" for k, v in row[2].items())))


def _group(rule: str, name: str, given: Options, initial_lr: float) -> dict[str, float]:
    """The columns of a group that mean what an optimizer's options mean."""
    columns: dict[str, float] = {"start": 1.0} if name == "FusedNovoGrad" else {}
    for key, value in given.items():
        if key == "betas":
            columns.update(beta1=value[0], beta2=value[1])
        elif key == "maximize":
            columns["sign"] = -1.0 if value else 1.0
        elif key == "corrected_weight_decay":
            columns["max_lr"] = initial_lr if value else 0.0
        elif key == "caution":
            columns["cautious"] = value
        elif key == "decoupled_weight_decay":
            columns["decoupled"] = value
        elif key == "amsgrad" and rule == "novograd":
            columns["amsgrad"] = value
        elif key == "bias_correction" and rule == "adam":
            columns["uncorrected"] = not value
        elif key == "adam_w_mode" and rule == "lamb":
            columns["decoupled_decay"] = 0 if value else 2
        elif key in ("adam_w_mode", "adagrad_w_mode", "wd_after_momentum"):
            columns["decoupled"] = value
        elif key == "use_nvlamb":
            columns["always_adapt"] = value
        elif key == "moment_mode":
            columns["outside"] = value
        elif key == "init_zero" and value:
            columns["start"] = 2.0
        elif key in OPTIONS[rule] or key in ("lr", "weight_decay"):
            columns[key] = value
    if name in ("AdamW", "sgdw.SGDW", "nadamw.NAdamW"):
        columns["decoupled"] = 1
    return {k: float(v) for k, v in columns.items()}


def _states(rule: str, given: Options) -> list[int]:
    if rule in ("sgd", "lars"):
        return [0] if given["momentum"] else []
    if rule == "adam":
        return [0, 1, 2] if given.get("amsgrad") else [0, 1]
    if rule in ("rmsprop", "rmsprop_tf"):
        return [0, *([1] if given["momentum"] else []), *([2] if given["centered"] else [])]
    return list(range(RULES[RULE_NAMES.index(rule)].most))


def _difference(ours: Tensor, theirs: Tensor | None) -> float:
    assert theirs is not None
    scale = theirs.abs().max().item() or 1.0
    return (ours - theirs).abs().max().item() / scale


def _compare(
    ops: Any,
    rule: str,
    name: str,
    optimizer_class: Callable[..., Any],
    options: Options,
    bound: float,
) -> None:
    """Five steps of both, at a changing rate; one parameter and one gradient are all zeros."""
    shapes = [(7, 5), (4, 3, 3, 3), (6,), (), (3, 4), (5,)]
    lr = 0.1
    optimizer = optimizer_class([torch.nn.Parameter(torch.zeros(1))], lr=lr, **options)
    given = {**optimizer.defaults, **options}
    step: dict[str, Any] = {"measures": 7, "trial": 1}
    if given.get("max_grad_norm") is not None:
        step.update(max_norm=given["max_grad_norm"], norm_eps=0)
    states = _states(rule, given)
    specs = [Spec(shape, F64, states=states) for shape in shapes]
    case = Case(rule, specs, [_group(rule, name, given, lr)], **step)
    case.params[4].zero_()
    if rule == "adagrad":
        for state in case.states:
            state.fill_(given.get("initial_accumulator_value", 0.0))
    params = [torch.nn.Parameter(p.clone()) for p in case.params]
    optimizer = optimizer_class(params, lr=lr, **options)
    for index in range(5):
        case.new_gradients()
        for i, (param, grad) in enumerate(zip(params, case.grads)):
            grad[torch.rand(grad.shape) < 0.3] = 0
            if i == 5 and index < 2:
                grad.zero_()
            param.grad = grad.clone()
        rate = lr * (1 - 0.15 * index)
        case.table[1, 0] = optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        ops.optimizer_step(*case.arguments(), None, None)
        for ours, theirs in zip(case.params, params):
            assert _difference(ours, theirs.detach()) < bound
    for row, param in zip(case.rows.tolist(), params):
        for k in states:
            theirs = optimizer.state[param][STATES[rule][k]]
            assert _difference(case.states[row[2 + k]], theirs) < bound
    assert case.scalars[0].tolist() == [5] * len(shapes)
    assert case.control[5] == 5


@pytest.mark.parametrize("row", TORCH, ids=_id)
def test_torch(ops: Any, row: tuple[str, str, Options]) -> None:
    name, rule, options = row
    _compare(ops, rule, name, getattr(torch.optim, name), options, 1e-12)


@pytest.mark.parametrize("row", TIMM, ids=_id)
def test_timm(ops: Any, row: tuple[str, str, Options]) -> None:
    name, rule, options = row
    timm()
    module, class_name = name.split(".")
    optimizer_class = getattr(importlib.import_module(f"timm.optim.{module}"), class_name)
    # timm rounds NovoGrad's second moment to float32 twice a step, and the ops once.
    _compare(ops, rule, name, optimizer_class, options, 1e-6 if rule == "novograd" else 1e-12)


@pytest.mark.parametrize("row", APEX, ids=_id)
def test_apex(ops: Any, row: tuple[str, str, Options]) -> None:
    name, rule, options = row
    # The ops keep NovoGrad's second moment in float32.
    _compare(ops, rule, name, TRUTHS[name], options, 1e-6 if rule == "novograd" else 1e-12)


@pytest.mark.parametrize("nesterov", [False, True])
def test_bound_of_caution(ops: Any, nesterov: bool) -> None:
    """Where fewer than one element in 1000 agrees."""
    timm()
    optimizer_class = importlib.import_module("timm.optim.sgdw").SGDW
    group = {"lr": 0.1, "momentum": 0.9, "nesterov": nesterov, "decoupled": 1, "cautious": 1}
    case = Case("sgd", [Spec((3, 1500), F64)], [group], trial=1)
    param = torch.nn.Parameter(case.params[0].clone())
    options = {"lr": 0.1, "momentum": 0.9, "nesterov": nesterov, "caution": True}
    optimizer = optimizer_class([param], weight_decay=0.0, **options)
    for factor in (1.0, -0.01):
        case.grads[0] *= factor
        case.grads[0][1, 2:5] = 1
        param.grad = case.grads[0].clone()
        optimizer.step()
        ops.optimizer_step(*case.arguments(), None, None)
        assert _difference(case.params[0], param.detach()) < 1e-12


@pytest.mark.parametrize(("factor", "eps"), [(0.01, 1e-3), (0.3, 1e-3), (5.0, 1e-3), (0.1, 1e-9)])
def test_adaptive_clipping_of_timm(ops: Any, factor: float, eps: float) -> None:
    timm()
    agc = importlib.import_module("timm.utils.agc").adaptive_clip_grad
    shapes = [(7, 5), (4, 3, 3, 3), (1, 6), (6,), ()]
    layouts = ["transposed", "channels_last", "contiguous", "contiguous", "contiguous"]
    specs = [Spec(s, F64, layout) for s, layout in zip(shapes, layouts)]
    group = {"lr": 0.1, "momentum": 0.9}
    case = Case("sgd", specs, [group], measures=7, unit_factor=factor, unit_eps=eps, write_back=1)
    case.params[0][2] = 0
    case.params[1][3] = 0
    params = [torch.nn.Parameter(p.clone()) for p in case.params]
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    for _ in range(5):
        case.new_gradients()
        case.grads[1][3] *= 1e-8
        for param, grad in zip(params, case.grads):
            param.grad = grad.clone()
        agc(params, factor, eps=eps)
        optimizer.step()
        ops.optimizer_step(*case.arguments(), None, None)
        for ours, grad, theirs in zip(case.params, case.grads, params):
            assert _difference(ours, theirs.detach()) < 1e-12
            assert _difference(grad, theirs.grad) < 1e-12


@pytest.mark.parametrize("max_norm", [0.5, 1e3])
def test_clipping_and_scaling_of_torch(ops: Any, max_norm: float) -> None:
    specs = [Spec((7, 5), F64), Spec((6,), F64)]
    group = {"lr": 0.1, "momentum": 0.9}
    case = Case("sgd", specs, [group], scale=1024.0, measures=3, max_norm=max_norm, write_back=1)
    params = [torch.nn.Parameter(p.clone()) for p in case.params]
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    for _ in range(5):
        case.new_gradients()
        for param, grad in zip(params, case.grads):
            param.grad = grad / 1024
        norm = torch.nn.utils.clip_grad_norm_(params, max_norm)
        optimizer.step()
        ops.optimizer_step(*case.arguments(), None, None)
        for ours, grad, theirs in zip(case.params, case.grads, params):
            assert _difference(ours, theirs.detach()) < 1e-12
            assert _difference(grad, theirs.grad) < 1e-12
        assert case.control[2].item() == pytest.approx(norm.item(), rel=1e-6)
        assert case.control[3].item() == pytest.approx(min(max_norm / norm.item(), 1), rel=1e-5)


# --- TorchScript


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("rule", RULES, ids=RULE_NAMES)
def test_scripted(rule: Any) -> None:
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int, dtype: torch.dtype = F64) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=dtype) + 0.1

    names = OPTIONS[rule.name]
    options = [[BUSY[rule.name].get(name, 0.0) for name in names], random(len(names)).tolist()]
    option = torch.nn.functional.pad(torch.tensor(options, dtype=F64), (0, 8 - len(names)))
    facts = Facts(
        lr=random(2),
        weight_decay=random(2),
        max_lr=random(2),
        cautious=torch.ones(2, dtype=F64),
        option=option,
        step=torch.tensor([1.0, 4.0], dtype=F64),
        grad_norm=random(2),
        param_norm=random(2),
        moments=random(2, 2, dtype=F32),
    )
    trial = Trial(*(random(2) for _ in range(4)))
    k = rule.prepare(facts)
    assert _equal(torch.jit.script(rule.prepare)(facts), k)
    assert _equal(torch.jit.script(finish)(k, trial), finish(k, trial))
    if rule.finish is not None:
        expected = rule.finish(facts, k, trial)
        assert _equal(torch.jit.script(rule.finish)(facts, k, trial), expected)
    scripted = torch.jit.script(rule.update)
    for dtype in (F32, F64):
        tensors = [random(3, 5, dtype=dtype) for _ in range(2 + rule.most)]
        kept = [t.clone() for t in tensors]
        c = list(k.c[1].to(dtype).unbind())
        expected = rule.update(tensors[0], tensors[1], tensors[2:], c)
        for _ in range(3):  # the later ones are optimised by the profiling executor
            u, grad, states = scripted(tensors[0], tensors[1], tensors[2:], c)
            torch.testing.assert_close((u, grad, states), expected, rtol=1e-6, atol=1e-7)
        assert all(torch.equal(a, b) for a, b in zip(tensors, kept)), "something was modified"


def _equal(a: Any, b: Any) -> bool:
    return all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(a, b, strict=True))


# --- nothing waits for the device


class _Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.calls.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rule", RULE_NAMES)
def test_no_synchronisation(rule: str) -> None:
    step: dict[str, Any] = {"measures": 7, "trial": 1, "max_norm": 1.0, "average_weight": 0.1}
    step.update(stochastic=1, scale=4.0, found_inf=0.0, lrs=[torch.tensor(0.1)])
    groups = [busy(rule, lr_index=0), busy(rule, cautious=1)]
    for write_back, unit_factor in ((1, 0.0), (2, 0.1)):
        step.update(write_back=write_back, unit_factor=unit_factor)
        case = Case(rule, specs_of(rule), groups, **step)
        with _Counted() as counted:
            optimizers.optimizer_step(*case.arguments(), None, None)
        assert len(counted.calls) > 100
        assert not [c for c in counted.calls if "_local_scalar_dense" in c or "nonzero" in c]
        # Tensors without values: whatever asked for one would fail.
        meta = case.to("meta")
        assert optimizers.optimizer_step(*meta.arguments(), None, None).is_meta
