"""Every step of every optimizer beside float64: properties over layouts, dtypes, options, skips.

The truth (helpers/optimizer_checks.py) starts each step from the fused optimizer's own parameters
and states, so errors do not add up and the tolerance stays at a few roundings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import fusedtrain
from fusedtrain.optim import FusedOptimizer
from fusedtrain.reference.optimizer_rules import RULES
from helpers import environment
from helpers.optimizer_checks import Checked, results
from helpers.optimizer_runs import (
    EXAMPLES,
    REPEATABLE,
    SCALER,
    SPECIAL,
    Iteration,
    Run,
    runs,
    simple,
)
from helpers.optimizers import CLASSES, NAMES, ours
from helpers.processes import run_python


@pytest.mark.parametrize("history", SPECIAL)
@pytest.mark.parametrize("name", CLASSES)
def test_histories(name: str, history: str) -> None:
    """Apex's optimizers also have their switches turned, and no bias correction."""
    values, switches = CLASSES[name].values, CLASSES[name].switches
    for on in (False, True) if switches else (False,):
        options: dict[str, Any] = {"momentum": 0.9} if "momentum" in values else {}
        if switches and "bias_correction" in values:
            options["bias_correction"] = not on
        for more in ({"ema_decay": 0.9}, {"max_grad_norm": 0.5, "gradient_writeback": "unscaled"}):
            fused, iterations = {**dict.fromkeys(switches, on), **more}, SPECIAL[history]
            Checked(simple(name, options, fused, iterations=iterations, scaler=SCALER)).all()


def two_parameters(name: str, **options: Any) -> tuple[list[Tensor], FusedOptimizer]:
    checked = Checked(simple(name, {}, options))
    checked.give_gradients(Iteration())
    return checked.params, checked.optimizer


@pytest.mark.parametrize("name", ["SGD", "LAMB"])
def test_tiny_gradients_are_clipped_as_by_torch_and_by_timm(name: str) -> None:
    """Here the eps beside their norm counts, which LAMB does without."""
    run = simple(name, {}, {"max_grad_norm": 1e-5, "gradient_writeback": "unscaled"})
    run.ones = [replace(one, size=1e-6) for one in run.ones]
    Checked(run).all()


def test_lion_where_momentum_and_gradient_almost_cancel() -> None:
    """Elsewhere the sign hardly depends on the momentum."""
    checked = Checked(simple("Lion", {"betas": (0.9, 0.99), "caution": False}, {}))
    checked.all()
    checked.give_gradients(Iteration())
    for p in checked.params:
        assert p.grad is not None
        sign = -1 if checked.group[id(p)]["maximize"] else 1
        ratio = 0.8 + 0.4 * torch.rand(p.shape)
        checked.optimizer.state[p]["exp_avg"].copy_(-sign * p.grad / 9 * ratio)
    checked.step(Iteration())


def test_momentum_switched_on_fills_the_buffer_with_the_first_gradient() -> None:
    """As torch does: the first gradient is not dampened."""
    run = simple("SGD", {"momentum": 0.0, "dampening": 0.3}, {})
    checked = Checked(run)
    checked.all()
    checked.optimizer.param_groups[0]["momentum"] = 0.9
    checked.steps = dict.fromkeys(checked.steps, 0)  # of the buffer
    checked.all()


@pytest.mark.parametrize("name", ["SGD", "AdamW", "LAMB"])
def test_other_strides_at_the_same_address(name: str) -> None:
    fused = {"ema_decay": 0.9, "momentum": 0.9} if name == "SGD" else {"ema_decay": 0.9}
    options: dict[str, Any] = {"momentum": fused.pop("momentum")} if "momentum" in fused else {}
    run = simple(name, options, fused)
    run.ones[0].shape = (6, 6)
    checked = Checked(run)
    checked.all()
    p = checked.params[0]
    p.data = p.data.t()
    checked.all()


def test_a_parameter_of_another_dtype_gets_its_master() -> None:
    fused = {"master_weights": True, "state_dtype": torch.float32}
    checked = Checked(simple("AdamW", {}, fused))
    checked.all()
    for p in checked.params:
        p.data = p.data.bfloat16()
    checked.all()
    assert all("master_param" in checked.optimizer.state[p] for p in checked.params)


def test_a_parameter_joins_another_group() -> None:
    run = simple("SGD", {"momentum": 0.9}, {})
    run.groups.append({**run.groups[0], "lr": 0.01})
    run.ones = [replace(run.ones[0], group=group) for group in (0, 0, 1)]
    checked = Checked(run)
    checked.all()
    first, second = checked.optimizer.param_groups
    moved = first["params"].pop()
    second["params"].insert(0, moved)
    checked.group[id(moved)] = second
    checked.all()


def test_a_parameter_that_joins_later_starts_from_the_initial_value() -> None:
    optimizer = fusedtrain.optim.Adagrad(
        [torch.nn.Parameter(torch.ones(1))], initial_accumulator_value=0.25
    )
    late = torch.nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [late]})  # torch's own raises KeyError at the step
    late.grad = torch.ones(2)
    optimizer.step()
    assert torch.equal(optimizer.state[late]["sum"], torch.full((2,), 1.25))


def test_a_step_without_gradients_forgets_no_count() -> None:
    params, optimizer = two_parameters("AdamW")
    optimizer.step()
    for p in params:
        p.grad = None
    optimizer.step()
    assert optimizer.applied_steps == 1


@EXAMPLES
@pytest.mark.parametrize("name", CLASSES)
def test_every_step_is_right(name: str, examples: int) -> None:
    @settings(REPEATABLE, max_examples=examples)
    @given(runs(name))
    def check(run: Run) -> None:
        Checked(run).all()

    check()


# --- the same numbers whatever computes them


@pytest.mark.parametrize("name", NAMES)
def test_the_same_bits_from_any_number_of_threads(name: str) -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = results(name)
        for number in (2, 3):
            torch.set_num_threads(number)
            assert all(map(torch.equal, one, results(name)))
    finally:
        torch.set_num_threads(threads)


def test_every_instruction_set_agrees(tmp_path: Path) -> None:
    """Instruction sets below the one of this process, each in a process of its own."""
    code = (
        "import sys, torch\n"
        "from helpers.optimizer_checks import results\n"
        "from helpers.optimizers import NAMES\n"
        "torch.save({name: results(name, 1) for name in NAMES}, sys.argv[1])"
    )
    (used,) = fusedtrain.backend_info().backends["cpu"].architectures
    every = fusedtrain.backend_info().build["instruction_sets"].split("+")
    others = every[: every.index(used)]
    for name in others:
        run = run_python(
            "-c",
            code,
            tmp_path / name,
            env=environment(FUSEDTRAIN_CPU_CAPABILITY=name),
            trains=True,
        )
        assert run.returncode == 0, run.stderr
    expected = {name: results(name, 1) for name in NAMES}
    for capability in others:
        there = torch.load(tmp_path / capability)
        for name in NAMES:
            for a, b in zip(expected[name], there[name], strict=True):
                scale = torch.finfo(torch.float32).eps * a.abs().clamp_min(a.abs().mean())
                assert ((a - b).abs() <= 2 * scale).all(), (name, capability)


# --- wrong optimizers are seen (tools/_optimizer_mutants.py has those of the sources)


def _no_op(step: Callable[..., Tensor], *arguments: Any) -> Tensor:
    kept = [p.detach().clone() for p in arguments[1]]
    sums = step(*arguments)
    for p, value in zip(arguments[1], kept):
        p.detach().copy_(value)
    return sums


def _sign_flip(step: Callable[..., Tensor], *arguments: Any) -> Tensor:
    kept = [p.detach().clone() for p in arguments[1]]
    sums = step(*arguments)
    for p, value in zip(arguments[1], kept):
        p.detach().copy_(2 * value - p)
    return sums


def _wrong_beta(step: Callable[..., Tensor], *arguments: Any) -> Tensor:
    # An option of the rule: the first, and Lion's second, for its first seldom changes a sign.
    arguments[9].view(-1, 14)[1:, 7 if RULES[arguments[0]].name == "lion" else 6] *= 0.95
    return step(*arguments)


def _stale_step(step: Callable[..., Tensor], *arguments: Any) -> Tensor:
    sums = step(*arguments)
    arguments[7][0] = 0
    return sums


def _unchanged(step: Callable[..., Tensor], *arguments: Any) -> Tensor:
    return step(*arguments)


MUTANTS = [_no_op, _sign_flip, _wrong_beta, _stale_step]


def checked_with(mutant: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step = torch.ops.fusedtrain.optimizer_step
    monkeypatch.setattr(
        torch.ops.fusedtrain, "optimizer_step", lambda *a: mutant(step, *a), raising=False
    )
    options: dict[str, Any] = {"momentum": 0.9} if "momentum" in CLASSES[name].values else {}
    if name in ("Adam", "AdamW", "NAdamW", "LAMB", "NovoGrad", "Lion"):
        options["betas"] = (0.9, 0.99)
    if name == "LAMB":
        options["bias_correction"] = True
    Checked(simple(name, options, {})).all()


@pytest.mark.parametrize("mutant", MUTANTS)
@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_optimizer_fails(name: str, mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "Lion" and mutant is _stale_step:
        return  # counts no steps
    with pytest.raises(AssertionError):
        checked_with(mutant, name, monkeypatch)


@pytest.mark.parametrize("name", NAMES)
def test_the_wrapper_alone_passes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checked_with(_unchanged, name, monkeypatch)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("name", CLASSES)
def test_an_average_changes_no_bit_of_the_weights(name: str, dtype: torch.dtype) -> None:
    """Tensors of 16 bits alone are stepped in registers, beside anything else in buffers."""
    weights = []
    for decay in (None, 0.9):
        g = torch.Generator().manual_seed(5)
        p = torch.randn(40_011, generator=g).to(dtype).requires_grad_()
        optimizer = ours(name, [p], {"lr": 1e-2, "ema_decay": decay})
        for _ in range(4):
            p.grad = torch.randn(40_011, generator=g).to(dtype)
            optimizer.step()
        weights.append({"": p.detach(), **optimizer.state[p]})
    without, beside = weights
    assert all(torch.equal(t, beside[name]) for name, t in without.items())
