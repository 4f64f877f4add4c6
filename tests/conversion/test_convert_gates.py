"""Products with a gate that `convert` makes one op of: gated linear units, squeeze-excitation."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as T
from torch import Tensor, nn

import fusedtrain
from helpers.conversion import compared, outline
from helpers.models import Parts, but_long, model_of, timm, torchvision, transformers


class Gate(nn.Module):
    def __init__(self, act: Any = nn.Sigmoid, order: str = "value first") -> None:
        super().__init__()
        self.reduce, self.act, self.order = nn.Conv2d(8, 8, 1), act(), order

    def forward(self, x: Tensor) -> Tensor:
        s = self.reduce(x.mean((2, 3), keepdim=True))
        return x * self.act(s) if self.order == "value first" else self.act(s) * x


class Mlp(nn.Module):
    def __init__(self, act: Any = nn.SiLU) -> None:
        super().__init__()
        self.first, self.act, self.last = nn.Linear(8, 32), act(), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.first(x).chunk(2, -1)
        output: Tensor = self.last(self.act(gate) * value)
        return output


class Gated(nn.Module):
    """The feed-forward part of Llama, Mistral and Gemma."""

    def __init__(self, act: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(8, 12), nn.Linear(8, 12)
        self.down_proj, self.act_fn = nn.Linear(12, 8), act

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return output


def swish(x: Tensor) -> Tensor:
    return x * x.sigmoid()


class OwnSwish(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return swish(x)


def _timm_layer(path: str, *arguments: Any, **named: Any) -> nn.Module:
    module, name = path.split(":")
    layers = __import__(f"{timm().__name__}.layers.{module}", fromlist=[name])
    layer: nn.Module = getattr(layers, name)(*arguments, **named)
    return layer


def images() -> Tensor:
    return torch.randn(3, 8, 6, 5, dtype=torch.float64)


def tokens() -> Tensor:
    return torch.randn(3, 7, 8, dtype=torch.float64)


# Model, input, and the gate. Each has one product, which keeps no more than before.
LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], str]] = {
    "sigmoid gate": (Gate, images, "Sigmoid"),
    "gate first": (lambda: Gate(nn.Hardsigmoid, "gate first"), images, "Hardsigmoid"),
    "swiglu": (Mlp, tokens, "SiLU"),
    "geglu tanh": (lambda: Mlp(lambda: nn.GELU("tanh")), tokens, "GELU"),
    "elu": (lambda: Mlp(lambda: nn.ELU(0.5)), tokens, "ELU"),
    "gated": (lambda: Gated(nn.SiLU()), tokens, "SiLU"),
    "gated, an own class": (lambda: Gated(OwnSwish()), tokens, "SiLU"),
    "gated, gelu": (lambda: Gated(nn.GELU("tanh")), tokens, "GELU"),
    "gated, a function": (lambda: Gated(T.silu), tokens, "silu"),
    "gated, an own function": (lambda: Gated(swish), tokens, "silu"),
    # The second is the gate, as in x * gate(s).
    "two activations": (
        lambda: model_of(
            lambda self, x: self.a(self.first(x)) * self.b(x),
            a=nn.SiLU(), b=nn.Tanh(), first=nn.Linear(8, 8),
        ),
        tokens, "Tanh",
    ),
    "an activation with another use": (
        lambda: model_of(
            lambda self, x: self.act(self.act(self.first(x)) * x), act=nn.SiLU(),
            first=nn.Linear(8, 8),
        ),
        tokens, "SiLU",
    ),
    "timm SEModule": (
        lambda: _timm_layer("squeeze_excite:SEModule", 8, rd_channels=4), images, "Sigmoid"),
    "timm EffectiveSE": (
        lambda: _timm_layer("squeeze_excite:EffectiveSEModule", 8), images, "Hardsigmoid"),
    "timm GluMlp": (lambda: _timm_layer("mlp:GluMlp", 8, 32), tokens, "Sigmoid"),
    "timm SwiGLU": (lambda: _timm_layer("mlp:SwiGLU", 8, 32), tokens, "SiLU"),
    "torchvision SE": (
        lambda: torchvision().ops.misc.SqueezeExcitation(8, 4), images, "Sigmoid"),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str) -> None:
    make, inputs, gate = LAYERS[name]
    layer, x = make().double(), inputs()
    report = compared(layer, x, x, 1e-6 if "Hardsigmoid" in gate else 1e-12)
    assert [product.activation for product in report.products] == [gate]
    assert "fused 1 product with a gate" in str(report)
    squeezes = {"adaptive_avg_pool2d", "mean"}
    assert {call.activation for call in report.calls} <= squeezes
    assert report.proof is not None
    assert report.proof.saved_after <= report.proof.saved_before
    if name in ("swiglu", "gated"):
        assert report.proof.saved_after < report.proof.saved_before


def _odd(work: Callable[[Any, Tensor, Tensor], Tensor], act: Any = nn.SiLU) -> nn.Module:
    """`work` gets the input of a gate, and the other factor."""
    return model_of(lambda self, x: work(self, self.first(x), x), first=nn.Linear(8, 8), act=act())


def _used_twice(self: Any, h: Tensor, x: Tensor) -> Tensor:
    opened = self.act(h)
    y: Tensor = opened * x + opened
    return y


def _stored(self: Any, h: Tensor, x: Tensor) -> Tensor:
    opened = self.act(h)
    self.opened = opened.detach()
    y: Tensor = opened * x
    return y


def _after(write: Callable[[Any, Tensor], Any]) -> Callable[[Any, Tensor, Tensor], Tensor]:
    def work(self: Any, h: Tensor, x: Tensor) -> Tensor:
        gate = self.act(h)
        more = write(self, h)
        y: Tensor = (x if more is None else x + more) * gate
        return y

    return work


def _plus(self: Any, h: Tensor) -> None:
    h += 1


def _product(self: Any, h: Tensor, x: Tensor) -> Tensor:
    y: Tensor = self.act(h) * x
    return y


# Use of a gate, the gate, and the reason why the product stays.
STAY: dict[str, tuple[Callable[[Any, Tensor, Tensor], Tensor], Any, str]] = {
    "used twice": (_used_twice, nn.SiLU, "the value of its gate is used elsewhere, too"),
    "stored": (_stored, nn.SiLU, "its forward stores something"),
    "in place": (_product, lambda: nn.SiLU(inplace=True), "its gate works in place"),
    "no kernel": (_product, nn.RReLU, "no fused version of its gate"),
    "hook": (_product, nn.SiLU, "its gate has hooks"),
    "excluded": (_product, nn.SiLU, "its gate is excluded"),
    "overwritten, operator": (_after(_plus), nn.Sigmoid, "memory that it needs is overwritten"),
    "overwritten, method": (
        _after(lambda self, h: h.add_(1)), nn.Sigmoid, "memory that it needs is overwritten"),
    "overwritten, function": (
        _after(lambda self, h: T.relu(h, inplace=True)), nn.Sigmoid,
        "memory that it needs is overwritten"),
    "overwritten, module": (
        _after(lambda self, h: self.relu(h)), nn.Sigmoid, "memory that it needs is overwritten"),
}  # fmt: skip


@pytest.mark.parametrize("why", STAY)
def test_products_that_stay_are_in_the_report_with_the_reason(why: str) -> None:
    work, act, reason = STAY[why]
    part = _odd(work, act)
    if why == "overwritten, module":
        part.relu = nn.ReLU(inplace=True)
    if why == "hook":
        part.act.register_forward_hook(lambda *_: None)
    model, x = nn.Sequential(part).eval(), tokens().float()
    with torch.no_grad():
        want = model(x)
    report = fusedtrain.convert(model, exclude=["0.act"] if why == "excluded" else [])
    assert report.products == []
    (left,) = report.left_products
    assert left.name == "0"
    assert reason in left.reason
    with torch.no_grad():
        torch.testing.assert_close(model(x), want)
    text = str(report)
    assert "left 1 product with a gate" in text
    assert ("\nwhat would help\n" in text) == (why not in ("excluded", "stored"))


def test_a_hook_for_all_modules_is_part_of_the_proof() -> None:
    """It would get the gate's input as its output."""

    def louder(module: nn.Module, _: Any, output: Tensor) -> Any:
        return 1.5 * output if type(module).__name__ == "Sigmoid" else None

    model, x = Gate().double(), images()
    hook = nn.modules.module.register_module_forward_hook(louder)
    try:
        want = model(x)
        report = fusedtrain.convert(model, x)
        assert report.products == []
        torch.testing.assert_close(model(x), want)
    finally:
        hook.remove()
    fusedtrain.revert(model)
    assert fusedtrain.convert(model, x).products


def test_a_module_named_mul_is_no_product() -> None:
    model = model_of(
        lambda self, x: self.mul(x, self.act(x)), mul=model_of(lambda self, a, b: a - b),
        act=nn.Sigmoid(),
    )  # fmt: skip
    assert outline(compared(model, tokens())) == ["act: module Sigmoid"]


def test_shapes_are_settled_at_run_time() -> None:
    """The same forward for a gate of any shape that torch broadcasts."""

    model = model_of(lambda self, x, s: x * self.act(s), act=nn.Sigmoid())
    assert len(fusedtrain.convert(model).products) == 1
    x = torch.randn(3, 8, 4, 4)
    for shape in ((3, 8, 1, 1), (3, 8, 4, 4), (8, 1, 1), (1,), (), (3, 1, 4, 4), (2, 3, 8, 4, 4)):
        s = torch.randn(shape)
        torch.testing.assert_close(model(x, s), x * s.sigmoid())
    assert model(x.bfloat16(), torch.randn(3, 8, 1, 1)).dtype is torch.float32


@pytest.mark.parametrize(
    "name",
    but_long(
        ["efficientnet_b0", "mobilenetv3_small_050", "regnety_002"],
        "efficientnet_b0", "regnety_002",
    ),
)  # fmt: skip
def test_models(name: str) -> None:
    torch.manual_seed(0)
    model = timm().create_model(name, num_classes=5, drop_path_rate=0.0).double()
    x = torch.randn(4, 3, 64, 64, dtype=torch.float64)
    expected = sum(type(m).__name__ in ("SqueezeExcite", "SEModule") for m in model.modules())
    assert len(compared(model, x, x, 1e-6, [True], copies=False).products) == expected > 0


class Whole(Parts):
    """A model that torch.fx cannot trace, and that might call any part of it."""

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = getattr(self, "mlp")(x) * float(len(x))  # noqa: B009
        return output


def test_a_gate_that_others_may_call_goes_on_working() -> None:
    model, x = Whole(mlp=Gated(nn.SiLU())), tokens().float()
    assert len(compared(model, x, x).products) == 1
    fusedtrain.convert(model)
    torch.testing.assert_close(model.mlp.act_fn(x), T.silu(x))
    for twin in (model, pickle.loads(pickle.dumps(model))):
        calls: list[int] = []
        before = twin(x)
        twin.mlp.act_fn.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        torch.testing.assert_close(twin(x), before)
        assert calls == [1]
    compiled = torch.compile(model.mlp, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model.mlp(x))


def test_a_formula_as_a_gate_follows_its_module() -> None:
    """T5's gate, in a forward that torch.fx cannot trace: a hook, or another class, is heeded."""
    transformers()
    from transformers.activations import NewGELUActivation

    mlp = model_of(
        lambda self, x: self.act(self.a(x)) * self.b(x),
        a=nn.Linear(8, 8), b=nn.Linear(8, 8), act=NewGELUActivation(),
    )  # fmt: skip
    model, x = Whole(mlp=mlp), torch.randn(4, 8)
    want = model(x)
    assert len(fusedtrain.convert(model, x).products) == 1
    torch.testing.assert_close(model(x), want)
    handle = model.mlp.act.register_forward_hook(lambda *_: torch.zeros(()))
    assert not model(x).any()
    handle.remove()
    ints = torch.arange(-4, 4).reshape(1, 8)
    model.mlp.a = model.mlp.b = nn.Identity()
    with pytest.warns(UserWarning, match=r"`a` of a Model.*revert"):
        model(ints)
    torch.testing.assert_close(model(ints), ints * NewGELUActivation()(ints))
    model.mlp.act = nn.SiLU()
    torch.testing.assert_close(model(x), x * nn.SiLU()(x) * 4)
