"""fold_conv_bn of every kind of layer: the same outputs without the norms."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.fx.experimental.optimization import fuse as fx_fuse
from torch.nn.utils import fusion

import fusedtrain
from helpers.folding import CONVS, assert_folds, channels, difference, waken

pytestmark = pytest.mark.usefixtures("one_thread")


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


class OnlyNamed(nn.Conv2d):
    pass


def test_subclass_without_forward_folds() -> None:
    model = waken(nn.Sequential(OnlyNamed(4, 4, 1), nn.SyncBatchNorm(4))).double()
    folded, report = fusedtrain.fold_conv_bn(model)
    assert len(report) == 1
    assert type(folded[0]) is OnlyNamed


def test_a_model_in_training_mode_is_warned_of() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    with pytest.warns(UserWarning, match=r"folded no norm.*Call model.eval\(\) first"):
        assert not fusedtrain.fold_conv_bn(model)[1].folded
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fusedtrain.fold_conv_bn(model.eval())[1].folded


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
