"""Apex's amp: levels one after the other, registered methods, DistributedDataParallel."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedtrain
from fusedtrain.apex import amp
from helpers.amp_runs import (
    MAKERS,
    Twins,
    backward,
    images,
    initialized,
    loss_of,
    moved_alike,
    network,
    start,
)
from helpers.rank_processes import results_of_two_ranks

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("second", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("first", ["O0", "O1"])
def test_another_level_for_the_same_model(first: str, second: str) -> None:
    model, _ = start(MAKERS["fused-SGD"], first)
    optimizer = MAKERS["fused-SGD"](model.parameters())
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=second, verbosity=0, loss_scale=64.0
    )
    assert model(images()[0]).dtype == (torch.float16 if second == "O1" else torch.float32)
    backward(loss_of(model), optimizer)
    optimizer.step()
    assert len(model._forward_hooks) == (second != "O1")


class _Library:
    def method(self, x: Tensor) -> torch.dtype:
        return x.dtype

    @staticmethod
    def static(x: Tensor) -> torch.dtype:
        return x.dtype

    @classmethod
    def of_class(cls, x: Tensor) -> torch.dtype:
        return x.dtype


def test_methods_of_every_kind_are_registered() -> None:
    for name in ("method", "static", "of_class"):
        amp.register_half_function(_Library, name)
    start(MAKERS["fused-SGD"], "O1")
    x = torch.ones(1)
    library = _Library()
    assert {library.method(x), library.static(x), library.of_class(x)} == {torch.float16}
    assert {_Library.static(x), _Library.of_class(x)} == {torch.float16}


@pytest.mark.parametrize("maker", ["torch-Adam", "fused-Adam"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_parameters_that_are_unfrozen_later(level: str, maker: str) -> None:
    twins = Twins("O0", maker)
    model = network()
    for some in (model, twins.plain):
        some[4].requires_grad_(False)
    twins.model, twins.optimizer = initialized(model, MAKERS[maker](model.parameters()), level)
    for step in range(8):
        if step == 3:
            for some in (twins.model, twins.plain):
                some[4].bias.data.add_(0.25)  # written to while frozen
                some[4].requires_grad_(True)
        twins.train()
    assert {p.dtype for p in amp.master_params(twins.optimizer)} == {torch.float32}
    moved_alike(twins.model, twins.plain, 0.04)


@pytest.mark.parametrize("adam", [torch.optim.Adam, fusedtrain.optim.Adam])
def test_states_of_parameters_that_are_frozen_and_unfrozen(adam: Any) -> None:
    model = network()
    optimizer = adam(model.parameters(), lr=2e-3)
    loss_of(model).backward()
    optimizer.step()
    model[4].requires_grad_(False)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level="O2", verbosity=0, loss_scale=128.0
    )
    for frozen in (True, False):
        model[4].requires_grad_(not frozen)
        optimizer.zero_grad()
        backward(loss_of(model), optimizer)
        optimizer.step()
    masters = list(amp.master_params(optimizer))
    assert set(optimizer.state) == set(masters)
    assert [float(optimizer.state[p]["step"]) for p in masters] == [3, 3, 3, 2, 2]


def test_a_group_of_another_optimizer_is_refused_whole() -> None:
    model, optimizer = start(MAKERS["fused-SGD"], "O1", loss_scale=64.0)
    other, other_optimizer = start(MAKERS["fused-SGD"], "O1", loss_scale=64.0)
    with pytest.raises(RuntimeError, match="another optimizer already"):
        optimizer.add_param_group({"params": other.parameters()})
    assert len(optimizer.param_groups) == 1
    for m, o in ((model, optimizer), (other, other_optimizer)):
        backward(loss_of(m), o)
        o.step()
        moved_alike(m, model, 1e-6)


# --- two ranks

RUNS: list[tuple[str, str, dict[str, Any]]] = [
    (level, maker, options)
    for level in ("O1", "O2")
    for maker in ("torch-SGD", "fused-SGD")
    for options in (
        {"zeros": True},
        {"apart": True},
        {"views": True},
        {"views": True, "zeros": True},
        {"views": True, "passes": 2},
        {"views": True, "passes": 2, "zeros": True},
        {"passes": 2, "delay": True},
        {"views": True, "passes": 2, "delay": True},
    )
]


def _train(run: tuple[str, str, dict[str, Any]], rank: int) -> nn.Module:
    level, maker, options = run
    # DistributedDataParallel gives all ranks the weights of the first one.
    model = network(1 + rank) if options.get("apart", False) else network()
    optimizer = MAKERS[maker](model.parameters())
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, loss_scale=64.0, verbosity=0
    )
    wrapped = nn.parallel.DistributedDataParallel(
        model.eval(), gradient_as_bucket_view=options.get("views", False)
    )
    x, y = images()
    passes, delay = options.get("passes", 1), options.get("delay", False)
    for _ in range(3):
        for k in range(passes):
            mine = slice(2 * k + rank, None, 2 * passes)
            delayed = delay and k < passes - 1
            with wrapped.no_sync() if delayed else nullcontext():
                loss = nn.functional.cross_entropy(wrapped(x[mine]), y[mine]) / passes
                backward(loss, optimizer, delay_unscale=delayed)
        optimizer.step()
        optimizer.zero_grad(set_to_none=not options.get("zeros", False))
    return model


def _on_a_rank(rank: int) -> list[dict[str, Tensor]]:
    return [_train(run, rank).state_dict() for run in RUNS]


@pytest.mark.slow
def test_two_ranks(tmp_path: Path) -> None:
    reference = network().eval()
    optimizer = MAKERS["torch-SGD"](reference.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(reference).backward()
        optimizer.step()
    for run, mine, others in zip(RUNS, *results_of_two_ranks(_on_a_rank, tmp_path), strict=True):
        assert all(torch.equal(mine[name], others[name]) for name in mine), run
        model = network()
        model.load_state_dict(mine)
        moved_alike(model, reference, 0.03)
