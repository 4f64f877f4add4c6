"""torch.fx: every function and module of the package, and converted models, in its graphs."""

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fusedtrain
import fusedtrain.functional as F
import fusedtrain.nn as fused_nn

pytestmark = pytest.mark.usefixtures("one_thread")

# Public functions that take more than one tensor, or an even number of channels, or bytes.
VECTOR = torch.linspace(0.5, 1.5, 4, dtype=torch.float64)
CALLS: dict[str, Callable[[Tensor], Any]] = {
    "prelu": lambda x: F.prelu(x, VECTOR),
    "star_relu": lambda x: F.star_relu(x, VECTOR[:1], VECTOR[1:2]),
    "threshold": lambda x: F.threshold(x, 0.1, 0.2),
    "glu": lambda x: F.glu(x, 1),
    "swiglu": lambda x: F.swiglu(x, dim=1),
    "geglu": lambda x: F.geglu(x, x * 2, approximate="tanh"),
    "reglu": lambda x: F.reglu(x, dim=1, gate_last=True),
    "bilinear_glu": lambda x: F.bilinear_glu(x, dim=1),
    "gated": lambda x: F.gated(x, x.mean((2, 3), True), "leaky_relu", negative_slope=0.3),
    "residual_add": lambda x: F.residual_add(x * 2, x, VECTOR, VECTOR[:2], dim=1),
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout_add": lambda x: F.dropout_add(x, x * 2, 0.5),
    "scaled_dot_product_attention": lambda x: F.scaled_dot_product_attention(x, x, x, None, 0.5),
    "bias_act_dropout": lambda x: F.bias_act_dropout(x, VECTOR, "silu", 0.5, dim=1),
    "bias_act": lambda x: F.bias_act(x, VECTOR, dim=1, act="lrelu", clamp=1.0),
    "batch_norm_act": lambda x: F.batch_norm_act(
        x, None, None, VECTOR, training=True, activation="silu", residual=x * 2
    ),
    "group_norm_act": lambda x: F.group_norm_act(x, 2, VECTOR, activation="silu"),
    "layer_norm": lambda x: F.layer_norm(x, [5], VECTOR.new_ones(5), residual=x * 2)[0],
    "rms_norm": lambda x: F.rms_norm(x, [5], VECTOR.new_ones(5)),
    "layer_norm_channels": lambda x: F.layer_norm_channels(x, VECTOR, VECTOR),
    "rms_norm_channels": lambda x: F.rms_norm_channels(x, VECTOR),
    "max_pool2d": lambda x: F.max_pool2d(x, 2, stride=1),
    "mean": lambda x: F.mean(x, (2, 3)),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, 1),
    "depthwise_conv1d": lambda x: F.depthwise_conv1d(x.flatten(2), VECTOR.view(4, 1, 1)),
    "depthwise_conv2d": lambda x: F.depthwise_conv2d(x, VECTOR.view(4, 1, 1, 1), VECTOR),
    "depthwise_conv3d": lambda x: F.depthwise_conv3d(x.unsqueeze(2), VECTOR.view(4, 1, 1, 1, 1)),
}
FUNCTIONS = sorted(
    name
    for name, value in vars(F).items()
    if inspect.isfunction(value) and not name.startswith("_") and name not in (
        "normalize_images", "handle_torch_function",
    )
    and value.__module__.startswith("fusedtrain.")
)  # fmt: skip


def image(channels: int = 4) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(2, channels, 5, 5, dtype=torch.float64)


def results(model: Callable[[Tensor], Any], x: Tensor) -> list[Tensor]:
    """Output, gradients of input and parameters, and buffers; same random numbers."""
    torch.manual_seed(1)
    x = x.clone().requires_grad_()
    y = model(x)
    (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
    assert x.grad is not None
    tensors = [y.detach(), x.grad]
    if isinstance(model, nn.Module):
        tensors += [p.grad for p in model.parameters() if p.grad is not None]
        tensors += [b.clone() for b in model.buffers()]
        model.zero_grad()
    return tensors


def assert_same(one: list[Tensor], other: list[Tensor], tolerance: float = 0.0) -> None:
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def copies(traced: fx.GraphModule) -> list[Any]:
    return [traced, copy.deepcopy(traced), pickle.loads(pickle.dumps(traced))]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_is_one_call(name: str) -> None:
    function = getattr(F, name)
    call = CALLS.get(name, lambda x: function(x))
    traced = fx.symbolic_trace(call)
    assert [n for n in traced.graph.nodes if n.target is function]
    expected = results(call, image())
    for one in copies(traced):
        assert_same(results(one, image())[:2], expected[:2])  # constants become buffers


class Wrapped(nn.Module):
    """A module within another: the tracer never looks at the outermost one as a call."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.part(x)
        return y * 2


SHORT: dict[str, tuple[Any, ...]] = {
    "BatchNormAct2d": (4,), "SyncBatchNormAct": (4,), "BiasActDropout": (4, "silu", 0.5, 1),
    "ConvBnAct": (4, 3, 3), "DepthwiseConv2d": (4, 4, 3), "MaxPool2d": (2,), "DropPath": (0.5,),
    "Threshold": (0.1, 0.2), "GroupNorm": (2, 4), "GroupNormAct": (4, 2), "GroupNorm1Act": (4,),
    "LayerNorm": (5,), "LayerNorm2d": (4,), "LayerNormAct2d": (4,), "RMSNorm": (5,),
    "RmsNorm2d": (4,), "Dropout": (0.5,), "GLU": (1,), "SwiGLU": (1,), "GEGLU": (1,), "ReGLU": (1,),
    "BilinearGLU": (1,),
}  # fmt: skip
# Modules of other inputs: see their own tests.
APART = ("BatchNormAct1d", "BatchNormAct3d", "BatchNormAddAct", "NormalizeImages",
         "DepthwiseConv1d", "DepthwiseConv3d")  # fmt: skip
MODULES = sorted(
    name
    for name, value in vars(fused_nn).items()
    if isinstance(value, type) and issubclass(value, nn.Module) and name not in APART
)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_one_call(name: str) -> None:
    """In both modes, whichever it was traced in, as torch's own modules are."""
    torch.manual_seed(0)
    model = Wrapped(getattr(fused_nn, name)(*SHORT.get(name, ())).double())
    for traced_in in (True, False):
        traced = fx.symbolic_trace(model.train(traced_in))
        calls = [n.target for n in traced.graph.nodes if n.op == "call_module"]
        assert calls == (["part.conv", "part.bn"] if name == "ConvBnAct" else ["part"])
        for training in (True, False):
            expected = results(copy.deepcopy(model).train(training), image())
            for one in copies(traced):
                assert_same(results(copy.deepcopy(one).train(training), image()), expected)
    scripts = name not in ("BiasActDropout", "SyncBatchNormAct")
    if scripts:
        x = image()
        torch.testing.assert_close(torch.jit.script(traced.eval())(x), model.eval()(x))
        torch.testing.assert_close(torch.jit.trace(traced, x)(x), model(x))


@pytest.mark.parametrize("name", [n for n in MODULES if n != "SyncBatchNormAct"])
def test_a_module_by_itself(name: str) -> None:
    torch.manual_seed(0)
    model = getattr(fused_nn, name)(*SHORT.get(name, ())).double()
    for training in (True, False):
        if name == "DropPath" and training:
            continue
        traced = fx.symbolic_trace(copy.deepcopy(model).train(training))
        expected = results(copy.deepcopy(model).train(training), image())
        for one in copies(traced):
            tensors = results(copy.deepcopy(one).train(training), image())
            assert_same(tensors[:2], expected[:2], 1e-12)
            if training:  # in eval mode a graph has no counter of batches
                assert_same(sorted(tensors[2:], key=_key), sorted(expected[2:], key=_key), 1e-12)


def _key(tensor: Tensor) -> tuple[int, float]:
    return tensor.numel(), float(tensor.sum())


@pytest.mark.parametrize("dimensions", [1, 3])
def test_norms_of_other_ranks(dimensions: int) -> None:
    norm = getattr(fused_nn, f"BatchNormAct{dimensions}d")(4).double()
    x = torch.randn(3, 4, *(2,) * dimensions, dtype=torch.float64)
    traced = fx.symbolic_trace(Wrapped(norm))
    expected = results(Wrapped(copy.deepcopy(norm)), x)
    assert_same(results(traced, x), expected)


def test_a_norm_with_a_residual() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = fused_nn.BatchNormAct2d(4, act_layer=nn.SiLU)
            self.two = fused_nn.BatchNormAddAct(4, drop_path=0.5)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.two(self.one(x, residual=x), x)
            return y

    model = Both().double()
    traced = fx.symbolic_trace(model)
    assert [n.target for n in traced.graph.nodes if n.op == "call_module"] == ["one", "two"]
    for training in (True, False):
        expected = results(copy.deepcopy(model).train(training), image())
        for one in copies(traced):
            assert_same(results(copy.deepcopy(one).train(training), image()), expected)
    x = image()
    torch.testing.assert_close(torch.jit.script(traced.eval())(x), model.eval()(x))


def test_images() -> None:
    x = torch.arange(2 * 3 * 4 * 4).reshape(2, 3, 4, 4).to(torch.uint8)
    model = fused_nn.NormalizeImages()
    for root in (model, nn.Sequential(model)):
        for one in copies(fx.symbolic_trace(root)):
            assert torch.equal(one(x), model(x))
    traced = fx.symbolic_trace(lambda t: F.normalize_images(t, [0.1, 0.2, 0.3], 0.5))
    assert torch.equal(traced(x), F.normalize_images(x, [0.1, 0.2, 0.3], 0.5))


class Everything(fx.Tracer):
    """Looks into torch's own modules, too."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return False


def test_a_tracer_that_looks_into_all_modules_sees_functions() -> None:
    model = nn.Sequential(fused_nn.SiLU(), fused_nn.GLU(1), fused_nn.ReLU(save="q1"))
    graph = Everything().trace(model)
    functions = [n.target for n in graph.nodes if n.op == "call_function"]
    assert functions == [F.silu, F.glu, F.relu]
    assert_same(results(fx.GraphModule(model, graph), image()), results(model, image()))


def test_subclasses_with_a_forward_of_their_own_are_looked_into() -> None:
    class Twice(fused_nn.SiLU):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) * 2

    class Same(fused_nn.SiLU):
        pass

    model = nn.Sequential(Twice(), Same())
    traced = fx.symbolic_trace(model)
    assert [n.op for n in traced.graph.nodes][1:-1] == [
        "call_function", "call_function", "call_module",
    ]  # fmt: skip
    assert_same(results(traced, image()), results(model, image()))


@pytest.mark.parametrize("layer", ["SiLU", "BatchNormAct2d"])
def test_hooks_act_once(layer: str) -> None:
    part = fused_nn.SiLU() if layer == "SiLU" else fused_nn.BatchNormAct2d(4)
    model = Wrapped(part).double()
    part.register_forward_pre_hook(lambda _, args: (args[0] + 0.5,))
    part.register_forward_hook(lambda _, args, output: output * 3)
    traced = fx.symbolic_trace(model)
    expected = results(copy.deepcopy(model), image())
    assert_same(results(traced, image())[:2], expected[:2], 1e-12)


def test_a_patched_forward_is_looked_into() -> None:
    model = Wrapped(fused_nn.SiLU())
    part: Any = model.part
    part.forward = lambda x: fused_nn.SiLU.forward(part, x) + 1
    assert_same(results(fx.symbolic_trace(model), image()), results(model, image()))


def test_retracing_and_transformers() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.SiLU()).double()
    fusedtrain.convert(model)
    traced = fx.symbolic_trace(model)
    expected = results(copy.deepcopy(model), image())
    again = fx.Transformer(fx.symbolic_trace(traced)).transform()
    assert_same(results(again, image()), expected, 1e-12)
