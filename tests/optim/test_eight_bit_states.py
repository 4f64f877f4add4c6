"""Optimizers with `state_dtype="q8"`: single steps, long runs, other options, wrong checkpoints.

Checkpoints and copies that go on bit for bit: test_small_states.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedtrain
from fusedtrain.optim import _codes, _plan
from fusedtrain.optim._codes import floats
from fusedtrain.reference.state_codes import quantise
from helpers.optimizer_steps import (
    ALL,
    alike,
    assert_same_bits,
    give_gradients,
    memory,
    parameters,
    saved_and_loaded,
    steps,
)
from helpers.optimizers import make

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
I8, U8 = torch.int8, torch.uint8
SQUARES = {"exp_avg_sq", "square_avg", "sum"}


pytestmark = pytest.mark.usefixtures("codes_of_small_parameters")


def coded(state: dict[str, Any]) -> dict[str, Tensor]:
    """The states of a parameter that are codes."""
    return {k: v for k, v in state.items() if isinstance(v, Tensor) and v.dtype in (I8, U8)}


def spacing(values: Tensor, name: str) -> Tensor:
    """The documented bound of the error of a stored state, of a dense tensor of any length."""
    flat = values.as_strided((values.numel(),), (1,)).double()
    padded = torch.zeros((len(flat) + 31) // 32 * 32, dtype=F64)
    padded[: len(flat)] = flat.abs()
    largest = padded.view(-1, 32).amax(1).repeat_interleave(32)[: len(flat)].clamp(min=1e-300)
    if name in SQUARES:  # of the root
        return largest.sqrt() / 255
    return (largest + flat.abs()) ** 2 / (250 * largest)


@ALL
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
def test_a_step_from_the_same_states(name: str, dtype: torch.dtype) -> None:
    """The parameters are those of float32 states; what is stored is within the documented bound."""
    shapes = [(40, 33), (70,), (1,), (2, 0), (6, 3, 5, 4), (33,)]
    p, q = parameters(dtype, shapes), parameters(dtype, shapes)
    p[4].data = p[4].data.contiguous(memory_format=torch.channels_last)
    q[4].data = q[4].data.contiguous(memory_format=torch.channels_last)
    ours = make(name, p, state_dtype="q8")
    theirs = make(name, q, state_dtype=F32)
    seen: set[torch.dtype] = set()
    for seed in range(3):
        give_gradients(p, seed)
        give_gradients(q, seed)
        ours.step()
        theirs.step()
        for a, b in zip(p, q, strict=True):
            assert torch.equal(a, b)
            for key, codes in coded(ours.state[a]).items():
                seen.add(codes.dtype)
                assert codes.dtype == (U8 if key in SQUARES else I8)
                assert codes.stride() == a.stride()
                got = floats(codes, ours.state[a][f"{key}_scale"])
                want = theirs.state[b][key]
                x, y = (t.as_strided((t.numel(),), (1,)).double() for t in (got, want))
                if key in SQUARES:
                    x, y = x.sqrt(), y.sqrt()
                assert ((x - y).abs() <= spacing(want, key) * 1.0001).all(), key
                if a.numel() > 1000:
                    assert not torch.equal(got, want)
                want.copy_(got)
    assert seen


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("AdamW", {}, {"exp_avg": I8, "exp_avg_sq": U8}),
        ("AdamW", {"amsgrad": True}, {"exp_avg": I8, "exp_avg_sq": F32, "max_exp_avg_sq": F32}),
        ("RMSprop", {"momentum": 0.9}, {"square_avg": U8, "momentum_buffer": I8}),
        (
            "RMSprop", {"momentum": 0.9, "centered": True},
            {"square_avg": F32, "momentum_buffer": I8, "grad_avg": F32},
        ),
        ("RMSpropTF", {"centered": True}, {"square_avg": F32, "grad_avg": F32}),
        ("SGD", {}, {}),
        ("NovoGrad", {}, {"exp_avg": I8}),
        ("Adagrad", {"initial_accumulator_value": 0.5}, {"sum": U8}),
    ],
)  # fmt: skip
def test_which_states_are_codes(name: str, options: Any, expected: dict[str, torch.dtype]) -> None:
    p = nn.Parameter(torch.randn(64).bfloat16())
    optimizer = getattr(fusedtrain.optim, name)([p], lr=0.1, state_dtype="q8", **options)
    give_gradients([p], 0)
    optimizer.step()
    large = {k: v.dtype for k, v in optimizer.state[p].items() if v.dim()}
    scales = {f"{k}_scale": F32 for k, v in expected.items() if v in (I8, U8)}
    assert large == {**expected, **scales}


def test_small_and_float64_parameters_keep_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    p = [nn.Parameter(torch.randn(n)) for n in (4095, 4096)]
    p += [nn.Parameter(torch.randn(64, 64).bfloat16()), nn.Parameter(torch.randn(5000).double())]
    optimizer = fusedtrain.optim.AdamW(p, state_dtype="q8", master_weights="split24")
    give_gradients(p, 0)
    optimizer.step()
    assert [optimizer.state[x]["exp_avg"].dtype for x in p] == [F32, I8, I8, F64]
    state = optimizer.state[p[2]]
    held = [p[2].detach(), *(v for v in state.values() if v.dim())]
    assert sum(t.numel() * t.element_size() for t in held) == 5.25 * p[2].numel()


def test_to_and_from_torch() -> None:
    p = parameters(F32)
    ours = fusedtrain.optim.AdamW(p, state_dtype="q8")
    steps(ours, p, range(1, 5))
    saved = saved_and_loaded(ours.state_dict())
    q = [nn.Parameter(x.detach().clone()) for x in p]
    theirs = torch.optim.AdamW(q)
    saved.pop("rounding_stream")
    theirs.load_state_dict(saved)
    for a, b in zip(p, q, strict=True):
        for key, codes in coded(ours.state[a]).items():
            assert torch.equal(theirs.state[b][key], floats(codes, ours.state[a][f"{key}_scale"]))
    steps(ours, p, [5])
    steps(theirs, q, [5])
    for a, b in zip(p, q, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    back = fusedtrain.optim.AdamW(q, state_dtype="q8")
    back.load_state_dict(theirs.state_dict())
    steps(back, q, [6])
    assert back.state[q[0]]["exp_avg"].dtype == I8


def test_the_option_may_change_between_steps() -> None:
    p = parameters(F32)
    optimizer = fusedtrain.optim.AdamW(p, state_dtype="q8")
    steps(optimizer, p, range(1, 4))
    expected = {
        key: floats(codes, optimizer.state[p[0]][f"{key}_scale"])
        for key, codes in coded(optimizer.state[p[0]]).items()
    }
    optimizer.state_dtype = F32
    optimizer.param_groups[0]["lr"] = 0.0
    for x in p[1:]:
        x.grad = None
    p[0].grad = torch.zeros_like(p[0])
    optimizer.step()
    state = optimizer.state[p[0]]
    assert not coded(state)
    assert not [key for key in state if key.endswith("_scale")]
    torch.testing.assert_close(state["exp_avg"], 0.9 * expected["exp_avg"])
    optimizer.state_dtype = "q8"
    optimizer.step()
    assert set(coded(optimizer.state[p[0]])) == {"exp_avg", "exp_avg_sq"}


def test_a_parameter_may_change_its_layout() -> None:
    p = nn.Parameter(torch.randn(8, 6, 5, 5))
    optimizer = fusedtrain.optim.SGD([p], lr=0.1, momentum=0.9, state_dtype="q8")
    give_gradients([p], 1)
    optimizer.step()
    state = optimizer.state[p]
    before = floats(state["momentum_buffer"], state["momentum_buffer_scale"])
    p.data = p.data.contiguous(memory_format=torch.channels_last)
    p.grad = torch.zeros_like(p)
    optimizer.step()
    assert state["momentum_buffer"].stride() == p.stride()
    after = floats(state["momentum_buffer"], state["momentum_buffer_scale"])
    bound = 4 * before.abs().amax() / 250  # rounded twice
    assert ((after - 0.9 * before).abs() <= 2 * bound).all()
    assert (after - 0.9 * before).abs().mean() < bound / 8


@pytest.mark.parametrize(
    "options",
    [
        {"ema_decay": 0.9, "max_grad_norm": 1.0, "gradient_writeback": "unscaled"},
        {"agc": 0.05, "gradient_writeback": "zero"},
        {"master_weights": True},
        {"master_weights": "split32", "ema_decay": 0.9},
        {"stochastic_rounding": True},
        {"master_weights": "split24", "stochastic_rounding": True, "agc": 0.05},
    ],
    ids=lambda o: "-".join(o),
)
@pytest.mark.parametrize("name", ["AdamW", "LAMB", "Lion"])
def test_other_options(name: str, options: Any) -> None:
    """A first step, whose states begin at 0, is the step with float32 states."""
    results = []
    for state_dtype in ("q8", F32):
        torch.manual_seed(0)
        p = parameters(BF16)
        optimizer = make(name, p, state_dtype=state_dtype, **options)
        give_gradients(p, 1)
        optimizer.step()
        kept = [
            v
            for s in optimizer.state.values()
            for k, v in s.items()
            if k in ("ema", "master_param")
        ]
        results.append((p, [x.grad for x in p], kept))
    assert alike(*results)


def test_an_unused_row_stays_still() -> None:
    """Where gradients are 0 a root is 0 or at least a code of 1: no step is larger than lr / eps
    would make it with a lost divisor."""
    p = nn.Parameter(torch.zeros(64, 32))
    optimizer = fusedtrain.optim.Adam([p], lr=1e-3, state_dtype="q8")
    generator = torch.Generator().manual_seed(0)
    for step in range(300):
        p.grad = torch.randn(64, 32, generator=generator)
        p.grad[:, 5] = 1e-3 * (step % 50 == 0)  # a thousandth of its neighbours, and rare
        p.grad[:, 7] = 0.0
        before = p.detach().clone()
        optimizer.step()
        assert (p.detach() - before).abs().max() < 0.012
    assert (p[:, 7] == 0).all()


def test_wrong_options_and_checkpoints() -> None:
    p = [nn.Parameter(torch.randn(64))]
    for wrong in ("q4", torch.int8, "Q8", 8):
        with pytest.raises(ValueError, match="state_dtype must be"):
            fusedtrain.optim.AdamW(p, state_dtype=wrong)
    optimizer = fusedtrain.optim.AdamW(p, state_dtype="q8")
    give_gradients(p, 0)
    optimizer.step()
    needs = "'exp_avg' is of 8-bit codes and needs 2 scales in 'exp_avg_scale', got"
    signed = "'exp_avg' must be floating point or codes of torch.int8, got"
    for damage, words in (
        ({"exp_avg_scale": None}, f"{needs} none"),
        ({"exp_avg_scale": torch.ones(3)}, f"{needs} 3"),
        ({"exp_avg_scale": torch.ones(2, dtype=torch.int64)}, f"{needs} a tensor of torch.int64"),
        ({"exp_avg": torch.ones(64, dtype=torch.uint8)}, f"{signed} torch.uint8"),
        ({"exp_avg": torch.ones(64, dtype=torch.int16)}, f"{signed} torch.int16"),
        ({"ema": torch.ones(64, dtype=torch.int8)}, "'ema' must be floating point, got torch.int8"),
    ):
        saved = optimizer.state_dict(compressed=True)
        saved["state"][0].update(damage)
        before = memory(optimizer)
        with pytest.raises(ValueError, match=words):
            optimizer.load_state_dict(saved)
        assert_same_bits(before, memory(optimizer))


def test_alternating_gradients_reuse_their_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of several sets of parameters hold the same tensors, scales included."""
    p = parameters(F32)
    optimizer = fusedtrain.optim.AdamW(p, state_dtype="q8")
    give_gradients(p, 1)
    optimizer.step()
    builds: list[int] = []
    build = optimizer._build
    monkeypatch.setattr(
        optimizer, "_build", lambda ps, *rest: builds.append(len(ps)) or build(ps, *rest)
    )
    for seed in range(2, 8):
        give_gradients(p, seed)
        if seed % 2:
            p[0].grad = None
        optimizer.step()
    assert builds == [len(p) - 1]


def test_failing_conversion_leaves_codes_with_their_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    p = parameters(F32)
    optimizer = fusedtrain.optim.AdamW(p, state_dtype="q8")
    steps(optimizer, p, [1, 2])
    before = memory(optimizer)
    optimizer.state_dtype = F32

    def fail(*_: Any) -> Tensor:
        raise torch.OutOfMemoryError("as on a full device")

    with monkeypatch.context() as full:
        full.setattr(_plan, "floats", fail)
        with pytest.raises(torch.OutOfMemoryError):
            steps(optimizer, p, [3])
    assert_same_bits(before, memory(optimizer))
    steps(optimizer, p, [3])
    assert not coded(optimizer.state[p[0]])


@pytest.mark.parametrize("dtype", [I8, U8])
@pytest.mark.parametrize("value", [0.0, 0.1, 2.0**-101, 2.0**119, float("nan")])
def test_new_states_are_the_codes_of_their_number(dtype: torch.dtype, value: float) -> None:
    for shape in ((0,), (1,), (33,), (7, 9)):
        p = torch.empty(shape).t() if len(shape) == 2 else torch.empty(shape)
        got = _codes.coded_state({}, "sum", p, dtype, value)
        want = quantise(torch.full_like(p, value), dtype)
        assert got[0].stride() == p.stride()
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_a_compressed_state_dict_has_codes_before_a_step() -> None:
    """Adagrad has float states then, into which torch.distributed.checkpoint would copy codes."""
    p = nn.Parameter(torch.randn(64, 32))
    optimizer = fusedtrain.optim.Adagrad([p], state_dtype="q8", initial_accumulator_value=0.5)
    saved = optimizer.state_dict(compressed=True)["state"][0]
    assert saved["sum"].dtype == U8
    assert torch.equal(floats(saved["sum"], saved["sum_scale"]), torch.full_like(p, 0.5))
    assert optimizer.state[p]["sum"].dtype == F32
    assert optimizer.state_dict()["state"][0]["sum"].dtype == F32


@pytest.mark.parametrize("channels", [32, 5])
def test_codes_that_lost_their_strides_are_refused(channels: int) -> None:
    p = nn.Parameter(torch.randn(8, channels, 3, 3).contiguous(memory_format=torch.channels_last))
    optimizer = fusedtrain.optim.AdamW([p], state_dtype="q8")
    give_gradients([p], 1)
    optimizer.step()
    saved = saved_and_loaded(optimizer.state_dict(compressed=True))
    before = memory(optimizer)
    optimizer.load_state_dict(saved)
    assert_same_bits(before, memory(optimizer))
    p.data = p.data.contiguous()
    give_gradients([p], 2)
    optimizer.step()
    other = optimizer.state_dict(compressed=True)["state"][0]["exp_avg_scale"]
    assert other.shape != saved["state"][0]["exp_avg_scale"].shape
    saved["state"][0]["exp_avg"] = saved["state"][0]["exp_avg"].contiguous()
    with pytest.raises(ValueError, match="'exp_avg' is contiguous, and was not when its scales"):
        optimizer.load_state_dict(saved)


def test_sliced_codes_need_their_scales() -> None:
    """Scripts that prune rows slice the states as they do the parameter."""
    p = nn.Parameter(torch.randn(64, 32))
    optimizer = fusedtrain.optim.AdamW([p], state_dtype="q8")
    give_gradients([p], 1)
    optimizer.step()
    p.grad, p.data = None, p.data[::2].clone()
    for name in ("exp_avg", "exp_avg_sq"):
        optimizer.state[p][name] = optimizer.state[p][name][::2].clone()
    give_gradients([p], 2)
    with pytest.raises(ValueError, match="needs 32 scales in 'exp_avg_scale', got 64"):
        optimizer.step()
