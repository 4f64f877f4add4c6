"""Products with a gate that `convert` makes one op of: gated linear units, squeeze-excitation."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as T
from torch import Tensor, nn

import fusedtrain
from fusedtrain._graph.modules import has_own_forward
from helpers.models import Parts, but_long, model_of, timm, torchvision


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


def converted(model: nn.Module, x: Tensor, tolerance: float = 1e-5) -> Any:
    """The report of a conversion that changes nothing but rounding, forward and backward."""
    stock = copy.deepcopy(model)
    report = fusedtrain.convert(model, x)
    results = []
    for one in (stock, model):
        torch.manual_seed(0)
        y = one(x)
        y.square().sum().backward()
        results.append([y.detach(), *(p.grad for p in one.parameters())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(
            a, b, rtol=tolerance, atol=tolerance * (1 + b.abs().max().item())
        )
    assert len(fusedtrain.convert(model)) == 0
    return report


def _timm_layer(path: str, *arguments: Any, **named: Any) -> nn.Module:
    module, name = path.split(":")
    layers = __import__(f"{timm().__name__}.layers.{module}", fromlist=[name])
    layer: nn.Module = getattr(layers, name)(*arguments, **named)
    return layer


IMAGES = lambda: torch.randn(3, 8, 6, 5)  # noqa: E731
TOKENS = lambda: torch.randn(3, 7, 8)  # noqa: E731
LAYERS: dict[str, tuple[Any, Any]] = {
    "sigmoid gate": (Gate, IMAGES),
    "gate first": (lambda: Gate(nn.Hardsigmoid, "gate first"), IMAGES),
    "swiglu": (Mlp, TOKENS),
    "geglu tanh": (lambda: Mlp(lambda: nn.GELU("tanh")), TOKENS),
    "elu": (lambda: Mlp(lambda: nn.ELU(0.5)), TOKENS),
    "timm SEModule": (lambda: _timm_layer("squeeze_excite:SEModule", 8, rd_channels=4), IMAGES),
    "timm EffectiveSE": (lambda: _timm_layer("squeeze_excite:EffectiveSEModule", 8), IMAGES),
    "timm GluMlp": (lambda: _timm_layer("mlp:GluMlp", 8, 32), TOKENS),
    "timm SwiGLU": (lambda: _timm_layer("mlp:SwiGLU", 8, 32), TOKENS),
    "torchvision SE": (
        lambda: torchvision().ops.misc.SqueezeExcitation(8, 4),
        IMAGES,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str) -> None:
    make, inputs = LAYERS[name]
    layer = make()
    keys, before = list(layer.state_dict()), [type(m) for m in layer.modules()]
    report = converted(layer, inputs())
    assert len(report.products) == 1, report
    assert "with a gate" in str(report)
    assert list(layer.state_dict()) == keys
    assert fusedtrain.revert(layer) > 0
    assert [type(m) for m in layer.modules()] == before
    assert not any(has_own_forward(m) for m in layer.modules())


def test_less_is_kept() -> None:
    report = converted(Mlp(), TOKENS())
    assert report.proof.saved_after < report.proof.saved_before


def test_copies_scripts_and_graphs() -> None:
    model, x = nn.Sequential(Mlp(), Mlp()), TOKENS()
    globals()["Mlp"].__qualname__ = "Mlp"
    want = model(x)
    fusedtrain.convert(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(twin(x), want)
    torch.testing.assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(x), want)
    torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), want)
    torch.testing.assert_close(torch.jit.script(model)(x), want)


@pytest.mark.parametrize(
    "why", ["used twice", "hook", "excluded", "in place", "stored", "no kernel"]
)
def test_products_that_stay(why: str) -> None:
    class Odd(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            gate, value = self.first(x).chunk(2, -1)
            opened = self.act(gate)
            y = opened * value
            if why == "used twice":
                y = y + opened
            if why == "stored":
                self.opened = opened.detach()
            output: Tensor = self.last(y)
            return output

    model = Odd(
        nn.ReLU if why == "in place" else nn.RReLU if why == "no kernel" else nn.SiLU
    ).eval()
    if why == "hook":
        model.act.register_forward_hook(lambda *_: None)
    if why == "in place":
        model.act.inplace = True
    x = TOKENS()
    with torch.no_grad():
        want = model(x)
    exclude = ["act"] if why == "excluded" else []
    report = fusedtrain.convert(model, exclude=exclude)
    assert report.products == []
    with torch.no_grad():
        torch.testing.assert_close(model(x), want)


def test_a_hook_for_all_modules_is_part_of_the_proof() -> None:
    """It would get the gate's input as its output."""

    def louder(module: nn.Module, _: Any, output: Tensor) -> Any:
        return 1.5 * output if type(module).__name__ == "Sigmoid" else None

    model, x = Gate().double(), torch.randn(2, 8, 5, 5, dtype=torch.float64)
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


class Overwriting(nn.Module):
    """The input of the gate is overwritten before the product."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.act, self.relu = nn.Linear(4, 4), nn.Sigmoid(), nn.ReLU(inplace=True)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        gate = self.act(h)
        if self.how == "operator":
            h += 1
        elif self.how == "method":
            x = x + h.add_(1)
        else:
            x = x + self.relu(h)
        return x * gate


@pytest.mark.parametrize("how", ["operator", "method", "module"])
def test_a_gate_is_not_moved_past_what_overwrites_its_input(how: str) -> None:
    model, x = Overwriting(how), torch.randn(3, 4)
    want = model(x)
    assert fusedtrain.convert(model).products == []
    torch.testing.assert_close(model(x), want)


def test_a_module_named_mul_is_no_product() -> None:
    class Model(Parts):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.mul(x, self.act(x))
            return y

    model, x = Model(mul=model_of(lambda self, a, b: a - b), act=nn.Sigmoid()), torch.randn(3, 4)
    want = model(x)
    assert fusedtrain.convert(model).products == []
    torch.testing.assert_close(model(x), want)


def test_an_activation_with_another_use_is_called_there() -> None:
    class Shared(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            gate, value = self.first(x).chunk(2, -1)
            y: Tensor = self.last(self.act(gate) * value)
            return self.act(y)

    model, x = Shared(), TOKENS()
    want = model(x)
    report = fusedtrain.convert(model)
    assert len(report.products) == 1
    torch.testing.assert_close(model(x), want)


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
    report = converted(model, x, 1e-6)
    assert len(report.products) == expected > 0


def test_two_activations_multiplied() -> None:
    """The second is the gate, as in x * gate(s)."""

    class Two(Parts):
        def forward(self, x: Tensor) -> Tensor:
            x, y = self.first(x).chunk(2, -1)
            return self.a(x) * self.b(y)

    model, x = Two(a=nn.SiLU(), b=nn.Tanh(), first=nn.Linear(8, 16)), TOKENS()
    report = converted(model, x)
    assert [p.activation for p in report.products] == ["Tanh"]
    first, second = model.first(x).chunk(2, -1)
    torch.testing.assert_close(model(x), T.silu(first) * torch.tanh(second))
