"""The optimizer step, in plain torch and in the CPU kernels, against torch, timm and Apex."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedtrain.reference import optimizers as reference
from fusedtrain.reference.optimizer_rules import RULES, Facts, Trial, finish
from helpers import optimizers
from helpers.models import timm
from helpers.observed import Counted
from helpers.optimizer_cases import F32, F64, RULE_NAMES, Case, Spec, specs_of
from helpers.optimizer_ops import BACKENDS
from helpers.optimizers import RULES as OF_RULES, SETS, Options, busy, set_id


@pytest.fixture(params=["reference", "cpu"])
def ops(request: pytest.FixtureRequest) -> Any:
    """Both implementations of the three ops."""
    return BACKENDS[request.param]()


# --- in float64 against torch.optim, timm.optim and Apex's formulas


def _difference(ours: Tensor, theirs: Tensor | None) -> float:
    assert theirs is not None
    scale = theirs.abs().max().item() or 1.0
    return (ours - theirs).abs().max().item() / scale


@pytest.mark.parametrize(("name", "options"), SETS, ids=set_id)
def test_counterparts(ops: Any, name: str, options: Options) -> None:
    """Five steps of both, at a changing rate; one parameter and one gradient are all zeros."""
    shapes = [(7, 5), (4, 3, 3, 3), (6,), (), (3, 4), (5,)]
    # timm rounds NovoGrad's second moment to float32 twice a step, and the ops once; that of Apex
    # the ops alone round.
    bound = 1e-6 if "NovoGrad" in name else 1e-12
    ours = optimizers.ours(name, [torch.nn.Parameter(torch.zeros(1))], options)
    (group,) = ours.param_groups
    slots = {k: slot for k, slot in enumerate(ours._slots(group)) if slot is not None}
    step: dict[str, Any] = {"measures": 7, "trial": 1}
    if ours.max_grad_norm is not None:
        step.update(max_norm=ours.max_grad_norm, norm_eps=0)
    specs = [Spec(shape, F64, states=list(slots)) for shape in shapes]
    case = Case(ours._rule, specs, [{}], **step)
    case.params[4].zero_()
    for row in case.rows.tolist():
        for k, slot in slots.items():
            case.states[row[2 + k]].fill_(ours._initial(slot))
    params = [torch.nn.Parameter(p.clone()) for p in case.params]
    theirs = optimizers.theirs(name, params, options)
    for index in range(5):
        case.new_gradients()
        for i, (param, grad) in enumerate(zip(params, case.grads)):
            grad[torch.rand(grad.shape) < 0.3] = 0
            if i == 5 and index < 2:
                grad.zero_()
            param.grad = grad.clone()
        group["lr"] = theirs.param_groups[0]["lr"] = 0.1 * (1 - 0.15 * index)
        case.table[1] = torch.tensor(ours._numbers(group).row([]), dtype=F64)
        theirs.step()
        ops.optimizer_step(*case.arguments(), None, None)
        for mine, param in zip(case.params, params):
            assert _difference(mine, param.detach()) < bound
    for row, param in zip(case.rows.tolist(), params):
        for k, slot in slots.items():
            assert _difference(case.states[row[2 + k]], theirs.state[param][slot]) < bound
    assert case.scalars[0].tolist() == [5] * len(shapes)
    assert case.control[5] == 5


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

    names = OF_RULES[rule.name].options
    options = [
        [OF_RULES[rule.name].busy.get(name, 0.0) for name in names],
        random(len(names)).tolist(),
    ]
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


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULE_NAMES)
def test_no_synchronisation(rule: str) -> None:
    step: dict[str, Any] = {"measures": 7, "trial": 1, "max_norm": 1.0, "average_weight": 0.1}
    step.update(stochastic=1, scale=4.0, found_inf=0.0, lrs=[torch.tensor(0.1)])
    groups = [busy(rule, lr_index=0), busy(rule, cautious=1)]
    for write_back, unit_factor in ((1, 0.0), (2, 0.1)):
        step.update(write_back=write_back, unit_factor=unit_factor)
        case = Case(rule, specs_of(rule), groups, **step)
        with Counted() as counted:
            reference.optimizer_step(*case.arguments(), None, None)
        assert len(counted.calls) > 100
        assert not [c for c in counted.calls if "_local_scalar_dense" in c or "nonzero" in c]
        # Tensors without values: whatever asked for one would fail.
        meta = case.to("meta")
        assert reference.optimizer_step(*meta.arguments(), None, None).is_meta
