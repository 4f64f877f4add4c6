"""A run that changes hands by a checkpoint: to and from what each optimizer is a counterpart of."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedtrain
from fusedtrain.apex import optimizers as of_apex
from fusedtrain.optim import FusedOptimizer
from helpers import optimizers
from helpers.optimizer_steps import assert_close, copies, in_groups, saved_and_loaded
from helpers.optimizers import APEX, CLASSES, NEWER, OTHER_BETAS, SETS, Options, set_id

# Their counterparts count steps by group, whether a parameter has a gradient or not.
COUNT_BY_GROUP = {"LAMB", "FusedAdam", "FusedLAMB", "FusedNovoGrad"}
# From whom the state goes, and whether a parameter had fewer gradients: both with each way, and
# with each set of options one of them.
HANDOVERS = [
    pytest.param(
        name, options, into, (row + way) % 2 == 0 and name != "FusedNovoGrad",
        id=f"{name}-{set_id(options)}-{into}",
    )
    for (row, (name, options)), (way, into) in product(
        enumerate(SETS), enumerate(("theirs", "ours"))
    )
]  # fmt: skip
ALL = pytest.mark.parametrize("name", CLASSES)
LATE = 1  # the parameter that gets fewer gradients
SHAPES = [(3, 5), (7,), (), (4, 3, 2, 2), (33,)]


def test_no_optimizer_is_left_out() -> None:
    public = [*fusedtrain.optim.__all__, *of_apex.__all__]
    modules = (fusedtrain.optim, of_apex)
    members = {n: next(getattr(m, n) for m in modules if hasattr(m, n)) for n in public}
    kinds = {n for n, k in members.items() if isinstance(k, type) and issubclass(k, FusedOptimizer)}
    assert kinds - {"FusedOptimizer"} == CLASSES.keys()


def parameters(name: str) -> list[nn.Parameter]:
    """Parameters in float64, but where our second moments are float32 whatever the parameter is."""
    dtype = torch.float32 if "NovoGrad" in name else torch.float64
    generator = torch.Generator().manual_seed(7)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in SHAPES]


def ours(name: str, params: list[nn.Parameter], options: Options) -> FusedOptimizer:
    return optimizers.ours(name, in_groups(params), options)


def theirs(name: str, params: list[nn.Parameter], options: Options) -> torch.optim.Optimizer:
    return optimizers.theirs(name, in_groups(params), options)


def steps(optimizer: Any, params: list[Any], seeds: range, without: tuple[int, ...] = ()) -> None:
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for i, p in enumerate(params):
            grad = torch.randn(p.shape, generator=generator).to(p.dtype)
            p.grad = None if i in without else grad
        optimizer.step()


def handed_over(giver: torch.optim.Optimizer, taker: torch.optim.Optimizer) -> None:
    """Through a file, with a learning rate that the taker was not made with."""
    giver.param_groups[0]["lr"] = 0.05
    taker.load_state_dict(saved_and_loaded(giver.state_dict()))


def copied(params: list[nn.Parameter]) -> list[nn.Parameter]:
    return list(map(nn.Parameter, copies(params)))


@pytest.mark.parametrize(("name", "options", "into", "fewer"), HANDOVERS)
def test_ten_more_steps_are_equal(name: str, options: Options, into: str, fewer: bool) -> None:
    p = parameters(name)
    give, take = (ours, theirs) if into == "theirs" else (theirs, ours)
    giver = give(name, p, options)
    steps(giver, p, range(4), (LATE,) if fewer else ())
    steps(giver, p, range(4, 6))
    q = copied(p)
    taker = take(name, q, options)
    handed_over(giver, taker)
    follows = list(range(len(p)))
    if fewer and into == "theirs" and name in COUNT_BY_GROUP:
        # Their optimizer continues with the count of the group; the docstring says so.
        assert giver.state[p[LATE]]["step"] == 2
        assert taker.param_groups[0]["step"] == 6
        follows.remove(LATE)
    # Ours counts by parameter: where theirs counts by group, no gradient is missing after the load.
    for seed in range(6, 16):
        without = (LATE,) if seed == 9 and name not in COUNT_BY_GROUP else ()
        steps(giver, p, range(seed, seed + 1), without)
        steps(taker, q, range(seed, seed + 1), without)
        assert_close([p[i] for i in follows], [q[i] for i in follows], 128)
    reference, mine = (taker, giver) if into == "theirs" else (giver, taker)
    for group, our_group in zip(
        reference.state_dict()["param_groups"], mine.state_dict()["param_groups"], strict=True
    ):
        assert group.keys() ^ our_group.keys() <= NEWER
        both = (group.keys() & our_group.keys()) - {"exp_avg_sq"}
        assert all(group[key] == our_group[key] for key in both)
    for i in follows:
        kept, state = (
            reference.state.get((q if into == "theirs" else p)[i], {}),
            mine.state.get((p if into == "theirs" else q)[i], {}),
        )
        for key in kept.keys() - ({"step"} if name in (*COUNT_BY_GROUP, "FusedAdagrad") else set()):
            if kept[key] is not None:
                a, b = (torch.as_tensor(x, dtype=torch.float64) for x in (state[key], kept[key]))
                assert_close([a], [b], 2.0**36 if "NovoGrad" in name else 256.0)


@pytest.mark.parametrize("name", sorted(COUNT_BY_GROUP))
def test_there_and_back(name: str) -> None:
    """Counts and norms that theirs only hands on are those from before the handover."""
    p = parameters(name)
    first = ours(name, p, OTHER_BETAS)
    steps(first, p, range(3), (LATE,) if name != "FusedNovoGrad" else ())
    steps(first, p, range(3, 4))
    saved = first.state_dict()
    q = copied(p)
    second = theirs(name, q, OTHER_BETAS)
    second.load_state_dict(copy.deepcopy(saved))
    steps(second, q, range(4, 7))
    back = second.state_dict()
    for number, state in back["state"].items():
        back["state"][number] = {**saved["state"][number], **state}
    third = ours(name, q, OTHER_BETAS)
    third.load_state_dict(copy.deepcopy(back))
    steps(first, p, range(4, 7))
    assert [third.state[x]["step"] for x in q] == [first.state[x]["step"] for x in p]
    steps(first, p, range(7, 10))
    steps(third, q, range(7, 10))
    follows = [i for i in range(len(p)) if i != LATE]
    assert_close([p[i] for i in follows], [q[i] for i in follows], 128)


@ALL
def test_states_have_the_names_of_the_counterpart(name: str) -> None:
    """States have all keys that the counterpart reads; tensors have its shapes and dtypes."""
    for options in CLASSES[name].sets:
        p, q = parameters(name), parameters(name)
        mine, reference = ours(name, p, options), theirs(name, q, options)
        steps(mine, p, range(2))
        steps(reference, q, range(2))
        our_state, saved = mine.state_dict(), reference.state_dict()
        for number, state in saved["state"].items():
            there = {k: v for k, v in state.items() if v is not None}
            assert there.keys() <= our_state["state"].get(number, {}).keys()
            for key, value in there.items():
                if isinstance(value, Tensor):
                    tensor = our_state["state"][number][key]
                    assert (tensor.shape, tensor.dtype) == (value.shape, value.dtype)
        for a, b in zip(our_state["param_groups"], saved["param_groups"], strict=True):
            assert a.get("step") == b.get("step")
            assert type(a.get("step")) is type(b.get("step"))


@ALL
def test_keys_of_groups_that_old_checkpoints_lack(name: str) -> None:
    """Loading puts the same values in their place as the counterpart does."""
    options = CLASSES[name].sets[1]
    p = parameters(name)
    reference = theirs(name, p, options)
    steps(reference, p, range(2))
    saved = reference.state_dict()
    tried = 0
    for key in sorted(saved["param_groups"][0].keys() - {"params", "lr", "step", "exp_avg_sq"}):
        old = copy.deepcopy(saved)
        for group in old["param_groups"]:
            del group[key]
        again = theirs(name, copied(p), options)
        again.load_state_dict(copy.deepcopy(old))
        if key not in again.param_groups[0]:
            continue
        mine = ours(name, copied(p), options)
        mine.load_state_dict(copy.deepcopy(old))
        if key in NEWER and key not in mine.param_groups[0]:
            continue
        assert mine.param_groups[0][key] == again.param_groups[0][key], key
        tried += 1
    assert tried or name in (*APEX, "LAMB", "NovoGrad")


# Classes of fusedtrain.optim, with the options by which they do what Apex's do.
BY_NAME: list[tuple[str, str, Options]] = [
    ("FusedAdam", "AdamW", {"weight_decay": 0.0}),
    ("FusedSGD", "SGD", {"momentum": 0.9}),
    ("FusedLAMB", "LAMB", {}),
    ("FusedAdagrad", "Adagrad", {}),
]


@pytest.mark.parametrize(("apex", "name", "options"), BY_NAME, ids=set_id)
def test_checkpoints_of_apex_load_by_name(apex: str, name: str, options: Options) -> None:
    p = parameters(apex)
    first = theirs(apex, p, {k: v for k, v in options.items() if k != "weight_decay"})
    steps(first, p, range(4))
    q = copied(p)
    second = ours(name, q, options)
    handed_over(first, second)
    steps(first, p, range(4, 14))
    steps(second, q, range(4, 14))
    assert_close(p, q, 128)


def test_novograd_refuses_norms_of_apex() -> None:
    first = theirs("FusedNovoGrad", p := parameters("NovoGrad"), {})
    steps(first, p, range(2))
    second = ours("NovoGrad", p, {"lr": 0.7})
    with pytest.raises(ValueError, match=r"apex\.optimizers\.FusedNovoGrad"):
        second.load_state_dict(first.state_dict())
    assert second.param_groups[0]["lr"] == 0.7
    assert not second.state
