"""Checkpoints of the optimizers beside torch's: the same keys and values, from one to the other.

Runs that change hands between an optimizer and its counterpart: test_optimizer_counterparts.py;
copies, hooks and what else loads a state: test_optimizer_copies.py.
"""

from __future__ import annotations

import copy
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import nn

import fusedtrain
from fusedtrain.optim import _codes
from fusedtrain.reference.state_codes import dequantise, quantise
from helpers.optimizer_steps import (
    ALL,
    SHAPES,
    alike,
    assert_close,
    give_gradients,
    in_groups,
    parameters,
    saved_and_loaded,
    skipped_step,
    steps,
)
from helpers.optimizers import OF_TORCH, SETS, make, set_id

ROWS = [(name, options) for name, options in SETS if name in OF_TORCH]
CASES = pytest.mark.parametrize(("name", "options"), ROWS, ids=set_id)


def in_turn(arguments: str, *values: Any) -> pytest.MarkDecorator:
    """CASES, each with the next one of the values."""
    cases = [
        pytest.param(name, options, value, id=f"{name}-{set_id(options)}-{value}")
        for (name, options), value in zip(ROWS, cycle(values))
    ]
    return pytest.mark.parametrize(f"name, options, {arguments}", cases)


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


def pair(
    name: str, options: dict[str, Any], dtype: torch.dtype = torch.float64
) -> tuple[list[nn.Parameter], torch.optim.Optimizer, list[nn.Parameter], torch.optim.Optimizer]:
    p, q = parameters(dtype), parameters(dtype)
    ours = getattr(fusedtrain.optim, name)(in_groups(p), **options)
    return p, ours, q, getattr(torch.optim, name)(in_groups(q), **options)


# --- the same as torch's


@in_turn("dtype", torch.float64, torch.float32)
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
        pytest.skip(f"not a case: torch's {name} has no {flag}")
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


@in_turn("into", "torch", "fusedtrain")
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
    assert_close(p, q)


@pytest.mark.parametrize("name", ["SGD", "LARS"])
@pytest.mark.parametrize("by", ["state_dict", "deepcopy"])
def test_averages_do_not_make_a_skipped_step_count(name: str, by: str) -> None:
    """The checkpoint has an average of every parameter, but no momentum yet."""
    runs = [parameters(), parameters()]
    optimizers = [make(name, r, ema_decay=0.9) for r in runs]
    skipped_step(optimizers[0], runs[0])
    if by == "state_dict":
        saved = saved_and_loaded(optimizers[0].state_dict())
        assert "ema" in saved["state"][0]
        assert "momentum_buffer" not in saved["state"][0]
        optimizers[0] = make(name, runs[0], ema_decay=0.9)
        optimizers[0].load_state_dict(saved)
    else:
        runs[0], optimizers[0] = copy.deepcopy((runs[0], optimizers[0]))
    for run, optimizer in zip(runs, optimizers, strict=True):
        steps(optimizer, run, range(3))
    assert alike(runs[0], runs[1])


@pytest.mark.parametrize("name", ["SGD", "LARS"])
def test_old_checkpoints_of_torch_with_a_momentum_of_none(name: str) -> None:
    runs = [parameters(), parameters()]
    optimizers = [make(name, r) for r in runs]
    saved = optimizers[0].state_dict()
    saved["state"] = {i: {"momentum_buffer": None} for i in range(len(SHAPES))}
    optimizers[0].load_state_dict(saved)
    for run, optimizer in zip(runs, optimizers, strict=True):
        steps(optimizer, run, range(3))
    assert alike(runs[0], runs[1])


@CASES
def test_groups_added_later(name: str, options: dict[str, Any]) -> None:
    """Also to an optimizer that has stepped, and in checkpoints of both."""
    if name == "Adagrad":
        pytest.skip("not a case: torch's Adagrad has no state for parameters that are added")
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
    assert_close(p, q)


@ALL
def test_order_of_groups_does_not_matter(name: str) -> None:
    options = {"ema_decay": 0.9}
    p, q = parameters(), parameters()
    first = make(name, in_groups(p), **options)
    second = make(name, in_groups(q)[::-1], **options)
    steps(first, p, range(3))
    steps(second, q, range(3))
    if name != "LAMB":  # sums the squares of all gradients in that order
        assert alike(p, q)
    assert_close(p, q)


def test_codes_are_made_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces, the last of which ends within a group, give the codes and numbers of the whole."""
    values = torch.randn(70, 97).t()
    codes, scales = quantise(values, torch.int8)
    monkeypatch.setattr(_codes, "_PIECE", 64)
    p = nn.Parameter(torch.zeros(70, 97).t())
    assert torch.equal(_codes.floats(codes, scales), dequantise(codes, scales))
    made = _codes.coded_state({"exp_avg": values}, "exp_avg", p, torch.int8, 0.0)
    assert torch.equal(made[0], codes)
    assert torch.equal(made[1], scales)
