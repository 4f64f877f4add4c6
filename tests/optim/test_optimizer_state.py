"""State besides moments: states of the user, step counts; nothing where torch keeps none."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch

import fusedtrain
from fusedtrain.apex import optimizers as of_apex
from helpers.optimizer_steps import (
    ALL,
    OF_TORCH,
    alike,
    assert_close,
    give_gradients,
    in_groups,
    parameters,
    same,
    saved_and_loaded,
    step,
)
from helpers.optimizers import make


def steps(optimizer: torch.optim.Optimizer, params: Any, seeds: Iterable[int]) -> None:
    for seed in seeds:
        step(optimizer, params, seed)


@ALL
def test_states_of_the_users_own(name: str) -> None:
    """As in torch: any key, kept in state dicts, copies and pickles, and no hindrance to steps."""
    p, q = parameters(), parameters()
    optimizer, other = make(name, p, ema_decay=0.9), make(name, q)
    steps(optimizer, p, range(2))
    steps(other, q, range(2))
    optimizer.state["x"] = 1
    optimizer.state["table"] = {"y": torch.ones(2)}
    optimizer.state[-1] = None
    optimizer.state[p[0]]["mine"] = 7
    optimizer.ema_decay = 0.5
    saved = optimizer.state_dict()
    assert saved["state"]["x"] == 1
    assert saved["state"]["table"] is optimizer.state["table"]
    assert saved["state"]["table"].keys() == {"y"}
    assert saved["state"][-1] is None
    assert saved["state"][0]["mine"] == 7
    optimizer.load_state_dict(copy.deepcopy(saved))
    both = copy.deepcopy({"params": p, "optimizer": optimizer})
    for run in (both, pickle.loads(pickle.dumps(both))):
        assert run["optimizer"].state["x"] == 1
        assert run["optimizer"].state[-1] is None
        assert run["optimizer"].state[run["params"][0]]["mine"] == 7
        steps(run["optimizer"], run["params"], range(2, 4))
    steps(other, q, range(2, 4))
    assert same(both["params"], q)


@ALL
def test_groups_that_step_one_after_the_other(name: str) -> None:
    """DeepSpeed hides all groups but one from each step. Momentum must last until the next."""
    p, q = parameters(), parameters()
    optimizer, other = (make(name, in_groups(t), ema_decay=0.9) for t in (p, q))
    for seed in range(4):
        give_gradients(p, seed)
        groups = optimizer.param_groups
        for group in groups:
            optimizer.param_groups = [group]
            optimizer.step()
        optimizer.param_groups = groups
        step(other, q, seed)
    assert same(p, q)
    assert same(*([average for _, average in o.averaged_parameters()] for o in (optimizer, other)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_state_dict_of_adagrad_before_the_first_step_is_complete(dtype: torch.dtype) -> None:
    """torch.distributed.checkpoint loads no states but those of this dict."""
    p = parameters(dtype)
    optimizer = make("Adagrad", p, ema_decay=0.9, master_weights=True)
    saved = optimizer.state_dict()["state"]
    made = {name for name, value in optimizer.state[p[0]].items() if value is not None}
    assert made == {"step", "sum"}  # the next step makes the copies
    step(optimizer, p, 0)
    for i, (x, first) in enumerate(zip(p, parameters(dtype), strict=True)):
        assert saved[i].keys() == optimizer.state[x].keys()
        for key in saved[i].keys() & {"ema", "master_param"}:
            assert saved[i][key].dtype is optimizer.state[x][key].dtype
            assert torch.equal(saved[i][key], first.to(saved[i][key].dtype))


@pytest.fixture
def _float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def counts(optimizer: torch.optim.Optimizer) -> dict[int, torch.Tensor]:
    return {n: state["step"] for n, state in optimizer.state_dict()["state"].items()}


@pytest.mark.usefixtures("_float64")
@pytest.mark.parametrize("flag", ["", "fused"])
@pytest.mark.parametrize("name", ["Adam", "AdamW", "Adagrad", "RMSprop"])
def test_counts_have_torchs_dtype_where_the_default_is_float64(name: str, flag: str) -> None:
    """float64, but for `fused`: torch's own decides."""
    flags = {flag: True} if flag else {}
    if not flags.keys() <= getattr(torch.optim, name)(parameters()).defaults.keys():
        pytest.skip(f"not a case: torch's {name} has no {flag}")
    p, q = parameters(), parameters()
    ours = getattr(fusedtrain.optim, name)(p, lr=0.1, **flags)
    theirs = getattr(torch.optim, name)(q, lr=0.1, **flags)
    for _ in range(2):
        steps(ours, p, range(3))
        steps(theirs, q, range(3))
        assert alike(counts(ours), counts(theirs))
        ours.load_state_dict(saved_and_loaded(ours.state_dict()))
        theirs.load_state_dict(saved_and_loaded(theirs.state_dict()))
    assert_close(p, q)


@pytest.mark.usefixtures("_float64")
def test_counts_of_capturable_steps() -> None:
    p = parameters()
    optimizer = fusedtrain.optim.Adam(p, capturable=True)
    step(optimizer, p, 0)
    assert {count.dtype for count in counts(optimizer).values()} == {torch.float64}


@pytest.mark.parametrize("other", [torch.float32, torch.float64], ids=str)
@ALL
def test_counts_loaded_under_another_default_dtype(name: str, other: torch.dtype) -> None:
    p, q = parameters(torch.float32), parameters(torch.float32)
    optimizer, whole = make(name, p), make(name, q)
    torch.set_default_dtype(other)
    try:
        steps(whole, q, range(5))
        steps(optimizer, p, range(3))
        saved = saved_and_loaded(optimizer.state_dict())
        torch.set_default_dtype(torch.float32 if other is torch.float64 else torch.float64)
        loaded = make(name, p)
        loaded.load_state_dict(saved)
        torch.set_default_dtype(other)
        steps(loaded, p, range(3, 5))
    finally:
        torch.set_default_dtype(torch.float32)
    assert same(p, q)


@pytest.mark.parametrize("name", ["SGD", "LARS", "FusedSGD"])
def test_without_momentum_nothing_is_kept(name: str) -> None:
    kind = getattr(of_apex if name in of_apex.__all__ else fusedtrain.optim, name)
    p, q = parameters(), parameters()
    ours, theirs = kind(p, lr=0.1), torch.optim.SGD(q, lr=0.1)
    for run, params in ((ours, p), (theirs, q)):
        steps(run, params, range(2))
        assert len(run.state) == 0
        assert run.state_dict()["state"] == {}
        assert run.state[params[0]] == {}  # a defaultdict: who looks makes one
        step(run, params, 2)
        assert run.state_dict()["state"] == {0: {}}
        for group in run.param_groups:  # switched on later
            group["momentum"] = 0.9
        steps(run, params, range(3, 6))
        assert run.state_dict()["state"].keys() == set(range(len(params)))
    if name != "LARS":
        assert_close(p, q)


@OF_TORCH
def test_the_order_of_states_is_torchs(name: str) -> None:
    """Parameters whose first gradient comes late are last, as in torch."""
    orders = []
    for module in (fusedtrain.optim, torch.optim):
        p = parameters()
        more = {"SGD": {"momentum": 0.9}, "RMSprop": {"momentum": 0.9, "centered": True}}
        optimizer = getattr(module, name)(p, lr=0.1, **more.get(name, {}))
        step(optimizer, p[2:], 0)
        step(optimizer, p, 1)
        state = optimizer.state_dict()["state"]
        orders.append([(number, list(values)) for number, values in state.items()])
    assert orders[0] == orders[1]
