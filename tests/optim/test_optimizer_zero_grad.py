"""Gradients to zero, by the optimizer and without it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fusedtrain
from helpers.optimizer_steps import ALL, parameters, step
from helpers.optimizers import make


@pytest.mark.parametrize("set_to_none", [True, False])
@ALL
def test_zero_grad_of_the_optimizer(name: str, set_to_none: bool) -> None:
    p = parameters()
    optimizer = make(name, p)
    step(optimizer, p, 0)
    optimizer.zero_grad(set_to_none=set_to_none)
    for x in p:
        assert x.grad is None if set_to_none else (x.grad == 0).all()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64], ids=str
)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_of_all_kinds(set_to_none: bool, dtype: torch.dtype) -> None:
    base = torch.ones(9, 14, dtype=dtype)
    grads = {
        "plain": torch.ones(40001, dtype=dtype),
        "empty": torch.ones(0, 3, dtype=dtype),
        "0-dim": torch.ones((), dtype=dtype),
        "sliced": base[1:7, 2:11:2],
        "transposed": torch.ones(5, 7, dtype=dtype).t(),
        "channels_last": torch.ones(2, 3, 4, 5, dtype=dtype).to(memory_format=torch.channels_last),
        "expanded": torch.ones(3, 1, dtype=dtype).expand(3, 4),
        "offset": torch.ones(1030, dtype=dtype)[3:],
        "sparse": torch.ones(4, dtype=dtype).to_sparse(),
    }
    params = [nn.Parameter(torch.ones(g.shape, dtype=dtype)) for g in grads.values()]
    params += [nn.Parameter(torch.ones(3, dtype=dtype))]  # no gradient
    for p, grad in zip(params, grads.values(), strict=False):
        p.grad = grad
    versions = [g._version for g in grads.values()]
    fusedtrain.zero_grad(iter(params), set_to_none=set_to_none)
    for p, (kind, grad), version in zip(params, grads.items(), versions, strict=False):
        if set_to_none:
            assert p.grad is None
            assert (grad.to_dense() == 1).all()
        else:
            assert p.grad is grad
            assert (grad.to_dense() == 0).all(), kind
            assert grad._version > version, kind
    outside = torch.ones(9, 14, dtype=torch.bool)
    outside[1:7, 2:11:2] = False
    assert (base[outside] == 1).all()


def test_zero_grad_detaches_gradients_with_a_graph() -> None:
    p = nn.Parameter(torch.ones(3))
    (g,) = torch.autograd.grad((p**3).sum(), p, create_graph=True)
    p.grad = g
    fusedtrain.zero_grad([p], set_to_none=False)
    assert p.grad is not None
    assert p.grad.grad_fn is None
    p.grad = torch.ones(3, requires_grad=True)
    fusedtrain.zero_grad(p, set_to_none=False)
    assert not p.grad.requires_grad
    assert (p.grad == 0).all()
