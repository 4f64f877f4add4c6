"""Apex's optimizers: interfaces, checkpoints. tests/optim has their steps beside Apex's formulas in
float64 (test_optimizer_numbers.py), copies and scalers."""

from __future__ import annotations

import copy
import inspect
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import required

import fusedtrain
from fusedtrain.apex import optimizers
from fusedtrain.optim import FusedOptimizer
from helpers.optimizer_steps import assert_close, parameters, same, saved_and_loaded, step
from helpers.optimizers import APEX, CLASSES

ALL = pytest.mark.parametrize("name", APEX)
BOTH = pytest.mark.parametrize("switched", [False, True], ids=["", "switched"])
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


def make(name: str, params: Any, **options: Any) -> FusedOptimizer:
    optimizer = getattr(optimizers, name)(params, **{"lr": 0.1, "weight_decay": 0.1, **options})
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert isinstance(optimizer, FusedOptimizer)
    return optimizer


def switches(name: str, on: bool) -> dict[str, bool]:
    return dict.fromkeys(CLASSES[name].switches, on)


# --- numbers


@pytest.mark.parametrize("init_zero", [False, True])
def test_a_first_gradient_of_zeros(init_zero: bool) -> None:
    """The norm starts at the first step's, which is not the first norm above 0."""
    p = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    optimizer = make("FusedNovoGrad", [p], init_zero=init_zero, betas=(0.5, 0.75))
    for grad in ([0.0, 0.0], [3.0, -4.0]):
        p.grad = torch.tensor(grad, dtype=torch.float64)
        optimizer.step()
    assert optimizer.state[p]["exp_avg_sq"] == 0.25 * 25
    norm = math.sqrt(0.25 * 25) / math.sqrt(1 - 0.75**2)
    expected = -0.1 * 0.5 * p.grad / (1 - 0.5**2) / norm
    torch.testing.assert_close(p.detach(), expected)


@BOTH
@ALL
def test_infinite_parameters_stay_where_nothing_decays(name: str, switched: bool) -> None:
    options = {k: v for k, v in switches(name, switched).items() if k != "use_nvlamb"}
    p = nn.Parameter(torch.tensor([math.inf, 1.0, -math.inf]))
    optimizer = make(name, [p], weight_decay=0.0, **options)
    step(optimizer, [p], 1)
    assert p.isinf().tolist() == [True, False, True]
    assert p[1] != 1


# --- the interface

# Apex's constructors, after `params`.
SIGNATURES: dict[str, dict[str, Any]] = {
    "FusedAdam": {
        "lr": 1e-3, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-8,
        "adam_w_mode": True, "weight_decay": 0.0, "amsgrad": False, "set_grad_none": True,
        "capturable": False, "master_weights": False,
    },
    "FusedSGD": {
        "lr": required, "momentum": 0, "dampening": 0, "weight_decay": 0,
        "nesterov": False, "wd_after_momentum": False, "materialize_master_grads": True,
        "set_grad_none": False,
    },
    "FusedLAMB": {
        "lr": 1e-3, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-6,
        "weight_decay": 0.01, "amsgrad": False, "adam_w_mode": True, "grad_averaging": True,
        "set_grad_none": True, "max_grad_norm": 1.0, "use_nvlamb": False,
    },
    "FusedAdagrad": {
        "lr": 1e-2, "eps": 1e-10, "weight_decay": 0.0, "set_grad_none": True,
        "adagrad_w_mode": False,
    },
    "FusedNovoGrad": {
        "lr": 1e-3, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-8,
        "weight_decay": 0.0, "amsgrad": False, "reg_inside_moment": False, "grad_averaging": True,
        "norm_type": 2, "init_zero": False, "set_grad_none": True,
    },
}  # fmt: skip
OF_THE_OPTIMIZER = {
    "adam_w_mode", "amsgrad", "set_grad_none", "capturable", "master_weights", "use_nvlamb",
    "wd_after_momentum", "materialize_master_grads", "adagrad_w_mode", "reg_inside_moment",
}  # fmt: skip


@ALL
def test_signatures_and_groups(name: str) -> None:
    arguments = list(inspect.signature(getattr(optimizers, name)).parameters.values())
    assert [arguments[0].name, arguments[-1].kind] == ["params", inspect.Parameter.VAR_KEYWORD]
    defaults = {p.name: p.default for p in arguments[1:-1]}
    assert list(defaults.items()) == list(SIGNATURES[name].items())
    group = make(name, parameters()).param_groups[0]
    assert group.keys() == {"params", *SIGNATURES[name]} - OF_THE_OPTIMIZER


@ALL
def test_zero_grad(name: str) -> None:
    for set_grad_none, makes_none in ((None, name != "FusedSGD"), (False, False), (True, True)):
        p = parameters()
        options = {} if set_grad_none is None else {"set_grad_none": set_grad_none}
        optimizer = make(name, p, **options)
        step(optimizer, p, 1)
        optimizer.zero_grad()
        assert all((x.grad is None) is makes_none for x in p)
        assert makes_none or not any(x.grad.any() for x in p)
        step(optimizer, p, 1)
        optimizer.zero_grad(set_to_none=not makes_none)
        assert all((x.grad is None) is not makes_none for x in p)


@ALL
def test_what_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="Invalid learning rate: -1"):
        make(name, parameters(), lr=-1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'foreach'"):
        make(name, parameters(), foreach=True)
    if name not in ("FusedSGD", "FusedAdagrad"):
        with pytest.raises(RuntimeError, match="does not support the AMSGrad variant"):
            make(name, parameters(), amsgrad=True)
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3).to_sparse()
    with pytest.raises(RuntimeError, match=f"{name} does not support sparse gradients"):
        make(name, [p]).step()
    assert torch.equal(p, torch.ones(3))


@pytest.mark.parametrize("argument", ["grads", "output_params", "scale", "grad_norms"])
def test_old_arguments_of_a_step(argument: str) -> None:
    p = parameters()
    optimizer, before = make("FusedAdam", p), [x.detach().clone() for x in p]
    step(optimizer, p, 1)
    assert not same(p, before)
    before = [x.detach().clone() for x in p]
    with pytest.raises(RuntimeError, match=argument):
        optimizer.step(**{argument: 1.0})
    assert same(p, before)
    assert optimizer.step(lambda: 7) == 7
    assert not same(p, before)


def test_the_rate_of_sgd_may_be_given_by_group() -> None:
    with pytest.raises(ValueError, match="lr"):
        optimizers.FusedSGD(parameters())
    assert optimizers.FusedSGD([{"params": parameters(), "lr": 0.5}]).param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("norm_type", [0, 1])
def test_other_norms(norm_type: int) -> None:
    error = pytest.raises(RuntimeError, match=f"norm_type=2, the 2-norm, only; got {norm_type}")
    with error:
        make("FusedNovoGrad", parameters(), norm_type=norm_type)
    p = parameters()
    with error:
        make("FusedNovoGrad", [{"params": p, "norm_type": norm_type}])
    optimizer = make("FusedNovoGrad", p)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0].update(norm_type=norm_type, lr=7.0)
    with error:
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.1
    optimizer.param_groups[0]["norm_type"] = norm_type
    before = [x.detach().clone() for x in p]
    with error:
        step(optimizer, p, 1)
    assert same(p, before)


def test_master_weights_and_capturable() -> None:
    with pytest.raises(RuntimeError, match="master_weights needs capturable"):
        make("FusedAdam", parameters(F16), master_weights=True)
    p = parameters(F16)
    groups = [{"params": p[:2]}, {"params": p[2:4], "lr": 0.25}]
    optimizer = make("FusedAdam", groups, capturable=True, master_weights=True)
    optimizer.add_param_group({"params": p[4:]})
    rates = [group["lr"] for group in optimizer.param_groups]
    assert [(type(lr), lr.dtype, round(lr.item(), 6)) for lr in rates] == [
        (Tensor, F32, 0.1), (Tensor, F32, 0.25), (Tensor, F32, 0.1),
    ]  # fmt: skip
    rates[0].fill_(0)  # and no other's
    before = [x.detach().clone() for x in p]
    step(optimizer, p, 1)
    assert same(p[:2], before[:2])
    assert not any(map(torch.equal, p[4:], before[4:]))
    assert {optimizer.state[x][k].dtype for x in p for k in ("master_param", "exp_avg")} == {F32}


# --- checkpoints

MIXED = (F32, F16, F32, BF16, F16)


def mixed(dtypes: Any = MIXED) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(3, 5), (7,), (2, 3), (4,), (2, 0, 3)]
    return [nn.Parameter(torch.randn(s, generator=generator).to(d)) for s, d in zip(shapes, dtypes)]


def some_options(name: str) -> dict[str, Any]:
    return {"momentum": 0.9, "dampening": 0.3} if name == "FusedSGD" else {}


def of_apex(name: str, optimizer: FusedOptimizer, count: int) -> dict[str, Any]:
    """The state dict that Apex would have saved after `count` steps."""
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        if name not in ("FusedSGD", "FusedAdagrad"):
            group["step"] = count
        if name == "FusedNovoGrad":
            half: list[float] = []
            single: list[float] = []
            for number, p in zip(group["params"], optimizer.param_groups[0]["params"]):
                if number in saved["state"]:
                    norm = saved["state"][number].pop("exp_avg_sq").sqrt().item()
                    (single if p.dtype == F32 else half).append(norm)
            group["exp_avg_sq"] = [torch.tensor(half), torch.tensor(single)]
    for state in saved["state"].values():
        state.pop("step", None)
    return saved_and_loaded(saved)


@pytest.mark.parametrize("dtypes", [MIXED, (F32,) * 5, (F16,) * 5], ids=["mixed", "float", "half"])
@ALL
def test_checkpoints_of_apex(name: str, dtypes: Any) -> None:
    """The second parameter never has a gradient, and so no state."""
    p = mixed(dtypes)
    optimizer = make(name, p, **some_options(name))
    for seed in range(4):
        step(optimizer, [p[0], *p[2:]], seed)
    q = copy.deepcopy(p)
    other = make(name, q, **{**some_options(name), "lr": 3.0})
    other.load_state_dict(of_apex(name, optimizer, 4))
    assert not {"step", "exp_avg_sq"} & other.param_groups[0].keys()
    for seed in range(4, 8):
        step(optimizer, [p[0], *p[2:]], seed)
        step(other, [q[0], *q[2:]], seed)
    for a, b in zip(p, q):
        torch.testing.assert_close(a, b, rtol=2 * torch.finfo(a.dtype).eps, atol=1e-6)
    if name not in ("FusedSGD", "FusedAdagrad"):
        assert other.state[q[0]]["step"] == 8


def test_norms_of_other_dtypes_and_numbers() -> None:
    p = mixed((F32,) * 5)
    optimizer = make("FusedNovoGrad", p)
    step(optimizer, p, 0)
    saved = of_apex("FusedNovoGrad", optimizer, 1)
    squares = [optimizer.state[x]["exp_avg_sq"].item() for x in p]
    later = make("FusedNovoGrad", mixed())  # their order is known all the same
    later.load_state_dict(saved)
    loaded = [later.state[x]["exp_avg_sq"].item() for x in later.param_groups[0]["params"]]
    assert loaded == pytest.approx(squares)
    single = saved["param_groups"][0]["exp_avg_sq"][1]
    saved["param_groups"][0]["exp_avg_sq"] = [single[:1], single[1:]]
    with pytest.raises(ValueError, match=r"1 float16 and 4 float32 parameters; .* 3 and 2"):
        later.load_state_dict(saved)


OF_TORCH = [
    ("FusedAdam", "Adam", {"adam_w_mode": False}, {"weight_decay": 0.1}),
    ("FusedAdam", "AdamW", {}, {"weight_decay": 0.1}),
    ("FusedAdam", "Adam", {}, {"maximize": True}),
    ("FusedSGD", "SGD", {}, {"momentum": 0.9, "dampening": 0.5, "maximize": True}),
    ("FusedAdagrad", "Adagrad", {}, {"lr_decay": 0.3, "weight_decay": 0.1, "maximize": True}),
]


@pytest.mark.parametrize(("name", "theirs", "options", "saved"), OF_TORCH)
@pytest.mark.parametrize("module", [torch.optim, fusedtrain.optim], ids=["torch", "fusedtrain"])
def test_checkpoints_of_torch(
    module: Any, name: str, theirs: str, options: dict[str, Any], saved: dict[str, Any]
) -> None:
    """The options of the loaded groups count, also those that Apex's groups do not have."""
    p = parameters()
    optimizer = getattr(module, theirs)(p, lr=0.1, **saved)
    step(optimizer, p, 0)
    q = [nn.Parameter(x.detach().clone()) for x in p]
    ours = make(name, q, **options)
    ours.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    for seed in range(1, 4):
        step(optimizer, p, seed)
        step(ours, q, seed)
    assert_close(q, p)


def test_amsgrad_of_torch_is_refused() -> None:
    p = parameters()
    optimizer, ours = torch.optim.Adam(p, amsgrad=True), make("FusedAdam", p)
    step(optimizer, p, 0)
    before = ours.state_dict()
    with pytest.raises(ValueError, match="amsgrad=True, which FusedAdam does not support"):
        ours.load_state_dict(optimizer.state_dict())
    assert ours.state_dict() == before
