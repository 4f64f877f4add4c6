"""Batch norm in the place of its input: the kernels of every backend, gradients against those with
the input kept, what is kept, and when nothing is overwritten."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedtrain
import fusedtrain.functional as F
from fusedtrain.ops import batch_norm_in_place as in_place
from helpers.activations import DTYPES
from helpers.backends import Kernels, same_bits
from helpers.batch_norm import LAYOUTS, Case, last, wide_dtype
from helpers.launches import NO_ELEMENTS
from helpers.observed import saved_bytes

F32, F64, F16, BF16 = DTYPES
SLOPES = {"identity": 1.0, "leaky_relu": 0.01}


def dense(x: Tensor) -> bool:
    return x.numel() == x.untyped_storage().nbytes() // x.itemsize


# The kernels


@pytest.mark.parametrize("kind", LAYOUTS)
def test_kernels(ops: Kernels, kind: str) -> None:
    """In place gives the bits of out of place. Restoring gives the input."""
    for i, dtype in enumerate(DTYPES):
        x = LAYOUTS[kind]()
        if not dense(x) or (x.size(1) == 1 and x.size(0) > 1 and not x.is_contiguous()):
            pytest.skip("not a case: the tensor is copied first")
        if ops.slow and x.numel() > 20_000:
            pytest.skip("slow where it is emulated or interpreted: needs a GPU")
        if ops.slow and (i + list(LAYOUTS).index(kind)) % (4 if x.numel() > 1_000 else 2):
            continue
        name = ("identity", "leaky_relu")[i // 2]
        case = Case(x, dtype, name, ops=ops, bias=i != 1, training=i != 2)
        assert case.weight is not None
        case.weight = case.weight.abs() + 0.25
        expected = ops("batch_norm_act", *case.forward())
        _, _, _, weight, bias, *statistics = case.forward()
        original = case.x.clone()
        in_its_place = ops("batch_norm_act_", case.x, weight, bias, *statistics)
        assert same_bits((case.x, *in_its_place), tuple(expected))

        mean, invstd = in_its_place
        back = ops("batch_norm_act_restore", case.x, weight, bias, mean, invstd, SLOPES[name])
        assert back.dtype is dtype
        assert back.stride() == torch.empty_like(original).stride()
        unit = torch.finfo(dtype).eps
        shape = (1, -1, *[1] * (x.dim() - 2))
        shift = 0 if bias is None else (bias / weight).abs().double().view(shape)
        mean, invstd = mean.double().view(shape), invstd.double().view(shape)
        normal = (original.double() - mean) * invstd
        error = (back.double() - original.double()).abs() * invstd
        # The output and the restored input are rounded to half a unit; float32 math adds to it.
        most = unit * (0.5 * (normal.abs() + shift) + 0.5 * original.double().abs() * invstd)
        wide = torch.finfo(wide_dtype(dtype)).eps
        assert (error <= 1.01 * most + 4 * wide * (normal.abs() + shift + 1)).all()


@NO_ELEMENTS
def test_no_elements(ops: Kernels) -> None:
    x = torch.empty(0, 3, 4, device=ops.device)
    mean, invstd = ops("batch_norm_act_", x, None, None, None, None, True, 0.1, 1e-5, -1, 0.0, 0.0)
    assert mean.tolist() == invstd.tolist() or not ops.kernel
    assert ops("batch_norm_act_restore", x, None, None, mean, invstd, 1.0).shape == x.shape


# The function


def leaves(dtype: torch.dtype, x: Tensor, *, small: tuple[int, ...] = ()) -> list[Tensor]:
    channels, wide = x.size(1), wide_dtype(dtype)
    weight = torch.rand(channels) + 0.5
    weight[1::2] *= -1
    weight[list(small)] = 0.0
    bias = torch.randn(channels)
    empty = torch.empty_like(x, dtype=dtype)
    return [empty.copy_(x).requires_grad_()] + [t.to(wide).requires_grad_() for t in (weight, bias)]


def step(
    tensors: list[Tensor], name: str, grad: Tensor, *, overwrite: bool, **options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, weight, bias = [t.detach().clone().requires_grad_() for t in tensors]
    made = x * 1
    y = F.batch_norm_act(
        made, None, None, weight, bias, True, activation=name, overwrite_input=overwrite, **options
    )
    assert (y.data_ptr() == made.data_ptr()) == overwrite
    y.backward(grad)
    assert x.grad is not None
    assert weight.grad is not None
    assert bias.grad is not None
    return y.detach(), x.grad, weight.grad, bias.grad


@pytest.mark.parametrize("small", [(), (0, 3)], ids=["", "lost channels"])
@pytest.mark.parametrize("name", SLOPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients(dtype: torch.dtype, name: str, small: tuple[int, ...]) -> None:
    """Near to float64's. Output and gradient of the bias equal those of an ordinary norm."""
    for x in (torch.randn(6, 5, 9, 7) * 2 + 1, last(6, 5, 9, 7) * 2 + 1, torch.randn(90, 5)):
        tensors = leaves(dtype, x, small=small)
        grad = torch.randn(x.shape).to(dtype)
        result = step(tensors, name, grad, overwrite=True)
        kept = step(tensors, name, grad, overwrite=False)
        truth = step([t.double() for t in tensors], name, grad.double(), overwrite=False)
        assert torch.equal(result[0], kept[0])
        assert torch.equal(result[3], kept[3])  # the bias' gradient does not depend on the input
        unit = torch.finfo(dtype).eps
        for got, want in zip(result[1:3], truth[1:3], strict=True):
            size = want.abs().amax() + 1e-30
            assert ((got.double() - want).abs() / size).max() <= 4 * unit
        for channel in small:  # the input of these was kept unchanged
            assert torch.equal(result[1][:, channel], kept[1][:, channel])
            assert torch.equal(result[2][channel], kept[2][channel])


def test_gradcheck() -> None:
    x, weight, bias = leaves(F64, torch.randn(4, 3, 2, 2), small=(1,))

    def function(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.batch_norm_act(
            x * 1, None, None, weight, bias, True, activation="leaky_relu", overwrite_input=True
        )

    assert torch.autograd.gradcheck(function, (x, weight, bias))


def test_fixed_statistics() -> None:
    running = torch.randn(3), torch.rand(3) + 0.5
    results = []
    for overwrite in (False, True):
        torch.manual_seed(0)
        x, weight, bias = leaves(F32, torch.arange(24.0).view(2, 3, 4))
        made = x * 1
        y = F.batch_norm_act(
            made, *running, weight, bias, False, activation="identity", overwrite_input=overwrite
        )
        assert (y.data_ptr() == made.data_ptr()) == overwrite
        y.square().sum().backward()
        results.append((x.grad, weight.grad, bias.grad))
    for kept, result in zip(*results, strict=True):
        torch.testing.assert_close(result, kept)


def test_running_statistics_move_alike() -> None:
    moved = []
    for overwrite in (False, True):
        torch.manual_seed(1)
        norm = fusedtrain.nn.BatchNormAct2d(4, apply_act=False, overwrite_input=overwrite)
        norm(nn.Conv2d(2, 4, 1)(torch.randn(3, 2, 5, 5)))
        moved.append((norm.running_mean, norm.running_var, norm.num_batches_tracked))
    assert same_bits(*moved)


# Memory kept for backward


def test_one_tensor_is_kept() -> None:
    first, last_conv = nn.Conv2d(3, 8, 1, bias=False), nn.Conv2d(8, 1, 1, bias=False)
    x = torch.randn(2, 3, 16, 16)
    sizes = {}
    for overwrite in (False, True):
        norm = fusedtrain.nn.BatchNormAct2d(
            8, act_layer=nn.LeakyReLU, overwrite_input=overwrite, affine=False
        )
        sizes[overwrite] = sum(saved_bytes(lambda norm=norm: last_conv(norm(first(x)))).values())
    activation = 2 * 8 * 16 * 16 * 4
    assert sizes[False] - sizes[True] == activation


def test_only_lost_channels_are_kept_apart() -> None:
    sizes = []
    for small in ((), (0, 2, 5)):
        tensors = leaves(F32, torch.randn(2, 6, 8, 8), small=small)
        x, weight, bias = tensors
        with torch.no_grad():
            bias.zero_()
        made = x * 1
        kept = saved_bytes(
            lambda made=made, weight=weight, bias=bias: F.batch_norm_act(
                made, None, None, weight, bias, True, activation="identity", overwrite_input=True
            )
        )
        sizes.append(sum(kept.values()))
    assert sizes[1] - sizes[0] == 3 * 2 * 8 * 8 * 4 + 3 * 8  # and their places


# In which channels the input would be lost


def test_bound() -> None:
    weight = torch.tensor([0.0, 1 / 64, 0.0156, -1.0, 1.0, -1.0, float("nan"), float("inf")])
    bias = torch.tensor([0.0, 0.0, 0.0, 4.0, 4.1, -4.1, 0.0, 0.0])
    assert in_place.lost(weight, bias) == [0, 2, 4, 5, 6, 7]
    assert in_place.lost(weight, None) == [0, 2, 6, 7]
    assert in_place.lost(None, bias) == [4, 5]
    assert in_place.lost(None, torch.tensor([1.0, float("nan")])) == [1]
    assert in_place.lost(None, None) == []
    weight.requires_grad_()
    with torch.no_grad():
        weight.fill_(1.0)
    assert in_place.lost(weight, None) == []
    weight.data[3] = 0.0  # which torch does not hear of
    assert in_place.lost(weight, None) == [3]


def test_numbers_that_would_round_to_infinity_stay_finite() -> None:
    x = (torch.rand(16, 2, 32) * 2 - 1) * 65000
    x[0, :, :4] = 65504
    gradients = []
    for overwrite in (False, True):
        weight = torch.tensor([0.3, 0.7], requires_grad=True)
        leaf = x.half().requires_grad_()
        y = F.batch_norm_act(
            leaf * 1, None, None, weight, torch.tensor([1.1, 2.0]), True, activation="identity",
            overwrite_input=overwrite,
        )  # fmt: skip
        (y.float().square() * torch.linspace(0, 1, 32)).sum().backward()
        gradients.append(weight.grad)
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=0)


# When nothing is overwritten


def overwritten(made: Tensor, **options: Any) -> bool:
    options = {"activation": "identity", "training": True} | options
    weight = torch.ones(3, requires_grad=True)
    before = made.detach().clone()
    y = F.batch_norm_act(made, None, None, weight, None, overwrite_input=True, **options)
    changed = not torch.equal(before, made)
    assert changed == (y.data_ptr() == made.data_ptr())
    return changed


def made() -> Tensor:
    return torch.randn(4, 3, 4, 4, requires_grad=True) * 1


def test_without_effect() -> None:
    assert overwritten(made())
    assert overwritten(made(), activation="leaky_relu")
    assert not overwritten(torch.randn(4, 3, 4, 4))  # the user's images
    assert not overwritten(torch.randn(4, 3, 4, 4, requires_grad=True))
    with torch.no_grad():
        assert not overwritten(made())
    for activation in ("relu", "elu", "celu", "selu", "softplus", "silu", "sigmoid"):
        assert not overwritten(made(), activation=activation)
    assert not overwritten(made(), activation="leaky_relu", negative_slope=0.0)
    assert not overwritten(made(), residual=torch.zeros(4, 3, 4, 4))
    assert not overwritten(made(), branch_scale=torch.ones(4))
    assert not overwritten(made()[:, :, ::2])
    assert not overwritten(made().view(4, 3, 16))  # a view
    with fusedtrain.recompute():
        assert not overwritten(made())
    assert in_its_place(torch.empty(4, 3, 4, 4, device="meta", requires_grad=True) * 1).is_meta


def test_an_activation_apart() -> None:
    """One that no kernel is exact for is called after the norm, which overwrites then."""
    x, grads = torch.randn(4, 3, 4, 4, requires_grad=True), []
    for overwrite in (False, True):
        y = F.batch_norm_act(
            x * 1, None, None, training=True, activation="leaky_relu", negative_slope=-0.1,
            overwrite_input=overwrite,
        )  # fmt: skip
        grads.append(torch.autograd.grad(y.square().sum(), x)[0])
    torch.testing.assert_close(*grads)


def test_slopes_that_float16_cannot_hold() -> None:
    for dtype, slope, wanted in ((F16, 1e-3, False), (F16, 0.01, True), (BF16, 1e-3, True)):
        x = made().to(dtype)
        options = {"activation": "leaky_relu", "negative_slope": slope}
        assert overwritten(x, **options) is wanted


def test_compiled_code_does_not_overwrite() -> None:
    weight = torch.ones(3, requires_grad=True)

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        made = x * 1
        y = F.batch_norm_act(
            made, None, None, weight, None, True, activation="identity", overwrite_input=True
        )
        return made, y

    x = torch.randn(4, 3, 4, 4, requires_grad=True)
    made, y = torch.compile(function, backend="aot_eager", fullgraph=True)(x)
    assert torch.equal(made, x)
    torch.testing.assert_close(y, F.batch_norm_act(x, None, None, weight, None, True,
                                                   activation="identity"))  # fmt: skip


# Errors


def in_its_place(x: Tensor) -> Tensor:
    return F.batch_norm_act(
        x, None, None, None, None, True, activation="identity", overwrite_input=True
    )


def test_an_input_that_another_op_saved_is_an_error() -> None:
    y = in_its_place(made().sigmoid())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    x = made()
    total = x.exp().mul(x).sum()
    in_its_place(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


def test_an_output_that_was_modified_is_an_error() -> None:
    y = in_its_place(made())
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_no_second_derivative() -> None:
    x = torch.randn(4, 3, 4, 4, requires_grad=True)
    y = in_its_place(x * 1)
    with pytest.raises(RuntimeError, match="overwrite_input=True there is no second derivative"):
        torch.autograd.grad(y.square().sum(), x, create_graph=True)


def test_backward_twice() -> None:
    x = torch.randn(4, 3, 4, 4, requires_grad=True)
    y = in_its_place(x * 1).square().sum()
    first = torch.autograd.grad(y, x, retain_graph=True)
    assert same_bits(first, torch.autograd.grad(y, x))
