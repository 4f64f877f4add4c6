"""Copies of the optimizers, what loads their state, and hooks: runs go on alike."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import fusedtrain
from fusedtrain.reference.stochastic_rounding import seed_after
from helpers.optimizer_steps import (
    ALL,
    alike,
    assert_close,
    give_gradients,
    in_groups,
    parameters,
    saved_and_loaded,
    skipped_step,
    step,
    steps,
)
from helpers.optimizers import CLASSES, make

# --- stochastic rounding


@pytest.mark.parametrize("other_seed", [False, True], ids=["same seed", "other seed"])
@pytest.mark.parametrize("stepped", [False, True], ids=["new", "stepped"])
@ALL
def test_stochastic_rounding_goes_on_after_loading(
    name: str, stepped: bool, other_seed: bool
) -> None:
    """As the uninterrupted run does: its stream neither starts again nor depends on the seed."""
    options = {"stochastic_rounding": True}
    runs = []
    for interrupted in (False, True):
        torch.manual_seed(-5)  # 2^64 - 5
        p = parameters(torch.bfloat16)
        optimizer = make(name, p, **options)
        steps(optimizer, p, range(3))
        skipped_step(optimizer, p)
        if interrupted:
            torch.manual_seed(2 if other_seed else -5)
            saved = saved_and_loaded(optimizer.state_dict())
            optimizer = make(name, p, **options)
            if stepped:
                kept = [x.detach().clone() for x in p]
                steps(optimizer, p, range(7, 9))
                with torch.no_grad():
                    for x, before in zip(p, kept, strict=True):
                        x.copy_(before)
            optimizer.load_state_dict(saved)
        steps(optimizer, p, range(3, 6))
        runs.append((p, optimizer.state_dict()))
    assert alike(runs[0][0], runs[1][0])
    assert alike(runs[0][1], runs[1][1])


def test_only_stochastic_rounding_adds_a_key() -> None:
    p = parameters(torch.bfloat16)
    optimizer = fusedtrain.optim.AdamW(p, stochastic_rounding=True)
    steps(optimizer, p, [0])
    saved = optimizer.state_dict()
    assert isinstance(saved.pop("rounding_stream"), int)
    optimizer.load_state_dict(saved)  # of an earlier version
    torch.optim.AdamW(p).load_state_dict(optimizer.state_dict())
    optimizer.stochastic_rounding = False
    assert optimizer.state_dict().keys() == {"state", "param_groups"}


# --- copies


@pytest.mark.parametrize(
    ("how", "dtype", "options"),
    [
        ("deepcopy", torch.float64, {"ema_decay": 0.9, "max_grad_norm": 0.5}),
        ("pickle", torch.float32, {"agc": 0.1, "state_dtype": torch.bfloat16}),
        (
            "torch.save", torch.bfloat16,
            {"stochastic_rounding": True, "state_dtype": torch.float32},
        ),
        ("deepcopy", torch.float16, {"master_weights": True, "gradient_writeback": "zero"}),
        ("pickle", torch.float32, {"state_dtype": "q8"}),
        ("deepcopy", torch.bfloat16, {"state_dtype": "q8", "master_weights": "split24"}),
        ("pickle", torch.float16, {"master_weights": "split32"}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else str(value),
)  # fmt: skip
@pytest.mark.usefixtures("codes_of_small_parameters")
@pytest.mark.parametrize("name", CLASSES)
def test_copies_go_on_alike(
    name: str, how: str, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    options = {**options, **dict.fromkeys(CLASSES[name].switches, dtype.itemsize == 2)}
    if name in ("LAMB", "FusedLAMB") and "agc" in options:
        options["max_grad_norm"] = None
    if name == "FusedAdam":
        options["capturable"] = True
    p = parameters(dtype)
    optimizer = make(name, in_groups(p), **options)
    steps(optimizer, p, range(1, 3))
    skipped_step(optimizer, p)
    both = {"params": p, "optimizer": optimizer}
    if how == "deepcopy":
        other = copy.deepcopy(both)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(both))
    else:
        file = io.BytesIO()
        torch.save(both, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    assert other["optimizer"]._fused_options == optimizer._fused_options
    assert other["optimizer"].skipped_steps == 1
    assert other["optimizer"].applied_steps == 2
    for run in (both, other):
        steps(run["optimizer"], run["params"], range(3, 6))
    assert alike(other["params"], p)
    for how_saved in ({}, {"compressed": True}):
        assert alike(*(run["optimizer"].state_dict(**how_saved) for run in (both, other)))
    assert other["params"][0].data_ptr() != p[0].data_ptr()
    assert other["optimizer"].ema_decay == optimizer.ema_decay
    other["optimizer"].zero_grad()
    assert (other["params"][1].grad is None) == (name != "FusedSGD")


# --- checkpoints of others


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_apex_counts_by_group(name: str) -> None:
    p, q = parameters(), parameters()
    theirs = getattr(torch.optim, name)(q, lr=0.1, weight_decay=0.1)
    for optimizer in (theirs, getattr(torch.optim, name)(p, lr=0.1, weight_decay=0.1)):
        params = q if optimizer is theirs else p
        for seed in range(5):
            give_gradients(params, seed)
            optimizer.step()
    saved = theirs.state_dict()
    keys = ("lr", "betas", "eps", "weight_decay", "params")
    group = {k: saved["param_groups"][0][k] for k in keys}
    state = {n: {k: v for k, v in s.items() if k != "step"} for n, s in saved["state"].items()}
    apex = {"param_groups": [{**group, "bias_correction": True, "step": 5}], "state": state}
    ours = getattr(fusedtrain.optim, name)(p, lr=0.3)
    ours.load_state_dict(saved_and_loaded(apex))
    steps(ours, p, range(5, 9))
    steps(theirs, q, range(5, 9))
    assert_close(p, q)
    assert "step" not in ours.param_groups[0]
    assert float(ours.state_dict()["state"][0]["step"]) == 8.0  # one step of four without gradient


# --- loading


@pytest.mark.parametrize("name", CLASSES)
def test_loading_over_a_live_plan(name: str) -> None:
    """States that were there before the load play no part, nor does the plan that knew them."""
    options = {"ema_decay": 0.9}
    p = parameters(torch.float32)
    optimizer = make(name, in_groups(p), **options)
    steps(optimizer, p, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    values = [x.detach().clone() for x in p]
    results = []
    for _ in range(3):
        with torch.no_grad():
            for x, value in zip(p, values, strict=True):
                x.copy_(value)
        kept = copy.deepcopy(saved)
        optimizer.load_state_dict(saved)
        steps(optimizer, p, range(3, 7))
        assert alike(saved, kept)  # what was given is not written to
        results.append([x.detach().clone() for x in p])
    assert alike(results[0], results[1])
    assert alike(results[0], results[2])


@ALL
def test_two_optimizers_from_one_state_dict(name: str) -> None:
    runs = [parameters(torch.float32) for _ in range(3)]
    optimizers = [make(name, r) for r in runs]
    steps(optimizers[0], runs[0], range(3))
    saved = optimizers[0].state_dict()
    for run, optimizer in zip(runs[1:], optimizers[1:], strict=True):
        for x, value in zip(run, runs[0], strict=True):
            x.data.copy_(value.detach())
        optimizer.load_state_dict(saved)
    for run, optimizer in zip(runs, optimizers, strict=True):
        steps(optimizer, run, range(3, 6))
    assert alike(runs[0], runs[1])
    assert alike(runs[0], runs[2])


@pytest.mark.parametrize("state_dtype", [None, torch.float32, torch.bfloat16], ids=str)
@ALL
def test_states_take_the_dtype_of_the_optimizer(name: str, state_dtype: torch.dtype | None) -> None:
    p, q = parameters(torch.bfloat16), parameters(torch.bfloat16)
    options = {"ema_decay": 0.9, "master_weights": True}
    first = make(name, p, **options, state_dtype=torch.float32)
    steps(first, p, range(3))
    second = make(name, q, **options, state_dtype=state_dtype)
    second.load_state_dict(saved_and_loaded(first.state_dict()))
    for x, y in zip(p, q, strict=True):
        for key, value in first.state[x].items():
            mine = second.state[y][key]
            if value.shape != x.shape or key in ("ema", "master_param", "step"):
                assert alike(mine, value), key
            elif x.dim() > 0:
                assert mine.dtype == (state_dtype or torch.bfloat16), key
                assert torch.equal(mine, value.to(mine.dtype)), key
    steps(second, q, range(3))


def test_hooks_see_and_change_what_is_loaded() -> None:
    p = parameters()
    optimizer = fusedtrain.optim.Adam(p)
    give_gradients(p, 0)
    optimizer.step()
    saved = optimizer.state_dict()

    def before(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        state = {n: {**s, "exp_avg": s["exp_avg"] + 2} for n, s in state_dict["state"].items()}
        return {**state_dict, "state": state}

    def after(loaded: torch.optim.Optimizer) -> None:
        loaded.state[p[1]]["exp_avg_sq"] = torch.full_like(p[1], 9.0)

    optimizer.register_load_state_dict_pre_hook(before)
    optimizer.register_load_state_dict_post_hook(after)
    optimizer.load_state_dict(saved)
    assert torch.equal(optimizer.state[p[0]]["exp_avg"], saved["state"][0]["exp_avg"] + 2)
    assert (optimizer.state[p[1]]["exp_avg_sq"] == 9).all()
    steps(optimizer, p, [3])
    assert len(optimizer._optimizer_load_state_dict_pre_hooks) == 1
    assert len(optimizer._optimizer_load_state_dict_post_hooks) == 1


def test_hooks_see_and_change_what_is_saved() -> None:
    p = parameters()
    optimizer = fusedtrain.optim.SGD(p, momentum=0.9)
    skipped_step(optimizer, p)
    seen: list[Any] = []
    optimizer.register_state_dict_pre_hook(lambda o: seen.append(o))
    optimizer.register_state_dict_post_hook(lambda _, saved: seen.append(dict(saved["state"])))
    optimizer.register_state_dict_post_hook(lambda _, saved: {"mine": saved})
    assert list(optimizer.state_dict()) == ["mine"]
    assert seen == [optimizer, {}]


def test_a_bad_state_dict_changes_nothing() -> None:
    p = parameters()
    optimizer = fusedtrain.optim.Adam(p)
    steps(optimizer, p, range(2))
    before = copy.deepcopy(optimizer.state_dict())
    bad = copy.deepcopy(before)
    bad["param_groups"].append({"params": []})
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict(bad)
    assert alike(optimizer.state_dict(), before)
    assert not optimizer._optimizer_load_state_dict_pre_hooks
    assert not optimizer._optimizer_load_state_dict_post_hooks


@pytest.mark.parametrize("way", ["plain", "flattened", "full"])
@pytest.mark.parametrize("states", [None, torch.float32, "q8"], ids=str)
@pytest.mark.parametrize("masters", [False, True, "split24", "split32"], ids=str)
@ALL
def test_distributed_checkpoint_of_every_kind(
    name: str, masters: Any, states: Any, way: str
) -> None:
    """The same states, and the same bits of the next step."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    options = StateDictOptions(
        full_state_dict=way == "full", flatten_optimizer_state_dict=way == "flattened"
    )
    kinds = {"master_weights": masters, "state_dtype": states, "ema_decay": 0.9}

    def built() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 70), nn.Unflatten(1, (7, 10)), nn.Conv1d(7, 2, 2))
        model = model.bfloat16() if masters or states else model
        return model, make(name, model.parameters(), **kinds)

    model, optimizer = built()
    for seed in range(2):
        step(optimizer, model.parameters(), seed)
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    assert way == "flattened" or "0.weight" in saved["state"]
    other, loaded = built()
    other.load_state_dict(model.state_dict())
    set_optimizer_state_dict(other, loaded, saved, options=options)
    assert alike(loaded.state_dict()["state"], optimizer.state_dict()["state"])
    steps_of_random = int(optimizer.applied_steps) - int(loaded.applied_steps)
    loaded._rounding_seed = seed_after(optimizer._rounding_seed, steps_of_random)  # not in the dict
    for p in (model, other):
        step(optimizer if p is model else loaded, p.parameters(), 2)
    assert alike(list(model.parameters()), list(other.parameters()))
    assert alike(loaded.state_dict()["state"], optimizer.state_dict()["state"])


def test_averages_turned_off_before_the_first_step_leave_nothing() -> None:
    """Adagrad, which has states by then, names its averages ahead for torch's checkpoints."""
    p = parameters()
    optimizer = make("Adagrad", p, ema_decay=0.9)
    assert all(state["ema"] is None for state in optimizer.state.values())
    assert "ema" in optimizer.state_dict()["state"][0]
    optimizer.ema_decay = None
    expected = make("Adagrad", parameters()).state_dict()["state"]
    assert alike(optimizer.state_dict()["state"], expected)
