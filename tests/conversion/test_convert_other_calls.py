"""Calls that are no activation of one tensor, products that stay, shapes as examples."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as T
from torch import Tensor, nn

import fusedtrain
from fusedtrain._graph.modules import has_own_forward
from fusedtrain.conversion._report import HELP
from helpers.models import Parts, transformers


class Calling(nn.Module):
    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.weight = nn.Conv2d(3, 4, 1), nn.Parameter(torch.rand(4))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, self.conv(x))


CALLS: dict[str, list[Callable[[Any, Tensor], Tensor]]] = {
    "glu": [lambda m, x: T.glu(x), lambda m, x: T.glu(x, dim=1)],
    "prelu": [
        lambda m, x: T.prelu(x, m.weight), lambda m, x: x.prelu(m.weight),
        lambda m, x: torch.prelu(x, T.hardtanh(m.weight, 0.0, 1.0)[:1]),
    ],
    "max_pool2d": [
        lambda m, x: T.max_pool2d(x, 2), lambda m, x: torch.max_pool2d(x, (2, 3), ceil_mode=True),
        lambda m, x: T.max_pool2d(x, kernel_size=3, stride=2, padding=1),
    ],
    "hardtanh": [lambda m, x: T.hardtanh(x, 0, 6)],
    "logsigmoid": [lambda m, x: T.logsigmoid(x)],
    "softsign": [lambda m, x: T.softsign(x)],
}  # fmt: skip


def values(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    y = model(x)
    y.square().sum().backward()
    return [y.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("name", "number"), [(name, i) for name in CALLS for i in range(len(CALLS[name]))]
)
def test_calls(name: str, number: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Calling(CALLS[name][number]).to(dtype)
    stock, x = copy.deepcopy(model), torch.randn(2, 3, 8, 8).to(dtype)
    x[0, :, 0, 0], x[0, :, 1, 1] = 0.0, -0.0
    report = fusedtrain.convert(model, x)
    assert name in [call.activation for call in report.calls]
    assert not report.left_calls
    assert report.proof.saved_after <= report.proof.saved_before  # type: ignore[union-attr]
    tolerance = 8 * torch.finfo(dtype).eps
    for a, b in zip(values(model, x), values(stock, x), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * b.abs().max().item())
    assert fusedtrain.revert(model) == 1


@pytest.mark.parametrize("name", ["glu", "prelu", "max_pool2d"])
def test_special_values(name: str) -> None:
    x = torch.randn(2, 4, 8, 8)
    x[0, 0, 0, :4] = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0])
    model = Calling(CALLS[name][0])
    model.conv = nn.Identity()  # type: ignore[assignment]
    stock = copy.deepcopy(model)
    assert len(fusedtrain.convert(model).calls) == 1
    torch.testing.assert_close(model(x), stock(x), equal_nan=True)


def test_pooling_keeps_less() -> None:
    report = fusedtrain.convert(Calling(CALLS["max_pool2d"][0]), (2, 3, 8, 8))
    assert report.proof is not None
    assert report.proof.saved_after < report.proof.saved_before


@pytest.mark.parametrize("function", [
    lambda m, x: T.max_pool2d(x, 2, return_indices=True)[0], lambda m, x: T.rrelu(x),
    lambda m, x: T.max_pool2d(x, x.shape[-1]), lambda m, x: T.dropout(x, 0.5),
])  # fmt: skip
def test_calls_that_stay(function: Any) -> None:
    model = Calling(function).eval()
    stock, x = copy.deepcopy(model), torch.randn(2, 3, 8, 8)
    assert fusedtrain.convert(model).calls == []
    torch.manual_seed(0)
    want = stock(x)
    torch.manual_seed(0)
    assert torch.equal(model(x), want)


# --- products with a gate


class Product(nn.Module):
    def __init__(self, why: str) -> None:
        super().__init__()
        self.first, self.act, self.why = nn.Linear(8, 8), nn.SiLU(inplace=why == "in place"), why
        if why == "hook":
            self.act.register_forward_hook(lambda *_: None)
        if why == "no kernel":
            self.act = nn.RReLU()  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        opened = self.act(self.first(x))
        y = opened * x
        if self.why == "used twice":
            y = y + opened
        if self.why == "overwritten":
            h = self.first(x)
            gate = torch.sigmoid(h)
            h += 1
            return y + gate * x
        return y


REASONS = {
    "used twice": "used elsewhere", "hook": "its gate has hooks", "in place": "works in place",
    "no kernel": "no fused version of its gate",
    "overwritten": "overwritten in between", "excluded": "its gate is excluded",
}  # fmt: skip


@pytest.mark.parametrize("why", REASONS)
def test_a_product_that_stays_is_in_the_report_with_the_reason(why: str) -> None:
    report = fusedtrain.convert(
        nn.Sequential(Product(why).eval()), exclude=["0.act"] if why == "excluded" else []
    )
    (left,) = report.left_products
    assert left.name == "0"
    assert REASONS[why] in left.reason
    text = str(report)
    assert "left 1 product with a gate" in text
    assert ("\nwhat would help\n" in text) == (why != "excluded")


def test_the_page_and_the_report_help_alike() -> None:
    page = (Path(__file__).parents[2] / "docs" / "convert.md").read_text()
    for words in ("slope at 0", "used elsewhere", "works in place"):
        assert f"{HELP[words]} |" in page, words
    for words in ("writes over its output", "torch.autograd.Function"):
        assert f"| {HELP[words]}" in page, words


def test_a_formula_as_a_gate_follows_its_module() -> None:
    """T5's gate, in a forward that torch.fx cannot trace: a hook, or another class, is heeded."""
    transformers()
    from transformers.activations import NewGELUActivation

    class Mlp(Parts):
        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.act(self.a(x)) * self.b(x)
            return output

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = Mlp(a=nn.Linear(8, 8), b=nn.Linear(8, 8), act=NewGELUActivation())

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = getattr(self, "mlp")(x) * float(len(x))  # noqa: B009
            return output

    model, x = Whole(), torch.randn(4, 8)
    want = model(x)
    assert len(fusedtrain.convert(model, x).products) == 1
    torch.testing.assert_close(model(x), want)
    handle = model.mlp.act.register_forward_hook(lambda *_: torch.zeros(()))
    assert not model(x).any()
    handle.remove()
    ints = torch.arange(-4, 4).reshape(1, 8)
    model.mlp.a = model.mlp.b = nn.Identity()  # type: ignore[assignment]
    with pytest.warns(UserWarning, match=r"`a` of a Mlp.*revert"):
        model(ints)
    torch.testing.assert_close(model(ints), ints * NewGELUActivation()(ints))
    model.mlp.act = nn.SiLU()
    torch.testing.assert_close(model(x), x * nn.SiLU()(x) * 4)


# --- shapes as examples


@pytest.mark.parametrize("shape", [(2, 3, 8, 8), [2, 3, 8, 8], torch.Size([2, 3, 8, 8])])
def test_a_shape_stands_for_random_numbers(shape: Any) -> None:
    model = Calling(CALLS["max_pool2d"][0]).bfloat16()
    # `convert` takes back what a hook stores in a list.
    note = Mock(return_value=None)
    model.register_forward_pre_hook(note)
    state = torch.get_rng_state()
    report = fusedtrain.convert(model, shape)
    seen = [call.args[1][0] for call in note.call_args_list]
    assert report.proof is not None
    assert torch.equal(torch.get_rng_state(), state)
    assert {tuple(x.shape) for x in seen} == {(2, 3, 8, 8)}
    assert seen[0].dtype is torch.bfloat16
    assert all(x.float().std() > 0.5 for x in seen)


@pytest.mark.parametrize("example", [
    ((2, 3, 8, 8), (2, 5)), [torch.Size([2, 3]), (2, 5)], (2, -3, 8, 8), lambda: ((2, 3), (4, 5)),
])  # fmt: skip
def test_what_may_be_shapes_or_arguments_is_refused(example: Any) -> None:
    model = Calling(CALLS["glu"][0])
    with pytest.raises(ValueError, match="example_inputs: "):
        fusedtrain.convert(model, example)
    assert not has_own_forward(model)


def test_a_shape_is_no_token_ids() -> None:
    model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8), nn.SiLU())
    with pytest.raises(ValueError, match=r"example_inputs: the shape \(2, 7\).*look-up"):
        fusedtrain.convert(model, (2, 7))
    assert fusedtrain.convert(model, lambda: torch.randint(9, (2, 7))).proof is not None
