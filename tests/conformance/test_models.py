"""timm's and torchvision's families before and after `convert`, each as small as it can be made."""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from _families import FAMILIES, LONG, SHORT, Family
from _tables import tensors
from differences import judge, unknown_keys
from torch import Tensor, nn

import fusedtrain
from helpers.models import timm, torchvision

pytestmark = pytest.mark.usefixtures("one_thread")

# Whose feature extraction is compared; the others are in the long form.
FEATURES = SHORT[::4]
REST = [f for f in FAMILIES if f not in FEATURES]
# Norm of the difference by norm of what it should be, in float64: torch's own backward of
# Hardsigmoid has a factor that is rounded to float32.
TOLERANCE = 1e-6
# Gradients below this part of the largest are rounding: those of biases before a batch norm.
NEGLIGIBLE = 1e-6


class Results(NamedTuple):
    outputs: list[Tensor]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


def run(model: nn.Module, x: Tensor, train: bool) -> Results:
    """One forward and backward, in a copy."""
    model = copy.deepcopy(model).train(train)
    x = x.clone().requires_grad_()
    torch.manual_seed(1)  # the same dropout, the same stochastic depth
    outputs = [t for t in tensors(model(x)) if t.requires_grad]
    generator = torch.Generator().manual_seed(2)
    weights = [torch.randn(t.shape, generator=generator).to(t.dtype) for t in outputs]
    torch.autograd.backward(outputs, weights)
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert x.grad is not None
    return Results(
        [t.detach() for t in outputs],
        {"the input": x.grad, **gradients},
        {n: b.detach() for n, b in model.named_buffers()},
    )


def differing(mine: Results, stock: Results) -> Iterator[str]:
    """Results that are off by more than rounding in float64."""
    if len(mine.outputs) != len(stock.outputs):
        yield "number of outputs"
    if mine.gradients.keys() != stock.gradients.keys():
        yield "what has a gradient"
        return
    largest = max(float(g.norm()) for g in stock.gradients.values())
    for i, (a, b) in enumerate(zip(mine.outputs, stock.outputs)):
        if not off(a, b) <= TOLERANCE:
            yield f"output {i} by {off(a, b):.1e}"
    for name, b in stock.gradients.items():
        a = mine.gradients[name]
        if not off(a, b, NEGLIGIBLE * largest) <= TOLERANCE:
            yield f"gradient of {name} by {off(a, b):.1e}"
    for name, b in stock.buffers.items():
        a = mine.buffers[name]
        if not (torch.equal(a, b) or off(a, b, 1e-3 * b.numel() ** 0.5) <= TOLERANCE):
            yield f"buffer {name} by {off(a, b):.1e}"


def off(a: Tensor, b: Tensor, floor: float = 0.0) -> float:
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    a, b = a.detach().double(), b.detach().double()
    scale = max(float(b.norm()), floor)
    difference = float((a - b).norm())
    return difference / scale if scale else difference


def same_bits(a: Results, b: Results) -> Iterator[str]:
    for part, x, y in zip(
        ("outputs", "gradients", "buffers"),
        (dict(enumerate(a.outputs)), a.gradients, a.buffers),
        (dict(enumerate(b.outputs)), b.gradients, b.buffers),
    ):
        if x.keys() != y.keys() or not all(torch.equal(x[k], y[k]) for k in x):
            yield part


@pytest.mark.parametrize(
    "family", [*SHORT, *(pytest.param(f, marks=pytest.mark.long) for f in LONG)], ids=str
)
def test_family(family: Family) -> None:
    model, x = family.build(), family.example()
    keys = list(model.state_dict())

    # The verdict of convert, in float32.
    stored = copy.deepcopy(model)
    report = fusedtrain.convert(stored, x)
    assert len(report) > 0, "nothing to convert: not worth a test"
    assert list(stored.state_dict()) == keys
    differences = [e.reason for e in report.left if e.reason.startswith("undone")]

    # An independent comparison in float64, in training and evaluation.
    stock, wide = copy.deepcopy(model).double(), copy.deepcopy(stored).double()
    for train in (True, False):
        mode = "training" if train else "evaluation"
        for what in differing(run(wide, x.double(), train), run(stock, x.double(), train)):
            differences.append(f"{mode}: {what}")

    # Computing again changes no bit.
    again = copy.deepcopy(model)
    fusedtrain.convert(again, memory="recompute")
    assert list(again.state_dict()) == keys
    differences += [f"bits of {w}" for w in same_bits(run(again, x, True), run(stored, x, True))]
    judge(f"models/family/{family}", differences)


@pytest.mark.parametrize(
    "family", [*FEATURES, *(pytest.param(f, marks=pytest.mark.long) for f in REST)], ids=str
)
def test_features(family: Family) -> None:
    """The library's feature extraction gives the same values by the same names."""
    tools = extraction(family.name.partition(":")[0])
    stock, x = family.build().double().eval(), family.example().double()
    try:
        names = tools.get_graph_node_names(stock)
    except Exception as error:
        pytest.skip(f"torch.fx cannot trace it: {str(error).splitlines()[0]}")
    if isinstance(names, tuple):  # of training and of evaluation: torchvision's
        names = [name for name in names[1] if name in names[0]]
    chosen = names[1 :: max(1, len(names) // 12)]
    expected = features(tools, stock, chosen, x)
    converted = copy.deepcopy(stock)
    fusedtrain.convert(converted)
    results = features(tools, converted, chosen, x)
    assert results.keys() == expected.keys()
    for name, value in expected.items():
        for a, b in zip(tensors(results[name]), tensors(value)):
            assert off(a, b) <= TOLERANCE, name


def extraction(library: str) -> Any:
    timm() if library == "timm" else torchvision()
    module = "timm.layers" if library == "timm" else "torchvision.models.feature_extraction"
    return importlib.import_module(module)


def features(tools: Any, model: nn.Module, names: list[str], x: Tensor) -> dict[str, Any]:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # graphs of training and evaluation may have other nodes
        extractor = tools.create_feature_extractor(model, names)
        outputs: dict[str, Any] = extractor.eval()(x)
    return outputs


def test_every_family_once_and_no_unknown_difference() -> None:
    assert len(set(map(str, SHORT))) >= 16
    assert len(set(map(str, FAMILIES))) == len(FAMILIES) >= 70
    assert not unknown_keys("models", (f"family/{f}" for f in FAMILIES))
