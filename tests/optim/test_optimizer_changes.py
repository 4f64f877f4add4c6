"""Changes allowed between steps: parameters, gradients, options, groups, states."""

from __future__ import annotations

import collections
import copy
import random
from typing import Any

import pytest
import torch
from torch import nn

import fusedtrain
from helpers.optimizer_steps import (
    ALL,
    OF_TORCH,
    SHAPES,
    assert_close,
    give_gradients,
    parameters,
    same,
    skipped_step,
    step,
)
from helpers.optimizers import CLASSES, make


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
    ("RMSprop", {"momentum": 0.9}, {"momentum": -0.3}),
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
        runs.append((getattr(module, name)(groups, **CLASSES[name].busy), params))
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
        pytest.skip("not a case: torch's Adagrad makes its states only once")
    p, q = parameters(), parameters()
    ours = getattr(fusedtrain.optim, name)(p, **CLASSES[name].busy)
    theirs = getattr(torch.optim, name)(q, **CLASSES[name].busy)
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
                    values = state[x] if how in ("tensors", "step") else {}
                    for key in values:
                        if how == "tensors" and key not in ("step", "grad_avg"):
                            values[key] = values[key].abs() + 1
                        elif how == "step" and key == "step":
                            values[key] = torch.tensor(17.0)
        step(ours, p, seed)
        step(theirs, q, seed)
        assert_close(p, q)


@pytest.mark.parametrize("change", ["", "layout", "step"])
@OF_TORCH
def test_states_whose_data_are_replaced(name: str, change: str) -> None:
    """As code that offloads states does; step counts are views of our memory until then."""
    runs = []
    for module in (fusedtrain.optim, torch.optim):
        params = parameters()
        optimizer = getattr(module, name)(params, **CLASSES[name].busy)
        for seed in range(5):
            step(optimizer, params, seed)
            for key, value in (row for x in params for row in optimizer.state[x].items()):
                if seed == 1:
                    swapped = value.dim() > 1 and change == "layout"
                    value.data = value.mT.contiguous().mT if swapped else value.clone()
                if seed == 1 and key == "step" and change == "step":
                    value.fill_(17)
        runs.append((optimizer.state_dict()["state"], params))
    for ours, theirs in zip(runs[0][0].values(), runs[1][0].values(), strict=True):
        for key, value in theirs.items():
            torch.testing.assert_close(ours[key], value, msg=key)
    assert_close(runs[0][1], runs[1][1])


@pytest.mark.parametrize("how", ["clear", "pop", "replace"])
@OF_TORCH
def test_states_dropped_before_the_second_step(name: str, how: str) -> None:
    """After its first step a plan has not looked at the dictionaries of the states yet."""
    if name == "Adagrad":
        pytest.skip("not a case: torch's Adagrad makes its states only once")
    runs = []
    for module in (fusedtrain.optim, torch.optim):
        p = nn.Parameter(torch.ones(3, dtype=torch.float64))
        optimizer = getattr(module, name)([p], **CLASSES[name].busy)
        for seed in range(4):
            if seed in (1, 3):
                if how == "clear":
                    optimizer.state.clear()
                elif how == "pop":
                    optimizer.state.pop(p)
                else:
                    optimizer.state = collections.defaultdict(dict)
            step(optimizer, [p], seed)
        assert optimizer.state_dict()["state"].keys() == {0}
        runs.append(p)
    assert_close(*runs)


@ALL
def test_which_parameters_have_gradients_may_vary(name: str) -> None:
    """There are more patterns than stored plans; parameters without gradients do not change."""
    choose = random.Random(0)
    p = parameters()
    alone = [parameters()[i] for i in range(len(SHAPES))]
    options = {"max_grad_norm": None}
    together, separate = make(name, p, **options), [make(name, [x], **options) for x in alone]
    for seed in range(30):
        chosen = [choose.random() < 0.5 for _ in SHAPES]
        give_gradients(p, seed)
        give_gradients(alone, seed)
        for x, y, optimizer, has in zip(p, alone, separate, chosen, strict=True):
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


def test_a_momentum_buffer_that_the_user_sets_is_dampened() -> None:
    """torch asks whether there is a buffer; a skipped step has made none."""
    p, q = parameters(), parameters()
    options = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}
    ours, theirs = fusedtrain.optim.SGD(p, **options), torch.optim.SGD(q, **options)
    skipped_step(ours, p[3:])
    for x in p[3:]:
        x.data = x.data.clone()  # another plan
    for optimizer, params in ((ours, p), (theirs, q)):
        for x in params[:3]:
            optimizer.state[x]["momentum_buffer"] = torch.full_like(x, 0.25)
    for seed in range(3):
        step(ours, p, seed)
        step(theirs, q, seed)
        assert_close(p, q)
        ours.add_param_group({"params": parameters()[:1]})  # another store
