"""Small trainings through the calls of Apex's amp, and Apex's documented rule of the loss scale."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedtrain
from fusedtrain.apex import amp

LEVELS = ("O0", "O1", "O2", "O3")
MAKERS: dict[str, Callable[[Any], Any]] = {
    "torch-SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "torch-Adam": lambda p: torch.optim.Adam(p, lr=2e-3, eps=1e-4),
    "fused-SGD": lambda p: fusedtrain.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "fused-Adam": lambda p: fusedtrain.optim.Adam(p, lr=2e-3, eps=1e-4),
    "fused-LAMB": lambda p: fusedtrain.optim.LAMB(p, lr=2e-3),
}

# Both ways of unscaling, at both levels that scale.
BOTH = pytest.mark.parametrize(
    ("level", "maker"), list(product(("O1", "O2"), ("torch-SGD", "fused-SGD")))
)


def network(seed: int = 1) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(6 * 36, 10),
    )


@cache
def _digits() -> Any:
    """Read once: it takes 22 ms, and a step of the network 3 ms."""
    from sklearn.datasets import load_digits

    return load_digits()


def images(count: int = 64) -> tuple[Tensor, Tensor]:
    """Handwritten digits, (count, 1, 8, 8) in [0, 1], and their labels."""
    digits = _digits()
    pixels = torch.tensor(digits.images[:count] / 16, dtype=torch.float32)[:, None]
    return pixels, torch.tensor(digits.target[:count])


def start(make: Any, level: str, **options: Any) -> tuple[nn.Module, Any]:
    model = network()
    optimizer = make(model.parameters())
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    return model, optimizer


def backward(loss: Tensor, optimizer: Any, **options: Any) -> None:
    with amp.scale_loss(loss, optimizer, **options) as scaled_loss:
        scaled_loss.backward()


def wait_for_the_device() -> None:
    """A message about an overflow is printed by the first call that finds it arrived."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def loss_of(model: nn.Module, part: slice = slice(None)) -> Tensor:
    x, y = images()
    return nn.functional.cross_entropy(model(x[part]), y[part])


def fail_in_the_middle(loss: Tensor, optimizer: Any) -> None:
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
        raise KeyError


class ApexScale:
    """The rule that Apex documents, in Python: the oracle of the scale's history."""

    def __init__(self, scale: float = 2.0**16, window: int = 2000) -> None:
        self.scale, self.window, self.unskipped = scale, window, 0
        self.low, self.high = 0.0, 2.0**24

    def update(self, overflow: bool) -> None:
        self.unskipped = 0 if overflow else self.unskipped + 1
        if overflow:
            self.scale = max(self.low, self.scale / 2)
        elif self.unskipped == self.window:
            self.scale, self.unskipped = min(self.high, self.scale * 2), 0


class _Overflowing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * float("inf")


def overflowing(loss: Tensor) -> Tensor:
    """The same loss; its gradients are infs and NaNs."""
    result: Tensor = _Overflowing.apply(loss)  # type: ignore[no-untyped-call]
    return result


def moved_alike(model: nn.Module, reference: nn.Module, share: float, seed: int = 1) -> None:
    """Asserts that the weights are off by at most `share` of the way that the reference's went.

    A model that did not move is off by the whole way.
    """
    start, weights, expected = (
        torch.cat([p.detach().double().flatten() for p in m.parameters()])
        for m in (network(seed), model, reference)
    )
    way, off = (expected - start).norm().item(), (weights - expected).norm().item()
    assert way > 1e-3
    assert off <= share * way, f"{off / way:.3g} of the way"


def gradients_alike(params: Iterable[Tensor], reference: nn.Module, share: float = 0.03) -> None:
    """Asserts that all gradients together differ from the reference's by at most `share`."""
    gradients, expected = [], []
    for p, q in zip(params, reference.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert p.grad.dtype == p.dtype
        gradients.append(p.grad.double().flatten())
        expected.append(q.grad.double().flatten())
    off = (torch.cat(gradients) - torch.cat(expected)).norm() / torch.cat(expected).norm()
    assert off <= share, f"off by {off:.3g}"


def plain_training(
    make: Callable[[Any], Any], skipped: Sequence[int], steps: int, dtype: torch.dtype
) -> tuple[list[float], nn.Module]:
    """Without amp, in one dtype: losses and the model."""
    model = network().to(dtype)
    optimizer = make(model.parameters())
    x, y = images()
    losses = []
    for i in range(steps):
        loss = nn.functional.cross_entropy(model(x.to(dtype)), y)
        optimizer.zero_grad()
        loss.backward()
        if i not in skipped:
            optimizer.step()
        losses.append(loss.item())
    return losses, model
