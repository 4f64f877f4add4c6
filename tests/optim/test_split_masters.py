"""Optimizers with split master weights: runs, values that others write, other kinds of masters.

Checkpoints and copies that go on bit for bit: test_small_states.py.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedtrain
from fusedtrain.reference.split_weights import join_weights, split_weights
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

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
DTYPES = {"split24": torch.int8, "split32": torch.int16}
KINDS = pytest.mark.parametrize("kind", DTYPES)
BOTH = pytest.mark.parametrize("dtype", [BF16, F16], ids=["bfloat16", "float16"])


def master_of(optimizer: Any, p: Tensor) -> Tensor:
    return join_weights(p.detach(), optimizer.state[p]["master_param"])


def nearest(weights: Tensor) -> Tensor:
    """bfloat16 with ties away from 0."""
    bits = (weights.detach().view(torch.int32).to(torch.int64) + 0x8000) >> 16
    return bits.to(torch.int16).view(BF16)


@ALL
def test_bfloat16_with_32_bits_is_the_run_with_float32_masters(name: str) -> None:
    p, q = parameters(BF16), parameters(BF16)
    options: dict[str, Any] = {"state_dtype": F32, "ema_decay": 0.9}
    ours = make(name, p, master_weights="split32", **options)
    theirs = make(name, q, master_weights=True, **options)
    steps(ours, p, range(1, 6))
    steps(theirs, q, range(1, 6))
    for a, b in zip(p, q, strict=True):
        assert ours.state[a]["master_param"].dtype == torch.int16
        assert torch.equal(master_of(ours, a), theirs.state[b]["master_param"])
        assert torch.equal(a, nearest(theirs.state[b]["master_param"]))
        low = ours.state[a]["master_param"].float()
        assert low.numel() < 9 or low.std() > 10000  # all 16 bits are in use
        assert torch.equal(ours.state[a]["ema"], theirs.state[b]["ema"])
    assert alike(ours.state_dict(), theirs.state_dict())


@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bfloat16", "float16"])
def test_tiny_updates_add_up(dtype: torch.dtype) -> None:
    """2^20 of them (4096 numbers, 256 steps): each is 2^-20 of the weight, a 16-bit weight loses
    them all. Sums in float32 are off by at most half a unit a step."""
    p = nn.Parameter(torch.linspace(1.0, 1.9, 4096).to(dtype))
    start = p.detach().double()
    optimizer = fusedtrain.optim.SGD([p], lr=1.0, master_weights="split32")
    p.grad = torch.full_like(p, 2.0**-20)
    for _ in range(256):
        optimizer.step()
    moved = start - master_of(optimizer, p).double()
    assert (moved - 256 * 2.0**-20).abs().max() == 0  # multiples of 2^-23: no rounding at all
    assert moved.mean() > 0


@BOTH
def test_to_and_from_torch_and_float32_masters(dtype: torch.dtype) -> None:
    p = parameters(dtype)
    ours = fusedtrain.optim.AdamW(p, master_weights="split32")
    steps(ours, p, range(1, 4))
    saved = saved_and_loaded(ours.state_dict())
    q = [nn.Parameter(x.detach().clone()) for x in p]
    whole = fusedtrain.optim.AdamW(q, master_weights=True)
    whole.load_state_dict(saved)
    steps(whole, q, range(4, 6))
    back = fusedtrain.optim.AdamW(q, master_weights="split32")
    back.load_state_dict(saved_and_loaded(whole.state_dict()))
    steps(ours, p, range(4, 8))
    steps(back, q, range(6, 8))
    for a, b in zip(p, q, strict=True):
        assert torch.equal(master_of(ours, a), master_of(back, b))
        assert not back.state[b]["master_param"].is_floating_point()
    compressed = whole.__class__(p, master_weights=True)
    compressed.load_state_dict(ours.state_dict(compressed=True))
    expected = [master_of(ours, x) for x in p]
    for x in p:
        x.grad = torch.zeros_like(x)
    compressed.param_groups[0]["lr"] = 0.0
    compressed.step()
    for x, master in zip(p, expected, strict=True):
        assert torch.equal(compressed.state[x]["master_param"], master)
    torchs = torch.optim.AdamW(p)
    torchs.load_state_dict(saved)
    again = fusedtrain.optim.AdamW(p)
    again.load_state_dict(torchs.state_dict())


def test_the_option_may_change_between_steps() -> None:
    p = parameters(BF16)
    ours, q = fusedtrain.optim.AdamW(p, master_weights="split32"), parameters(BF16)
    theirs = fusedtrain.optim.AdamW(q, master_weights=True)
    for first, kind in ((1, True), (4, "split32"), (7, "split24")):
        steps(ours, p, range(first, first + 3))
        steps(theirs, q, range(first, first + 3))
        ours.master_weights = kind
    steps(ours, p, [16])
    steps(theirs, q, [16])
    for a, b in zip(p, q, strict=True):
        master = theirs.state[b]["master_param"]
        assert ours.state[a]["master_param"].dtype == torch.int8
        assert ((master_of(ours, a) - master).abs() <= 2.0**-15 * master.abs()).all()
    ours.master_weights = False
    steps(ours, p, [12])
    ours.master_weights = "split24"
    before = [x.detach().float() for x in p]
    for x in p:
        x.grad = torch.zeros_like(x)
    ours.param_groups[0]["lr"] = 0.0
    ours.step()  # others wrote to the parameters: the step without masters
    assert all(torch.equal(master_of(ours, x), b) for x, b in zip(p, before, strict=True))


@KINDS
def test_what_others_write_is_the_weight(kind: str) -> None:
    """load_state_dict of the model, pruning: the corrections were not made for these values."""
    p = nn.Parameter(torch.randn(50, generator=torch.Generator().manual_seed(0)).bfloat16())
    q = nn.Parameter(p.detach().clone())
    optimizer = fusedtrain.optim.SGD([p, q], lr=0.1, master_weights=kind)
    give_gradients([p, q], 1)
    optimizer.step()
    kept, untouched = p.detach().clone(), master_of(optimizer, q)
    assert not torch.equal(master_of(optimizer, p), kept.float())
    with torch.no_grad():
        p.mul_(3)
    assert torch.equal(optimizer.state_dict()["state"][0]["master_param"], p.detach().float())
    with torch.no_grad():
        p.add_(1)
    optimizer.param_groups[0]["lr"] = 0.0
    q.grad = None  # another plan
    optimizer.step()
    assert torch.equal(master_of(optimizer, p), p.detach().float())
    assert torch.equal(master_of(optimizer, q), untouched)
    with torch.no_grad():
        q.mul_(2)
    other = copy.deepcopy({"q": q, "optimizer": optimizer})
    state = other["optimizer"].state[other["q"]]
    assert (state["master_param"] == 0).all()


def loaded(p: nn.Parameter) -> None:
    with torch.no_grad():
        p.copy_(torch.full_like(p, 0.3))


def replaced(p: nn.Parameter) -> None:
    p.data = torch.full_like(p, 0.3)


READERS = {
    "float32_state_dict": lambda m, o: fusedtrain.optim.float32_state_dict(m, o)["weight"],
    "state_dict": lambda m, o: o.state_dict()["state"][0]["master_param"],
    "deepcopy": lambda m, o: copy.deepcopy(o).state_dict()["state"][0]["master_param"],
}


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("write", [loaded, replaced])
@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_float32_masters_are_read_after_others_have_written(
    read: Any, write: Any, dtype: torch.dtype
) -> None:
    """A reader outside of a step sees the model, as the next step does; the rest keeps its bits."""
    model = nn.Linear(4, 3).to(dtype)
    optimizer = fusedtrain.optim.AdamW(model.parameters(), lr=0.1, master_weights=True)
    give_gradients(model.parameters(), 1)
    optimizer.step()
    kept = optimizer.state[model.bias]["master_param"].clone()
    assert not torch.equal(kept, model.bias.float())
    write(model.weight)
    assert torch.equal(read(model, optimizer), model.weight.detach().float())
    assert torch.equal(optimizer.state[model.bias]["master_param"], kept)
    optimizer.state[model.bias]["master_param"].add_(1)  # a master itself may be written, too
    optimizer.state_dict()
    assert torch.equal(optimizer.state[model.bias]["master_param"], kept + 1)


def test_a_float32_master_of_an_option_turned_off_is_not_read_in_place_of_the_model() -> None:
    model = nn.Linear(4, 3).bfloat16()
    optimizer = fusedtrain.optim.AdamW(model.parameters(), lr=0.1, master_weights=True)
    steps(optimizer, [*model.parameters()] * 3, [4])
    optimizer.master_weights = False
    steps(optimizer, [*model.parameters()] * 3, [8])
    weights = fusedtrain.optim.float32_state_dict(model, optimizer)
    assert torch.equal(weights["weight"].bfloat16(), model.weight)


@pytest.mark.parametrize("kind", [*DTYPES, True])
def test_swapped_averages_leave_the_masters(kind: Any) -> None:
    p = parameters(BF16)
    optimizer = make("AdamW", p, master_weights=kind, ema_decay=0.5)
    steps(optimizer, p, range(1, 4))
    before = memory(optimizer)
    saved = optimizer.state_dict()
    with optimizer.swap_averages():
        assert torch.equal(p[0], optimizer.state[p[0]]["ema"].bfloat16())
        assert alike(optimizer.state_dict(), saved)
        with optimizer.swap_averages():
            assert alike(optimizer.state_dict(), saved)
    assert_same_bits(before, memory(optimizer))
    assert alike(optimizer.state_dict(), saved)
    with torch.no_grad():
        p[0].zero_()
    assert (optimizer.state_dict()["state"][0]["master_param"] == 0).all()


@pytest.mark.parametrize("kind", [*DTYPES, True, False])
def test_float32_state_dict(kind: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).bfloat16()
    model[1].float()
    optimizer = fusedtrain.optim.AdamW(model[0].parameters(), master_weights=kind)
    for seed in range(3):
        give_gradients(model[0].parameters(), seed)
        optimizer.step()
    weights = fusedtrain.optim.float32_state_dict(model, optimizer)
    assert weights.keys() == model.state_dict().keys()
    saved = optimizer.state_dict()["state"]
    for number, name in enumerate(("0.weight", "0.bias")):
        expected = saved[number]["master_param"] if kind else model.state_dict()[name].float()
        assert torch.equal(weights[name], expected)
        assert torch.equal(weights[name], model.state_dict()[name].float()) == (kind is False)
    assert weights["1.num_batches_tracked"].dtype == torch.int64
    wide = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    wide.load_state_dict(weights)
    with pytest.raises(TypeError, match="of fusedtrain"):
        fusedtrain.optim.float32_state_dict(model, torch.optim.SGD(model.parameters()))


def test_options() -> None:
    p = parameters(BF16)
    with pytest.raises(ValueError, match="together"):
        fusedtrain.optim.SGD(p, master_weights="split32", stochastic_rounding=True)
    for wrong in ("split16", 1, None, ["split24"]):
        with pytest.raises(ValueError, match="'split24' or 'split32'"):
            fusedtrain.optim.SGD(p, master_weights=wrong)
    optimizer = fusedtrain.optim.SGD(p, master_weights="split24", stochastic_rounding=True)
    with pytest.raises(ValueError, match="together"):
        optimizer.master_weights = "split32"
    wide = parameters(F32)  # have no master
    plain = fusedtrain.optim.SGD(wide, lr=0.1, master_weights="split32")
    steps(plain, wide, [1])
    assert not any("master_param" in state for state in plain.state.values())


def test_the_parts_take_half_the_memory() -> None:
    p = nn.Parameter(torch.zeros(1000, dtype=BF16))
    sizes = []
    for kind in (True, "split32", "split24"):
        optimizer = fusedtrain.optim.SGD([p], master_weights=kind)
        p.grad = torch.zeros_like(p)
        optimizer.step()
        state = optimizer.state[p]
        sizes.append(sum(t.nbytes for t in state.values() if isinstance(t, Tensor)))
    assert sizes == [4000, 2000, 1000]


def test_a_tie_of_a_float32_checkpoint() -> None:
    """Rounded to even there, up here: the master is the same, the parameter the next one."""
    weights = torch.tensor([1.0 + 2.0**-8, -1.0 - 2.0**-8, 1.0 + 3 * 2.0**-8])
    p = nn.Parameter(weights.bfloat16())
    whole = fusedtrain.optim.SGD([p], lr=0.0, master_weights=True)
    p.grad = torch.zeros_like(p)
    whole.step()
    whole.state[p]["master_param"].copy_(weights)
    split = fusedtrain.optim.SGD([p], lr=0.0, master_weights="split32")
    split.load_state_dict(whole.state_dict())
    split.step()
    assert torch.equal(master_of(split, p), weights)
    assert torch.equal(p, split_weights(weights, BF16, torch.int16)[0])
    saved, above = saved_and_loaded(split.state_dict()), p.detach().clone()
    for kind in (True, "split24", "split32"):  # and back, with the parameter above the middle
        with torch.no_grad():
            p.copy_(above)
        again = fusedtrain.optim.SGD([p], lr=0.0, master_weights=kind)
        again.load_state_dict(saved)
        again.step()
        assert torch.equal(again.state_dict()["state"][0]["master_param"], weights)
