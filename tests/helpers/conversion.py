"""Small models that the tests of conversion share, their results, and the comparison of results."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedtrain
from fusedtrain._graph.report import Unchanged
from helpers.models import timm


class Block(nn.Module):
    """A residual block with everything, as ResNets have it."""

    def __init__(self, act: nn.Module | None = None, drop: nn.Module | None = None) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.act = act or nn.ReLU(inplace=True)
        self.drop = drop or nn.Identity()
        self.shortcut = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))

    def forward(self, x: Tensor) -> Tensor:
        out = self.act(self.bn1(self.conv1(x)))
        out = self.drop(self.bn2(self.conv2(out)))
        identity = self.shortcut(x)
        out += identity
        output: Tensor = self.act(out)
        return output


class Calls(nn.Module):
    """conv, batch norm, and what a function does with its output."""

    def __init__(self, after: Callable[[nn.Module, Tensor], Any], **children: nn.Module) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)
        for name, child in children.items():
            self.add_module(name, child)
        self.after = after

    def forward(self, x: Tensor) -> Any:
        return self.after(self, self.bn(self.conv(x)))


def outline(report: fusedtrain.ConversionReport) -> list[str]:
    """Everything that was fused: `bn: norm add + ReLU`, `product SiLU` in the root's forward."""
    units: list[tuple[str, str, tuple[str, ...]]] = [
        *((n.name, "norm", n.parts) for n in report.norms),
        *((p.name, "product", (p.activation,)) for p in report.products),
        *((b.name, "branch", b.parts) for b in report.branches),
        *((c.name, "call", (c.activation,)) for c in report.calls),
        *((c.name, "module", (c.target.rpartition(".")[2],)) for c in report.converted),
    ]
    return [f"{name}: " * bool(name) + f"{kind} {' + '.join(parts)}" for name, kind, parts in units]


def reasons(report: fusedtrain.ConversionReport) -> list[str]:
    """Everything that was left: `1: excluded`; only the reason in the root's forward."""
    left = (*report.left, *report.left_calls, *report.left_products)
    return [f"{entry.name}: " * bool(entry.name) + entry.reason for entry in left]


def compared(
    model: nn.Module,
    x: Tensor,
    example: Any = None,
    tolerance: float = 1e-5,
    modes: Sequence[bool] = (True, False),
    copies: bool = True,
    **options: Any,
) -> fusedtrain.ConversionReport:
    """The report of a conversion. The model, and copies of it, have the results of the stock model
    in each mode of training; a second conversion finds nothing, and revert leaves nothing.

    `copies`: False for large models. Pickles are compared where the stock model has one.
    """
    stock = copy.deepcopy(model)
    keys, training = list(model.state_dict()), [m.training for m in model.modules()]
    report = fusedtrain.convert(model, example, **options)
    assert list(model.state_dict()) == keys
    assert [m.training for m in model.modules()] == training
    twins = [model, *([copy.deepcopy(model)] if copies else [])]
    try:
        if copies and pickle.dumps(stock):
            twins.append(pickle.loads(pickle.dumps(model)))
    except (pickle.PicklingError, AttributeError):  # a class or function without a name
        with pytest.raises((pickle.PicklingError, AttributeError)):
            pickle.dumps(stock)
    expected = [results(stock.train(mode), x) for mode in modes]
    for twin in twins:
        for mode, wanted in zip(modes, expected):
            assert_same(results(twin.train(mode), x), wanted, tolerance)
    memory = options.get("memory", "store")
    again = fusedtrain.convert(model, memory=memory, exclude=options.get("exclude", ()))
    assert (len(again), outline(again)) == (0, [])
    assert bool(fusedtrain.revert(model)) == bool(outline(report) or memory == "recompute")
    assert _kinds(model) == _kinds(stock)
    return report


def _kinds(model: nn.Module) -> list[tuple[str, type, list[str]]]:
    return [(name, type(m), sorted(vars(m))) for name, m in model.named_modules()]


def left_of(report: fusedtrain.ConversionReport) -> list[Unchanged]:
    """The modules that stay for another reason than that they would gain nothing."""
    return [left for left in report.left if not left.reason.startswith("gains nothing: ")]


def small(*after: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), *(after or (nn.SiLU(),)))


def image(size: int = 8, channels: int = 3, **options: Any) -> Tensor:
    return torch.randn(2, channels, size, size, **options)


def results(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Outputs, gradients and buffers of a forward and backward, and the next random numbers."""
    torch.manual_seed(7)
    model.zero_grad()
    x = x.clone().requires_grad_(x.is_floating_point())
    output = model(x)
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    loss = sum((y * torch.linspace(-1, 1.5, y.numel()).view_as(y).to(y)).sum() for y in leaves)
    assert isinstance(loss, Tensor)
    loss.backward()
    named = {f"output {i}": leaf.detach() for i, leaf in enumerate(leaves)}
    named["random numbers"] = torch.rand(3)
    assert x.grad is not None
    named["gradient of the input"] = x.grad
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    largest = max((float(g.norm()) for g in gradients.values()), default=0.0)
    for name, gradient in gradients.items():
        # A bias before a batch norm has a gradient of rounding.
        if float(gradient.norm()) > 1e-3 * largest:
            named[f"gradient of {name}"] = gradient
    return named | {name: b.clone() for name, b in model.named_buffers()}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        if not value.is_floating_point():
            assert torch.equal(actual[name], value), name
            continue
        difference = float((actual[name] - value).detach().norm())
        # A running mean of zero is rounding.
        assert difference <= tolerance * max(float(value.detach().norm()), 1e-6), name


def snapshot(model: nn.Module) -> list[tuple[str, type, dict[str, Any]]]:
    return [(name, type(m), dict(vars(m))) for name, m in model.named_modules()]


def kinds(report: fusedtrain.ConversionReport) -> dict[str, int]:
    return dict(Counter(" + ".join(norm.parts) for norm in report.norms))


class OwnNorm(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Doubled(nn.Module):
    """A parametrization."""

    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def small_linear(activation: nn.Module | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 5), activation or nn.SiLU(), nn.Linear(5, 3))


def output_and_gradients(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The output, and the gradients of the input and of every parameter."""
    x = x.clone().requires_grad_()
    y = model(x)
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    model.zero_grad()
    (y * weights).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert x.grad is not None
    return y.detach(), {"input": x.grad, **gradients}


def timm_class(path: str) -> type[nn.Module]:
    package = timm().models if path.startswith("metaformer") else timm().layers
    file, name = path.split(".")
    cls: type[nn.Module] = getattr(getattr(package, file), name)
    return cls
