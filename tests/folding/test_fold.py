"""fold_conv_bn of every kind of layer: the same outputs without the norms."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

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
    """With as many rows as features the wrong axis would fit."""
    model = waken(nn.Sequential(nn.Linear(6, rows), nn.BatchNorm1d(6)))
    _, report = fusedtrain.fold_conv_bn(model, torch.randn(3, 6, 6))
    reason = "has 3 dimensions" if rows == 6 else "5 channels"
    assert reason in report.left[0].reason


def test_linear_needs_to_be_known_as_flat() -> None:
    model = waken(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)))
    assert "may have three dimensions" in fusedtrain.fold_conv_bn(model)[1].left[0].reason
    flat = waken(nn.Sequential(nn.Flatten(), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(),
                               nn.Linear(6, 6), nn.BatchNorm1d(6)))  # fmt: skip
    assert len(fusedtrain.fold_conv_bn(flat)[1]) == 2
    folded, _ = fusedtrain.fold_conv_bn(model, torch.randn(4, 6))
    with pytest.raises(RuntimeError, match="made for inputs of 2 dimensions, not 3"):
        folded(torch.randn(3, 6, 6))


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
        fusedtrain.fold_conv_bn(3)


def test_in_place() -> None:
    model = waken(nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU()))
    x = torch.randn(2, 4, 6, 6)
    expected = model(x)
    folded, _ = fusedtrain.fold_conv_bn(model, x, inplace=True)
    assert folded is model
    assert isinstance(model[1], nn.Identity)
    assert difference(model(x), expected) < 1e-6
