"""Gradient release: the same bits as ordinary steps, with few gradients at a time."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedtrain
from helpers.optimizer_steps import alike, saved_and_loaded
from helpers.optimizers import CLASSES, make
from helpers.released import assert_alike, loss_of, network, pair, train

BF16, F32 = torch.bfloat16, torch.float32
# Every sixth class starts with another of these options.
OPTIONS: list[dict[str, Any]] = [
    {"agc": 0.05, "ema_decay": 0.9},
    {"stochastic_rounding": True},
    {"master_weights": True, "state_dtype": F32},
    {"master_weights": "split24", "stochastic_rounding": True, "agc": 0.1},
    {"master_weights": "split32", "ema_decay": 0.9},
    {"master_weights": "split24", "state_dtype": "q8"},
]


pytestmark = pytest.mark.usefixtures("codes_of_small_parameters")


@pytest.mark.parametrize("which", range(2))
@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.filterwarnings("ignore:stochastic_rounding")
def test_same_bits_as_ordinary_steps(name: str, which: int) -> None:
    options = OPTIONS[(list(CLASSES).index(name) + 2 * which) % len(OPTIONS)]
    both = pair(name, BF16 if which else F32, **options)
    reports = [train(*one, range(5)) for one in both]
    assert alike(*reports)
    assert_alike(both)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ",".join(options))
def test_every_option(options: dict[str, Any]) -> None:
    both = pair("NAdamW", BF16, **options)
    reports = [train(*one, range(5)) for one in both]
    assert alike(*reports)
    assert_alike(both)


@pytest.mark.parametrize("name", ["AdamW", "LAMB"])
def test_no_gradient_is_left(name: str) -> None:
    _, (model, optimizer) = pair(name)
    before = [p.detach().clone() for p in model.parameters()]
    loss_of(model, 0).backward()
    after = [p.detach().clone() for p in model.parameters()]
    assert all(p.grad is None for p in model.parameters())
    changed = [not torch.equal(a, b) for a, b in zip(before, after, strict=True)]
    assert changed == [p.requires_grad for p in model.parameters()]
    optimizer.step()
    assert alike(after, list(model.parameters()))
    optimizer.zero_grad()
    optimizer.zero_grad(set_to_none=False)
    assert int(optimizer.applied_steps) == 1


def most_alive(released: bool, layers: int = 12, width: int = 64) -> int:
    """The most bytes of gradients that live at once in a backward pass."""
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)]).bfloat16()
    optimizer = fusedtrain.optim.AdamW(model.parameters())
    most = 0

    def look(_: Tensor) -> None:
        nonlocal most
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        most = max(most, sum(grad.nbytes for grad in grads))

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(look)
    if released:
        optimizer.release_gradients(model)
    model(torch.randn(2, width, dtype=BF16)).sum().backward()
    optimizer.step()
    return most


def test_one_gradient_lives_at_a_time() -> None:
    assert most_alive(released=False) == 12 * 64 * 64 * 2
    assert most_alive(released=True) == 64 * 64 * 2


def test_peak_of_memory_falls_by_the_gradients() -> None:
    """As torch's profiler counts allocations; states exist before."""
    from benchmarks.harness.memory import most_allocated

    peaks = []
    for released in (False, True):
        model = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(10)]).bfloat16()
        optimizer = fusedtrain.optim.AdamW(model.parameters())
        if released:
            optimizer.release_gradients(model)

        def step(model: Any = model, optimizer: Any = optimizer) -> None:
            model(torch.ones(1, 256, dtype=BF16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        peaks.append(most_allocated(step, "cpu")[0])
    one = 256 * 256 * 2
    assert peaks[0] >= 10 * one
    assert peaks[1] < 3.5 * one  # two gradients, and what oneDNN needs: 3.04 on some processors


def test_schedulers() -> None:
    both = pair("SGD")
    torch_one = [
        torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5) for _, optimizer in both
    ]
    for seed in range(3):
        for (model, optimizer), scheduler in zip(both, torch_one, strict=True):
            train(model, optimizer, range(seed, seed + 1))
            scheduler.step()
    assert_alike(both)
    applied = [
        fusedtrain.optim.AppliedStepScheduler(
            optimizer, lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5)
        )
        for _, optimizer in both
    ]
    for seed in range(3):
        for (model, optimizer), one in zip(both, applied, strict=True):
            train(model, optimizer, range(seed, seed + 1))
            one.step()
            rate = float(optimizer.param_groups[0]["lr"])
            assert rate == pytest.approx(0.1 * 0.5 ** (4 + seed))
    assert_alike(both)


@pytest.mark.parametrize("compressed", [False, True])
def test_checkpoints_between_steps(compressed: bool) -> None:
    options = {"master_weights": "split24", "stochastic_rounding": True, "ema_decay": 0.9}
    both = pair("AdamW", BF16, **options)
    for model, optimizer in both:
        train(model, optimizer, range(3))
        saved = copy.deepcopy(model.state_dict()), optimizer.state_dict(compressed=compressed)
        kept = saved_and_loaded(saved[1])
        train(model, optimizer, range(3, 6))
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(kept)
        train(model, optimizer, range(3, 6))
    assert_alike(both)


def test_loading_forgets_an_open_step() -> None:
    both = pair()
    for model, optimizer in both:
        train(model, optimizer, range(2))
        saved = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        loss_of(model, 7).backward()
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        for p in model.parameters():
            p.grad = None
        train(model, optimizer, range(2, 4))
    assert_alike(both)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_take_ordinary_steps(how: str) -> None:
    (plain, ordinary), (model, optimizer) = pair()
    train(plain, ordinary, range(2))
    train(model, optimizer, range(2))
    whole = [model, optimizer, optimizer._release]
    copied: Any
    if how == "deepcopy":
        copied = copy.deepcopy(whole)
    elif how == "pickle":
        copied = pickle.loads(pickle.dumps(whole))
    else:
        file = io.BytesIO()
        torch.save(whole, file)
        file.seek(0)
        copied = torch.load(file, weights_only=False)
    other, its_optimizer, handle = copied
    handle.remove()
    loss_of(other, 2).backward()
    assert other.branch.weight.grad is not None
    assert alike(dict(other.named_parameters()), dict(model.named_parameters()))
    its_optimizer.step()
    train(plain, ordinary, range(2, 3))
    assert alike(dict(other.named_parameters()), dict(plain.named_parameters()))
    loss_of(model, 2).backward()
    assert model.branch.weight.grad is None


def test_the_handle_brings_ordinary_steps_back() -> None:
    model = network()
    optimizer = make("AdamW", model.parameters())
    with optimizer.release_gradients(model) as handle:
        train(model, optimizer, range(1))
        with pytest.raises(RuntimeError, match="released already"):
            optimizer.release_gradients(model)
    loss_of(model, 1).backward()
    assert model.branch.weight.grad is not None
    optimizer.step(lambda: loss_of(model, 1))
    handle.remove()
    optimizer.max_grad_norm = 1.0
    optimizer.max_grad_norm = None
    optimizer.release_gradients(model).remove()


@pytest.mark.parametrize("leave", [False, True])
def test_removed_in_the_middle_of_a_step(leave: bool) -> None:
    both = pair(ema_decay=0.9)
    for model, optimizer in both:
        train(model, optimizer, range(2))
        loss_of(model, 2).backward()
        if optimizer._release is not None:
            optimizer._release.remove()
            with pytest.raises(RuntimeError, match="released already"):
                optimizer.release_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        if leave and model is both[1][0]:
            optimizer.release_gradients(model)
        train(model, optimizer, range(3, 5))
    assert_alike(both)


def test_gradients_after_a_removal_are_no_second_update() -> None:
    _, (model, optimizer) = pair()
    loss_of(model, 0).backward()
    assert optimizer._release is not None
    optimizer._release.remove()
    loss_of(model, 1).backward()
    with pytest.raises(RuntimeError, match="a second update"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.step()
    assert optimizer._release is None


def test_parameters_outside_of_the_model_and_added_later() -> None:
    results: list[Any] = []
    for released in (False, True):
        torch.manual_seed(1)
        model, other = network(BF16), nn.Linear(6, 6).bfloat16()
        optimizer = make(
            "LAMB", [*model.parameters(), *other.parameters()], stochastic_rounding=True,
            ema_decay=0.9,
        )  # fmt: skip
        if released:
            optimizer.release_gradients(model)
        for seed in range(5):
            if seed == 2:
                added = nn.Linear(6, 6).bfloat16()
                model.add_module("added", added)
                optimizer.add_param_group({"params": added.parameters()})
            x = model(torch.ones(2, 6, dtype=BF16) * (seed + 1))
            x = other(x) if seed != 3 else x
            loss = added(x) if seed >= 2 else x
            loss.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            results.append([optimizer.grad_norm, optimizer.applied_steps])
        results[-1] += [*model.parameters(), *other.parameters(), optimizer.state_dict()]
        results[-1] += [{p.shape: n for p, n in optimizer.nonfinite_gradients()}]
    assert alike(results[:5], results[5:])
