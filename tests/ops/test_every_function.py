"""Properties of every public function that has a gradient: derivatives of each order, batches of
gradients, transforms, compilers, tensors of other kinds. helpers/functions.py has the table.

Numbers, errors and whatever a family has alone are in the family's own files.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusedtrain import functional as F
from helpers.activations import INPLACE
from helpers.functions import CASES, IMAGE, NORMS, ONCE, Case, Seeded, tensors
from helpers.observed import compiled_plainly

ON_THE_GPU_TOO = True  # the tests make tensors on the default device: see conftest.py
ALL = {**CASES, **ONCE}
# Transforms and compilers run plain torch, which draws other random numbers.
STEADY = {name: case for name, case in CASES.items() if not isinstance(case[0], Seeded)}


def detached(case: Case, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [t.detach() for t in tensors(case, dtype)]


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("name", CASES)
def test_first_and_second_derivatives(name: str, last: bool) -> None:
    """Finite differences, the first ones of each element. A gradient with a graph is made by
    another formula, which is no other."""
    function, leaves = CASES[name][0], tensors(CASES[name], last=last)
    total = function(*leaves).square().sum()
    with_graph = torch.autograd.grad(total, leaves, create_graph=True)
    torch.testing.assert_close(with_graph, torch.autograd.grad(total, leaves))
    assert torch.autograd.gradcheck(function, leaves, fast_mode=last)
    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


def batched(y: Tensor, leaves: list[Tensor], grads: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(y, leaves, grads, is_grads_batched=True, retain_graph=True)


def mapped(y: Tensor, leaves: list[Tensor], grads: Tensor) -> Any:
    return torch.func.vmap(lambda g: torch.autograd.grad(y, leaves, g, retain_graph=True))(grads)


@pytest.mark.filterwarnings("error::UserWarning")  # torch's, of an op without a batching rule
@pytest.mark.parametrize(
    ("last", "dtype"),
    [(False, torch.float64), (True, torch.float64), (False, torch.float32)],
    ids=["contiguous", "channels_last", "float32"],
)
@pytest.mark.parametrize("name", ALL)
def test_batched_gradients(name: str, last: bool, dtype: torch.dtype) -> None:
    """torch.autograd.grad with is_grads_batched=True, jacobian(vectorize=True), vmap of backward;
    and a graph that serves again and again."""
    function, leaves = ALL[name][0], tensors(ALL[name], dtype, last)
    y = function(*leaves)
    grads = torch.randn((3, *y.shape), dtype=y.dtype)
    alone = [torch.autograd.grad(y, leaves, g, retain_graph=True) for g in grads]
    assert all(
        map(torch.equal, torch.autograd.grad(y, leaves, grads[0], retain_graph=True), alone[0])
    )
    want = [torch.stack(columns) for columns in zip(*alone, strict=True)]
    close: dict[str, Any] = {} if dtype is torch.float64 else {"rtol": 1e-5, "atol": 1e-5}
    for how in (batched, mapped):
        torch.testing.assert_close(list(how(y, leaves, grads)), want, **close)
    if last or dtype is torch.float32:
        return
    jacobian = torch.autograd.functional.jacobian(function, tuple(leaves), vectorize=True)
    products = [torch.tensordot(grads, j, dims=y.dim()) for j in jacobian]
    torch.testing.assert_close(products, want)


def unsupported(name: str) -> bool:
    """torch's hardsigmoid has no forward-over-reverse."""
    return name.startswith("hardsigmoid")


@pytest.mark.parametrize("name", STEADY)
def test_transforms(name: str) -> None:
    """torch.func agrees with the outputs and gradients of the function itself."""
    function, leaves = CASES[name][0], tensors(CASES[name])
    values = [t.detach() for t in leaves]
    numbers = tuple(range(len(values)))
    tangents = tuple(t.cos() for t in values)
    pairs = [torch.stack([t, 0.5 * t]) for t in values]

    def total(*tensors: Tensor) -> Tensor:
        return function(*tensors).square().sum()

    want = function(*leaves)
    jacobian = torch.autograd.functional.jacobian(function, tuple(values))
    slope = sum(
        torch.tensordot(j, t, dims=t.dim()) for j, t in zip(jacobian, tangents, strict=True)
    )
    gradients = torch.autograd.grad(total(*leaves), leaves, create_graph=True)
    products = torch.autograd.grad(gradients, leaves, tangents, materialize_grads=True)
    torch.testing.assert_close(torch.func.jvp(function, tuple(values), tangents), (want, slope))
    torch.testing.assert_close(torch.func.grad(total, numbers)(*values), gradients)
    for jacobian_of in (torch.func.jacrev, torch.func.jacfwd):
        torch.testing.assert_close(jacobian_of(function, numbers)(*values), jacobian)
    by_sample = [tuple(torch.unbind(t)) for t in pairs]
    each = [function(*sample) for sample in zip(*by_sample, strict=True)]
    torch.testing.assert_close(
        torch.func.vmap(function, randomness="same")(*pairs), torch.stack(each)
    )
    grads = [torch.func.grad(total, numbers)(*sample) for sample in zip(*by_sample, strict=True)]
    torch.testing.assert_close(
        torch.func.vmap(torch.func.grad(total, numbers), randomness="same")(*pairs),
        tuple(torch.stack(column) for column in zip(*grads, strict=True)),
    )
    forward_over_reverse = lambda: torch.func.jvp(  # noqa: E731
        torch.func.grad(total, numbers), tuple(values), tangents
    )[1]
    if unsupported(name):
        with pytest.raises(NotImplementedError):
            forward_over_reverse()
    else:
        torch.testing.assert_close(forward_over_reverse(), products)


# Batch norm and depthwise convolutions stay ops in graphs: batch_norm/test_batch_norm_compilers.py,
# test_depthwise_compiled.py. Of functions that differ in the activation one is enough.
COMPILED = [
    name
    for name in STEADY
    if name not in NORMS and not name.startswith("depthwise") and "gate last" not in name
    and (not name.startswith("bias_act, ") or "lrelu" in name)
]  # fmt: skip


@pytest.mark.parametrize("name", COMPILED)
def test_compilers_see_plain_operators(name: str) -> None:
    function, leaves = STEADY[name][0], tensors(STEADY[name], torch.float32)
    y, expected = compiled_plainly(function, *leaves), function(*leaves)
    torch.testing.assert_close(y, expected)
    grad = torch.linspace(-1, 1, y.numel()).view(y.shape)
    gradients = (torch.autograd.grad(output, leaves, grad) for output in (y, expected))
    torch.testing.assert_close(*gradients)


class Labelled(Tensor):
    """A subclass that adds no dispatch key."""


@pytest.mark.parametrize("name", ALL)
def test_tensors_of_other_kinds(name: str) -> None:
    function, values = ALL[name][0], detached(ALL[name])
    want = function(*values)
    assert not want.requires_grad
    with torch.no_grad():
        assert torch.equal(function(*tensors(ALL[name], torch.float32)), want)
    with torch.inference_mode():
        y = function(*values)
        made_inside = detached(ALL[name])
        inside = function(*made_inside)
    assert torch.equal(y, want)
    torch.testing.assert_close(function(*made_inside), want)
    assert inside.is_inference()
    assert not function(*detached(ALL[name])).is_inference()
    parameters = [nn.Parameter(t.clone()) for t in values]
    y = function(*parameters)
    torch.testing.assert_close(y.detach(), want)
    y.sum().backward()
    assert all(p.grad is not None for p in parameters)
    labelled = function(*(t.as_subclass(Labelled) for t in values))
    assert type(labelled) is Labelled
    if not isinstance(function, Seeded):
        torch.testing.assert_close(labelled.as_subclass(Tensor), want)
        meta = function(*(t.to("meta") for t in values))
        assert meta.device.type == "meta"
        assert meta.shape == want.shape


@pytest.mark.parametrize("name", CASES)
def test_autocast_keeps_the_dtypes_of_gradients(name: str) -> None:
    function, leaves = CASES[name][0], tensors(CASES[name], torch.float32)
    with torch.autocast(torch.get_default_device().type, dtype=torch.bfloat16):
        y = function(*leaves)
    assert y.dtype in (torch.float32, torch.bfloat16)
    torch.testing.assert_close(y.float(), function(*leaves), rtol=4e-2, atol=4e-2)
    gradients = torch.autograd.grad(y.sum(), leaves)
    assert {g.dtype for g in gradients} == {torch.float32}


@pytest.mark.cpu_only
def test_all_functions_are_tested() -> None:
    public = {n for n, f in vars(F).items() if callable(f) and not n.startswith("_")}
    ours = {n for n in public if getattr(F, n).__module__.startswith("fusedtrain")}
    tested = " ".join(ALL) + " batch_norm_act"
    # normalize_images takes bytes: no gradient; gelu_tanh is gelu's.
    assert {n for n in ours if n not in tested} == {"normalize_images"}
    assert math.prod(IMAGE) == 48
    assert {f"{name}, in place" for name in INPLACE} <= set(CASES)
