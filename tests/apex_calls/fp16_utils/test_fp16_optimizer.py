"""FP16_Optimizer: mistakes and groups. Training, scales, accumulation, closures and checkpoints are
tested beside amp's, in tests/apex_calls/amp."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedtrain
from fusedtrain.apex.fp16_utils import FP16_Optimizer, network_to_half
from helpers.amp_runs import FP16, MAKERS, Twins, backward, gradients_alike, loss_of, network, start

ON_THE_GPU_TOO = True  # the tests make tensors on the default device: see conftest.py

pytestmark = pytest.mark.usefixtures("one_thread")
KINDS = pytest.mark.parametrize("maker", ["torch-SGD", "fused-SGD"])


def test_mistakes() -> None:
    _, optimizer = start(MAKERS["fused-SGD"], FP16)
    _, smaller = start(MAKERS["fused-SGD"], FP16)
    saved = copy.deepcopy(smaller.state_dict())
    saved["fp32_from_fp16"][0].pop()
    with pytest.raises(ValueError, match="fp32_from_fp16"):
        optimizer.load_state_dict(saved)
    with pytest.raises(RuntimeError, match="serialized using state_dict"):
        copy.deepcopy(optimizer)
    with pytest.raises(TypeError, match=r"Received torch\.float64"):
        FP16_Optimizer(torch.optim.SGD([nn.Parameter(torch.ones(2).double())], lr=0.1))
    sparse = nn.Embedding(4, 2, sparse=True).half()
    wrapped = FP16_Optimizer(torch.optim.SGD(sparse.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match="sparse gradient"):
        wrapped.backward(sparse(torch.tensor([1])).float().sum())


def _refuse(grad: Tensor) -> Tensor:
    raise KeyError


@KINDS
def test_a_backward_pass_that_raises_leaves_no_gradients(maker: str) -> None:
    twins = Twins(FP16, maker, loss_scale=64.0)
    model, optimizer = twins.model, twins.optimizer
    hook = model[1][2].register_forward_hook(lambda *args: args[2].register_hook(_refuse) and None)
    with pytest.raises(KeyError):
        optimizer.backward(loss_of(model))
    assert all(p.grad is None for p in model.parameters())
    hook.remove()
    twins.backward()
    gradients_alike((p for g in optimizer.param_groups for p in g["params"]), twins.plain)


@KINDS
def test_a_checkpoint_has_what_others_have_written_to_the_model(maker: str) -> None:
    model, optimizer = start(MAKERS[maker], FP16)
    backward(loss_of(model), optimizer)
    optimizer.step()
    weight = optimizer.all_fp16_params[0]
    with torch.no_grad():
        weight.fill_(0.3)
    assert torch.equal(optimizer.state_dict()["fp32_from_fp16"][0][0], weight.float())


def test_parameters_by_group() -> None:
    model = network_to_half(network())
    conv, norm, linear = model[1][0], model[1][1], model[1][4]
    groups = [{"params": model[1][:2].parameters()}, {"params": model[1][2:].parameters()}]
    options: dict[str, Any] = {"lr": 0.05, "momentum": 0.9}
    optimizer = FP16_Optimizer(fusedtrain.optim.SGD(groups, **options), verbose=False)
    assert (conv.weight.dtype, norm.weight.dtype) == (torch.float16, torch.float32)
    assert [[id(p) for p in group] for group in optimizer.fp16_groups] == [
        [id(conv.weight)], [id(linear.weight), id(linear.bias)],
    ]  # fmt: skip
    assert [[p.dtype for p in group] for group in optimizer.fp32_from_fp16_groups] == [
        [torch.float32], [torch.float32] * 2,
    ]  # fmt: skip
    assert [[id(p) for p in group] for group in optimizer.fp32_from_fp32_groups] == [
        [id(norm.weight), id(norm.bias)], [],
    ]  # fmt: skip
    optimizer.param_groups = optimizer.param_groups[:1]
    assert len(optimizer.optimizer.param_groups) == 1
    optimizer.state = optimizer.state
