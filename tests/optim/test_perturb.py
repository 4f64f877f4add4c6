"""Sharpness-aware minimisation: perturb() and restore() beside SAM by hand in float64."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedtrain
from fusedtrain.optim import SGD, AdamW
from helpers.optimizers import counterpart

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
KINDS: list[tuple[torch.dtype, Any]] = [
    (F64, False), (F32, False), (BF16, False), (BF16, True), (BF16, "split32"), (BF16, "split24"),
    (F16, True), (F16, "split32"), (F16, "split24"),
]  # fmt: skip
pytestmark = pytest.mark.usefixtures("one_thread")
EVERY_KIND = pytest.mark.parametrize(("dtype", "masters"), KINDS, ids=str)


class Net(nn.Module):
    """Two layers and a parameter without a gradient."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to(dtype)
        self.unused = nn.Parameter(torch.ones(3, dtype=dtype))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        dtype = self.unused.dtype
        out: Tensor = self.layers(x.to(dtype)).squeeze(1)
        return (out.double() - y).square().mean()


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 8, generator=generator)
    return x, x[:, 0].sin().double() + x[:, 1]


def everything(model: nn.Module, optimizer: Any) -> list[Tensor]:
    states = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    return [t.detach().clone() for t in [*model.parameters(), *states]]


def sam_step(model: Net, optimizer: Any, rho: float, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    model.loss(x, y).backward()
    optimizer.perturb(rho)
    optimizer.zero_grad()
    model.loss(x, y).backward()
    optimizer.restore()
    optimizer.step()


def sam_by_hand(model: Net, optimizer: torch.optim.Optimizer, rho: float, x: Any, y: Any) -> None:
    """As github.com/davda54/sam has it."""
    optimizer.zero_grad()
    model.loss(x, y).backward()
    params = [p for p in model.parameters() if p.grad is not None]
    with torch.no_grad():
        norm = torch.stack([p.grad.norm() for p in params if p.grad is not None]).norm()
        old = [p.clone() for p in params]
        for p in params:
            p.add_(p.grad * (rho / (norm + 1e-12)))
    optimizer.zero_grad()
    model.loss(x, y).backward()
    with torch.no_grad():
        for p, value in zip(params, old):
            p.copy_(value)
    optimizer.step()


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Lion"])
@EVERY_KIND
def test_restore_puts_every_bit_back(name: str, dtype: torch.dtype, masters: Any) -> None:
    model, (x, y) = Net(dtype), data()
    make = getattr(fusedtrain.optim, name)
    optimizer = make(model.parameters(), lr=0.01, master_weights=masters, ema_decay=0.9)
    for number in range(3):
        model.loss(x, y).backward()
        before = everything(model, optimizer)
        optimizer.perturb(rho=0.1)
        assert torch.equal(before[0], model.unused)
        moved = [p for p, old in zip(model.layers.parameters(), before[1:]) if (p != old).any()]
        assert len(moved) == 4
        optimizer.restore()
        after = everything(model, optimizer)
        assert all(map(torch.equal, before, after)), number
        optimizer.step()


@EVERY_KIND
def test_the_perturbation(dtype: torch.dtype, masters: Any) -> None:
    """The rounded sum of the master and rho g / |g|."""
    model, (x, y) = Net(dtype), data()
    optimizer = AdamW(model.parameters(), lr=0.01, master_weights=masters)
    model.loss(x, y).backward()
    optimizer.step()
    weights = copy.deepcopy(fusedtrain.optim.float32_state_dict(model, optimizer))
    grads = {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}
    norm = torch.stack([g.norm() for g in grads.values()]).norm()
    optimizer.perturb(rho=0.3)
    eps = torch.finfo(dtype).eps
    for name, p in model.named_parameters():
        if name in grads:
            expected = weights[name].double() + 0.3 * grads[name] / norm
            atol = 2e-8 if dtype != F64 else 1e-15  # the sum is of float32
            torch.testing.assert_close(p.double(), expected, rtol=eps / 2 + 1e-6, atol=atol)


@EVERY_KIND
def test_steps_are_those_of_stock_sam(dtype: torch.dtype, masters: Any) -> None:
    """Ten large ones, within the rounding of the parameters beside a float64 reference."""
    model, reference, (x, y) = Net(dtype), Net(F64), data()
    for p, q in zip(model.parameters(), reference.parameters()):
        q.data = p.detach().double()
    ours = SGD(model.parameters(), lr=0.05, momentum=0.9, master_weights=masters)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.05, momentum=0.9)
    for _ in range(10):
        sam_step(model, ours, 0.05, x, y)
        sam_by_hand(reference, theirs, 0.05, x, y)
    far = {F64: 1e-10, F32: 1e-5, F16: 4e-3, BF16: 4e-2}[dtype]
    for p, q in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(p.double(), q, rtol=0, atol=far)


def line(optimizer: Any, w: nn.Parameter, step: str) -> None:
    """300 SAM steps of a linear regression."""
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(2)).to(w.dtype)

    def backward() -> None:
        w.grad = None
        (x @ w - 1).double().square().mean().backward()

    for _ in range(300):
        backward()
        assert w.grad is not None
        e = w.grad * (0.05 / (w.grad.double().norm() + 1e-12)).to(w.dtype)
        with torch.no_grad():
            optimizer.perturb(0.05) if step == "perturb" else w.add_(e)
        backward()
        with torch.no_grad():
            optimizer.restore() if step == "perturb" else w.sub_(e)
        optimizer.step()


@pytest.mark.parametrize("masters", ["split24", "split32", True])
@pytest.mark.parametrize(("name", "lr"), [("AdamW", 2e-6), ("SGD", 2e-5)])
def test_small_steps_move_as_far_as_stock_sam(name: str, lr: float, masters: Any) -> None:
    """300 steps below half a unit of bfloat16. With add_ and sub_ split masters lose them, and
    warn."""
    start = torch.randn(64, generator=torch.Generator().manual_seed(3)).bfloat16()
    w, q, by_hand = (nn.Parameter(start.to(t)) for t in (BF16, F64, BF16))
    options: dict[str, Any] = {"master_weights": masters, "state_dtype": F32}
    options["stochastic_rounding"] = masters == "split24"
    make = getattr(fusedtrain.optim, name)
    optimizer = make([w], lr=lr, **options)
    line(optimizer, w, "perturb")
    line(counterpart(name)([q], lr=lr), q, "by hand")
    model = nn.Module()
    model.w = w
    master = fusedtrain.optim.float32_state_dict(model, optimizer)["w"]
    ours, theirs = master.double() - start.double(), q.detach() - start.double()
    assert theirs.norm() > 1e-3
    assert 0.9 < ours.norm() / theirs.norm() < 1.1
    assert torch.dot(ours, theirs) / (ours.norm() * theirs.norm()) > 0.97
    if masters == "split32":
        with pytest.warns(UserWarning, match="perturb.. and restore"):
            line(make([by_hand], lr=lr, **options), by_hand, "by hand")
        away = by_hand.detach().double() - start.double()
        assert torch.dot(away, theirs) / theirs.square().sum() < 0.5


@pytest.mark.parametrize("scaled", ["fused", "unscaled first"])
def test_with_a_scaler(scaled: str) -> None:
    """The scale makes no difference; infinite gradients perturb nothing."""
    x, y = data()
    models = [Net(F32), Net(F32)]
    optimizers = [SGD(m.parameters(), lr=0.1) for m in models]
    scaler = fusedtrain.amp.GradScaler("cpu", init_scale=2.0**10)
    for _ in range(4):
        sam_step(models[0], optimizers[0], 0.05, x, y)
        model, optimizer = models[1], optimizers[1]
        optimizer.zero_grad()
        scaler.scale(model.loss(x, y)).backward()
        if scaled == "unscaled first":  # of another scale: the norm counts
            for p in model.layers.parameters():
                assert p.grad is not None
                p.grad /= 2.0**10
        optimizer.perturb(0.05)
        optimizer.zero_grad()
        scaler.scale(model.loss(x, y)).backward()
        optimizer.restore()
        scaler.step(optimizer)
        scaler.update()
    for p, q in zip(models[0].parameters(), models[1].parameters()):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)
    before = everything(models[1], optimizers[1])
    grad = next(models[1].layers.parameters()).grad
    assert grad is not None
    grad.fill_(torch.inf)
    optimizers[1].perturb(0.05)
    assert all(map(torch.equal, before, everything(models[1], optimizers[1])))
    optimizers[1].restore()


def test_closures_maximize_and_frozen_groups() -> None:
    x, y = data()
    model, other = Net(F32), Net(F32)
    groups: list[dict[str, Any]] = [
        {"params": [*model.layers.parameters()]},
        {"params": [model.unused], "lr": 0.5},
    ]
    optimizer = SGD(groups, lr=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model.loss(x, y)
        loss.backward()
        optimizer.perturb()
        optimizer.zero_grad()
        model.loss(x, y).backward()
        optimizer.restore()
        return loss

    assert optimizer.step(closure) > 0
    sam_step(other, SGD(other.parameters(), lr=0.1), 0.05, x, y)
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    w = nn.Parameter(torch.ones(1))
    up = SGD([w], lr=0.1, maximize=True)
    (2 * w).sum().backward()
    up.perturb(0.25)
    assert w.item() == 0.75


def test_mistakes() -> None:
    p = nn.Parameter(torch.ones(3).bfloat16())
    optimizer = AdamW([p], lr=0.1, master_weights="split32", ema_decay=0.9)
    with pytest.raises(RuntimeError, match=r"not perturbed. Call optimizer.perturb\(\)"):
        optimizer.restore()
    with pytest.raises(RuntimeError, match=r"no parameter has a gradient. Call loss.backward"):
        optimizer.perturb()
    p.grad = torch.ones(3).bfloat16()
    with pytest.raises(ValueError, match="Invalid rho value: -1"):
        optimizer.perturb(-1)
    optimizer.step()
    saved = optimizer.state_dict()
    with optimizer.swap_averages(), pytest.raises(RuntimeError, match="leave the context first"):
        optimizer.perturb()
    optimizer.perturb()
    for misuse in (
        optimizer.step, optimizer.perturb, optimizer.state_dict,
        lambda: optimizer.load_state_dict(saved), lambda: copy.deepcopy(optimizer),
        lambda: optimizer.swap_averages().__enter__(),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=r"are perturbed. Call optimizer.restore\(\) first"):
            misuse()
    optimizer.restore()
    with pytest.raises(RuntimeError, match="restore: the parameters are not perturbed"):
        optimizer.restore()
    optimizer.step()
    q = nn.Parameter(torch.ones(3))
    q.grad = torch.ones(3).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        SGD([q], lr=0.1).perturb()
    layer = nn.Linear(2, 1)
    released = SGD(layer.parameters(), lr=0.1)
    handle = released.release_gradients(layer)
    with pytest.raises(RuntimeError, match="release_gradients"):
        released.perturb()
    handle.remove()


def test_one_write_does_not_warn() -> None:
    p = nn.Parameter(torch.ones(3).bfloat16())
    optimizer = AdamW([p], lr=0.1, master_weights="split32")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(9):
            p.grad = torch.ones(3).bfloat16()
            optimizer.step()
            if number % 3:
                with torch.no_grad():
                    p.mul_(0.9)
