"""The functions layer_norm, rms_norm and both over channels beside torch's: numbers, dtypes,
layouts, errors, sums with a residual. test_every_function.py has derivatives and compilers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as torch_functional
from torch import Tensor

from fusedtrain import functional as F, nn, recompute
from fusedtrain.ops import row_norm
from helpers.batch_norm import last
from helpers.models import timm

Args = tuple[Any, ...]


@pytest.fixture(autouse=True)
def _kernels_take_small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_norm, "_LEAST", {})


def over_channels(norm: Callable[..., Tensor], x: Tensor, *args: Any) -> Tensor:
    return norm(x.movedim(1, -1), x.shape[1:2], *args).movedim(-1, 1)


EAGER: dict[str, Callable[..., Tensor]] = {
    "layer_norm": torch_functional.layer_norm,
    "rms_norm": torch_functional.rms_norm,
    "layer_norm_channels": partial(over_channels, torch_functional.layer_norm),
    "rms_norm_channels": partial(over_channels, torch_functional.rms_norm),
}


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=dtype).requires_grad_()


def cases(dtype: torch.dtype, affine: torch.dtype) -> list[tuple[str, Args]]:
    def of(*shape: int) -> Tensor:
        return leaf(*shape, dtype=affine)

    x = leaf(3, 4, 6, dtype=dtype)
    image = leaf(2, 8, 5, 3, dtype=dtype)
    image_last = last(2, 8, 5, 3).to(dtype).requires_grad_()
    transposed = leaf(4, 3, 6, dtype=dtype).transpose(0, 1)
    return [
        ("layer_norm", (x, (6,), of(6), of(6))),
        ("layer_norm", (x, [4, 6], of(4, 6), None, 1e-3)),
        ("layer_norm", (x, torch.Size([6]), None, of(6))),
        ("layer_norm", (transposed, (6,), of(6), of(6))),
        ("layer_norm", (image_last, (3,), of(3), of(3))),
        ("rms_norm", (x, (6,), of(6))),
        ("rms_norm", (x, (4, 6), of(4, 6), 1e-3)),
        ("rms_norm", (x, [6])),
        ("rms_norm", (transposed, (6,), of(6))),
        ("rms_norm", (transposed, (4, 6), of(4, 6))),
        ("rms_norm", (image_last, (5, 3), None)),
        ("layer_norm_channels", (image, of(8), of(8), 1e-6)),
        ("layer_norm_channels", (image_last, of(8), None, 1e-3)),
        ("layer_norm_channels", (leaf(4, 8, dtype=dtype), None, of(8), 1e-6)),
        ("layer_norm_channels", (leaf(2, 3, 5, 7, dtype=dtype)[:, :, ::2], of(3), of(3), 1e-6)),
        ("rms_norm_channels", (image, of(8), 1e-6)),
        ("rms_norm_channels", (image_last, None, 1e-3)),
        ("rms_norm_channels", (leaf(4, 8, dtype=dtype), of(8), 1e-6)),
    ]


@pytest.mark.parametrize("mixed", [False, True], ids=["one dtype", "wide weights"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16],
                         ids=str)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_numbers_and_layouts(dtype: torch.dtype, mixed: bool) -> None:
    """Output and gradients beside torch's, which for 16 bits are those of float32 rounded."""
    affine = torch.float32 if mixed and dtype.itemsize == 2 else dtype
    for name, args in cases(dtype, affine):
        eager = EAGER[name]
        wide = [a.detach().double().requires_grad_() if isinstance(a, Tensor) else a for a in args]
        leaves = [a for a in args if isinstance(a, Tensor)]
        y, want = getattr(F, name)(*args), eager(*args)
        assert y.dtype is want.dtype
        assert name.endswith("channels") or y.is_contiguous()
        grad = torch.randn(y.shape, dtype=y.dtype)
        epsilon = torch.finfo(torch.float64 if dtype is torch.float64 else torch.float32).eps
        if name == "rms_norm" and len(wide) < 4:
            wide = [*wide, *[None] * (3 - len(wide)), epsilon]
        exact = eager(*wide)
        gradients = torch.autograd.grad(y, leaves, grad)
        wanted = torch.autograd.grad(
            exact, [a for a in wide if isinstance(a, Tensor)], grad.double()
        )
        limit = {2: 8e-3 if dtype is torch.float16 else 2e-2, 4: 2e-5, 8: 1e-11}[dtype.itemsize]
        torch.testing.assert_close(y.double(), exact, rtol=limit, atol=limit)
        for gradient, right, t in zip(gradients, wanted, leaves, strict=True):
            assert gradient.dtype is t.dtype
            torch.testing.assert_close(gradient.double(), right, rtol=4 * limit, atol=4 * limit)


def test_channels_keep_the_layout() -> None:
    weight = torch.ones(8)
    for x in (torch.randn(2, 8, 5, 3), last(2, 8, 5, 3), torch.randn(2, 8, 4)):
        assert F.layer_norm_channels(x, weight).stride() == x.stride()
        assert F.rms_norm_channels(x, weight).stride() == x.stride()
        plain = F.layer_norm_channels(x.to(torch.complex64).real.requires_grad_(), weight)
        assert plain.shape == x.shape


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_a_residual(name: str) -> None:
    """Norm and sum have both gradients; either may have none; shapes that broadcast are torch's."""
    function, eager = getattr(F, name), EAGER[name]
    for dtype, limit in ((torch.float32, 2e-6), (torch.bfloat16, 2e-2)):
        x, r, w = (leaf(*shape, dtype=dtype) for shape in ((3, 5, 6), (3, 5, 6), (6,)))
        for other in (r, leaf(6, dtype=dtype), r.detach()):
            y, total = function(x, (6,), w, residual=other)
            want = x + other
            assert torch.equal(total, want)
            leaves = [t for t in (x, other, w) if t.requires_grad]
            for used in ((0, 1), (0,), (1,)):
                outputs = [(y, total)[i] for i in used]
                pair = [(eager(want, (6,), w), want)[i] for i in used]
                grads = [torch.randn(3, 5, 6, dtype=dtype) for _ in used]
                ours, theirs = (
                    torch.autograd.grad(o, leaves, grads, retain_graph=True, allow_unused=True)
                    for o in (outputs, pair)
                )
                for a, b in zip(ours, theirs, strict=True):
                    assert (a is None) is (b is None)
                    if a is not None and b is not None:
                        torch.testing.assert_close(a, b, rtol=20 * limit, atol=20 * limit)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("LayerNorm2d", (8, 1e-3)), ("LayerNorm2d", (8, 1e-3, False)), ("LayerNormAct2d", (8,)),
        ("LayerNormAct2d", (8, 1e-3, True, True, "silu", None, False, torch.nn.Tanh)),
        ("LayerNormAct2d", (8, 1e-3, False, False)), ("RmsNorm2d", (8,)),
        ("RmsNorm2d", (8, 1e-3, False)),
    ],
)  # fmt: skip
def test_modules_of_timm(name: str, args: Args) -> None:
    """Constructed as timm's, with their checkpoints and numbers."""
    timm()
    layers = pytest.importorskip("timm.layers")
    ours, stock = getattr(nn, name)(*args), getattr(layers, name)(*args)
    for p in stock.parameters():
        torch.nn.init.normal_(p)
    ours.load_state_dict(stock.state_dict())
    x = torch.randn(2, 8, 5, 3)
    torch.testing.assert_close(ours(x), stock(x))
    torch.testing.assert_close(torch.jit.script(ours)(x), stock(x))


def test_residual_second_derivatives() -> None:
    x, r, w = (leaf(*shape, dtype=torch.float64) for shape in ((2, 5), (2, 5), (5,)))
    for name in ("layer_norm", "rms_norm"):
        function = lambda x, r, w, name=name: getattr(F, name)(x, [5], w, residual=r)  # noqa: E731
        assert torch.autograd.gradcheck(function, (x, r, w))
        assert torch.autograd.gradgradcheck(function, (x, r, w))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_second_derivatives_of_16_bits_are_rounded_once(name: str, dtype: torch.dtype) -> None:
    """The shares by way of the statistics and past them cancel."""
    torch.manual_seed(0)
    x = (torch.randn(3, 2) * 0.01).to(dtype)
    second = []
    for t in (x, x.float()):
        leaf = t.requires_grad_()
        y = getattr(F, name)(leaf, [2], eps=1e-6)
        scale = torch.tensor([1.0, 2.0]).to(y.dtype).expand_as(y)
        (g,) = torch.autograd.grad(y, leaf, scale, create_graph=True)
        second += torch.autograd.grad(g.sum(), leaf)
    torch.testing.assert_close(second[0], second[1].to(dtype))


def test_errors_are_those_of_torch() -> None:
    x = torch.ones(2, 3)
    for name, args in (
        ("layer_norm", (x, (4,))), ("layer_norm", (x, ())), ("layer_norm", (x, 3)),
        ("layer_norm", (x, (3,), torch.ones(2))), ("layer_norm", (x.int(), (3,))),
        ("layer_norm", (x.bfloat16(), (3,), torch.ones(3).bfloat16(), torch.ones(3))),
        ("rms_norm", (x, (4,))), ("rms_norm", (x, ())), ("rms_norm", (x, (3,), torch.ones(2))),
        ("rms_norm", (x.int(), (3,))), ("layer_norm_channels", (x, torch.ones(2))),
        ("layer_norm_channels", (x[0],)), ("rms_norm_channels", (x, torch.ones(2))),
    ):  # fmt: skip
        with pytest.raises(Exception) as theirs:
            EAGER[name](*args)
        with pytest.raises(type(theirs.value)) as ours:
            getattr(F, name)(*args)
        assert name.endswith("channels") or str(ours.value) == str(theirs.value)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_an_input_from_inference_mode_beside_a_weight_with_a_gradient(dtype: torch.dtype) -> None:
    with torch.inference_mode():
        x = torch.randn(3, 6).to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    weight, twin = leaf(6, dtype=wide), torch.ones(6, dtype=wide, requires_grad=True)
    weight.data.fill_(1)
    y, stock = F.rms_norm(x, [6], weight), torch_functional.rms_norm(x, [6], twin)
    assert isinstance(y, Tensor)
    y.sum().backward()
    stock.sum().backward()
    torch.testing.assert_close(y, stock)
    torch.testing.assert_close(weight.grad, twin.grad)


def test_autocast() -> None:
    w = torch.randn(6)
    with torch.autocast("cpu", torch.bfloat16):
        for name in ("layer_norm", "rms_norm"):
            for x in (torch.randn(3, 6), torch.randn(3, 6).bfloat16()):
                y, want = getattr(F, name)(x, (6,), w), EAGER[name](x, (6,), w)
                assert y.dtype is want.dtype
                torch.testing.assert_close(y, want, rtol=1e-2, atol=1e-2)


def test_recomputed() -> None:
    """A product saves the norm: backward makes it again, with the same bits."""
    x, w = leaf(4, 6), leaf(6)
    for name in ("layer_norm", "rms_norm"):
        gradients = []
        for context in (recompute(), torch.enable_grad()):
            with context:
                y = getattr(F, name)(x, [6], w)
                z = y * y
            saved = z.grad_fn._saved_self  # type: ignore[union-attr]
            assert torch.equal(saved, y)
            gradients.append(torch.autograd.grad(z.sum(), (x, w)))
        assert all(map(torch.equal, *gradients))


def test_scripts() -> None:
    x, w = torch.randn(3, 6), torch.randn(6)
    for name in ("layer_norm", "rms_norm"):
        scripted = torch.jit.script(getattr(F, name))
        torch.testing.assert_close(scripted(x, [6], w), EAGER[name](x, (6,), w))
        norm, total = scripted(x, [6], w, residual=x)
        assert torch.equal(total, x + x)
        torch.testing.assert_close(norm, EAGER[name](x + x, (6,), w))
    for name, args in (("layer_norm_channels", (w, None, 1e-6)), ("rms_norm_channels", (w, 1e-6))):
        scripted = torch.jit.script(getattr(F, name))
        torch.testing.assert_close(scripted(x, *args), EAGER[name](x, *args))
        assert scripted(torch.randn(2, 6, 3)).is_contiguous()
