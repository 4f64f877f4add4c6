"""fusedtrain.apex.fp16_utils: loss scales and the search for overflow."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusedtrain.apex.fp16_utils import (
    DynamicLossScaler,
    LossScaler,
    master_params_to_model_params,
    model_grads_to_master_grads,
    prep_param_lists,
)
from helpers.amp_runs import ApexScale
from helpers.observed import Counted

HALF, FLOAT = torch.float16, torch.float32


def with_gradient(grad: Tensor) -> Tensor:
    p = torch.zeros_like(grad, requires_grad=True)
    p.grad = grad
    return p


DTYPES = [HALF, torch.bfloat16, FLOAT, torch.float64, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_overflow_is_an_inf_or_nan_and_nothing_else(dtype: torch.dtype) -> None:
    scaler = DynamicLossScaler()
    finite = [
        with_gradient(torch.full(shape, torch.finfo(dtype).max, dtype=dtype))
        for shape in ((5000,), (3, 7), (), (0,))
    ]
    if dtype.is_complex:
        finite.append(with_gradient(torch.full((3,), complex(3e38, 3e38)).conj()))
    unused = torch.zeros(2, requires_grad=True)
    assert scaler.has_overflow([*finite, unused]) is False
    for value in (math.inf, -math.inf, math.nan):
        for place in (0, 2500, 4999):
            bad = torch.ones(5000, dtype=dtype)
            bad[place] = value
            assert scaler.has_overflow(iter([*finite, with_gradient(bad)])) is True
            assert scaler.has_overflow([with_gradient(bad[::2]), with_gradient(bad[1::2])])
    assert scaler.has_overflow(with_gradient(bad)) is True
    assert scaler.has_overflow([]) is False


@pytest.mark.parametrize("value", [1.0, math.nan])
def test_the_host_waits_once(value: float) -> None:
    params = [with_gradient(torch.full((4,), value, dtype=d)) for d in DTYPES for _ in range(5)]
    with Counted() as counted:
        assert DynamicLossScaler().has_overflow(params) is (value != 1.0)
    assert counted.reads == 1
    with Counted() as counted:
        for flat in (False, True):
            model_params, masters = prep_param_lists(nn.Linear(2, 2).half(), flat)
            for p in model_params:
                p.grad = torch.ones_like(p)
            model_grads_to_master_grads(model_params, masters, flat)
            master_params_to_model_params(model_params, masters, flat)
    assert counted.reads == 0


def test_sparse_gradients_are_refused() -> None:
    model = nn.Sequential(nn.Linear(1, 3), nn.Embedding(3, 2, sparse=True))
    model[1](torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=r"params\[2\].*sparse=False.*to_dense\(\)"):
        DynamicLossScaler().has_overflow(model.parameters())


@pytest.mark.parametrize("seed", range(20))
def test_the_scale_follows_the_documented_rule(seed: int) -> None:
    random_ = random.Random(seed)
    window = random_.choice([1, 2, 3, 7])
    factor = random_.choice([2.0, 1.5, 4.0])
    rate = random_.choice([0.02, 0.1, 0.4])
    overflows = [random_.random() < rate for _ in range(200)]
    scaler = DynamicLossScaler(2.0**5, factor, window)
    oracle = ApexScale(2.0**5, window, factor)
    oracle.low, oracle.high = 1.0, math.inf
    for count, overflow in enumerate(overflows):
        assert scaler.cur_iter == count
        scaler.update_scale(overflow)
        oracle.update(overflow)
        assert scaler.loss_scale == scaler.cur_scale == oracle.scale
        last = max((i for i in range(count + 1) if overflows[i]), default=-1)
        assert scaler.last_overflow_iter == last


def test_a_new_dynamic_scale_is_as_apex_has_it() -> None:
    scaler = DynamicLossScaler()
    assert vars(scaler) == {
        "cur_scale": 2**32, "cur_iter": 0, "last_overflow_iter": -1,
        "scale_factor": 2.0, "scale_window": 1000,
    }  # fmt: skip
    static = LossScaler(128.0)
    static.update_scale(True)
    assert static.loss_scale == static.cur_scale == 128.0
    assert static.has_overflow([with_gradient(torch.tensor(math.inf))]) is False


@pytest.mark.parametrize("scaler", [LossScaler(8), DynamicLossScaler(8)])
def test_backward_and_hook_multiply_by_the_scale(scaler: Any) -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    loss = (x * x).sum()
    scaler.backward(loss, retain_graph=True)
    scaler.backward(loss)
    assert torch.equal(x.grad, 2 * 8 * 2 * x.detach())
    with pytest.raises(RuntimeError, match="second time"):
        scaler.backward(loss)
    grads = scaler.scale_gradient(None, (torch.ones(2), None), (None,))
    assert torch.equal(grads[0], torch.full((2,), 8.0))
    assert grads[1] is None


def test_a_scale_beyond_float16_overflows_and_falls() -> None:
    """It does not raise, which a number too large for the dtype would elsewhere."""
    scaler = DynamicLossScaler()
    p = torch.ones((), dtype=HALF, requires_grad=True)
    scaler.backward(p * 1)
    assert scaler.has_overflow([p])


def test_scales_out_of_range_are_refused() -> None:
    for scale in (0, -1.0, math.nan):
        with pytest.raises(ValueError, match=r"^scale must be above 0"):
            LossScaler(scale)
        with pytest.raises(ValueError, match="init_scale must be above 0"):
            DynamicLossScaler(init_scale=scale)
        with pytest.raises(ValueError, match="scale_factor must be above 0"):
            DynamicLossScaler(scale_factor=scale)
    with pytest.raises(ValueError, match="scale_window must be at least 1, got 0"):
        DynamicLossScaler(scale_window=0)
