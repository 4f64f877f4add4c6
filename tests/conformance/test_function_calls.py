"""How the functions that torch has too can be called: other dtypes, mistakes, in place, out=."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from _functions import INPLACE, NAMES, fresh, kind, ours_of, run, samples, theirs_of, weights_like
from _tables import DTYPES, error, op_info, outcome, short, tensors
from differences import judge
from torch import Tensor
from torch.testing import make_tensor

from fusedtrain.reference import ACTIVATIONS

pytestmark = pytest.mark.usefixtures("one_thread")

FROM_OUTPUT_IN_PLACE = {
    name for name, row in ACTIVATIONS.items() if row.backward_in_place is not None
}
OTHERS = [
    torch.complex64, torch.complex128, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
]  # fmt: skip


@pytest.mark.parametrize("case", NAMES)
def test_other_dtypes(case: str) -> None:
    """Eager torch's results, and its errors; gradients of complex numbers, too."""
    differences = set()
    sample = next(s for s in samples(case, torch.float32) if s.input.dim() > 0)
    for dtype in OTHERS:
        x = make_tensor(sample.input.shape, device="cpu", dtype=dtype)
        results = []
        for function in (ours_of(case), theirs_of(case)):
            input = x.clone().requires_grad_(dtype.is_complex)
            args = [a.detach().to(dtype) if isinstance(a, Tensor) else a for a in sample.args]
            y = outcome(function, input, *args, **sample.kwargs)
            if isinstance(y, Tensor) and y.requires_grad:
                y = (y, outcome(torch.autograd.grad, y, input, torch.ones_like(y)))
            results.append(y)
        a, b = results
        if not (a is b or same_trees(a, b)):
            differences.add(short(dtype))
    judge(f"functions/other dtypes/{case}", differences)


def same_trees(a: Any, b: Any) -> bool:
    x, y = tensors(a), tensors(b)
    return len(x) == len(y) > 0 and all(
        p.dtype == q.dtype and torch.allclose(p, q, equal_nan=True) for p, q in zip(x, y)
    )


@pytest.mark.parametrize("case", [*NAMES, "batch_norm"])
def test_mistakes(case: str) -> None:
    """The types of exceptions, for OpInfo's mistakes and for common ones."""
    ours, theirs, differences = ours_of(case), theirs_of(case), set()
    info = op_info(case)
    listed = list(info.error_inputs("cpu")) if info.error_inputs_func is not None else []
    for item in listed:
        s = item.sample_input
        mine = outcome(ours, s.input, *s.args, **s.kwargs)
        if mine is not item.error_type:
            differences.add(f"{item.error_regex}: {mine}")
    x, good = torch.ones(2, 4, 4), next(samples(case, torch.float32))
    more: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "no arguments": ((), {}),
        "no tensor": ((None, *good.args), good.kwargs),
        "a list": (([1.0], *good.args), good.kwargs),
        "too many": ((x, *[1.0] * 12), {}),
        "an unknown keyword": ((x, *good.args), {**good.kwargs, "unknown": 1}),
        "a string": ((x, "a", *good.args[1:]), {}),
        "sparse": ((torch.eye(4).to_sparse(), *good.args), good.kwargs),
    }
    for what, (args, kwargs) in more.items():
        mine, stock = outcome(ours, *args, **kwargs), outcome(theirs, *args, **kwargs)
        if mine is not stock and not (isinstance(mine, Tensor) and isinstance(stock, Tensor)):
            differences.add(f"{what}: {kind(mine)} instead of {kind(stock)}")
    judge(f"functions/mistakes/{case}", differences)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("case", INPLACE)
def test_in_place(case: str, dtype: torch.dtype) -> None:
    ours, theirs, differences = ours_of(case), theirs_of(case), set()
    for sample in samples(case, dtype):
        kwargs = {k: v for k, v in sample.kwargs.items() if k != "inplace"}
        results = []
        for function in (ours, theirs):
            (leaf, *args), _ = fresh(sample)
            x = leaf * 1
            version = x._version
            y = function(x, *args, **kwargs, inplace=True)
            identity = case == "dropout" and not (kwargs.get("training", True) and kwargs.get("p"))
            assert y is x
            assert (x._version > version) or identity
            gradient = torch.autograd.grad(y, leaf, weights_like(y, dtype))[0]
            results.append([y.detach(), gradient])
        # The kernel is the same in place; some functions take the derivative from the output then.
        output, gradient = run(ours, sample)
        if case in FROM_OUTPUT_IN_PLACE:
            gradient = results[1][1]
        for a, b in zip(results[0], (output, gradient)):
            assert b is not None
            assert error(a, b) <= 1
    inputs = {
        "a leaf": lambda: torch.ones(3, requires_grad=True),
        "an expanded tensor": lambda: torch.ones(3, 1).expand(3, 4),
        "a view of a leaf": lambda: torch.ones(3, requires_grad=True)[:2],
        "integers": lambda: torch.ones(3, dtype=torch.int64),
        "complex numbers": lambda: torch.ones(3, dtype=torch.complex64),
    }
    for what, make in inputs.items():
        mine, stock = (outcome(f, make(), *args, **kwargs, inplace=True) for f in (ours, theirs))
        if mine is not stock and not (isinstance(mine, Tensor) and isinstance(stock, Tensor)):
            differences.add(f"{what}: {kind(mine)} instead of {kind(stock)}")
    judge(f"functions/in place/{case}", differences)


@pytest.mark.parametrize("case", [*NAMES, "batch_norm"])
def test_out(case: str) -> None:
    """Where torch's function takes out=, ours does."""
    differences, sample = set(), next(samples(case, torch.float32))
    results = []
    for function in (ours_of(case), theirs_of(case)):
        args, kwargs = fresh(sample)
        out = torch.empty(0)
        y = outcome(function, *(a.detach() if isinstance(a, Tensor) else a for a in args),
                    **kwargs, out=out)  # fmt: skip
        results.append(y)
        if isinstance(y, Tensor):
            assert y is out
    mine, stock = results
    if isinstance(mine, Tensor) and isinstance(stock, Tensor):
        torch.testing.assert_close(mine, stock)
    elif isinstance(stock, Tensor):
        differences.add(f"{kind(mine)} instead of {kind(stock)}")
    judge(f"functions/out/{case}", differences)
