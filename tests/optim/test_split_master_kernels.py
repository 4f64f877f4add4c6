"""Split master weights in the kernels of every backend: float32 masters in fewer bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fusedtrain.reference.split_weights import join_weights, split_weights
from helpers.optimizer_cases import BF16, F16, F32, Case, Spec, bits
from helpers.optimizer_ops import BACKENDS, EVERY_BACKEND
from helpers.optimizers import busy

I8, I16 = torch.int8, torch.int16
# A master of a finite weight is at most so far from it, relative to the weight; of float16 ones
# below 2^-14, in parts of 2^-14. Half a unit, or one where a tie is clamped.
FAR = {(BF16, I16): 0.0, (BF16, I8): 2.0**-16, (F16, I16): 2.0**-26, (F16, I8): 2.0**-18}
PAIRS = list(FAR)
IDS = ["bfloat16-32", "bfloat16-24", "float16-32", "float16-24"]
SHAPES = ((0,), (1,), (17,), (6, 3, 5, 4), (4200,))  # the last: more than a chunk of CUDA
EDGES = torch.tensor(
    [
        0x00000000, 0x00000001, 0x00007FFF, 0x00008000, 0x00018000, 0x3F807FFF, 0x3F808000,
        0x3F808001, 0x3F818000, 0x3F80007F, 0x3F800080, 0x3F7FFFFF, 0x3F7FF7FF, 0x7F7FFFFF,
        0x7F7F7FFF, 0x7F7F8000, 0x7F800000, 0x7FC00000, 0x33000000, 0x33000001, 0x387FE000,
        0x477FE000, 0x477FEFFF,
    ],
    dtype=torch.int32,
)  # fmt: skip


@pytest.fixture(params=EVERY_BACKEND)
def ops(request: pytest.FixtureRequest) -> Any:
    return EVERY_BACKEND[request.param]()


def weights_of_all_sizes(count: int = 20000) -> Tensor:
    """Random bits of float32 and the edges, of both signs."""
    random = torch.Generator().manual_seed(3)
    some = torch.randint(-(2**31), 2**31, (count,), generator=random).to(torch.int32)
    edges = torch.cat([EDGES, EDGES | -(2**31)])
    return torch.cat([edges, some]).view(F32)


def has_correction(weights: Tensor, dtype: torch.dtype, correction: torch.dtype) -> Tensor:
    """Whether the nearest parameter is finite, and of bfloat16 not 0."""
    if dtype == F16:
        return weights.abs() < 65520
    magnitude = weights.abs().view(torch.int32)
    cut = 0x80 if correction == I8 else 0  # half of what the nearest 24 bits leave out
    return (magnitude >= 0x8000 - cut) & (magnitude < 0x7F7F8000 - cut)


def error(joined: Tensor, weights: Tensor, dtype: torch.dtype, correction: torch.dtype) -> float:
    """The largest distance of weights, relative to them."""
    inside = has_correction(weights, dtype, correction)
    true = weights[inside].double()
    least = 2.0**-14 if dtype == F16 else 2.0**-126
    return ((joined[inside].double() - true).abs() / true.abs().clamp(min=least)).max().item()


@pytest.mark.parametrize(("dtype", "correction"), PAIRS, ids=IDS)
def test_splitting_and_joining(dtype: torch.dtype, correction: torch.dtype) -> None:
    """The reference, over float32 numbers of all sizes."""
    weights = weights_of_all_sizes(500000)
    param, low = split_weights(weights, dtype, correction)
    assert (param.dtype, low.dtype) == (dtype, correction)
    joined = join_weights(param, low)
    assert error(joined, weights, dtype, correction) <= FAR[dtype, correction]
    exact = weights.isinf()
    assert torch.equal(joined.isnan(), weights.isnan())
    if correction == I16 and dtype == BF16:
        magnitude = weights.abs().view(torch.int32)
        exact = ((magnitude >= 0x8000) & (magnitude < 0x7F7F8000)) | (weights == 0) | exact
    elif correction == I16:  # the spacing of float32 is above that of corrections
        exact = (weights.abs() >= 2.0**-14) & (weights.abs() < 65520)
    assert torch.equal(joined[exact].view(torch.int32), weights[exact].view(torch.int32))
    nearest = joined.to(dtype)
    if dtype == BF16:  # ties away from 0
        rounded = (joined.view(torch.int32).to(torch.int64) + 0x8000) >> 16
        nearest = rounded.to(I16).view(BF16)
    same = (param == nearest) | param.isnan()
    assert same.all()


@pytest.mark.parametrize(("dtype", "correction"), PAIRS, ids=IDS)
def test_a_step_of_zero_changes_no_bit(
    ops: Any, dtype: torch.dtype, correction: torch.dtype
) -> None:
    weights = weights_of_all_sizes(1000)
    weights = weights[(weights > 0) | (weights.to(dtype) != 0)]  # -0 - 0 may be 0
    spec = Spec((len(weights),), dtype, master=correction, states=())
    case = Case("sgd", [spec], [{"lr": 0.5}], measures=0)
    case.params[0], case.masters[0] = split_weights(weights, dtype, correction)
    if correction == I8 and dtype == F16:  # any code that a step has left
        assert case.masters[0].abs().max() == 127
    case.grads[0].zero_()
    before = bits(case.params[0][~weights.isnan()]), bits(case.masters[0])
    ops.optimizer_step(*case.arguments(), None, None)
    assert (bits(case.params[0][~weights.isnan()]), bits(case.masters[0])) == before
    assert torch.equal(case.params[0].isnan(), weights.isnan())


def pairs_of(rule: str, dtype: torch.dtype, correction: torch.dtype, **step: Any) -> Case:
    """Each shape with a float32 master, then each with a correction, of the same numbers."""
    layouts = ["channels_last" if len(s) == 4 else "contiguous" for s in SHAPES]
    layouts[2] = "offset"
    specs = [
        Spec(s, dtype, layout, master=m, average=F32, state_dtype=F32)
        for m in (True, correction)
        for s, layout in zip(SHAPES, layouts)
    ]
    return Case(rule, specs, [busy(rule)], **step)


def equal_halves(case: Case) -> None:
    """Copies the gradients of the first half to the second."""
    n = len(SHAPES)
    for i in range(n):
        case.grads[n + i].copy_(case.grads[i])


STEPS: dict[str, dict[str, Any]] = {
    "amp": {"scale": 256.0, "measures": 7, "average_weight": 0.1, "write_back": 1},
    "units": {"measures": 7, "unit_factor": 0.1},
    "trial": {"measures": 7, "trial": 1, "write_back": 2},
}


# Triton is interpreted: of each pair one step.
STEPS_OF_RULES = [("adam", "amp"), ("adam", "units"), ("lamb", "trial"), ("adam", "amp")]
CASES = [
    pytest.param(
        backend, *pair, *step, id=f"{backend}-{name}-{'-'.join(step)}",
        marks=pytest.mark.long if backend == "triton" and step != STEPS_OF_RULES[i] else (),
    )
    for backend in EVERY_BACKEND
    for i, (pair, name) in enumerate(zip(PAIRS, IDS, strict=True))
    for step in STEPS_OF_RULES[:3]
]  # fmt: skip


@pytest.mark.parametrize(("ops", "dtype", "correction", "rule", "step"), CASES, indirect=["ops"])
def test_steps_beside_float32_masters(
    ops: Any, dtype: torch.dtype, correction: torch.dtype, rule: str, step: str
) -> None:
    """From equal weights, twice: the sweep over parameters, norms, trials, averages."""
    case, n = pairs_of(rule, dtype, correction, **STEPS[step]), len(SHAPES)
    for _ in range(2):
        for i in range(n):
            case.masters[i].copy_(join_weights(case.params[n + i], case.masters[n + i]))
            for k in range(len(case.states) // (2 * n)):
                each = len(case.states) // (2 * n)
                case.states[each * (n + i) + k].copy_(case.states[each * i + k])
            case.averages[n + i].copy_(case.averages[i])
        case.new_gradients()
        equal_halves(case)
        before = [t.clone() for t in case.params]
        sums = ops.optimizer_step(*case.arguments(), None, None)
        torch.testing.assert_close(sums[:n], sums[n:], rtol=0, atol=0)
        for i in range(n):
            master, low = case.masters[i], case.masters[n + i]
            joined = join_weights(case.params[n + i], low)
            if master.numel():
                assert error(joined, master, dtype, correction) <= FAR[dtype, correction]
            if (dtype, correction) == (BF16, I16):
                assert torch.equal(joined, master)
            assert torch.equal(case.averages[i], case.averages[n + i])
            assert torch.equal(case.grads[i], case.grads[n + i])
            if master.numel() > 1000:
                assert not torch.equal(case.params[n + i], before[n + i])
                assert low.to(F32).std() > 20
                # Equal but for ties, and where 24 bits round twice.
                assert (case.params[i] != case.params[n + i]).double().mean() < 0.02


@pytest.mark.parametrize("write_back", [0, 2])
@pytest.mark.parametrize(("dtype", "correction"), PAIRS, ids=IDS)
def test_a_skipped_step_changes_no_bit(
    ops: Any, dtype: torch.dtype, correction: torch.dtype, write_back: int
) -> None:
    step = {"measures": 7, "average_weight": 0.1, "write_back": write_back, "stochastic": 1.0}
    case = pairs_of("adam", dtype, correction, scale=8.0, **step)
    case.grads[-1].view(-1)[5] = float("inf")
    kept = ("params", "masters", "states", "averages", "scalars")
    before = {name: bits(t) for name, t in case.written() if name.startswith(kept)}
    ops.optimizer_step(*case.arguments(), None, None)
    assert case.control[0] == 1
    assert before == {name: bits(t) for name, t in case.written() if name.startswith(kept)}


def test_stochastic_rounding_of_24_bits(ops: Any) -> None:
    """The bits of the reference: up or down by the random numbers, and without bias."""
    results = []
    for op in (ops, BACKENDS["reference"]()):
        spec = Spec((40000,), BF16, master=I8, states=())
        case = Case("sgd", [spec], [{"lr": 1.0}], measures=0, stochastic=1, seed=12345)
        weights = torch.full((40000,), 1.0 + 2.0**-9)
        case.params[0], case.masters[0] = split_weights(weights, BF16, I8)
        case.grads[0].fill_(-(2.0**-17))  # a quarter of a unit of 2^-15
        op.optimizer_step(*case.arguments(), None, None)
        results.append((case.params[0], case.masters[0]))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    moved = (join_weights(*results[0]).double() - (1.0 + 2.0**-9)) * 2**15
    assert set(moved.tolist()) == {0.0, 1.0}
    assert abs(moved.mean().item() - 0.25) < 0.01  # four standard errors


@pytest.mark.launches_nothing("a call that is refused")
def test_what_is_no_correction(ops: Any) -> None:
    for dtype, master, words in ((F32, I16, "16-bit"), (BF16, torch.int32, "int16 or int8")):
        case = Case("sgd", [Spec((5,), dtype, master=True, states=())], [{}])
        case.masters[0] = case.masters[0].to(master)
        if getattr(ops, "is_reference", False):
            continue  # plain torch checks shapes only
        with pytest.raises(RuntimeError, match=words):
            ops.optimizer_step(*case.arguments(), None, None)
