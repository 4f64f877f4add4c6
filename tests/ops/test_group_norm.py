"""Group norm, modulation and activation: the ops on every backend; the function against torch in
float64; derivatives, layouts, special values, choices."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as T
from torch import Tensor, nn
from torch.func import jvp, vmap

import fusedtrain
import fusedtrain.functional as F
from fusedtrain.nn import GroupNorm, GroupNorm1Act, GroupNormAct
from fusedtrain.ops import group_norm
from fusedtrain.reference import group_norm as reference
from fusedtrain.reference.dtypes import wide_of
from fusedtrain.reference.pointwise import INDEX
from helpers.backends import Kernels, placed
from helpers.models import timm

LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
SILU = (INDEX["silu"], 0.0, 0.0)
ACTIVATIONS: dict[str | None, Any] = {None: lambda z: z, "silu": T.silu, "tanh": torch.tanh}


@pytest.fixture
def every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs of any size and layout run the op."""
    monkeypatch.setattr(group_norm, "_gains", lambda *_: True)


pytestmark = pytest.mark.usefixtures("every_size")


SHAPES: tuple[tuple[tuple[int, ...], int, str], ...] = (
    ((3, 8, 5, 7), 4, "contiguous"),
    ((3, 12, 5, 2), 3, "channels_last"),
    ((2, 40, 3, 3), 1, "contiguous"),
    ((2, 36, 3, 3), 1, "channels_last"),
    ((1, 16, 9), 16, "contiguous"),
    ((2, 1, 4, 5), 1, "contiguous"),
    ((3, 8), 2, "contiguous"),
    ((2, 6, 4, 4), 2, "transposed"),
    ((2, 6, 5, 3), 3, "of a larger one"),
    ((2, 0, 4, 4), 1, "contiguous"),
    ((0, 6, 4, 4), 2, "contiguous"),
)


def laid(t: Tensor, kind: str) -> Tensor:
    if kind == "transposed":
        return t.transpose(0, 3).contiguous().transpose(0, 3)
    if kind == "of a larger one":
        return torch.cat([t, t], 2)[:, :, ::2][:, :, : t.size(2)].copy_(t)
    return t.contiguous(memory_format=LAYOUTS[kind])


def formula(name: str, *arguments: Any) -> Any:
    return getattr(reference, name)(*arguments)


def run(call: Any, tensors: Any, groups: int, activation: Any, needs: Any) -> list[Tensor]:
    """The output, the same of given vectors, the vectors, the gradients."""
    x, grad, *affine = tensors
    y, vectors = call("group_norm_act", x, groups, *affine, 1e-3, *activation)
    again = call("group_norm_act_apply", x, vectors, *activation)
    back = (grad, x, groups, *affine, vectors, *activation, *needs)
    return [y, again, vectors, *call("group_norm_act_backward", *back)]


@pytest.mark.usefixtures("memory_is_full_of_nan")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernels(ops: Kernels, dtype: torch.dtype) -> None:
    """Outputs, vectors and gradients of every backend, as the formula in float64; the output of the
    same vectors has the same bits."""
    eps = torch.finfo(dtype).eps
    slack = {torch.float64: 48, torch.float32: 32}.get(dtype, 1)
    wants = ((True, False, True, True, True), (False, True, True, False, False))
    for number, ((shape, groups, kind), option) in enumerate(itertools.product(SHAPES, range(4))):
        if ops.slow and number % 3:
            continue
        torch.manual_seed(option)
        wide = wide_of(torch.empty(0, dtype=dtype)) if option == 2 else dtype
        x, grad = (laid((torch.randn(shape) * 2 + 1).to(dtype), kind) for _ in range(2))
        affine: list[Tensor | None] = [(torch.rand(shape[1]) - 0.3).to(wide) for _ in range(2)]
        assert affine[0] is not None
        group = shape[1] // groups
        affine[0][::3], affine[0][:group] = 0, 0  # a group of zeros, and one of nearly none
        affine[0][-group:] *= 1e-305 if dtype is torch.float64 else 1e-30
        affine += [torch.randn(shape[:2]).to(dtype) for _ in range(2)]
        affine = [t if (0b1111, 0b0010, 0b0011, 0b1000)[option] >> i & 1 else None
                  for i, t in enumerate(affine)]  # fmt: skip
        activation = SILU if option != 1 else (-1, 0.0, 0.0)
        needs = wants[option % 2] if option != 2 else (True,) * 5
        tensors = (x, grad, *affine)
        moved = [None if t is None else placed(t, ops.device) for t in tensors]
        results = run(ops, moved, groups, activation, needs)
        exact = [None if t is None else t.double() for t in tensors]
        truths = run(formula, exact, groups, activation, needs)
        models = (x, x, None, x if needs[0] else None)
        for i, (result, truth) in enumerate(zip(results, truths, strict=True)):
            assert result.shape == truth.shape, (shape, option, i)
            if i == 2 or result.numel() == 0:
                continue
            error, most = (result.cpu().double() - truth).abs().max(), truth.abs().max()
            bound = slack * eps * most + 16 * torch.finfo(dtype).tiny
            assert error <= bound, (shape, kind, option, i, float(error / most / eps))
            if i < 4 and (model := models[i]) is not None:
                assert result.stride() == torch.empty_like(model).stride(), (shape, kind, i)
        assert results[0].equal(results[1])
        assert [t.dtype for t in results[:2]] == [dtype] * 2
        gradients = zip(results[4:], affine, needs[1:], strict=True)
        assert all(t is None or r.dtype is t.dtype for r, t, needed in gradients if needed)


def call(x: Tensor, w: Any, b: Any, scale: Any, shift: Any, groups: int, act: Any) -> Tensor:
    """The truth, of operators of torch."""
    z = T.group_norm(x, groups, w, b)
    if scale is not None:
        z = z * (1 + scale[:, :, None, None])
    return ACTIVATIONS[act](z if shift is None else z + shift[:, :, None, None])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", LAYOUTS)
def test_numbers(kind: str, dtype: torch.dtype) -> None:
    """Outputs and all gradients, against float64. Weights of 0 and next to it have exact ones."""
    eps = torch.finfo(dtype).eps
    slack = {torch.float64: 24, torch.float32: 16}.get(dtype, 1)
    shapes = (((3, 8, 5, 7), 4), ((2, 16, 9, 9), 16), ((4, 6, 33, 3), 1), ((1, 8, 6, 6), 2))
    for (shape, groups), act, options in itertools.product(shapes, ACTIVATIONS, range(4)):
        torch.manual_seed(0)
        weight = torch.rand(shape[1]) + 0.5
        weight[::3], weight[1], weight[-1] = 0, 1e-20, -1e-30
        vectors = [weight, torch.randn(shape[1]), torch.randn(shape[:2]), torch.randn(shape[:2])]
        wanted = ((1, 1, 1, 1), (1, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 0))[options]
        x = (torch.randn(shape) * 2 + 1).contiguous(memory_format=LAYOUTS[kind])
        grad = torch.randn(shape).to(dtype)
        leaves = [t.to(dtype) if n else None for t, n in zip((x, *vectors), (1, *wanted))]
        for t in leaves:
            if t is not None:
                t.requires_grad_()
        exact = [None if t is None else t.detach().double().requires_grad_() for t in leaves]
        y = F.group_norm_act(leaves[0], groups, *leaves[1:3], 1e-5, act, *leaves[3:])
        want = call(*exact, groups, act)
        assert y.stride() == x.stride()
        assert y.dtype is dtype
        results = torch.autograd.grad(y, [t for t in leaves if t is not None], grad)
        truths = torch.autograd.grad(want, [t for t in exact if t is not None], grad.double())
        for result, truth in zip((y, *results), (want, *truths)):
            error = (result.double() - truth).abs().max() / truth.abs().max()
            assert error < slack * eps, (shape, act, options, float(error / eps))


@pytest.mark.parametrize("kind", LAYOUTS)
def test_zero_weights_give_no_gradient(kind: str) -> None:
    """Exactly, in groups whose weights are all 0: an optimizer may go by the sign."""
    x = torch.randn(2, 8, 4, 4).contiguous(memory_format=LAYOUTS[kind]).requires_grad_()
    weight = torch.cat([torch.zeros(4), torch.ones(4)]).requires_grad_()
    F.group_norm_act(x, 2, weight, None, activation="silu").square().sum().backward()
    assert x.grad is not None
    assert x.grad[:, :4].eq(0).all()
    assert x.grad[:, 4:].ne(0).all()
    assert weight.grad is not None
    assert weight.grad.isfinite().all()


@pytest.mark.parametrize("kind", LAYOUTS)
def test_special_values(kind: str) -> None:
    """Means 1e4 deviations off, constants, infinity and NaN in one group, as torch in float64."""
    torch.manual_seed(0)
    x = torch.randn(4, 8, 6, 6)
    x[0] += 1e4
    x[1] = 3.0
    x[2, 0, 0, 0] = torch.inf
    x[3, 0, 0, 0] = torch.nan
    leaf = x.contiguous(memory_format=LAYOUTS[kind]).requires_grad_()
    exact = x.double().requires_grad_()
    y, want = F.group_norm_act(leaf, 2), T.group_norm(exact, 2)
    grad = torch.randn(x.shape)
    (g,) = torch.autograd.grad(y, leaf, grad)
    (truth,) = torch.autograd.grad(want, exact, grad.double())
    for part in range(4):
        rough = (2e-3, 2e-3) if part == 0 else (1e-5, 1e-3)  # x itself has been rounded by 5e-4
        close = {"equal_nan": True, "check_dtype": False, "rtol": 0}
        torch.testing.assert_close(y[part], want[part], atol=rough[0], **close)
        scale = 316.0 if part == 1 else 1.0  # 1 / sqrt(eps)
        torch.testing.assert_close(g[part], truth[part], atol=rough[1] * scale, **close)


def leaves(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(1)
    shapes = ((2, 4, 3, 2), (4,), (4,), (2, 4), (2, 4))
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("act", [None, "silu", "sigmoid"])
def test_derivatives(act: str | None) -> None:
    """First and second ones by differences; forward mode and vmap as torch's operators."""

    def run(x: Tensor, w: Tensor, b: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return F.group_norm_act(x, 2, w, b, 1e-5, act, scale, shift)

    for last in (False, True):
        x, *rest = leaves()
        if last:
            x = x.detach().contiguous(memory_format=torch.channels_last).requires_grad_()
        assert torch.autograd.gradcheck(run, (x, *rest))
        assert torch.autograd.gradgradcheck(run, (x, *rest), gen_non_contig_grad_outputs=True)
    tensors = tuple(t.detach() for t in leaves())
    output, tangent = jvp(run, tensors, tensors)
    torch.testing.assert_close(output, run(*tensors))
    assert tangent.isfinite().all()
    many = vmap(run)(*(torch.stack([t, 2 * t]) for t in tensors))
    torch.testing.assert_close(many[0], run(*tensors))


def test_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule for inputs that run the op."""
    monkeypatch.undo()

    def fused(
        shape: tuple[int, ...], act: str | None = "silu", last: bool = True, scale: Any = None,
        dtype: torch.dtype = torch.float32,
    ) -> bool:  # fmt: skip
        x = torch.randn(shape, dtype=dtype, requires_grad=True)
        x = x.contiguous(memory_format=torch.channels_last) if last else x
        y = F.group_norm_act(x, 2, activation=act, scale=scale)
        return "GroupNormAct" in type(y.grad_fn).__name__

    assert fused((8, 64, 8, 8))
    assert fused((8, 64, 8, 8), None)
    assert not fused((2, 64, 8, 8))
    assert not fused((512, 32, 4, 4))
    assert fused((4, 256, 32, 32), last=False)
    assert not fused((4, 256, 32, 32), None, last=False)
    assert not fused((4, 256, 32, 32), last=False, dtype=torch.bfloat16)
    assert not fused((64, 256, 8, 8), last=False)
    for last in (False, True):
        assert fused((2, 4, 8, 8), last=last, scale=torch.randn(2, 4))
    assert not fused((2, 4, 4, 4), last=False, scale=torch.randn(2, 4))
    assert not fused((2, 64, 32, 32), last=False)
    with fusedtrain.recompute():
        assert fused((2, 64, 32, 32), last=False)
        assert not fused((2, 64, 32, 32), None, last=False)


def test_torch_sees_other_calls() -> None:
    """Numbers, dtypes and errors of torch, where the op does not take the call."""
    x, w, b, scale, shift = (t.detach() for t in leaves(torch.float32))
    with torch.autocast("cpu", torch.bfloat16):
        assert F.group_norm_act(x, 2, w, b, activation="silu").dtype is torch.float32
    assert F.group_norm_act(x.bfloat16(), 2, w, b).dtype is torch.bfloat16
    assert F.group_norm_act(x.bfloat16(), 2, scale=scale).dtype is torch.float32
    for bad in (
        lambda g: g(x, 3), lambda g: g(x, 2, w[:3]), lambda g: g(x[0, 0, 0], 1),
        lambda g: g(torch.randn(1, 2), 2), lambda g: g(x, 2, w.double()), lambda g: g(x.int(), 2),
        lambda g: g(None, 2),
    ):  # fmt: skip
        with pytest.raises(Exception) as theirs:
            bad(T.group_norm)
        with pytest.raises(theirs.type) as ours:
            bad(F.group_norm_act)
        assert str(ours.value) == str(theirs.value)
    with pytest.raises(ValueError, match="scale: expected one value for each sample and channel"):
        F.group_norm_act(x, 2, scale=scale[:1])
    compiled = torch.compile(lambda *t: F.group_norm_act(*t[:1], 2, *t[1:]), backend="aot_eager")
    torch.testing.assert_close(
        compiled(x, w, b, 1e-5, "silu", scale, shift),
        F.group_norm_act(x, 2, w, b, 1e-5, "silu", scale, shift),
    )


def test_output_may_be_modified() -> None:
    x = torch.randn(2, 4, 3, 3, requires_grad=True)
    y = F.group_norm_act(x, 2, activation="silu")
    y += 1
    y.sum().backward()


def test_recompute() -> None:
    """The same bits; nothing but the input is kept, in either layout."""
    for kind in LAYOUTS.values():
        torch.manual_seed(0)
        conv = nn.Conv2d(8, 8, 3).to(memory_format=kind)
        norm = GroupNorm(2, 8, activation="silu")
        x = torch.randn(2, 8, 9, 9).contiguous(memory_format=kind).requires_grad_()
        kept, gradients = [], []
        for scope in (False, True):
            sizes: list[int] = []
            with (
                fusedtrain.recompute()
                if scope
                else torch.autograd.graph.saved_tensors_hooks(
                    lambda t, s=sizes: (s.append(t.numel()), t)[1], lambda t: t
                )
            ):
                y = conv(norm(x))
            kept.append(sizes)
            gradients.append(torch.autograd.grad(y.square().sum(), (x, *norm.parameters())))
        assert all(a.equal(b) for a, b in zip(*gradients))
        assert sorted(kept[0])[-2:] == [x.numel(), x.numel()]


def timm_layers() -> Any:
    timm()
    import timm.layers as layers

    return layers


MODULES = {
    "torch": (lambda: GroupNorm(2, 8, activation="silu"), lambda: nn.GroupNorm(2, 8), T.silu),
    "timm": (lambda: GroupNormAct(8, 4), lambda: timm_layers().GroupNormAct(8, 4), None),
    "timm, size": (
        lambda: GroupNormAct(8, group_size=4, act_layer="silu"),
        lambda: timm_layers().GroupNormAct(8, group_size=4, act_layer="silu"), None,
    ),
    "timm, drop": (
        lambda: GroupNormAct(8, 2, 1e-3, drop_layer=lambda: nn.Dropout(0.0)),
        lambda: timm_layers().GroupNormAct(8, 2, 1e-3, drop_layer=lambda: nn.Dropout(0.0)), None,
    ),
    "timm, one": (
        lambda: GroupNorm1Act(8, 1e-3), lambda: timm_layers().GroupNorm1Act(8, 1e-3), None,
    ),
    "timm, no act": (
        lambda: GroupNormAct(8, 2, apply_act=False),
        lambda: timm_layers().GroupNormAct(8, 2, apply_act=False), None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_modules(name: str) -> None:
    """Constructed as their models, with their checkpoints and numbers; scripted, copied, traced."""
    ours, theirs, after = MODULES[name]
    norm, model = ours(), theirs()
    for p in model.parameters():
        nn.init.normal_(p)
    norm.load_state_dict(model.state_dict())
    x = torch.randn(2, 8, 5, 5)
    want = model(x) if after is None else after(model(x))
    torch.testing.assert_close(norm(x), want)
    torch.testing.assert_close(copy.deepcopy(norm)(x), want)
    torch.testing.assert_close(torch.jit.script(norm)(x), want)
    traced = torch.fx.symbolic_trace(nn.Sequential(norm))
    assert [node.op for node in traced.graph.nodes] == ["placeholder", "call_module", "output"]
    torch.testing.assert_close(traced(x), want)
    torch.testing.assert_close(torch.fx.symbolic_trace(norm)(x), want)


def test_modulated_module() -> None:
    norm = GroupNorm(2, 8, activation="silu", bias=False)
    assert norm.bias is None
    x, scale, shift = torch.randn(2, 8, 5, 5), torch.randn(2, 8), torch.randn(2, 8)
    want = call(x, norm.weight, None, scale, shift, 2, "silu")
    torch.testing.assert_close(norm(x, scale, shift), want)
    torch.testing.assert_close(torch.jit.script(norm)(x, scale, shift), want)
    hooked: list[int] = []
    norm.act.register_forward_hook(lambda *_: hooked.append(1))
    torch.testing.assert_close(norm(x, scale, shift), want)
    assert hooked == [1]
    with pytest.raises(ValueError, match="group_size: 3 does not divide 8 channels"):
        GroupNormAct(8, group_size=3)
    with pytest.raises(ValueError, match="shift: expected one value"):
        norm(x, shift=shift[0])
