"""One table of cases for the kernels of the pointwise chains of every backend, against the formulas
in float64: numbers, layouts, halves of packed tensors, sums, masks.

test_chains.py has the functions.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fusedtrain.ops.bias_act import BOUNDED
from fusedtrain.reference.channels import spread
from fusedtrain.reference.philox import keep_mask, philox
from fusedtrain.reference.pointwise import Pointwise
from helpers.activations import DTYPES
from helpers.backends import Kernels, placed, same_bits
from helpers.batch_norm import EXACT, FORMULAS, last
from helpers.launches import parameters

pytestmark = pytest.mark.usefixtures("memory_is_full_of_nan")

F32, F64, F16, BF16 = DTYPES
# Errors relative to one plus the size of the number, forward; backward differentiates an output
# that was rounded.
LIMITS = {F32: 2e-6, F64: 1e-13, F16: 1.5e-3, BF16: 1.2e-2}
SEED = torch.tensor([0x1234_5678_9ABC_DEF1, -0x0FED_CBA9_8765_4321])


def close(result: Tensor, want: Tensor, dtype: torch.dtype, times: float = 1.0) -> None:
    result, want = result.double().cpu(), want.double().cpu()
    assert result.shape == want.shape
    assert torch.equal(result.isnan(), want.isnan())
    error = ((result - want).abs() / (1 + want.abs())).nan_to_num()
    assert not error.numel() or error.max() <= times * LIMITS[dtype], error.max()


def close_sums(sums: Tensor, terms: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    """Sums of so many terms: errors grow like the root of their number."""
    assert sums.dtype is (F64 if dtype is F64 else F32)
    scale = terms.double().cpu().square().sum().sqrt() + 1
    error = (sums.double().cpu() - want).abs().max() / scale if want.numel() else 0
    assert error <= (1e-13 if dtype is F64 else 4e-6), error


def autograd(function: object, *tensors: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """The truth, which is computed on the CPU."""
    inputs = [t.detach().cpu().double().requires_grad_() for t in tensors]
    output = function(*inputs)  # type: ignore[operator]
    return (output.detach(), *torch.autograd.grad(output, inputs, grad.cpu().double()))


def smooth(name: str) -> bool:
    """Whether rounding cannot put a number on the other side of a jump."""
    return name not in (
        "hardtanh", "hardshrink", "softshrink", "threshold", "relu6", "hardswish", "hardsigmoid",
    )  # fmt: skip


# --- gated products ---

PACKED = {
    "rows": lambda: (torch.randn(5, 34), 1),
    "a row": lambda: (torch.randn(40_002), 0),
    "long rows": lambda: (torch.randn(3, 40_000), 1),
    # Several tiles of Triton and a rest: of 16 bytes, of 8, of 4 and of single elements.
    **{
        f"rows of {n}": lambda n=n: (torch.randn(2, 2 * n + 8)[:, : 2 * n], 1)
        for n in (2064, 1036, 2050, 1027)
    },
    "tokens": lambda: (torch.randn(2, 7, 48), 2),
    "planes": lambda: (torch.randn(3, 10, 5, 7), 1),
    "channels last": lambda: (last(3, 10, 5, 7), 1),
    "channels last, aligned": lambda: (last(3, 32, 5, 7), 1),
    "first dimension": lambda: (torch.randn(6, 5, 3), 0),
    "middle of a transposed one": lambda: (torch.randn(6, 8, 5).transpose(0, 2), 1),
    "sliced": lambda: (torch.randn(7, 40)[:, 1:35], 1),
    "expanded": lambda: (torch.randn(1, 12).expand(5, 12), 1),
    "empty": lambda: (torch.randn(0, 12), 1),
    "nothing": lambda: (torch.randn(4, 0), 1),
}


def check_gated(
    ops: Kernels, name: str, gate: Tensor, value: Tensor, packed: Tensor | None, dim: int
) -> None:
    activation, dtype = FORMULAS[name], value.dtype
    grad = torch.randn(value.shape).to(ops.device, dtype)
    exact = EXACT[name]
    want, *wanted = autograd(lambda g, v: exact(g) * v, gate, value, grad=grad)
    output = ops("gated", gate, value, *activation)
    close(output, want, dtype)
    if ops.kernel:
        assert output.stride() == torch.empty_like(value).stride()
    if packed is None:
        outs = [torch.empty_like(gate), torch.empty_like(value)]
    else:
        outs = list(torch.full_like(packed, float("nan")).chunk(2, dim))
    kept = [t.clone() for t in (grad, gate, value)]
    ops("gated_backward", grad, gate, value, *outs, *activation)
    assert all(map(torch.equal, kept, (grad, gate, value)))
    close(outs[1], wanted[1], dtype, 2)
    if smooth(name):
        close(outs[0], wanted[0], dtype, 8)


@pytest.mark.parametrize("name", FORMULAS)
def test_every_gate(ops: Kernels, name: str) -> None:
    for i, dtype in enumerate(DTYPES):
        if ops.slow and i % 2 == len(name) % 2:
            continue
        x = torch.randn(5, 38).to(ops.device, dtype)
        check_gated(ops, name, *x.chunk(2, 1), x, 1)


@pytest.mark.parametrize("kind", parameters(PACKED, "empty", "nothing"))
def test_every_packing(ops: Kernels, kind: str) -> None:
    for i, dtype in enumerate(DTYPES):
        whole, dim = PACKED[kind]()
        if ops.slow and whole.numel() > 10_000:
            pytest.skip("slow where it is emulated or interpreted: needs a GPU")
        if ops.slow and i % 2:
            continue
        x = placed(whole, ops.device, dtype)
        gate, value = x.chunk(2, dim)
        check_gated(ops, ("silu", "relu", "gelu", "identity")[i], gate, value, x, dim)
        check_gated(ops, "sigmoid", value, gate, None, dim)


def test_gate_and_value_in_different_layouts(ops: Kernels) -> None:
    gate, value = torch.randn(3, 6, 5, 4), last(3, 6, 5, 4)
    for pair in ((gate, value), (value, gate), (torch.randn(3, 12, 5, 4)[:, ::2], value)):
        check_gated(ops, "silu", *(placed(t, ops.device) for t in pair), None, 1)


# --- scaled sums ---

# Several tiles of Triton, the last cut off.
TILED: dict[str, Callable[[], Tensor]] = {
    "planes of tiles": lambda: torch.randn(2, 2, 2050),
    "planes of tiles of units": lambda: torch.randn(2, 3, 1032),
    "tiles of channels last": lambda: torch.randn(2, 4, 1036).transpose(1, 2),
    "tiles of few pixels": lambda: torch.randn(4, 300, 7),
}
# shape, dimension of the channels, whether samples have scales of their own
SCALED = {
    "planes": (lambda: torch.randn(3, 5, 6, 7), 1, True),
    "large planes": (lambda: torch.randn(2, 3, 130, 150), 1, True),
    "small planes": (lambda: torch.randn(3, 20, 2, 2), 1, True),
    **{kind: (make, 1, i % 2 == 0) for i, (kind, make) in enumerate(TILED.items())},
    "channels last": (lambda: last(3, 20, 6, 7), 1, True),
    "many channels last": (lambda: last(2, 700, 3, 3), 1, True),
    "odd channels last": (lambda: last(3, 7, 6, 7), 1, True),
    "few samples": (lambda: last(1, 24, 40, 40), 1, True),
    "layer scale of planes": (lambda: torch.randn(3, 5, 6, 7), 1, False),
    "layer scale of tokens": (lambda: torch.randn(3, 9, 24), 2, False),
    "and drop path": (lambda: torch.randn(3, 9, 24), 2, True),
    "drop path": (lambda: torch.randn(5, 9, 7), -1, True),
    "drop path, channels last": (lambda: last(5, 8, 4, 4), -1, True),
    "one number": (lambda: torch.randn(5, 9, 7), -1, False),
    "middle": (lambda: torch.randn(2, 3, 8, 5), 2, True),
    "samples inside": (lambda: torch.randn(8, 5, 6).permute(1, 0, 2), 2, True),
    "channels outside": (lambda: torch.randn(5, 8, 6).transpose(0, 1), 1, False),
    "sliced": (lambda: torch.randn(3, 9, 50)[:, :, 1:25], 2, True),
    "samples and channels": (lambda: torch.randn(7, 40), 1, True),
    "one dimension": (lambda: torch.randn(40), 0, False),
    "no dimension": (lambda: torch.randn(()), -1, False),
    "empty": (lambda: torch.randn(0, 6, 3), 1, True),
    "no plane": (lambda: torch.randn(2, 6, 0), 1, True),
}


@pytest.mark.parametrize("kind", parameters(SCALED, "empty", "no plane"))
def test_every_scale(ops: Kernels, kind: str) -> None:
    make, dim, per_sample = SCALED[kind]
    for i, dtype in enumerate(DTYPES):
        x = placed(make(), ops.device, dtype)
        if ops.slow and x.numel() > 10_000:
            pytest.skip("slow where it is emulated or interpreted: needs a GPU")
        if ops.slow and i % 2 == len(kind) % 2:
            continue
        samples = x.shape[0] if per_sample else 1
        scale = torch.randn(samples, x.shape[dim] if dim >= 0 else 1).to(ops.device, dtype)
        residual, grad = (torch.randn(x.shape).to(ops.device, dtype) for _ in "ab")
        added = residual.cpu().double()
        want, want_x, want_scale = autograd(
            lambda x, s, r=added, d=dim: x * spread(s, x, d) + r, x, scale, grad=grad
        )
        close(ops("scale_add", x, scale, residual, dim), want, dtype)
        plain = ops("scale_add", x, scale, None, dim)
        close(plain, want - added, dtype)
        grad_x, sums = ops("scale_add_backward", grad, x, scale, dim, True)
        close(grad_x, want_x, dtype)
        close_sums(sums, grad.cpu().double() * x.cpu().double(), want_scale, dtype)
        if ops.kernel:
            assert plain.stride() == grad_x.stride() == torch.empty_like(x).stride()
        only, nothing = ops("scale_add_backward", grad, None, scale, dim, True)
        assert same_bits(only.contiguous(), grad_x.contiguous())
        assert nothing.numel() == 0
        nothing, again = ops("scale_add_backward", grad, x, scale, dim, False)
        assert nothing.numel() == 0
        assert same_bits(again, sums)


SPREAD = {
    kind: make
    for kind, (make, dim, each) in SCALED.items()
    if dim == 1 and each and make().dim() > 2
}
GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "in order": lambda gate: gate,
    "sliced": lambda gate: torch.stack([gate, gate], -1)[..., 0],
    "channels outside": lambda gate: gate.transpose(0, 1).contiguous().transpose(0, 1),
}


@pytest.mark.parametrize("kind", parameters(SPREAD, "empty"))
def test_every_gate_over_space(ops: Kernels, kind: str) -> None:
    names = itertools.cycle(("sigmoid", "silu", "identity", "hardsigmoid", "leaky_relu"))
    for dtype, lay_out in itertools.product(DTYPES, GATES):
        value = placed(SPREAD[kind](), ops.device, dtype)
        if ops.slow and value.numel() > 10_000:
            pytest.skip("slow where it is emulated or interpreted: needs a GPU")
        if ops.slow and lay_out == "sliced":
            continue
        name = next(names)
        exact, activation = EXACT[name], FORMULAS[name]
        gate = torch.randn(*value.shape[:2], *[1] * (value.dim() - 2)).to(ops.device, dtype)
        gate = GATES[lay_out](gate)
        # A kernel rounds what the gate becomes to the dtype, as eager torch does.
        grad = torch.randn(value.shape).to(ops.device, dtype)
        want, want_gate, want_value = autograd(
            lambda g, v, exact=exact: exact(g) * v, gate, value, grad=grad
        )
        output = ops("gated_spread", gate, value, *activation)
        close(output, want, dtype, 2)
        grad_gate, grad_value = ops("gated_spread_backward", grad, gate, value, *activation, True)
        close(grad_value, want_value, dtype, 2)
        assert grad_gate.dtype is dtype
        assert grad_gate.shape == gate.shape
        if smooth(name):
            size = (
                (grad.double() * value.double()).flatten(2).norm(dim=2).max().item()
                if value.numel()
                else 0
            )
            close(grad_gate / (1 + size), want_gate / (1 + size), dtype, 8)
        if ops.kernel:
            assert output.stride() == grad_value.stride() == torch.empty_like(value).stride()
        nothing, only = ops("gated_spread_backward", grad, gate, None, *activation, True)
        assert same_bits(only.contiguous(), grad_value.contiguous())
        assert nothing.numel() == 0
        again, nothing = ops("gated_spread_backward", grad, gate, value, *activation, False)
        assert nothing.numel() == 0
        assert same_bits(again, grad_gate)


# --- bias, activation, gain, clamp, dropout ---

BIASED = {
    "planes": (lambda: torch.randn(3, 5, 6, 7), 1),
    "large planes": (lambda: torch.randn(2, 3, 130, 150), 1),
    **{kind: (make, 1) for kind, make in TILED.items()},
    "channels last": (lambda: last(3, 16, 6, 7), 1),
    "odd channels last": (lambda: last(3, 7, 6, 7), 1),
    "tokens": (lambda: torch.randn(3, 9, 24), 2),
    "many features": (lambda: torch.randn(9, 1500), 1),
    "middle": (lambda: torch.randn(2, 3, 8, 5), 2),
    "one dimension": (lambda: torch.randn(40), 0),
    "first": (lambda: torch.randn(5, 6, 7), 0),
    "sliced": (lambda: torch.randn(3, 9, 50)[:, :, 1:25], 2),
    "empty": (lambda: torch.randn(0, 6, 3), 1),
}
FINISHES = [
    (1.0, -1.0, 0.0),
    (2**0.5, -1.0, 0.0),
    (2.0, 0.5, 0.0),
    (1.0, -1.0, 0.3),
    (-0.5, -1.0, 0.75),
]


def check_bias(
    ops: Kernels,
    name: str,
    x: Tensor,
    dim: int,
    finish: tuple[float, float, float],
    has_bias: bool = True,
) -> None:
    activation, dtype = FORMULAS[name], x.dtype
    gain, clamp, p = finish
    bias = torch.randn(x.shape[dim]).to(ops.device, dtype) if has_bias else None
    grad = torch.randn(x.shape).to(ops.device, dtype)
    rest = (dim, *activation, gain, clamp, p)
    mask = torch.ones(x.shape, dtype=F64)
    if p:
        mask = keep_mask(SEED, p, x.cpu()).double() / (1 - p)
    exact = EXACT[name]

    def function(x: Tensor, b: Tensor) -> Tensor:
        y = exact(x + spread(b[None], x, dim)) * gain
        return (y.clamp(-clamp, clamp) if clamp >= 0 else y) * mask

    zeros = torch.zeros(x.shape[dim])
    want, want_x, want_bias = autograd(function, x, zeros if bias is None else bias, grad=grad)
    seed = SEED.to(ops.device)
    output = ops("bias_act", x, bias, seed, None, *rest)
    close(output, want, dtype, 2)
    residual = torch.randn(x.shape).to(ops.device, dtype)
    added = ops("bias_act", x, bias, seed, residual, *rest)
    close(added, want + residual.cpu().double(), dtype, 2)
    if ops.kernel:
        assert added.stride() == output.stride()
    dropped = mask == 0
    assert (output.cpu()[dropped] == 0).all()
    assert torch.equal(added.cpu()[dropped], residual.cpu()[dropped])
    saved = output if activation.saves_output else x
    if (clamp >= 0 and dtype in (F16, BF16)) or not smooth(name):
        return  # a rounded number may be on the other side of the bound
    gx, sums = ops("bias_act_backward", grad, saved, bias, seed, *rest, True)
    close(gx, want_x, dtype, 16)
    if dtype in (F32, F64):
        close_sums(sums.view(-1), want_x, want_bias, dtype)
    again, nothing = ops("bias_act_backward", grad, saved, bias, seed, *rest, False)
    assert same_bits(again, gx)
    assert nothing.numel() == 0


@pytest.mark.parametrize("name", FORMULAS)
def test_every_activation(ops: Kernels, name: str) -> None:
    bounded = FORMULAS[name].op in BOUNDED
    for i, dtype in enumerate(DTYPES):
        finish = FINISHES[0 if bounded else (i + len(name)) % len(FINISHES)]
        if ops.slow and i % 2 == len(name) % 2:
            continue
        check_bias(ops, name, torch.randn(3, 6, 5, 4).to(ops.device, dtype), 1, finish)


@pytest.mark.parametrize("kind", parameters(BIASED, "empty"))
def test_every_bias(ops: Kernels, kind: str) -> None:
    make, dim = BIASED[kind]
    for i, dtype in enumerate(DTYPES):
        for j, finish in enumerate(FINISHES):
            x = placed(make(), ops.device, dtype)
            if ops.slow and x.numel() > 10_000:
                pytest.skip("slow where it is emulated or interpreted: needs a GPU")
            if ops.slow and (i + j) % 4:
                continue
            name = ("gelu", "leaky_relu", "identity", "silu", "relu")[(i + j) % 5]
            check_bias(ops, name, x, dim, finish, has_bias=(i + j) % 3 > 0)


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("name", ["leaky_relu", "silu"])
def test_gradients_of_clamped_outputs(ops: Kernels, name: str, p: float) -> None:
    """Cases that save the output, or the input."""
    for dtype in (F32, F64):
        check_bias(ops, name, torch.randn(3, 6, 5, 4).to(ops.device, dtype), 1, (2.0, 0.5, p))


def test_masks_are_those_of_the_stream(ops: Kernels) -> None:
    """The same for every backend and dtype; a number for each element, in the order of memory."""
    words = philox(SEED, 2504).tolist()
    numbers = torch.tensor([
        word if k < 4 else (word << 16 | word >> 16) & 0xFFFFFFFF
        for i in range(5003)
        for k in (i % 8,)
        for word in (words[i // 8 * 4 + k % 4],)
    ])  # fmt: skip
    # These numbers, of a word and of exchanged halves, are kept, and then not.
    edges = [int(numbers[i] + j) / 2**32 for i in (11, 14) for j in (0, 1)]
    for dtype in DTYPES[:: 2 if ops.slow else 1]:
        probabilities = edges[1:3] if ops.slow else (0.1, *edges)
        for p, count in itertools.product(probabilities, (5003, 5000, 4996)):
            # 5000 and 4996 are whole vectors.
            x = torch.ones(count).to(ops.device, dtype)
            rest = (-1, *Pointwise(), 1.0, -1.0, p)
            output = ops("bias_act", x, None, SEED.to(ops.device), None, *rest).cpu()
            kept = numbers[:count] >= int(p * 2**32)
            assert torch.equal(output != 0, kept)
            residual = (torch.arange(count) % 7).to(ops.device, dtype)
            added = ops("bias_act", x, None, SEED.to(ops.device), residual, *rest).cpu()
            assert torch.equal(added != residual.cpu(), kept)
            close(added, kept.double() / (1 - p) + residual.cpu(), dtype)
            grads, _ = ops("bias_act_backward", x, x, None, SEED.to(ops.device), *rest, False)
            assert torch.equal(grads.cpu() != 0, kept)
            # Elements from an odd one on: vectors of a kernel do not begin where blocks do.
            odd = torch.ones(17, 3).to(ops.device, dtype)[1:]
            part = ops("bias_act", odd, None, SEED.to(ops.device), None, *rest)
            assert torch.equal(part.cpu().flatten() != 0, kept[:48])
            if count % 2 == 0:
                continue
            # Runs that begin and end within blocks, of channels that are first or last.
            for shape, dim in (((7, 29, 21), 1), ((7, 21, 29), 2)):
                x, bias = torch.ones(shape).to(ops.device, dtype), torch.zeros(29)
                part = ops("bias_act", x, bias.to(x), SEED.to(ops.device), None, dim, *rest[1:])
                assert torch.equal(part.cpu().flatten() != 0, kept[: x.numel()])


def test_philox_has_the_published_words() -> None:
    """Known answers of Random123's kat_vectors for philox4x32-10."""
    zeros = philox(torch.tensor([0, 0]), 4).tolist()
    assert zeros == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
