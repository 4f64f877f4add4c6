"""fold_conv_bn: the same outputs without the norms, by dataflow, or a reason why not."""

from __future__ import annotations

import copy
import io
import pickle
import re
from typing import Any

import pytest
import torch
from _models import build, timm
from torch import Tensor, nn
from torch.fx.experimental.optimization import fuse as fx_fuse
from torch.nn import functional as F
from torch.nn.utils import fusion, parametrize, weight_norm

import fusedtrain
from fusedtrain.folding import _conv_act
from fusedtrain.folding._conv_act import Act, ConvAct2d, ConvAct3d

DOUBLE = 1e-12  # relative to the largest magnitude, for single layers in float64


pytestmark = pytest.mark.usefixtures("one_thread")


def waken(model: nn.Module) -> nn.Module:
    """Statistics and parameters of norms that a wrong fold would show; eval mode."""
    for module in model.modules():
        if getattr(module, "running_mean", None) is not None:
            module.running_mean.normal_(0, 0.3)
            module.running_var.uniform_(0.5, 2)
            if module.weight is not None:
                with torch.no_grad():
                    module.weight.uniform_(0.5, 1.5)
                    module.bias.normal_(0, 0.3)
    return model.eval()


def difference(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b.double()).abs().max() / b.double().abs().max()).item()


def assert_folds(model: nn.Module, x: Tensor, count: int = 1, limit: float = DOUBLE) -> nn.Module:
    """All of `count` norms fold, the outputs agree, and the model is as it was."""
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with torch.no_grad():
        expected = model(x)
        folded, report = fusedtrain.fold_conv_bn(model, x, tolerance=limit)
        assert difference(folded(x), expected) <= limit
        assert torch.equal(model(x), expected)
    assert (len(report), report.left) == (count, []), report
    after = model.state_dict()
    assert all(torch.equal(after[k], v) for k, v in before.items())
    return folded


CONVS: dict[str, tuple[Any, Any, tuple[int, ...]]] = {
    "1d": (lambda: nn.Conv1d(4, 6, 3, padding=1), nn.BatchNorm1d, (2, 4, 9)),
    "2d": (lambda: nn.Conv2d(4, 6, 3, stride=2), nn.BatchNorm2d, (2, 4, 9, 8)),
    "3d": (lambda: nn.Conv3d(4, 6, 2), nn.BatchNorm3d, (2, 4, 5, 4, 3)),
    "no bias": (lambda: nn.Conv2d(4, 6, 3, bias=False), nn.BatchNorm2d, (2, 4, 9, 8)),
    "grouped": (lambda: nn.Conv2d(4, 6, 3, groups=2), nn.BatchNorm2d, (2, 4, 9, 8)),
    "depthwise": (lambda: nn.Conv2d(6, 6, 3, groups=6), nn.BatchNorm2d, (2, 6, 9, 8)),
    "circular": (
        lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"), nn.BatchNorm2d, (2, 4, 9, 8)
    ),
    "transposed 1d": (lambda: nn.ConvTranspose1d(4, 6, 3), nn.BatchNorm1d, (2, 4, 9)),
    "transposed 2d": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2), nn.BatchNorm2d, (2, 4, 5, 4)),
    "transposed 3d": (lambda: nn.ConvTranspose3d(4, 6, 2), nn.BatchNorm3d, (2, 4, 3, 4, 2)),
    "transposed, grouped": (
        lambda: nn.ConvTranspose2d(4, 6, 3, groups=2), nn.BatchNorm2d, (2, 4, 5, 4)
    ),
    "transposed, depthwise": (
        lambda: nn.ConvTranspose2d(4, 4, 3, groups=4), nn.BatchNorm2d, (2, 4, 5, 4)
    ),
    "linear": (lambda: nn.Linear(4, 6), nn.BatchNorm1d, (5, 4)),
}  # fmt: skip


def channels(conv: Any) -> int:
    return conv.out_features if isinstance(conv, nn.Linear) else conv.out_channels


@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
@pytest.mark.parametrize("name", CONVS)
def test_every_convolution(name: str, affine: bool) -> None:
    make, norm, shape = CONVS[name]
    conv = make()
    model = waken(nn.Sequential(conv, norm(channels(conv), affine=affine))).double()
    if affine:
        with torch.no_grad():
            model[1].weight[0], model[1].weight[1] = 0, -1
    folded = assert_folds(model, torch.randn(shape).double())
    assert isinstance(folded[1], nn.Identity)
    assert type(folded[0]) is type(conv)
    assert folded[0].weight.shape == conv.weight.shape
    assert folded[0].bias.requires_grad


def test_layout_and_flags_stay() -> None:
    conv = nn.Conv2d(4, 6, 3, bias=False).to(memory_format=torch.channels_last)
    conv.weight.requires_grad_(False)
    folded, _ = fusedtrain.fold_conv_bn(waken(nn.Sequential(conv, nn.BatchNorm2d(6))))
    assert folded[0].weight.stride() == conv.weight.stride()
    assert not folded[0].weight.requires_grad
    assert not folded[0].bias.requires_grad


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bit_convolution_with_float32_norm(dtype: torch.dtype) -> None:
    model = waken(nn.Sequential(nn.Conv2d(4, 6, 3, bias=False), nn.BatchNorm2d(6)))
    model[0].to(dtype)
    x = torch.randn(2, 4, 8, 8, dtype=dtype)
    folded = assert_folds(model, x, limit=4 * torch.finfo(dtype).eps)
    assert folded[0].weight.dtype == folded[0].bias.dtype == dtype


class ByNames(nn.Module):
    """Children in an order that says nothing about the data."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


class Reversed(ByNames):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))


def test_by_dataflow_not_by_declaration() -> None:
    model = Reversed(
        norm2=nn.BatchNorm2d(4), conv2=nn.Conv2d(4, 4, 1), norm1=nn.BatchNorm2d(4),
        conv1=nn.Conv2d(4, 4, 3),
    )  # fmt: skip
    assert_folds(waken(model).double(), torch.randn(2, 4, 6, 6).double(), 2)


class ReluBetween(ByNames):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.act(self.conv(x)))


def test_not_through_an_activation() -> None:
    """mmcv.fuse_conv_bn takes neighbours by declaration: it folds conv -> relu -> norm, too."""
    model = ReluBetween(conv=nn.Conv2d(4, 4, 1), norm=nn.BatchNorm2d(4), act=nn.ReLU())
    x = torch.randn(2, 4, 5, 5)
    folded, report = fusedtrain.fold_conv_bn(waken(model), x)
    assert len(report) == 0
    assert "the output of ReLU" in report.left[0].reason
    with torch.no_grad():
        assert difference(folded(x), model(x)) < 1e-6
        wrong = fusion.fuse_conv_bn_eval(model.conv, model.norm)
        assert difference(F.relu(wrong(x)), model(x)) > 0.1  # what folding here would do


class Twice(ByNames):
    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.norm(self.conv(x)))


def test_a_convolution_called_twice_is_left() -> None:
    """B5 (a): fx.fuse folds the shared weight (pytorch#104593)."""
    model = waken(Twice(conv=nn.Conv2d(4, 4, 1), norm=nn.BatchNorm2d(4)))
    x = torch.randn(2, 4, 5, 5)
    folded, report = fusedtrain.fold_conv_bn(model, x)
    assert report.left[0].reason == "conv is called 2 times"
    with torch.no_grad():
        expected = model(x)
        assert torch.equal(folded(x), expected)
        assert difference(fx_fuse(model)(x), expected) > 0.05


class NormTwice(ByNames):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.b(self.norm(self.a(x))))


class OutputTwice(ByNames):
    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return self.norm(y) + y


def test_uses_elsewhere() -> None:
    model = waken(NormTwice(a=nn.Conv2d(4, 4, 1), b=nn.Conv2d(4, 4, 1), norm=nn.BatchNorm2d(4)))
    assert fusedtrain.fold_conv_bn(model)[1].left[0].reason == "called 2 times"
    model = waken(OutputTwice(conv=nn.Conv2d(4, 4, 1), norm=nn.BatchNorm2d(4)))
    report = fusedtrain.fold_conv_bn(model)[1]
    assert report.left[0].reason == "the output of conv is used elsewhere, too"


def test_shared_block_is_folded_once() -> None:
    block = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU())
    model = waken(nn.Sequential(block, nn.Tanh(), block)).double()
    folded = assert_folds(model, torch.randn(2, 4, 5, 5).double())
    assert folded[0] is folded[2]


@pytest.mark.parametrize("rows", [5, 6])
def test_linear_on_three_dimensions_is_left(rows: int) -> None:
    """B5 (b): with as many rows as features fx.fuse folds the wrong axis (pytorch/ao#4116)."""
    model = waken(nn.Sequential(nn.Linear(6, rows), nn.BatchNorm1d(6)))
    x = torch.randn(3, 6, 6)
    if rows == 6:
        _, report = fusedtrain.fold_conv_bn(model, x)
        assert "has 3 dimensions" in report.left[0].reason
        with torch.no_grad():
            assert difference(fx_fuse(model)(x), model(x)) > 0.05
    else:
        assert "5 channels" in fusedtrain.fold_conv_bn(model, x)[1].left[0].reason


def test_linear_needs_to_be_known_as_flat() -> None:
    model = waken(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)))
    assert "may have three dimensions" in fusedtrain.fold_conv_bn(model)[1].left[0].reason
    flat = waken(nn.Sequential(nn.Flatten(), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(),
                               nn.Linear(6, 6), nn.BatchNorm1d(6)))  # fmt: skip
    assert len(fusedtrain.fold_conv_bn(flat)[1]) == 2
    folded, _ = fusedtrain.fold_conv_bn(model, torch.randn(4, 6))
    with pytest.raises(RuntimeError, match="made for inputs of 2 dimensions, not 3"):
        folded(torch.randn(3, 6, 6))


def test_linear_without_affine() -> None:
    """B5 (c): torch.nn.utils.fusion fails."""
    linear, norm = nn.Linear(4, 6).eval(), nn.BatchNorm1d(6, affine=False).eval()
    with pytest.raises(TypeError):
        fusion.fuse_linear_bn_eval(linear, norm)
    assert_folds(waken(nn.Sequential(linear, norm)).double(), torch.randn(3, 4).double())


def test_grouped_transposed() -> None:
    """B5 (d): torch.nn.utils.fusion fails, or makes a weight of another shape (pytorch#180995)."""
    norm = nn.BatchNorm2d(4).eval()
    with pytest.raises(RuntimeError):
        fusion.fuse_conv_bn_eval(nn.ConvTranspose2d(4, 4, 3, groups=2).eval(), norm, transpose=True)
    depthwise = nn.ConvTranspose2d(4, 4, 3, groups=4).eval()
    assert fusion.fuse_conv_bn_eval(depthwise, norm, transpose=True).weight.shape == (4, 4, 3, 3)
    assert_folds(waken(nn.Sequential(depthwise, norm)).double(), torch.randn(2, 4, 5, 5).double())


def test_new_bias_requires_a_gradient() -> None:
    """B5 (e)."""
    conv, norm = nn.Conv2d(4, 4, 1, bias=False).eval(), nn.BatchNorm2d(4).eval()
    assert not fusion.fuse_conv_bn_eval(conv, norm).bias.requires_grad
    folded, _ = fusedtrain.fold_conv_bn(nn.Sequential(conv, norm))
    assert folded[0].bias.requires_grad


def test_zero_gamma() -> None:
    """B5 (f): torch.ao's quantisation-aware ConvBn2d divides by gamma."""
    from torch.ao.nn.intrinsic.qat import ConvBn2d
    from torch.ao.quantization import default_qconfig

    x = torch.randn(2, 4, 5, 5)
    rival = ConvBn2d(4, 4, 1, qconfig=default_qconfig)
    with torch.no_grad():
        rival.bn.weight.zero_()
        assert rival(x).isnan().any()
        model = waken(nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)))
        model[1].weight.zero_()
        folded, _ = fusedtrain.fold_conv_bn(model, x)
        assert torch.equal(folded(x), model(x))


BEFORE: dict[str, tuple[nn.Module, str]] = {
    "valid": (nn.Conv2d(4, 6, 3), ""),
    "grouped": (nn.Conv2d(4, 6, 3, groups=2, bias=False), ""),
    "reflected": (nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), ""),
    "zeros": (nn.Conv2d(4, 6, 3, padding=1), "pads with zeros"),
    "same": (nn.Conv2d(4, 6, 3, padding="same"), "pads with zeros"),
    "transposed": (nn.ConvTranspose2d(4, 6, 3), "is transposed"),
}


@pytest.mark.parametrize("name", BEFORE)
def test_norm_before_the_convolution(name: str) -> None:
    conv, reason = BEFORE[name]
    model = waken(nn.Sequential(nn.Tanh(), nn.BatchNorm2d(4), conv)).double()
    x = torch.randn(2, 4, 6, 6).double()
    if not reason:
        assert_folds(model, x)
    else:
        assert reason in fusedtrain.fold_conv_bn(model, x)[1].left[0].reason


def test_norms_on_both_sides() -> None:
    layers = (nn.BatchNorm2d(4), nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6))
    model = waken(nn.Sequential(nn.Tanh(), *layers)).double()
    assert_folds(model, torch.randn(2, 4, 6, 6).double(), 2)


def test_norm_before_linear() -> None:
    model = waken(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))).double()
    assert_folds(model, torch.randn(5, 4).double())


class Functional(nn.Module):
    def __init__(self, training: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 6, 3, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.train_norm = training

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm
        y = F.batch_norm(
            self.conv(x), n.running_mean, n.running_var, n.weight, n.bias, self.train_norm, eps=1e-3
        )
        return y.relu()


def test_functional_batch_norm() -> None:
    """fx.fuse has no pattern for it (pytorch#122070)."""
    model = waken(nn.Sequential(Functional())).double()
    x = torch.randn(2, 4, 6, 6).double()
    folded, report = fusedtrain.fold_conv_bn(model, x)
    assert [f.other_type for f in report.folded] == ["F.batch_norm"]
    assert set(folded.state_dict()) == {"0.conv.weight", "0.conv.bias"}
    assert type(folded[0]).__name__ == "Functional"
    with torch.no_grad():
        assert difference(folded(x), model(x)) < DOUBLE
    for part in (copy.deepcopy(folded), pickle.loads(pickle.dumps(folded))):
        assert torch.equal(part(x), folded(x))
    report = fusedtrain.fold_conv_bn(Functional(training=True).eval())[1]
    assert "training mode" in " ".join(left.reason for left in report.left)


class Branches(ByNames):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return self.part(x)
        return self.norm(self.conv(x))


def test_where_torch_fx_cannot_trace() -> None:
    inner = nn.Sequential(nn.Conv2d(4, 4, 1), nn.Sequential(nn.BatchNorm2d(4), nn.ReLU()))
    model = Branches(conv=nn.Conv2d(4, 4, 1), norm=nn.BatchNorm2d(4), part=inner)
    x = torch.rand(2, 4, 5, 5)
    folded, report = fusedtrain.fold_conv_bn(waken(model), x)
    assert [f.other for f in report.folded] == ["part.1.0"]
    assert "torch.fx cannot trace (the model itself) (TraceError" in report.left[0].reason
    with torch.no_grad():
        for value in (x, -x):
            assert difference(folded(value), model(value)) < 1e-6


def test_across_modules_and_idle_layers() -> None:
    layers = (nn.Conv2d(4, 4, 1), nn.Identity(), nn.Dropout(), nn.Sequential(nn.BatchNorm2d(4)))
    assert_folds(waken(nn.Sequential(*layers)).double(), torch.randn(2, 4, 5, 5).double())


class Stores(ByNames):
    def forward(self, x: Tensor) -> Tensor:
        self.last = self.conv(x)
        return self.norm(self.last)


def test_tracing_leaves_nothing_behind() -> None:
    model = waken(Stores(conv=nn.Conv2d(4, 4, 1), norm=nn.BatchNorm2d(4)))
    folded, _ = fusedtrain.fold_conv_bn(model)
    assert "last" not in vars(model)
    assert "last" not in vars(folded)


class OwnConv(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class OwnNorm(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class OnlyNamed(nn.Conv2d):
    pass


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def left_alone() -> dict[str, tuple[nn.Module, nn.Module, str]]:
    conv, norm = (lambda: nn.Conv2d(4, 4, 1)), (lambda: nn.BatchNorm2d(4))
    hooked, parametrized, patched = conv(), conv(), norm()
    with torch.no_grad():  # with a graph behind it, the weight could not be copied
        normed = weight_norm(conv())
    hooked.register_forward_hook(lambda *_: None)
    parametrize.register_parametrization(parametrized, "weight", Doubled())
    patched.forward = lambda x: x
    hooked_norm, training = norm(), norm()
    hooked_norm.register_full_backward_hook(lambda *_: None)
    return {
        "own conv": (OwnConv(4, 4, 1), norm(), "OwnConv has a forward of its own"),
        "own norm": (conv(), OwnNorm(4), "OwnNorm has a forward of its own"),
        "hooked conv": (hooked, norm(), "it has hooks"),
        "hooked norm": (conv(), hooked_norm, "it has hooks"),
        "weight norm": (normed, norm(), "computed anew at every call"),
        "parametrized": (parametrized, norm(), "computed anew|parametrized"),
        "patched": (conv(), patched, "its forward is patched"),
        "training": (conv(), training, "in training mode"),
        "no statistics": (conv(), nn.BatchNorm2d(4, track_running_stats=False), "keeps no running"),
        "other kind": (conv(), nn.BatchNorm1d(4), "does not fit"),
    }


@pytest.mark.parametrize("name", left_alone())
def test_left_alone(name: str) -> None:
    conv, norm, reason = left_alone()[name]
    model = nn.Sequential(conv, norm).eval()
    norm.train(name == "training")
    _, report = fusedtrain.fold_conv_bn(model)
    assert len(report) == 0
    assert re.search(reason, report.left[0].reason), report
    assert "left 1 norm" in str(report)


def test_subclass_without_forward_folds() -> None:
    model = waken(nn.Sequential(OnlyNamed(4, 4, 1), nn.SyncBatchNorm(4))).double()
    folded, report = fusedtrain.fold_conv_bn(model)
    assert len(report) == 1
    assert type(folded[0]) is OnlyNamed


def test_verification() -> None:
    model = waken(nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)))
    x = torch.randn(2, 4, 6, 6)
    before = copy.deepcopy(model.state_dict())
    for inplace in (False, True):
        with pytest.raises(RuntimeError, match=r"differ by \d\.\d+e-\d+ of the largest"):
            fusedtrain.fold_conv_bn(model, x, tolerance=0.0, inplace=inplace)
    assert isinstance(model[1], nn.BatchNorm2d)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert fusedtrain.fold_conv_bn(model, verify=(x,))[1].error < 1e-5
    assert fusedtrain.fold_conv_bn(model, {"input": x})[1].error < 1e-5
    assert fusedtrain.fold_conv_bn(model, x, verify=False, tolerance=0.0)[1].error is None
    with pytest.raises(ValueError, match="tolerance"):
        fusedtrain.fold_conv_bn(model, tolerance=-1.0)
    with pytest.raises(TypeError, match="model must be"):
        fusedtrain.fold_conv_bn(3)  # type: ignore[arg-type]


def test_in_place() -> None:
    model = waken(nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU()))
    x = torch.randn(2, 4, 6, 6)
    expected = model(x)
    folded, _ = fusedtrain.fold_conv_bn(model, x, inplace=True)
    assert folded is model
    assert isinstance(model[1], nn.Identity)
    assert difference(model(x), expected) < 1e-6


# --- whole models ---

# Norms folded, norms left (they do not follow a convolution), activations fused.
MODELS = {
    "torchvision:resnet18": (20, 0, 17),
    "torchvision:resnet50": (53, 0, 49),
    "torchvision:mobilenet_v3_large": (46, 0, 47),
    "torchvision:efficientnet_b0": (49, 0, 65),
    "torchvision:densenet121": (59, 62, 59),
    "torchvision:regnet_y_400mf": (53, 0, 65),
    "torchvision:shufflenet_v2_x1_0": (56, 0, 37),
    "torchvision:googlenet": (59, 0, 59),
    "torchvision:inception_v3": (96, 0, 96),
    "timm:resnet18": (20, 0, 17),
    "timm:resnet50": (53, 0, 49),
    "timm:mobilenetv3_large_100": (46, 0, 58),
    "timm:efficientnet_b0": (49, 0, 74),
    "timm:tf_efficientnet_b0": (49, 0, 69),
    "timm:densenet121": (59, 62, 59),
    "timm:regnety_004": (53, 0, 49),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore:The default weight initialization")
def test_models(name: str) -> None:
    """1e-5 of the largest output; 2e-6 was the most that was seen (Inception v3)."""
    model = waken(build(name))
    size = 128 if "inception" in name else 64
    x = torch.randn(2, 3, size, size)
    expected = model(x)
    folded, report = fusedtrain.fold_conv_bn(model, x, tolerance=1e-5)
    assert (len(report), len(report.left), len(report.fused)) == MODELS[name]
    assert torch.equal(model(x), expected)
    names = {k.rpartition(".")[0] for k in model.state_dict()}
    assert {k.rpartition(".")[0] for k in folded.state_dict()} <= names
    lasting = x.contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        assert difference(folded(lasting), expected) < 1e-5


def test_norm_with_activation_becomes_the_activation() -> None:
    timm()
    from timm.layers import BatchNormAct2d

    for norm, kind in ((BatchNormAct2d(4, act_layer=nn.SiLU), nn.SiLU),
                       (BatchNormAct2d(4, apply_act=False), nn.Identity)):  # fmt: skip
        model = waken(nn.Sequential(nn.Conv2d(4, 4, 1), norm)).double()
        folded = assert_folds(model, torch.randn(2, 4, 5, 5).double())
        assert type(folded[1]) is kind


# --- activations inside ---

ACTS: dict[str, tuple[nn.Module, Act]] = {
    "relu": (nn.ReLU(), Act("relu")),
    "relu6": (nn.ReLU6(), Act("hardtanh", (0.0, 6.0))),
    "hardtanh": (nn.Hardtanh(-0.3, 0.4), Act("hardtanh", (-0.3, 0.4))),
    "leaky_relu": (nn.LeakyReLU(0.2), Act("leaky_relu", (0.2,))),
    "silu": (nn.SiLU(), Act("swish")),
    "hardswish": (nn.Hardswish(), Act("hardswish")),
    "hardsigmoid": (nn.Hardsigmoid(), Act("hardsigmoid")),
    "sigmoid": (nn.Sigmoid(), Act("sigmoid")),
    "tanh": (nn.Tanh(), Act("tanh")),
    "gelu": (nn.GELU(), Act("gelu", (), "none")),
    "gelu_tanh": (nn.GELU("tanh"), Act("gelu", (), "tanh")),
    "fused silu": (fusedtrain.nn.SiLU(), Act("swish")),
}


def test_the_private_ops_are_there() -> None:
    """Where this fails, torch has renamed them: convolutions then run unfused."""
    assert _conv_act.PLATFORMS["cpu"].there
    assert _conv_act.PLATFORMS["cpu"]._reorder is not None


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("name", ACTS)
def test_activation_is_fused(name: str, last: bool) -> None:
    module, act = ACTS[name]
    conv = nn.Conv2d(4, 6, 3, groups=2, stride=2, padding=1, dilation=1)
    model = nn.Sequential(conv, nn.BatchNorm2d(6), copy.deepcopy(module))
    x = 3 * torch.randn(2, 4, 7, 6)
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    folded, report = fusedtrain.fold_conv_bn(waken(model), x)
    assert isinstance(folded[0], ConvAct2d)
    assert folded[0]._act == act
    assert len(report.fused) == 1
    assert isinstance(folded[2], nn.Identity)
    with torch.no_grad():
        expected = model(x)
        for _ in range(2):  # packed, and packed already
            y = folded(x)
            assert difference(y, expected) < 1e-5
            assert y.stride() == expected.stride()
    assert folded[0]._refused is None  # fused indeed
    assert set(folded.state_dict()) == {"0.weight", "0.bias"}
    # With gradients: plain torch.
    x.requires_grad_()
    (g,) = torch.autograd.grad(folded(x).sum(), x)
    (wanted,) = torch.autograd.grad(model(x).sum(), x)
    assert difference(g, wanted) < 1e-5


def test_3d_and_bfloat16() -> None:
    model = waken(nn.Sequential(nn.Conv3d(3, 4, 2), nn.BatchNorm3d(4), nn.ReLU()))
    x = torch.randn(2, 3, 4, 5, 6)
    for layout in (torch.contiguous_format, torch.channels_last_3d):
        folded, _ = fusedtrain.fold_conv_bn(model, x.contiguous(memory_format=layout))
        assert isinstance(folded[0], ConvAct3d)
    model = waken(nn.Sequential(nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4), nn.ReLU())).bfloat16()
    fusedtrain.fold_conv_bn(model, torch.randn(2, 3, 5, 6).bfloat16())


class Residual(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.act = how, nn.ReLU(inplace=True)
        self.conv1, self.norm1 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv2, self.norm2 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(h))
        if self.how == "in place":
            y += h
        elif self.how == "into the other":
            h += y
            return self.act(h)
        elif self.how == "other first":
            y = h + y
        elif self.how == "scalar":
            y = y + 1.0
        elif self.how == "alpha":
            y = torch.add(y, h, alpha=2)
        elif self.how == "broadcast":
            y = y + x.mean((2, 3), keepdim=True)
        elif self.how == "no act":
            return y + h
        return self.act(y)


@pytest.mark.parametrize(
    ("how", "kinds"),
    [
        ("in place", ["ReLU", "add + ReLU"]),
        ("other first", ["ReLU", "add + ReLU"]),
        ("broadcast", ["ReLU", "add + ReLU"]),
        ("no act", ["ReLU", "add"]),
        ("into the other", ["ReLU", "add + ReLU"]),
        ("scalar", ["ReLU"]),
        ("alpha", ["ReLU"]),
    ],
)
def test_residual(how: str, kinds: list[str]) -> None:
    model = waken(nn.Sequential(Residual(how)))
    x = torch.randn(2, 4, 6, 6)
    folded, report = fusedtrain.fold_conv_bn(model, x, tolerance=1e-5)
    assert [f.other_type for f in report.fused] == kinds
    lasting = x.contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        assert difference(folded(lasting), model(x)) < 1e-5
        assert difference(folded.double()(x.double()), model.double()(x.double())) < 1e-5


def test_packed_weight_follows_the_weight() -> None:
    model = waken(nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU()))
    folded, _ = fusedtrain.fold_conv_bn(model)
    x = torch.randn(2, 4, 6, 6).contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        before = folded(x)
        assert folded[0]._packs is not None
        state = {k: 2 * v for k, v in folded.state_dict().items()}
        folded.load_state_dict(state)
        assert difference(folded(x), 2 * before) < 1e-6
        for size in (5, 6, 7, 8):
            y = torch.randn(2, 4, size, size).contiguous(memory_format=torch.channels_last)
            assert difference(folded(y), F.relu(F.conv2d(y, *state.values()))) < 1e-5
        assert len(folded[0]._packs[1]) <= 2
        buffer = io.BytesIO()
        torch.save(folded, buffer)
        buffer.seek(0)
        other = torch.load(buffer, weights_only=False)
        assert other[0]._packs is None
        assert torch.equal(other(x), folded(x))
        assert torch.equal(copy.deepcopy(folded)(x), folded(x))


def test_packed_without_an_activation() -> None:
    """The convolution of a shortcut, which nothing but an addition follows, and that of a cat."""
    model = waken(nn.Sequential(nn.Conv2d(4, 6, 1, stride=2, bias=False), nn.BatchNorm2d(6)))
    folded, report = fusedtrain.fold_conv_bn(model)
    assert report.fused == []
    conv = folded[0]
    assert isinstance(conv, ConvAct2d)
    for layout in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(2, 4, 6, 6).contiguous(memory_format=layout)
        with torch.no_grad():
            assert difference(folded(x), model(x)) < 1e-5
    assert conv._packs is not None
    for untouched in (nn.Conv2d(4, 6, 1, padding="same"), nn.ConvTranspose2d(4, 6, 1)):
        model = waken(nn.Sequential(untouched, nn.BatchNorm2d(6)))
        assert type(fusedtrain.fold_conv_bn(model)[0][0]) is type(untouched)
    model = waken(nn.Sequential(nn.Conv2d(4, 6, 1), nn.BatchNorm2d(6)))
    assert type(fusedtrain.fold_conv_bn(model, fuse_activation=False)[0][0]) is nn.Conv2d


def test_fused_convolution_elsewhere() -> None:
    """Unbatched, empty, other dtypes, autocast, compiled: as eager torch."""
    model = waken(nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU()))
    folded, _ = fusedtrain.fold_conv_bn(model)
    conv = folded[0]
    with torch.no_grad():
        x = torch.randn(2, 4, 6, 6)
        plain = F.relu(F.conv2d(x, conv.weight, conv.bias))
        assert difference(conv(x[0]), plain[0]) < 1e-6
        assert conv(x[:0]).shape == (0, 6, 4, 4)
        with torch.autocast("cpu", torch.bfloat16):
            assert conv(x).dtype == torch.bfloat16
        with torch.inference_mode():
            assert difference(conv(x), plain) < 1e-6
        assert difference(torch.compile(conv, backend="eager", fullgraph=True)(x), plain) < 1e-6
        with pytest.raises(RuntimeError, match="channels"):
            conv(torch.randn(2, 3, 6, 6))
    off, report = fusedtrain.fold_conv_bn(model, fuse_activation=False)
    assert type(off[0]) is nn.Conv2d
    assert not report.fused
    _, report = fusedtrain.fold_conv_bn(copy.deepcopy(model).double())
    assert not report.fused
