"""Every function of fusedtrain.functional that torch has, on all samples of torch's OpInfo: numbers
and gradients. What else a call may be: test_function_calls.py; higher derivatives and transforms of
all functions: ops/test_every_function.py."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _functions import (
    ACTIVATED,
    CASES,
    NAMES,
    POINTWISE_NAMES,
    few_samples,
    fresh,
    ours_of,
    run,
    same_layout,
    samples,
    theirs_of,
    torch_functional,
    weights_like,
)
from _tables import DTYPES, error, outcome, short, spread
from differences import judge, unknown_keys
from torch import Tensor

from fusedtrain import functional
from helpers.autograd_routes import is_of_this_package

# Units in the last place (`_tables.error`); or twice what torch's own result is off, four times
# where sums of a channel cancel.
LIMIT = {torch.float32: 8.0, torch.float64: 64.0, torch.float16: 2.0, torch.bfloat16: 2.0}
CHECKS = ("numbers", "infinities", "out", "other dtypes", "mistakes", "in place", "vmap")

pytestmark = pytest.mark.usefixtures("one_thread")


def test_every_function_of_torch_is_here() -> None:
    public = {n for n, f in vars(functional).items() if inspect.isfunction(f) and n[0] != "_"}
    shared = {n for n in public if hasattr(torch_functional, n) or hasattr(torch, n)}
    # torch's samples of these are too small for a kernel: test_mean.py, test_attention.py of ops.
    assert shared - {"adaptive_avg_pool2d", "mean", "scaled_dot_product_attention"} == set(NAMES)
    assert {"relu", "silu", "hardtanh"} <= set(ACTIVATED)
    assert not unknown_keys("functions", (f"{check}/{n}" for check in CHECKS for n in CASES))


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("case", CASES)
def test_numbers(case: str, dtype: torch.dtype) -> None:
    ours, theirs = ours_of(case), theirs_of(case)
    differences: set[str] = set()
    worst, slack, count = {"output": 0.0, "gradient": 0.0}, {"output": 0.0, "gradient": 0.0}, 0
    growth = 4 if "_norm" in case else 2
    for sample in samples(case, dtype):
        truth = run(theirs, sample, torch.float64)
        mine, stock = run(ours, sample), run(theirs, sample)
        assert len(mine) == len(stock) == len(truth)
        count += mine[0] is not None
        for i, (a, b, t) in enumerate(zip(mine, stock, truth, strict=True)):
            assert (a is None) == (b is None), "a gradient that one of them lacks"
            if a is None or b is None or t is None:
                continue
            assert a.dtype == b.dtype
            assert i or same_layout(a, b), f"strides {a.stride()} instead of {b.stride()}"
            part = "gradient" if i else "output"
            worst[part] = max(worst[part], error(a, t))
            slack[part] = max(slack[part], growth * error(b, t))
            # torch's worst element of 16 bits may be far off: the others are not.
            if torch.finfo(dtype).bits == 16 and not spread(a, t) <= max(2.0, 2 * spread(b, t)):
                differences.add(part)
    assert count
    # In float64 the truth is torch's rounding, in a norm of three numbers 53 eps off (ours: 32).
    limit = LIMIT[dtype] * (growth if dtype is torch.float64 else 1)
    differences |= {p for p in worst if not worst[p] <= max(limit, slack[p])}
    judge(f"functions/numbers/{case}", differences, dtype)


@pytest.mark.parametrize("case", [n for n in CASES if n not in ("dropout", "layer_norm")])
def test_samples_reach_the_kernels(case: str) -> None:
    nodes = set()
    for sample in few_samples(case):
        args, kwargs = fresh(sample)
        nodes.add(type(ours_of(case)(*args, **kwargs).grad_fn))
    assert any(is_of_this_package(node) for node in nodes)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("case", POINTWISE_NAMES)
def test_infinities(case: str, dtype: torch.dtype) -> None:
    """Also gradients at NaN. Where torch's vector and scalar loops differ, both are right."""
    values = [-float("inf"), float("inf"), float("nan"), -0.0, 0.0]
    sample, differences = next(samples(case, dtype)), set()

    def call(function: Callable[..., Any], x: Tensor) -> tuple[Tensor, Tensor]:
        x.requires_grad_()
        y = function(x, *sample.args, **sample.kwargs)
        return y.detach(), torch.autograd.grad(y, x, torch.ones_like(y))[0]

    for value in values:
        x = torch.full((85, 2), value, dtype=dtype)
        scalar, vector = call(theirs_of(case), x[:, 0]), call(theirs_of(case), x[0].repeat(64))
        for layout in (x[:, 0], x[:, 0].clone()):
            mine = call(ours_of(case), layout)
            for part, a, *both in zip(("output", "gradient"), mine, scalar, vector):
                if not any(alike(a, b[:1], signed=part == "output") for b in both):
                    differences.add(
                        f"{part} at {value}: {_number(a)} instead of {_number(both[1])}"
                    )
    judge(f"functions/infinities/{case}", differences, dtype)


def alike(a: Tensor, b: Tensor, signed: bool) -> bool:
    zero_signs = bool(((b != 0) | (a.signbit() == b.signbit())).all())
    close = torch.allclose(a, b.expand_as(a), equal_nan=True, atol=1e-6, rtol=1e-2)
    return close and (zero_signs or not signed)


def _number(values: Tensor) -> str:
    return f"{values[0].item():.2g}"


@pytest.mark.parametrize("case", CASES)
def test_vmap_float64(case: str) -> None:
    """vmap of the function; of its backward, as jacobian(vectorize=True) calls it; of both."""
    differences = set()
    for sample in few_samples(case):
        results = []
        for function in (ours_of(case), theirs_of(case)):
            args, kwargs = fresh(sample)
            x = args[0].detach()

            def call(x: Tensor, args: Any = args, kwargs: Any = kwargs) -> Any:
                return function(x, *args[1:], **kwargs)  # noqa: B023 (called within the loop)

            def batched_backward(x: Tensor, call: Any = call) -> Any:
                output = call(x.requires_grad_())
                weights = torch.stack(
                    [weights_like(output, torch.float64), torch.ones_like(output)]
                )
                return torch.autograd.grad(output, x, weights, is_grads_batched=True)[0]

            each = functools.partial(torch.vmap, randomness="same")
            results.append(
                {
                    "forward": outcome(each(call), torch.stack([x, -x])),
                    "batched backward": outcome(batched_backward, x.clone()),
                    "vmap of grad": outcome(
                        each(torch.func.grad(lambda x: call(x).sum())),
                        torch.stack([x, -x]),
                    ),
                }
            )
        mine, stock = results
        for part in mine:
            a, b = mine[part], stock[part]
            same = a is b or (
                isinstance(a, Tensor) and isinstance(b, Tensor) and torch.allclose(a, b, rtol=1e-7)
            )
            if not same:
                kinds = [v if isinstance(v, type) else "a tensor" for v in (a, b)]
                differences.add(f"{part}: {kinds}")
    judge(f"functions/vmap/{case}", differences)
