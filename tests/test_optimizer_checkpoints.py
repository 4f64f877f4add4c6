"""Checkpoints of the optimizers: as torch's, in copies, hooks and files.

Runs that change hands between an optimizer and its counterpart: test_optimizer_counterparts.py.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedtrain

SHAPES = [(3, 5), (7,), (), (2, 0), (4, 3, 2, 2), (33,)]

# Class, and options that are not the defaults.
TORCH: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
    ("Adam", {"lr": 0.1}),
    ("Adam", {"lr": 0.1, "amsgrad": True, "weight_decay": 0.1, "betas": (0.8, 0.9)}),
    ("Adam", {"lr": 0.1, "maximize": True, "eps": 1e-3, "decoupled_weight_decay": True}),
    ("AdamW", {"lr": 0.1}),
    ("AdamW", {"lr": 0.1, "amsgrad": True, "weight_decay": 0.2}),
    ("RMSprop", {"lr": 0.1}),
    ("RMSprop", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "alpha": 0.9}),
    ("RMSprop", {"lr": 0.1, "momentum": 0.9, "centered": True, "maximize": True, "eps": 1e-3}),
    ("Adagrad", {"lr": 0.1}),
    ("Adagrad", {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1}),
    ("Adagrad", {"lr": 0.1, "initial_accumulator_value": 0.5, "maximize": True}),
]
# One of each class, with every state.
EACH: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "dampening": 0.5},
    "SGDW": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "caution": True},
    "LARS": {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1},
    "Adam": {"lr": 0.1, "amsgrad": True},
    "AdamW": {"lr": 0.1},
    "NAdamW": {"lr": 0.1, "caution": True, "corrected_weight_decay": True},
    "LAMB": {"lr": 0.1, "caution": True},
    "Lion": {"lr": 0.1, "weight_decay": 0.1},
    "RMSprop": {"lr": 0.1, "momentum": 0.9, "centered": True},
    "RMSpropTF": {"lr": 0.1, "momentum": 0.9, "centered": True},
    "Adagrad": {"lr": 0.1},
    "NovoGrad": {"lr": 0.1, "amsgrad": True, "weight_decay": 0.1},
}
ALL = pytest.mark.parametrize("name", EACH)
Groups = list[dict[str, Any]]


def ids(value: Any) -> str:
    return value if isinstance(value, str) else ",".join(f"{k}={v}" for k, v in value.items())


CASES = pytest.mark.parametrize(("name", "options"), TORCH, ids=ids)


def parameters(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(7)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in SHAPES]


def in_groups(params: list[Any]) -> Groups:
    return [{"params": params[:2]}, {"params": params[2:], "lr": 0.03, "weight_decay": 0.07}]


def give_gradients(params: Iterable[Tensor], seed: int, without: Any = ()) -> None:
    generator = torch.Generator().manual_seed(seed)
    for i, p in enumerate(params):
        grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        p.grad = None if i in without else grad


def steps(optimizer: torch.optim.Optimizer, params: Iterable[Tensor], seeds: Iterable[int]) -> None:
    """Steps whose gradients, and which parameters have none, follow from the seed."""
    for seed in seeds:
        without = [(), (0,), (5, 2), (1,)][seed % 4]
        give_gradients(params, seed, without)
        optimizer.step()


def skipped_step(optimizer: Any, params: Iterable[Tensor]) -> None:
    for p in params:
        p.grad = torch.full_like(p, float("nan"))
    optimizer.found_inf = torch.tensor(1.0)
    optimizer.step()
    del optimizer.found_inf


def assert_close(a: Any, b: Any, limit: float = 16) -> None:
    a, b = torch.as_tensor(a), torch.as_tensor(b)
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    eps = torch.finfo(a.dtype).eps
    assert ((a - b).abs() <= limit * eps * b.abs().clamp_min(1)).all()


def assert_same_state_dict(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours.keys() == theirs.keys()
    for a, b in zip(ours["param_groups"], theirs["param_groups"], strict=True):
        assert list(a) == list(b)
        assert a == b
    assert ours["state"].keys() == theirs["state"].keys()
    for number, state in theirs["state"].items():
        assert ours["state"][number].keys() == state.keys()
        for key, value in state.items():
            mine = ours["state"][number][key]
            assert type(mine) is type(value), key
            assert_close(mine, value)
            assert mine.device == value.device
            assert mine.stride() == value.stride()


def same_bits(a: Any, b: Any) -> bool:
    """Of tensors, or of dicts and lists of them."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_bits(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same_bits, a, b))
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return bool(a == b)


def saved_and_loaded(state_dict: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def pair(
    name: str, options: dict[str, Any], dtype: torch.dtype = torch.float64
) -> tuple[list[nn.Parameter], torch.optim.Optimizer, list[nn.Parameter], torch.optim.Optimizer]:
    p, q = parameters(dtype), parameters(dtype)
    ours = getattr(fusedtrain.optim, name)(in_groups(p), **options)
    return p, ours, q, getattr(torch.optim, name)(in_groups(q), **options)


# --- the same as torch's


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@CASES
def test_the_state_dict_is_torchs(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    p, ours, q, theirs = pair(name, options, dtype)
    assert_same_state_dict(ours.state_dict(), theirs.state_dict())
    for seed in range(1, 5):
        steps(ours, p, [seed])
        steps(theirs, q, [seed])
        assert_same_state_dict(ours.state_dict(), theirs.state_dict())
    assert len(ours.state) >= len(theirs.state)


@pytest.mark.parametrize("flag", ["capturable", "fused", "foreach"])
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop"])
def test_flags_are_kept(name: str, flag: str) -> None:
    if flag not in getattr(torch.optim, name)(parameters()).defaults:
        pytest.skip(f"torch's {name} has no {flag}")
    if flag == "capturable":
        # torch's own step is not to be had with it on the CPU.
        ours = getattr(fusedtrain.optim, name)(parameters(), capturable=True)
        assert ours.state_dict()["param_groups"][0]["capturable"] is True
        return
    p, ours, q, theirs = pair(name, {flag: True})
    give_gradients(p, 0)
    give_gradients(q, 0)
    ours.step()
    theirs.step()
    assert_same_state_dict(ours.state_dict(), theirs.state_dict())


@CASES
def test_skipped_steps_leave_no_trace(name: str, options: dict[str, Any]) -> None:
    p, ours, q, theirs = pair(name, options)
    skipped_step(ours, p)
    if name in ("SGD", "Adagrad"):
        assert_same_state_dict(ours.state_dict(), theirs.state_dict())
    steps(ours, p, [0])
    steps(theirs, q, [0])
    skipped_step(ours, p)
    assert_same_state_dict(ours.state_dict(), theirs.state_dict())


# --- runs that change hands


@pytest.mark.parametrize("skips", [False, True], ids=["", "skips"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@CASES
def test_torch_to_fusedtrain_to_torch(
    name: str, options: dict[str, Any], dtype: torch.dtype, skips: bool
) -> None:
    p, ours, q, theirs = pair(name, options, dtype)
    steps(theirs, q, range(12))
    first = getattr(torch.optim, name)(in_groups(p), **options)
    steps(first, p, range(4))
    ours.load_state_dict(saved_and_loaded(first.state_dict()))
    if skips:
        skipped_step(ours, p)
    steps(ours, p, range(4, 8))
    if skips:
        skipped_step(ours, p)
    last = getattr(torch.optim, name)(in_groups(p), **options)
    last.load_state_dict(saved_and_loaded(ours.state_dict()))
    steps(last, p, range(8, 12))
    for a, b in zip(p, q, strict=True):
        assert_close(a.detach(), b.detach(), 64)
    assert_same_state_dict(last.state_dict(), theirs.state_dict())


@pytest.mark.parametrize("into", ["torch", "fusedtrain"])
@CASES
def test_a_checkpoint_after_nothing_but_skipped_steps(
    name: str, options: dict[str, Any], into: str
) -> None:
    p, ours, q, theirs = pair(name, options)
    skipped_step(ours, p)
    skipped_step(ours, p)
    module = torch.optim if into == "torch" else fusedtrain.optim
    last = getattr(module, name)(in_groups(p), **options)
    last.load_state_dict(saved_and_loaded(ours.state_dict()))
    steps(last, p, range(4))
    steps(theirs, q, range(4))
    for a, b in zip(p, q, strict=True):
        assert_close(a.detach(), b.detach())


@pytest.mark.parametrize("name", ["SGD", "LARS"])
@pytest.mark.parametrize("by", ["state_dict", "deepcopy"])
def test_averages_do_not_make_a_skipped_step_count(name: str, by: str) -> None:
    """The checkpoint has an average of every parameter, but no momentum yet."""
    runs = [parameters(), parameters()]
    optimizers = [getattr(fusedtrain.optim, name)(r, **EACH[name], ema_decay=0.9) for r in runs]
    skipped_step(optimizers[0], runs[0])
    if by == "state_dict":
        saved = saved_and_loaded(optimizers[0].state_dict())
        assert "ema" in saved["state"][0]
        assert "momentum_buffer" not in saved["state"][0]
        optimizers[0] = getattr(fusedtrain.optim, name)(runs[0], **EACH[name], ema_decay=0.9)
        optimizers[0].load_state_dict(saved)
    else:
        runs[0], optimizers[0] = copy.deepcopy((runs[0], optimizers[0]))
    for run, optimizer in zip(runs, optimizers, strict=True):
        steps(optimizer, run, range(3))
    assert same_bits(runs[0], runs[1])


@pytest.mark.parametrize("name", ["SGD", "LARS"])
def test_old_checkpoints_of_torch_with_a_momentum_of_none(name: str) -> None:
    runs = [parameters(), parameters()]
    optimizers = [getattr(fusedtrain.optim, name)(r, **EACH[name]) for r in runs]
    saved = optimizers[0].state_dict()
    saved["state"] = {i: {"momentum_buffer": None} for i in range(len(SHAPES))}
    optimizers[0].load_state_dict(saved)
    for run, optimizer in zip(runs, optimizers, strict=True):
        steps(optimizer, run, range(3))
    assert same_bits(runs[0], runs[1])


@CASES
def test_groups_added_later(name: str, options: dict[str, Any]) -> None:
    """Also to an optimizer that has stepped, and in checkpoints of both."""
    if name == "Adagrad":
        pytest.skip("torch's Adagrad has no state for parameters that are added")
    p, q = parameters(), parameters()
    ours = getattr(fusedtrain.optim, name)(p[:3], **options)
    theirs = getattr(torch.optim, name)(q[:3], **options)
    for optimizer, params in ((ours, p), (theirs, q)):
        steps(optimizer, params, range(2))
        optimizer.add_param_group({"params": params[5:], "lr": 0.01})
        steps(optimizer, params, range(2, 4))
        optimizer.add_param_group({"params": params[3:5]})
        steps(optimizer, params, range(4, 6))
    assert_same_state_dict(ours.state_dict(), theirs.state_dict())
    last = getattr(fusedtrain.optim, name)([{"params": q[:3]}, {"params": q[5:]}], **options)
    last.add_param_group({"params": q[3:5]})
    last.load_state_dict(saved_and_loaded(theirs.state_dict()))
    steps(last, q, range(6, 9))
    steps(ours, p, range(6, 9))
    for a, b in zip(p, q, strict=True):
        assert_close(a.detach(), b.detach())


def test_adagrad_takes_groups_later_where_torch_does_not() -> None:
    p = parameters()
    optimizer = fusedtrain.optim.Adagrad(p[:2], initial_accumulator_value=0.5)
    optimizer.add_param_group({"params": p[2:]})
    steps(optimizer, p, range(2))
    assert all(float(optimizer.state[x]["sum"].min()) >= 0.5 for x in p if x.numel())


@ALL
def test_order_of_groups_does_not_matter(name: str) -> None:
    options = {**EACH[name], "ema_decay": 0.9}
    p, q = parameters(), parameters()
    first = getattr(fusedtrain.optim, name)(in_groups(p), **options)
    second = getattr(fusedtrain.optim, name)(in_groups(q)[::-1], **options)
    steps(first, p, range(3))
    steps(second, q, range(3))
    if name != "LAMB":  # sums the squares of all gradients in that order
        assert same_bits(p, q)
    for a, b in zip(p, q, strict=True):
        assert_close(a.detach(), b.detach())


# --- stochastic rounding


@pytest.mark.parametrize("other_seed", [False, True], ids=["same seed", "other seed"])
@pytest.mark.parametrize("stepped", [False, True], ids=["new", "stepped"])
@ALL
def test_stochastic_rounding_goes_on_after_loading(
    name: str, stepped: bool, other_seed: bool
) -> None:
    """As the uninterrupted run does: its stream neither starts again nor depends on the seed."""
    options = {**EACH[name], "stochastic_rounding": True}
    runs = []
    for interrupted in (False, True):
        torch.manual_seed(-5)  # 2^64 - 5
        p = parameters(torch.bfloat16)
        optimizer = getattr(fusedtrain.optim, name)(p, **options)
        steps(optimizer, p, range(3))
        skipped_step(optimizer, p)
        if interrupted:
            torch.manual_seed(2 if other_seed else -5)
            saved = saved_and_loaded(optimizer.state_dict())
            optimizer = getattr(fusedtrain.optim, name)(p, **options)
            if stepped:
                kept = [x.detach().clone() for x in p]
                steps(optimizer, p, range(7, 9))
                with torch.no_grad():
                    for x, before in zip(p, kept, strict=True):
                        x.copy_(before)
            optimizer.load_state_dict(saved)
        steps(optimizer, p, range(3, 6))
        runs.append((p, optimizer.state_dict()))
    assert same_bits(runs[0][0], runs[1][0])
    assert same_bits(runs[0][1], runs[1][1])


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


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float64, {"ema_decay": 0.9, "max_grad_norm": 0.5}),
        (torch.float32, {"agc": 0.1, "state_dtype": torch.bfloat16}),
        (torch.bfloat16, {"stochastic_rounding": True, "state_dtype": torch.float32}),
        (torch.float16, {"master_weights": True, "gradient_writeback": "zero"}),
    ],
    ids=lambda value: str(value) if isinstance(value, torch.dtype) else next(iter(value)),
)
@ALL
def test_copies_go_on_alike(
    name: str, dtype: torch.dtype, options: dict[str, Any], how: str
) -> None:
    if name == "LAMB" and "agc" in options:
        options = {**options, "max_grad_norm": None}
    p = parameters(dtype)
    optimizer = getattr(fusedtrain.optim, name)(in_groups(p), **{**EACH[name], **options})
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
    assert same_bits(other["params"], p)
    assert same_bits(other["optimizer"].state_dict(), optimizer.state_dict())
    assert other["params"][0].data_ptr() != p[0].data_ptr()
    assert other["optimizer"].ema_decay == optimizer.ema_decay


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
    for a, b in zip(p, q, strict=True):
        assert_close(a.detach(), b.detach())
    assert "step" not in ours.param_groups[0]
    assert float(ours.state_dict()["state"][0]["step"]) == 8.0  # one step of four without gradient


# --- loading


@ALL
def test_loading_over_a_live_plan(name: str) -> None:
    """States that were there before the load play no part, nor does the plan that knew them."""
    options = {**EACH[name], "ema_decay": 0.9}
    p = parameters(torch.float32)
    optimizer = getattr(fusedtrain.optim, name)(in_groups(p), **options)
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
        assert same_bits(saved, kept)  # what was given is not written to
        results.append([x.detach().clone() for x in p])
    assert same_bits(results[0], results[1])
    assert same_bits(results[0], results[2])


@ALL
def test_two_optimizers_from_one_state_dict(name: str) -> None:
    runs = [parameters(torch.float32) for _ in range(3)]
    optimizers = [getattr(fusedtrain.optim, name)(r, **EACH[name]) for r in runs]
    steps(optimizers[0], runs[0], range(3))
    saved = optimizers[0].state_dict()
    for run, optimizer in zip(runs[1:], optimizers[1:], strict=True):
        for x, value in zip(run, runs[0], strict=True):
            x.data.copy_(value.detach())
        optimizer.load_state_dict(saved)
    for run, optimizer in zip(runs, optimizers, strict=True):
        steps(optimizer, run, range(3, 6))
    assert same_bits(runs[0], runs[1])
    assert same_bits(runs[0], runs[2])


@pytest.mark.parametrize("state_dtype", [None, torch.float32, torch.bfloat16], ids=str)
@ALL
def test_states_take_the_dtype_of_the_optimizer(name: str, state_dtype: torch.dtype | None) -> None:
    p, q = parameters(torch.bfloat16), parameters(torch.bfloat16)
    options = {**EACH[name], "ema_decay": 0.9, "master_weights": True}
    first = getattr(fusedtrain.optim, name)(p, **options, state_dtype=torch.float32)
    steps(first, p, range(3))
    second = getattr(fusedtrain.optim, name)(q, **options, state_dtype=state_dtype)
    second.load_state_dict(saved_and_loaded(first.state_dict()))
    for x, y in zip(p, q, strict=True):
        for key, value in first.state[x].items():
            mine = second.state[y][key]
            if value.shape != x.shape or key in ("ema", "master_param", "step"):
                assert same_bits(mine, value), key
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
    assert same_bits(optimizer.state_dict(), before)
    assert not optimizer._optimizer_load_state_dict_pre_hooks
    assert not optimizer._optimizer_load_state_dict_post_hooks


@ALL
def test_distributed_checkpoint_functions(name: str) -> None:
    from torch.distributed.checkpoint.state_dict import (
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(12, 2))
        return model, getattr(fusedtrain.optim, name)(
            model.parameters(), **EACH[name], ema_decay=0.9
        )

    model, optimizer = make()
    params = list(model.parameters())
    for seed in range(3):
        give_gradients(params, seed)
        optimizer.step()
    optimizer.zero_grad()
    saved = get_optimizer_state_dict(model, optimizer)
    assert "0.weight" in saved["state"]
    other, loaded = make()
    other.load_state_dict(model.state_dict())
    set_optimizer_state_dict(other, loaded, saved)
    assert same_bits(loaded.state_dict()["state"], optimizer.state_dict()["state"])
    for m, o in ((model, optimizer), (other, loaded)):
        for seed in range(3, 5):
            give_gradients(list(m.parameters()), seed)
            o.step()
    assert same_bits(list(model.parameters()), list(other.parameters()))
