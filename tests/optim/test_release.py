"""Gradient release: the same bits as ordinary steps, with few gradients at a time."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fusedtrain
from fusedtrain.optim import FusedOptimizer
from helpers.optimizer_steps import alike, in_groups, saved_and_loaded
from helpers.optimizers import CLASSES, make

BF16, F32 = torch.bfloat16, torch.float32
# Every fourth class starts with another of these options.
OPTIONS: list[dict[str, Any]] = [
    {"agc": 0.05, "ema_decay": 0.9},
    {"stochastic_rounding": True},
    {"master_weights": True, "state_dtype": F32},
    {"master_weights": "split24", "stochastic_rounding": True, "agc": 0.1},
    {"master_weights": "split32", "ema_decay": 0.9},
]


class Net(nn.Module):
    """Its branch is not always used, its last weight is tied to the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)
        self.branch, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.last.weight = self.first.weight
        self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)

    def forward(self, x: Tensor, branch: bool = True) -> Tensor:
        x = self.norm(self.first(x)).tanh()
        return self.last(self.branch(x).tanh() if branch else x)


def network(dtype: torch.dtype = F32) -> Net:
    torch.manual_seed(3)
    return Net().to(dtype)


def loss_of(model: nn.Module, seed: int, **options: Any) -> Tensor:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
    loss: Tensor = model(x.to(next(model.parameters()).dtype), **options).square().mean()
    return loss


def options_of(name: str, **options: Any) -> dict[str, Any]:
    if name in ("LAMB", "FusedLAMB"):
        options["max_grad_norm"] = None
    if name == "FusedAdam":
        options["capturable"] = True
    return {"gradient_writeback": "none", **options}


def pair(
    name: str = "AdamW", dtype: torch.dtype = F32, **options: Any
) -> list[tuple[Net, FusedOptimizer]]:
    """Two equal networks, the second with gradient release."""
    results = []
    for _ in range(2):
        torch.manual_seed(1)  # the stream of stochastic rounding
        model = network(dtype)
        groups = in_groups(list(model.parameters()))
        results.append((model, make(name, groups, **options_of(name, **options))))
    results[1][1].release_gradients(results[1][0])
    return results


def train(model: nn.Module, optimizer: FusedOptimizer, seeds: range) -> list[Any]:
    reports = []
    for seed in seeds:
        loss_of(model, seed, branch=seed % 3 != 1).backward()
        optimizer.step()
        for p in model.parameters():  # `zero_grad` of Apex's FusedSGD leaves zeros
            p.grad = None
        reports.append((
            optimizer.grad_norm, optimizer.applied_steps, optimizer.skipped_steps,
            optimizer.last_step_skipped,
        ))  # fmt: skip
    return reports


def assert_alike(both: list[tuple[Net, FusedOptimizer]]) -> None:
    (model, optimizer), (released, other) = both
    assert alike(dict(model.named_parameters()), dict(released.named_parameters()))
    assert alike(optimizer.state_dict(), other.state_dict())
    assert alike(
        [b for _, b in optimizer.averaged_parameters()], [b for _, b in other.averaged_parameters()]
    )


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
    assert peaks[1] < 3 * one


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
    results = []
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
                model.added = nn.Linear(6, 6).bfloat16()
                optimizer.add_param_group({"params": model.added.parameters()})
            x = model(torch.ones(2, 6, dtype=BF16) * (seed + 1))
            x = other(x) if seed != 3 else x
            loss = model.added(x) if seed >= 2 else x  # type: ignore[operator]
            loss.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            results.append([optimizer.grad_norm, optimizer.applied_steps])
        results[-1] += [*model.parameters(), *other.parameters(), optimizer.state_dict()]
        results[-1] += [{p.shape: n for p, n in optimizer.nonfinite_gradients()}]
    assert alike(results[:5], results[5:])


def test_two_optimizers_over_one_model() -> None:
    results = []
    for released in (False, True):
        model = network()
        norms = [*model.norm.parameters()]
        others = [p for p in model.parameters() if all(p is not q for q in norms)]
        optimizers = [make("SGD", norms), make("Lion", others)]
        for optimizer in optimizers if released else ():
            optimizer.release_gradients(model)
        for seed in range(3):
            loss_of(model, seed).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        results.append([list(model.parameters()), *(o.state_dict() for o in optimizers)])
    assert alike(*results)


def test_unfrozen_and_moved_parameters() -> None:
    both = pair()
    for model, optimizer in both:
        train(model, optimizer, range(1))
        model.frozen.requires_grad_()
        model.frozen.grad = torch.ones(3)
        optimizer.step()
        optimizer.zero_grad()
        model.branch.weight.data = model.branch.weight.detach().clone().t().contiguous().t()
        train(model, optimizer, range(1, 3))
        model.to(torch.float64)
        train(model, optimizer, range(3, 5))
    assert_alike(both)


def test_gradients_that_do_not_accumulate() -> None:
    """torch.autograd.grad, functorch and evaluation leave the model as it is."""
    _, (model, optimizer) = pair()
    before = copy.deepcopy(model.state_dict())
    params = [p for p in model.parameters() if p.requires_grad]
    torch.autograd.grad(loss_of(model, 0), params)
    named = {name: p.detach() for name, p in model.named_parameters()}
    torch.func.grad(lambda n: torch.func.functional_call(model, n, torch.ones(1, 6)).sum())(named)
    model.eval()
    with torch.no_grad():
        loss_of(model, 0)
    optimizer.step()
    assert alike(dict(model.state_dict()), dict(before))
    assert int(optimizer.applied_steps) == 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks(reentrant: bool) -> None:
    results = []
    for released in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)])
        optimizer = make("AdamW", model.parameters())
        if released:
            optimizer.release_gradients(model)
        for seed in range(3):
            x = torch.ones(2, 6).mul(seed + 1).requires_grad_()
            for block in model:
                x = checkpoint(block, x, use_reentrant=reentrant)
            x.square().mean().backward()
            assert released == (next(model.parameters()).grad is None)
            optimizer.step()
            optimizer.zero_grad()
        results.append([list(model.parameters()), optimizer.state_dict()])
    assert alike(*results)


def test_exceptions_in_backward_leave_a_step_to_close() -> None:
    _, (model, optimizer) = pair(ema_decay=0.9)
    train(model, optimizer, range(1))
    broken = model.norm.register_full_backward_hook(_fail)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(ZeroDivisionError):
        loss_of(model, 1).backward()
    broken.remove()
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert {"branch.weight", "last.bias", "norm.weight"} <= changed
    assert not {"first.weight", "first.bias"} & changed
    with pytest.raises(RuntimeError, match="second time"):
        loss_of(model, 1).backward()
    optimizer.step()
    assert int(optimizer.applied_steps) == 2
    train(model, optimizer, range(2, 4))
    assert int(optimizer.applied_steps) == 4


def _fail(*_: Any) -> None:
    raise ZeroDivisionError


def _clamp(p: Tensor) -> None:
    assert p.grad is not None
    p.grad.clamp_(-0.01, 0.01)


def test_hooks_of_others() -> None:
    """Those that change gradients, and those registered before, see them; later ones do not."""
    results = []
    for released in (False, True):
        model = network()
        optimizer = make("SGD", model.parameters())
        seen: list[bool] = []
        for p in model.parameters():
            if p.requires_grad:
                p.register_hook(lambda grad: grad * 0.5)
                p.register_post_accumulate_grad_hook(_clamp)
        if released:
            optimizer.release_gradients(model)
        model.branch.weight.register_post_accumulate_grad_hook(
            lambda p, seen=seen: seen.append(p.grad is None)
        )
        train(model, optimizer, range(2))
        assert seen == [released]  # the second step leaves the branch out
        results.append(list(model.parameters()))
    assert alike(*results)


def test_create_graph_and_strange_gradients() -> None:
    both = pair()
    for model, optimizer in both:
        loss_of(model, 0).backward(create_graph=True)
        optimizer.step()
        optimizer.zero_grad()
        weight = model.branch.weight
        (weight.t() * torch.ones(6, 6).double().float()).sum().backward()  # transposed
        optimizer.step()
        optimizer.zero_grad()
        weight.sum().backward()  # expanded: all elements at one place
        optimizer.step()
        optimizer.zero_grad()
        torch._neg_view(weight).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_alike(both)


@pytest.mark.parametrize("memory", ["store", "recompute"])
def test_converted_models(memory: str) -> None:
    results = []
    for released in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU(), nn.Conv2d(8, 8, 3),
            nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1),
        )  # fmt: skip
        optimizer = make("AdamW", model.parameters())
        if released:
            optimizer.release_gradients(model)
        fusedtrain.convert(model, memory=memory)
        for seed in range(3):
            x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
            model(x).square().mean().backward()
            assert released == (model[0].weight.grad is None)
            optimizer.step()
            optimizer.zero_grad()
        results.append([dict(model.state_dict()), optimizer.state_dict()])
    assert alike(*results)


def test_optimizers_and_models_go_away() -> None:
    def made() -> Iterator[Any]:
        model = network()
        optimizer = make("AdamW", model.parameters())
        optimizer.release_gradients(model)
        train(model, optimizer, range(2))
        yield from (model, optimizer)

    import weakref

    gone = [weakref.ref(one) for one in made()]
    gc.collect()
    assert [one() for one in gone] == [None, None]
