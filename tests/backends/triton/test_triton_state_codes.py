"""States in 8-bit codes in Triton: the functions, to the bit, and whole steps beside the reference.

test_state_code_kernels.py has the numbers of all backends. Compilation has processes of its own,
for the reason that helpers/compiling.py gives: this file, run as a script with a target's name.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedtrain.reference import optimizers
from fusedtrain.reference.optimizers import MAX_STATES
from fusedtrain.reference.state_codes import (
    GROUP,
    SIGNED,
    SQUARES,
    dequantise,
    is_codes,
    quantise,
)
from helpers import backends
from helpers.backends import HAS_GPU
from helpers.compiling import TARGETS, run, source_of
from helpers.optimizer_cases import BF16, F16, F32, F64, Case, Spec, bits
from helpers.optimizer_ops import BACKENDS
from helpers.optimizers import busy

triton = pytest.importorskip("triton", reason="triton is not installed")
import triton.language as tl  # noqa: E402

BOTH = [SIGNED, SQUARES]
quantised: Any = None  # imported by the tests, when it is known who interprets
dequantised: Any = None


def import_functions() -> None:
    global quantised, dequantised
    from fusedtrain.triton import state_codes

    quantised, dequantised = state_codes.quantise, state_codes.dequantise


@triton.jit
def codes_kernel(  # type: ignore[no-untyped-def]
    x_ptr, random_ptr, codes_ptr, scales_ptr, SIGNED: tl.constexpr, N: tl.constexpr
):
    at, group = tl.arange(0, N), tl.arange(0, N // 32)
    random = tl.load(random_ptr + group).to(tl.uint32)
    codes, scales = quantised(tl.load(x_ptr + at), random, SIGNED)
    tl.store(codes_ptr + at, codes)
    tl.store(scales_ptr + group, scales)


@triton.jit
def numbers_kernel(codes_ptr, scales_ptr, x_ptr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    at, group = tl.arange(0, N), tl.arange(0, N // 32)
    tl.store(x_ptr + at, dequantised(tl.load(codes_ptr + at), tl.load(scales_ptr + group)))


# --- the functions


def float_of(bits: int) -> float:
    return torch.tensor(bits, dtype=torch.int32).view(F32).item()


# Largest element of a group: the least scale and the number below, the largest scale and the one
# that is too large, ...
LARGEST = [
    float_of(0x0D800000), float_of(0x0D7FFFFF), float_of(0x7AFFFFFF), float_of(0x7B000000),
    float_of(1), 1e-39, 3e38, float("inf"), -float("inf"), float("nan"), -1.0, 0.0, -0.0,
]  # fmt: skip


# An element, its group's scale and the 13 bits of the chance with which both codes are as near.
TIES = {SIGNED: (float_of(0x3D138F80), 1.0, 6813), SQUARES: (131**2 / 2**14, 65025.0, 129)}


def groups_of_all_kinds() -> Tensor:
    """256 groups: random ones of all sizes, some with elements of all sizes, and LARGEST among
    zeros and among other numbers."""
    random = torch.Generator().manual_seed(5)
    x = torch.randn(256, GROUP, generator=random)
    x *= 2.0 ** torch.randint(-98, 110, (256, 1), generator=random)
    x[:64] *= 2.0 ** torch.randint(-40, 1, (64, GROUP), generator=random)
    x[64:80] *= torch.rand(16, GROUP, generator=random) < 0.3
    for i, largest in enumerate(LARGEST):
        x[80 + i], x[80 + i, i] = 0, largest
        x[100 + i] = torch.randn(GROUP, generator=random) * 1e-31
        x[100 + i, 31 - i] = largest
    return x


@pytest.mark.parametrize("dtype", BOTH, ids=str)
def test_quantised(dtype: torch.dtype) -> None:
    device = backends.BACKENDS["triton"]().device
    import_functions()
    x = groups_of_all_kinds()
    x = x.abs() if dtype == SQUARES else x
    random = torch.randint(0, 2**32, (256,), generator=torch.Generator().manual_seed(6))
    element, scale, chance = TIES[dtype]
    x[200] = 0
    x[200, 0], x[200, 1], random[200] = element, scale, chance << 19
    codes = torch.empty(x.numel(), dtype=dtype, device=device)
    scales = torch.empty(256, device=device)
    signed = dtype == SIGNED
    codes_kernel[(1,)](x.flatten().to(device), random.to(device), codes, scales, signed, x.numel())
    expected, expected_scales = quantise(x.flatten(), dtype, random)
    assert len(expected.unique()) == (255 if signed else 256)
    assert torch.equal(codes.cpu(), expected)
    assert torch.equal(scales.cpu().view(torch.int32), expected_scales.view(torch.int32))


@pytest.mark.parametrize("dtype", BOTH, ids=str)
def test_dequantised(dtype: torch.dtype) -> None:
    device = backends.BACKENDS["triton"]().device
    import_functions()
    codes = torch.arange(256).repeat(32).to(torch.uint8).view(dtype)
    scales = groups_of_all_kinds().abs().amax(1)
    x = torch.empty(codes.numel(), device=device)
    numbers_kernel[(1,)](codes.to(device), scales.to(device), x, codes.numel())
    expected = dequantise(codes, scales)
    assert torch.equal(x.cpu().isnan(), expected.isnan())
    assert torch.equal(x.cpu().nan_to_num(), expected.nan_to_num())


# --- steps


def with_codes(case: Case) -> Case:
    """The case with codes of random states: momenta first, then averages of squares."""
    states, random = case.states, torch.Generator().manual_seed(7)
    case.states = []
    for row, param in zip(case.rows, case.params):
        for k in range(MAX_STATES):
            if row[2 + k] < 0:
                continue
            old = states[row[2 + k]]
            values = torch.randn(old.shape, generator=random).to(torch.float32)
            state = torch.empty_like(param, dtype=F32).copy_(values.square() if k else values)
            row[2 + k] = len(case.states)
            if param.dtype == F64:
                case.states.append(old)
            else:
                case.states += quantise(state, SQUARES if k else SIGNED)
    return case


# Groups that end with the tensor or do not, in more than a chunk; three states; floats beside.
SPECS = [
    Spec((0,)),
    Spec((1,)),
    Spec((33,), F16, states=[0, 1]),
    Spec((6, 3, 5, 4), BF16, "channels_last", master=torch.int8, average=F32),
    Spec((9, 40), BF16, "transposed", group=1),
    Spec((8200,)),
    Spec((70,), F64),
]


def assert_close(case: Case, expected: Case) -> None:
    """Interpreted, no multiply is fused: codes and scales have the same bits. On a GPU a number may
    be rounded otherwise before it becomes a code."""
    for (name, ours), (_, theirs) in zip(case.written(), expected.written()):
        if name.startswith("states") and ours.dtype != F64 and not HAS_GPU:
            assert bits(ours) == bits(theirs), f"{name} {ours.dtype} {tuple(ours.shape)}"
        elif is_codes(ours):
            far = (ours.int() - theirs.int()).abs()
            assert far.numel() == 0 or far.max() <= 1, name
            assert (far > 0).sum() <= 1 + ours.numel() // 1000, f"{name}: {(far > 0).sum()}"
        else:
            eps = 2.0**-7 if ours.dtype in (F16, BF16) else 1e-5
            torch.testing.assert_close(ours, theirs, rtol=eps, atol=eps, msg=name)


@pytest.mark.parametrize(
    ("rule", "step"),
    [
        ("adam", {"measures": 7, "unit_factor": 0.3, "write_back": 1, "average_weight": 0.1}),
        ("lamb", {"measures": 7, "trial": 1, "stochastic": 1, "scale": 8.0, "max_norm": 60.0}),
    ],
    ids=["adam", "lamb"],
)
def test_steps(rule: str, step: dict[str, Any]) -> None:
    """Two, the second from the reference's states."""
    kernels = BACKENDS["triton"]()
    groups = [busy(rule), busy(rule, lr=0.02, cautious=1, sign=-1)]
    case = with_codes(Case(rule, SPECS, groups, seed=2**40 + 3, seed_high=9, **step))
    assert sum(map(is_codes, case.states)) > 2 * (len(SPECS) - 2)
    for _ in range(2):
        expected = case.clone()
        optimizers.optimizer_step(*expected.arguments(), None, None)
        before = [bits(t) for t in case.states]
        kernels.optimizer_step(*case.arguments(), None, None)
        assert_close(case, expected)
        assert sum(a != bits(t) for a, t in zip(before, case.states)) > len(before) / 2
        case = expected
        case.new_gradients()


def test_skipped_step() -> None:
    """No bit of codes and scales changes, those of groups beside an infinity neither."""
    kernels = BACKENDS["triton"]()
    case = with_codes(Case("adam", SPECS, [busy("adam")] * 2, measures=7, found_inf=0.0))
    case.grads[5][77] = float("inf")
    before = [(name, bits(t)) for name, t in case.written() if name != "control"]
    kernels.optimizer_step(*case.arguments(), None, None)
    assert case.control[0] == 1
    assert before == [(name, bits(t)) for name, t in case.written() if name != "control"]


def test_scales_that_moved() -> None:
    """The tables that are kept from step to step are those of other addresses."""
    kernels = BACKENDS["triton"]()
    case = with_codes(Case("sgd", [Spec((70,), states=[0])], [busy("sgd")], measures=7))
    for _ in range(2):
        expected, old = case.clone(), case.states[1]
        optimizers.optimizer_step(*expected.arguments(), None, None)
        kernels.optimizer_step(*case.arguments(), None, None)
        assert_close(case, expected)
        case.states[1] = old.clone()
        old.fill_(float("nan"))


def test_errors() -> None:
    kernels = BACKENDS["triton"]()
    case = with_codes(Case("sgd", [Spec((40,))], [busy("sgd")]))
    codes, scales = case.states
    before = [bits(t) for _, t in case.written()]
    for states, match in (
        ([codes], "index of scales"),
        ([codes, scales[:1]], "a scale for each group of 32"),
        ([codes, scales.double()], "scales"),
        ([codes, scales.repeat(2)[::2]], "scales"),
        ([codes.repeat(2)[::2], scales], "same shape and strides"),
        ([codes.to(torch.int16), scales], "state must be float32"),
    ):
        broken = case.clone()
        broken.states = states
        with pytest.raises(RuntimeError, match=match):
            kernels.optimizer_step(*broken.arguments(), None, None)
    broken = case.clone()
    broken.params, broken.grads = [case.params[0].double()], [case.grads[0].double()]
    with pytest.raises(RuntimeError, match="float64 parameters cannot be codes"):
        kernels.optimizer_step(*broken.arguments(), None, None)
    assert before == [bits(t) for _, t in case.written()]


# --- the compiled code


@pytest.mark.parametrize(
    "target", ["sm_90", *(pytest.param(t, marks=pytest.mark.long) for t in ("sm_80", "gfx942"))]
)
def test_code(target: str, tmp_path: Path) -> None:
    run(__file__, target, TRITON_CACHE_DIR=str(tmp_path))


def compiled_for(target: str, kernel: Any, constants: tuple[Any, ...], codes: str) -> str:
    """PTX, or the assembly of AMD."""
    from triton.backends.compiler import GPUTarget

    from fusedtrain.triton.launch import _OPTIONS

    names = {"codes_ptr": codes, "random_ptr": "i64"}
    source = source_of(kernel, constants, lambda name: names.get(name, "fp32"))
    compiled = triton.compile(source, target=GPUTarget(*TARGETS[target]), options=dict(_OPTIONS))
    return compiled.asm["ptx" if "ptx" in compiled.asm else "amdgcn"]


def check_target(target: str) -> None:
    """No sum follows a product that is not exact, divisions and roots are those of IEEE."""
    import_functions()
    for signed, name, divisions in ((True, "i8", 8), (False, "u8", 1)):
        code = compiled_for(target, codes_kernel, (signed, 1024), name)
        numbers = compiled_for(target, numbers_kernel, (1024,), name)
        if target == "gfx942":
            # Four elements of a thread at once, in two turns or in one.
            assert code.count("v_div_fixup_f32") >= min(4, divisions)
            continue
        assert "fma" not in numbers
        assert code.count("fma.rn.f32") == (0 if signed else 8)  # chance * (2 k + 1) + k * k
        products = set(re.findall(r"mul(?:\.rn)?\.f32 \t?(%\w+),", code))
        sums = re.findall(r"(?:add|sub)(?:\.rn)?\.f32 \t?%\w+, (%?\w+), (%?\w+);", code)
        assert products
        assert sums
        assert not products & {operand for pair in sums for operand in pair}
        assert len(re.findall(r"div\.rn\.f32", code)) >= divisions
        assert not re.findall(r"div\.(?:full|approx)|sqrt\.approx|\.ftz", code + numbers)
        assert code.count("sqrt.rn.f32") == (0 if signed else 8)
        assert numbers.count("div.rn.f32") == (8 if signed else 0)


if __name__ == "__main__":
    check_target(sys.argv[1])
