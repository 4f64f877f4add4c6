"""Feature extraction of torchvision and timm from converted models: names, values, gradients."""

import copy
import pickle
import warnings
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fusedtrain
import fusedtrain.functional as F
import fusedtrain.nn as fused_nn
from fusedtrain._graph.modules import has_own_forward
from helpers.models import but_long, model_of, timm, torchvision

pytestmark = pytest.mark.usefixtures("one_thread")


def extraction(library: str) -> Any:
    """timm's functions, which add its own leaves to torchvision's, or torchvision's."""
    if library == "timm":
        timm()
        return import_module("timm.layers")
    torchvision()
    return import_module("torchvision.models.feature_extraction")


def stock(library: str, name: str) -> nn.Module:
    torch.manual_seed(0)
    if library == "timm":
        model: nn.Module = timm().create_model(name, drop_path_rate=0.2, num_classes=3)
    elif name == "ConvNeXt":  # the smallest with a name has 28 million parameters
        torchvision()
        parts = import_module("torchvision.models.convnext")
        stages = [parts.CNBlockConfig(8, 16, 1), parts.CNBlockConfig(16, None, 2)]
        model = parts.ConvNeXt(stages, stochastic_depth_prob=0.2, num_classes=3)
    else:
        torchvision()
        model = import_module("torchvision.models").get_model(name, num_classes=3)
    for module in model.modules():  # 1e-6 would hide what is multiplied with it
        for key in ("gamma", "layer_scale"):
            scale = module._parameters.get(key)
            if scale is not None:
                nn.init.uniform_(scale, 0.5, 1.5)
    return model.double()


def results(model: nn.Module, x: Tensor, training: bool) -> dict[str, Tensor]:
    """Features, gradients and buffers, by name; same random numbers."""
    model = copy.deepcopy(model).train(training)
    torch.manual_seed(1)
    features = model(x)
    values = {f"feature {key}": value.detach().clone() for key, value in features.items()}
    sum((value * torch.cos(value.detach())).mean() for value in features.values()).backward()
    values |= {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    return values | {key: b.clone() for key, b in model.named_buffers()}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        scale = float(value.double().abs().max()) if value.numel() else 0.0
        torch.testing.assert_close(
            actual[key], value, rtol=1e-7, atol=1e-8 * scale + 1e-10, msg=key
        )


# Nodes of each: norms, activations, sums, gates, drops, and whole layers by the start of a name.
CASES: dict[tuple[str, str], list[str]] = {
    ("torchvision", "resnet18"): [
        "bn1", "relu", "layer1", "layer1.0.bn1", "layer1.0.relu", "layer1.0.bn2", "layer1.0.add",
        "layer1.0.relu_1", "layer2.0.downsample.1", "layer4.1.conv1", "fc",
    ],
    ("torchvision", "mobilenet_v3_small"): [
        "features.0", "features.1.block.1", "features.3.block.2", "features.3.add", "features.5",
        "features.5.block.2", "classifier.1",
    ],
    ("torchvision", "regnet_y_400mf"): [
        "stem", "trunk_output.block1.block1-0.add", "trunk_output.block1.block1-0.activation",
        "trunk_output.block1.block1-0.f.c", "trunk_output.block2.block2-0.f.se",
    ],
    ("torchvision", "ConvNeXt"): [
        "features.1.0.block", "features.1.0.mul", "features.1.0.add", "features.3.0",
    ],
    ("timm", "efficientnet_b0"): [
        "bn1", "blocks.0.0.se.gate", "blocks.0.0.se.mul", "blocks.1.1.add", "blocks.2",
    ],
    ("timm", "convnext_atto"): [
        "stages.0.blocks.0.mlp.act", "stages.1.blocks.1", "stages.1.blocks.1.mul",
    ],
    ("timm", "seresnet18"): ["layer1.0.se.gate", "layer1.0.add", "layer1.0.act2", "layer2"],
}  # fmt: skip
# In which the modes of memory differ most: projections without an activation, gates.
ALL_MODES = ("mobilenet_v3_small", "ConvNeXt")


# Gates and sums are in others, too.
LONG = (("torchvision", "regnet_y_400mf"), ("timm", "efficientnet_b0"))


@pytest.mark.slow
@pytest.mark.parametrize("case", but_long(CASES, *LONG), ids="-".join)
def test_features_of_a_converted_model(case: tuple[str, str]) -> None:
    library, name = case
    functions, model, wanted = extraction(library), stock(library, name), CASES[case]
    x = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    extractor = functions.create_feature_extractor(copy.deepcopy(model), wanted)
    expected = {training: results(extractor, x, training) for training in (True, False)}
    for memory in ("store", "recompute", "inplace") if name in ALL_MODES else ("inplace",):
        converted = copy.deepcopy(model)
        report = fusedtrain.convert(converted, memory=memory)
        assert report
        extractor = functions.create_feature_extractor(converted, wanted)
        for training in (True, False):
            assert_same(results(extractor, x, training), expected[training])
    loaded = pickle.loads(pickle.dumps(extractor))
    assert_same(results(loaded, x, True), expected[True])
    scripted = torch.jit.script(extractor.eval())(x)
    for node in wanted:
        assert_same({"": scripted[node]}, {"": expected[False][f"feature {node}"]})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "name"),
    [("torchvision", "resnet18"), ("timm", "mobilenetv3_small_050"), ("timm", "seresnet18")],
)
def test_names_are_those_of_the_unconverted_model(library: str, name: str) -> None:
    functions, model = extraction(library), stock(library, name)
    expected = functions.get_graph_node_names(model)
    assert fusedtrain.convert(model)
    assert functions.get_graph_node_names(model) == expected
    fusedtrain.revert(model)
    assert functions.get_graph_node_names(model) == expected


class Root(nn.Module):
    """Its own forward, which convert rewrites, calls functions, gates, drops and adds."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn1, self.bn2 = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.act, self.gate = nn.SiLU(inplace=True), nn.Sigmoid()
        self.drop = fused_nn.DropPath(0.5)
        self.gamma = nn.Parameter(torch.rand(4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.bn1(self.conv(x)))
        y = self.act(self.bn2(self.conv(y)) + x)
        y = y * self.gate(y.mean((2, 3), keepdim=True))
        return x + self.drop(y * self.gamma)


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("memory", ["store", "recompute", "inplace"])
def test_a_rewritten_forward(memory: str, within: bool) -> None:
    torch.manual_seed(0)
    model = Root().double()
    model = nn.Sequential(model) if within else model
    x = torch.randn(3, 4, 5, 5, dtype=torch.float64)
    expected = {mode: results(_named(model), x, mode) for mode in (True, False)}
    report = fusedtrain.convert(model, memory=memory)
    assert len(report.norms) == 2
    assert has_own_forward(model[0] if within else model)
    traced = fx.symbolic_trace(model)
    for one in (traced, copy.deepcopy(traced), pickle.loads(pickle.dumps(traced))):
        for mode in (True, False):
            assert_same(results(_named(one), x, mode), expected[mode])
    scripted = torch.jit.script(traced.eval())
    assert_same({"": scripted(x)}, {"": expected[False]["feature "]})
    torch.testing.assert_close(torch.jit.trace(traced, x)(x), scripted(x))
    torch.testing.assert_close(torch.export.export(traced, (x,)).module()(x), scripted(x))
    # The model itself goes on as before.
    for mode in (True, False):
        assert_same(results(_named(model), x, mode), expected[mode])


def _named(model: nn.Module) -> nn.Module:
    return model_of(lambda self, x: {"": self.model(x)}, model=model)


def test_leaves_that_belong_together_with_others_are_looked_into() -> None:
    """A tracer may call any class as a whole; what lost work to a module outside cannot be."""

    class Leaves(fx.Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return isinstance(m, (nn.BatchNorm2d, nn.SiLU, nn.Sigmoid, fused_nn.DropPath))

    model, x = nn.Sequential(Root()).double(), torch.randn(2, 4, 3, 3, dtype=torch.float64)
    expected = copy.deepcopy(model).eval()(x)
    assert fusedtrain.convert(model)
    graph = Leaves().trace(model.eval())
    torch.testing.assert_close(fx.GraphModule(model, graph)(x), expected)


def test_leaves_and_their_surroundings_keep_their_own_work() -> None:
    class Stem(nn.Sequential):
        pass

    class Early(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = Stem(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
            self.rest = nn.BatchNorm2d(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.rest(F.silu(self.stem(x)))

    class Leaves(fx.Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return isinstance(m, (Stem, nn.BatchNorm2d))

    model, x = Early().double(), torch.randn(2, 4, 3, 3, dtype=torch.float64)
    want = copy.deepcopy(model)(x)
    assert len(fusedtrain.convert(model, memory="recompute").norms) == 2
    graph = Leaves().trace(model)
    assert [str(n.target) for n in graph.nodes if n.op == "call_module"] == ["stem", "rest"]
    torch.testing.assert_close(fx.GraphModule(model, graph)(x), want)


def test_an_extractor_can_be_converted() -> None:
    functions, model = extraction("torchvision"), stock("torchvision", "resnet18")
    wanted = ["layer1", "layer2.0.relu_1"]
    x = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    extractor = functions.create_feature_extractor(model, wanted)
    expected = {mode: results(extractor, x, mode) for mode in (True, False)}
    assert fusedtrain.convert(extractor).norms
    for mode in (True, False):
        assert_same(results(extractor, x, mode), expected[mode])


def test_fx_quantisation_keeps_the_numbers_of_what_it_does_not_know() -> None:
    quantize = import_module("torch.ao.quantization.quantize_fx")
    qconfig = import_module("torch.ao.quantization").get_default_qconfig_mapping("fbgemm")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU(), nn.Conv2d(8, 4, 1))
    x = torch.randn(2, 3, 8, 8)
    expected = model.eval()(x)
    assert fusedtrain.convert(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepared = quantize.prepare_fx(model, qconfig, (x,))
        torch.testing.assert_close(prepared(x), expected)
        assert (quantize.convert_fx(prepared)(x) - expected).abs().max() < 0.1
