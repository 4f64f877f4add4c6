"""Small trainings through the calls of Apex's amp and of its FP16_Optimizer, and Apex's documented
rule of the loss scale."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedtrain
from fusedtrain.apex import amp
from fusedtrain.apex.amp._loss_scaler import LossScaler
from fusedtrain.apex.fp16_utils import FP16_Optimizer, network_to_half

LEVELS = ("O0", "O1", "O2", "O3")
MAKERS: dict[str, Callable[[Any], Any]] = {
    "torch-SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "torch-Adam": lambda p: torch.optim.Adam(p, lr=2e-3, eps=1e-4),
    "fused-SGD": lambda p: fusedtrain.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "fused-Adam": lambda p: fusedtrain.optim.Adam(p, lr=2e-3, eps=1e-4),
    "fused-LAMB": lambda p: fusedtrain.optim.LAMB(p, lr=2e-3),
}

FP16 = "FP16"  # in the place of a level of amp: FP16_Optimizer
# Both ways of unscaling, at both levels of amp that scale; and with FP16_Optimizer, too.
BOTH = pytest.mark.parametrize(
    ("level", "maker"), list(product(("O1", "O2"), ("torch-SGD", "fused-SGD")))
)
EVERY = pytest.mark.parametrize(
    ("level", "maker"), list(product(("O1", "O2", FP16), ("torch-SGD", "fused-SGD")))
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


def initialized(
    model: nn.Module, optimizer: Any, level: str, verbose: bool = False, **options: Any
) -> tuple[Any, Any]:
    """The two as a script of Apex has them; options are those of the loss scaler, or of amp."""
    if level != FP16:
        return amp.initialize(model, optimizer, opt_level=level, verbosity=int(verbose), **options)
    scale = options.pop("loss_scale", "dynamic")
    dynamic = {"dynamic_loss_scale": True, "dynamic_loss_args": options}
    kind = dynamic if scale == "dynamic" else {"static_loss_scale": scale}
    return network_to_half(model), FP16_Optimizer(optimizer, verbose=verbose, **kind)


def start(make: Any, level: str, **options: Any) -> tuple[Any, Any]:
    model = network()
    optimizer = make(model.parameters())
    return initialized(model, optimizer, level, **options)


def backward(loss: Tensor, optimizer: Any, delay_unscale: bool = False, **options: Any) -> None:
    if isinstance(optimizer, FP16_Optimizer):
        optimizer.backward(loss, update_master_grads=not delay_unscale)
        return
    with amp.scale_loss(loss, optimizer, delay_unscale=delay_unscale, **options) as scaled_loss:
        scaled_loss.backward()


def scaler_of(optimizer: Any) -> LossScaler:
    if isinstance(optimizer, FP16_Optimizer):
        return optimizer.loss_scaler
    return amp._amp_state.loss_scalers[0]


def saved_scale(optimizer: Any) -> dict[str, Any]:
    """The loss scale as checkpoints have it."""
    if isinstance(optimizer, FP16_Optimizer):
        return optimizer.state_dict()["loss_scaler"]
    assert list(amp.state_dict()) == ["loss_scaler0"]
    return amp.state_dict()["loss_scaler0"]


def wait_for_the_device() -> None:
    """A message about an overflow is printed by the first call that finds it arrived."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def loss_of(model: nn.Module, part: slice = slice(None)) -> Tensor:
    x, y = images()
    output = model(x[part])
    return nn.functional.cross_entropy(
        output if output.dtype is torch.float64 else output.float(), y[part]
    )


def fail_in_the_middle(loss: Tensor, optimizer: Any) -> None:
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
        raise KeyError


class ApexScale:
    """The rule that Apex documents, in Python: the oracle of the scale's history."""

    def __init__(self, scale: float = 2.0**16, window: int = 2000, factor: float = 2.0) -> None:
        self.scale, self.window, self.factor, self.unskipped = scale, window, factor, 0
        self.low, self.high = 0.0, 2.0**24

    def update(self, overflow: bool) -> None:
        self.unskipped = 0 if overflow else self.unskipped + 1
        if overflow:
            self.scale = max(self.low, self.scale / self.factor)
        elif self.unskipped == self.window:
            self.scale, self.unskipped = min(self.high, self.scale * self.factor), 0


class _Overflowing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * float("inf")


def overflowing(loss: Tensor) -> Tensor:
    """The same loss; its gradients are infs and NaNs."""
    result: Tensor = _Overflowing.apply(loss)
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


class Twins:
    """A model that is trained in Apex's calls, and one in float64 that is trained without them."""

    def __init__(self, level: str, maker: str, **options: Any) -> None:
        self.model, self.optimizer = start(MAKERS[maker], level, **options)
        self.plain = network().double()
        self.plain.register_forward_pre_hook(lambda _, args: (args[0].double(),))
        self.plain_optimizer = MAKERS[maker](self.plain.parameters())

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()
        self.plain_optimizer.zero_grad()

    def backward(self, part: slice = slice(None), delay_unscale: bool = False) -> None:
        backward(loss_of(self.model, part), self.optimizer, delay_unscale=delay_unscale)
        loss_of(self.plain, part).backward()

    def step(self) -> None:
        self.optimizer.step()
        self.plain_optimizer.step()

    def train(self, overflows: bool = False, clip: float | None = None) -> list[float]:
        """One step; an overflow is to skip it. Both losses, and the norms where they are clipped.

        Args:
            clip: norm of all gradients, after which larger ones are scaled.
        """
        loss, plain = loss_of(self.model), loss_of(self.plain)
        self.zero_grad()
        backward(overflowing(loss) if overflows else loss, self.optimizer)
        plain.backward()
        norms = []
        if clip is not None:
            norms.append(clip_masters(self.optimizer, clip))
            norms.append(nn.utils.clip_grad_norm_(self.plain.parameters(), clip))
        self.optimizer.step()
        if not overflows:
            self.plain_optimizer.step()
        return [loss.item(), plain.item(), *map(float, norms)]


def clip_masters(optimizer: Any, norm: float) -> Any:
    if isinstance(optimizer, FP16_Optimizer):
        return optimizer.clip_master_grads(norm)
    return nn.utils.clip_grad_norm_(amp.master_params(optimizer), norm)
