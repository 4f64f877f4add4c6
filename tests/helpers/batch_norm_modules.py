"""Modules of batch norm, what they stand for in stock PyTorch, and how the two are compared."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

import fusedtrain.nn as fnn

MODULES: dict[str, tuple[type[Any], type[nn.Module], tuple[int, ...]]] = {
    "1d, [N, C]": (fnn.BatchNormAct1d, nn.BatchNorm1d, (6, 4)),
    "1d": (fnn.BatchNormAct1d, nn.BatchNorm1d, (3, 4, 5)),
    "2d": (fnn.BatchNormAct2d, nn.BatchNorm2d, (3, 4, 5, 2)),
    "3d": (fnn.BatchNormAct3d, nn.BatchNorm3d, (2, 4, 3, 2, 2)),
    "add": (fnn.BatchNormAddAct, nn.BatchNorm2d, (3, 4, 5, 2)),
}


class Stock(nn.Module):
    """The equivalent of a module of ours in stock PyTorch."""

    def __init__(self, ours: Any, norm: type[nn.Module] = nn.BatchNorm2d) -> None:
        super().__init__()
        self.norm: Any = norm(
            ours.num_features, ours.eps, ours.momentum, ours.affine, ours.track_running_stats
        )
        parameter = next(ours.parameters(), None)
        self.norm.to(torch.float32 if parameter is None else parameter.dtype)
        state = {k: v for k, v in ours.state_dict().items() if not k.startswith("act.")}
        self.norm.load_state_dict(state)
        self.drop, self.act = copy.deepcopy(ours.drop), copy.deepcopy(ours.act)
        self.train(ours.training)

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        z = self.drop(self.norm(input))
        return self.act(z if residual is None else z + residual)


def randomized(module: Any) -> Any:
    """Weights of both signs and zero, running statistics that are no one's."""
    with torch.no_grad():
        for t in (module.weight, module.bias, module.running_mean):
            if t is not None:
                t.copy_(torch.randn(t.shape))
        if module.weight is not None:
            module.weight[1] = 0
        if module.running_var is not None:
            module.running_var.copy_(torch.rand(module.running_var.shape) + 0.5)
    return module


def drop_path() -> nn.Module:
    return fnn.DropPath(0.3)


def leaf(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.detach().clone().requires_grad_()


def results(module: Any, input: Tensor, residual: Tensor | None = None) -> list[Any]:
    """Output, gradients of inputs and parameters, buffers."""
    inputs = [leaf(t) for t in (input, residual) if t is not None]
    module.zero_grad()
    output = module(*inputs)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        grad = torch.randn(output.shape)
    output.backward(grad.to(output.dtype))
    norm = getattr(module, "norm", module)
    return [
        output.detach(), *(t.grad for t in inputs),
        *(p.grad for p in (norm.weight, norm.bias) if p is not None),
        *(b.clone() for b in norm.buffers()),
    ]  # fmt: skip


def assert_equal_results(ours: list[Any], theirs: list[Any], tolerance: float = 2e-5) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype is b.dtype
        assert a.shape == b.shape
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def assert_same_outcome(ours: Any, theirs: Any) -> None:
    """The same values, or the same type of exception."""
    if isinstance(ours, type) or isinstance(theirs, type):
        assert ours == theirs
    else:
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)
