"""Split master weights after others have written to the 16-bit weights, unseen: through `.data`.

A weight that is not the rounded master is the new master. Where the two parts cannot tell, the
master rounds to the weight. So it is for every 16-bit pattern and every correction.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

import fusedtrain
from fusedtrain.reference.split_weights import join_weights, split_weights
from helpers.optimizer_cases import BF16, F16, F32, Case, Spec
from helpers.optimizer_ops import EVERY_BACKEND
from helpers.optimizer_runs import EXAMPLES, REPEATABLE
from helpers.optimizers import counterpart

I8, I16 = torch.int8, torch.int16
PAIRS = [(BF16, I16), (BF16, I8), (F16, I16), (F16, I8)]
IDS = ["bfloat16-32", "bfloat16-24", "float16-32", "float16-24"]
EVERY_PAIR = pytest.mark.parametrize(("dtype", "correction"), PAIRS, ids=IDS)
KINDS = {I8: "split24", I16: "split32"}


def patterns(dtype: torch.dtype) -> Tensor:
    """All 65,536 weights."""
    return torch.arange(-(2**15), 2**15).to(I16).view(dtype)


def corrections(dtype: torch.dtype) -> Tensor:
    """All of int8; of int16 the bounds, those around the middle of a half, and some between."""
    if dtype == I8:
        return torch.arange(-128, 128).to(I8)
    near = torch.arange(-9, 10)
    edges = [near + middle for middle in (-(2**15) + 9, -(2**14), 0, 2**14, 2**15 - 10)]
    random = torch.randint(-(2**15), 2**15, (161,), generator=torch.Generator().manual_seed(0))
    return torch.cat([*edges, random]).to(I16)


def words(t: Tensor) -> Tensor:
    return t.view(I16 if t.itemsize == 2 else torch.int32)


def is_exact(param: Tensor) -> Tensor:
    """Where a weight has no correction, whoever wrote it."""
    special = ~param.isfinite()
    return special | (param == 0) if param.dtype == BF16 else special


def assert_is_the_weight(joined: Tensor, param: Tensor, correction: Tensor) -> None:
    """The invariant: the master rounds to the weight, or is the weight."""
    again, low = split_weights(joined, param.dtype, correction.dtype)
    nan = param.isnan()
    assert torch.equal(joined.isnan(), nan)
    assert torch.equal(words(again)[~nan], words(param)[~nan])
    if param.dtype == BF16:  # a tie of float16 may be a unit of the correction off
        assert torch.equal(words(join_weights(again, low))[~nan], words(joined)[~nan])
    exact = is_exact(param) & ~nan
    assert torch.equal(words(joined[exact]), words(param.float()[exact]))
    if param.dtype == F16:
        rounded = joined.to(F16)
    else:  # ties away from 0
        rounded = ((joined.view(torch.int32).to(torch.int64) + 0x8000) >> 16).to(I16).view(BF16)
    assert torch.equal(words(rounded)[~nan], words(param)[~nan])


@EVERY_PAIR
def test_every_weight_with_every_correction(dtype: torch.dtype, correction: torch.dtype) -> None:
    """The formula."""
    param, counted, many = patterns(dtype), 0, 0
    for value in corrections(correction):
        low = value.expand_as(param)
        joined = join_weights(param, low)
        assert_is_the_weight(joined, param, low)
        corrected = ~is_exact(param) & (value != 0)
        counts = joined != param.float()
        if dtype == BF16:  # a split makes every such pair
            assert torch.equal(counts & ~param.isnan(), corrected)
        many += int(corrected.sum())
        counted += int((counts & corrected).sum())
    assert counted > 0.9 * many


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # of Triton's interpreter
@pytest.mark.parametrize("backend", EVERY_BACKEND)
@EVERY_PAIR
def test_kernels_join_every_weight(
    backend: str, dtype: torch.dtype, correction: torch.dtype
) -> None:
    """An average of weight 1 is the joined weight; a step of 0 splits it again."""
    ops, values = EVERY_BACKEND[backend](), corrections(correction)
    if backend != "cpu":  # the bounds, and both sides of the middle of a half
        values = values[[0, -1, *([] if backend == "triton" else [64, 65, 127, 129])]]
    param = patterns(dtype)
    for part in values.split(16):
        spec = Spec((len(part), len(param)), dtype, master=correction, average=F32, states=())
        case = Case("sgd", [spec], [{"lr": 0.5}], measures=0, average_weight=1.0)
        case.params[0].copy_(param.expand(len(part), -1))
        case.masters[0].copy_(part[:, None].expand(-1, len(param)))
        case.grads[0].zero_()
        case.averages[0].zero_()
        joined = join_weights(case.params[0], case.masters[0])
        expected = split_weights(joined, dtype, correction)
        ops.optimizer_step(*case.arguments(), None, None)
        torch.testing.assert_close(case.averages[0], joined, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(case.params[0], expected[0], rtol=0, atol=0, equal_nan=True)
        counts = joined != 0  # -0 - 0 may be 0
        assert torch.equal(case.masters[0][counts], expected[1][counts])


# --- whole optimizers

VALUES = [0.0, -0.0, 6e-8, 1.0, -1.0, 0.25, 2.0**-14, 3e4]
# Squares of denormals are 0 in timm's norms.
NOT_OF_NORMS = [1e-40, -9e-41, torch.inf, -torch.inf, torch.nan]
WRITES: dict[str, Callable[[Tensor, float], Any]] = {
    "a mask": lambda w, _: w.mul_((torch.arange(w.numel()) % 3 > 0).view(w.shape)),
    "clamped below": lambda w, _: w.clamp_(min=0),
    "clamped above": lambda w, value: w.clamp_(max=value),
    "an element": lambda w, value: w.view(-1)[7:8].fill_(value),
    "all": lambda w, value: w.fill_(value),
    "other signs": lambda w, _: w.neg_(),
    "doubled": lambda w, _: w.mul_(2),
    "the next number": lambda w, _: w.view(I16).add_(1),
}
NAMES = ["AdamW", "SGD", "Lion", "LAMB"]
OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9, "weight_decay": 0.01}, "LAMB": {"max_grad_norm": None},
}  # fmt: skip


def written_over(
    w: Tensor, master: Tensor, optimizer: Any, p: nn.Parameter, write: str, value: float
) -> Tensor:
    """The master after a write, which must be as the rule says."""
    before = w.clone()
    WRITES[write](w, value)
    joined = join_weights(w, optimizer.state[p]["master_param"])
    same = words(before) == words(w)
    assert torch.equal(words(joined)[same], words(master)[same])
    rounded = split_weights(joined, w.dtype, I16)[0]
    nan = w.isnan()
    assert torch.equal(joined.isnan(), nan)
    assert torch.equal(words(rounded)[~nan], words(w)[~nan])
    exact = is_exact(w) & ~nan
    assert torch.equal(joined[exact], w.float()[exact])
    return joined


@EXAMPLES
@pytest.mark.parametrize("name", NAMES)
@EVERY_PAIR
def test_steps_go_on_from_what_others_have_written(
    name: str, dtype: torch.dtype, correction: torch.dtype, examples: int
) -> None:
    """Beside the counterpart, whose float32 weight is the master before each step."""
    values = [*VALUES, *(() if name == "LAMB" else NOT_OF_NORMS)]
    rtol = 2.0**-15 + 2e-6 if correction == I8 else 2e-6  # a unit of 24 bits
    one = st.tuples(st.sampled_from(list(WRITES)), st.sampled_from(values))

    @settings(REPEATABLE, max_examples=examples)
    @given(st.lists(st.lists(one, max_size=2), min_size=3, max_size=3), st.integers(0, 99))
    def check(writes: list[list[tuple[str, float]]], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        p = nn.Parameter(torch.randn(3, 50, generator=generator).to(dtype))
        q = nn.Parameter(p.detach().float())
        options = {"lr": 0.01, **OPTIONS.get(name, {})}
        ours = getattr(fusedtrain.optim, name)(
            [p], **options, master_weights=KINDS[correction], state_dtype=F32
        )
        theirs = counterpart(name)([q], **options)
        for some in [[], *writes]:
            for write, value in some:
                q.data = written_over(p.data, q.data, ours, p, write, value)
            p.grad = torch.randn(3, 50, generator=generator).to(dtype)
            q.grad = p.grad.float()
            ours.step()
            theirs.step()
            master = join_weights(p.detach(), ours.state[p]["master_param"])
            param, low = split_weights(q.detach(), dtype, correction)
            expected = join_weights(param, low)
            torch.testing.assert_close(master, expected, rtol=rtol, atol=1e-6, equal_nan=True)
            q.data = master

    check()


ZEROS: dict[str, Callable[[Tensor], Any]] = {
    "a mask": lambda w: w.mul_(0),
    "zero_": lambda w: w.zero_(),
    "clamped": lambda w: w.clamp_(min=0, max=0),
}


@pytest.mark.parametrize("write", ZEROS.values(), ids=ZEROS)
@pytest.mark.parametrize("kind", KINDS.values())
@pytest.mark.parametrize("name", NAMES)
def test_zeros_are_masters(name: str, kind: str, write: Any) -> None:
    """All are 0 in bfloat16, as with torch.optim, in all that reads masters."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64, bias=False).bfloat16()
    p = model.weight
    optimizer = getattr(fusedtrain.optim, name)([p], lr=1e-2, master_weights=kind)
    p.grad = torch.randn_like(p)
    optimizer.step()
    assert (optimizer.state[p]["master_param"] < 0).sum() > 1000
    write(p.data)
    assert (fusedtrain.optim.float32_state_dict(model, optimizer)["weight"] == 0).all()
    assert (optimizer.state_dict()["state"][0]["master_param"] == 0).all()
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert (p == 0).all()
    optimizer.param_groups[0]["lr"] = 1e-2
    optimizer.step()  # LAMB: the ratio of a norm of 0 is 1
    assert p.isfinite().all()
    assert p.abs().max() > 1e-4
