"""fusedtrain.apex.fp16_utils: master copies of parameters, their gradients, and the way back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedtrain
from fusedtrain.apex import fp16_utils

HALF, FLOAT = torch.float16, torch.float32


def network(*, channels_last: bool = True) -> nn.Module:
    """In float16: a weight that is channels_last, one that is transposed, one of no elements."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Flatten(), nn.Linear(4, 5)).half()
    if channels_last:
        model.to(memory_format=torch.channels_last)
    model[2].weight = nn.Parameter(torch.randn(4, 5).half().t())
    model.register_parameter("none", nn.Parameter(torch.zeros(0, 2).half()))
    model.register_parameter("frozen", nn.Parameter(torch.ones(2).half(), requires_grad=False))
    return model


def fill_gradients(params: list[nn.Parameter], without: tuple[int, ...] = ()) -> None:
    for index, p in enumerate(params):
        p.grad = None if index in without else torch.randn_like(p)


def test_master_copies_are_float32_and_apart() -> None:
    model = network()
    model.append(nn.BatchNorm1d(5))  # float32 already
    params, masters = fp16_utils.prep_param_lists(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert [id(p) for p in params] == [id(p) for p in trained]
    assert len(masters) == len(params) == 7
    for p, master in zip(params, masters, strict=True):
        assert (master.dtype, master.requires_grad, master.is_leaf) == (FLOAT, True, True)
        assert master.stride() == p.stride()
        assert torch.equal(master, p.float())
        assert master.grad is None
        assert p.numel() == 0 or master.data_ptr() != p.data_ptr()


def test_the_flat_master_copy_is_in_the_order_of_indices() -> None:
    params, masters = fp16_utils.prep_param_lists(network(), flat_master=True)
    (master,) = masters
    assert type(master) is nn.Parameter
    expected = torch.tensor([x for p in params for x in p.flatten().tolist()])
    assert torch.equal(master, expected)
    assert torch.equal(master.grad, torch.zeros_like(expected))
    single = nn.Linear(2, 1, bias=False)
    _, (master,) = fp16_utils.prep_param_lists(single, True)
    assert master.data_ptr() != single.weight.data_ptr()


@pytest.mark.parametrize("zeroed", [True, False])
def test_gradients_reach_the_master_copies(zeroed: bool) -> None:
    """Both kinds, after gradients that were there, with parameters that have none."""
    params, masters = fp16_utils.prep_param_lists(network())
    _, flat = fp16_utils.prep_param_lists(network(), flat_master=True)
    for without in ((), (1, 3), (0,)):
        fill_gradients(params, without)
        fp16_utils.model_grads_to_master_grads(params, masters)
        fp16_utils.model_grads_to_master_grads(params, flat, flat_master=True)
        of_flat = flat[0].grad.split([p.numel() for p in params])
        for p, master, piece in zip(params, masters, of_flat, strict=True):
            if p.grad is None:
                assert master.grad is None
                assert not piece.any()
            else:
                assert master.grad.dtype == FLOAT
                assert not master.grad.requires_grad
                assert torch.equal(master.grad, p.grad.float())
                assert torch.equal(piece, p.grad.float().flatten())
        if zeroed:
            fusedtrain.zero_grad([*masters, *flat])
            assert flat[0].grad is None


@pytest.mark.parametrize("flat", [False, True])
def test_master_copies_reach_the_model(flat: bool) -> None:
    model = network()
    frozen = model.frozen.clone()
    params, masters = fp16_utils.prep_param_lists(model, flat)
    strides = [p.stride() for p in params]
    expected = []
    with torch.no_grad():
        for master in masters:
            master.add_(torch.randn_like(master))
        for piece, p in zip(
            masters[0].split([p.numel() for p in params]) if flat else masters, params
        ):
            expected.append(piece.reshape(p.shape).half())
    fp16_utils.master_params_to_model_params(params, masters, flat_master=flat)
    for p, value, stride in zip(params, expected, strides, strict=True):
        assert torch.equal(p, value)
        assert (p.stride(), p.dtype, p.requires_grad) == (stride, HALF, True)
    assert torch.equal(model.frozen, frozen)


def test_lists_of_several_dtypes_are_copied() -> None:
    params = [nn.Parameter(torch.randn(3).to(d)) for d in (HALF, FLOAT, HALF, torch.bfloat16)]
    model = nn.ParameterList(params)
    _, masters = fp16_utils.prep_param_lists(model)
    fill_gradients(params)
    fp16_utils.model_grads_to_master_grads(params, masters)
    for p, master in zip(params, masters, strict=True):
        assert torch.equal(master.grad, p.grad.float())
        master.data.copy_(torch.randn(3))
    fp16_utils.master_params_to_model_params(params, masters)
    assert all(torch.equal(p, m.to(p.dtype)) for p, m in zip(params, masters, strict=True))


def test_backward_through_weights_that_were_overwritten_raises() -> None:
    model = nn.Linear(2, 2, bias=False)
    params, masters = fp16_utils.prep_param_lists(model)
    loss = model(torch.ones(1, 2, requires_grad=True)).sum()
    fp16_utils.master_params_to_model_params(params, masters)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Mixed(nn.Module):
    def __init__(self, other: Tensor) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(2).half())
        self.middle = nn.Parameter(torch.ones(2).half())
        self.other = nn.Parameter(other)


def test_parameters_that_differ_are_named() -> None:
    prep = fp16_utils.prep_param_lists
    with pytest.raises(TypeError, match=r"first is torch.float16, other is torch.float32"):
        prep(Mixed(torch.ones(2)), flat_master=True)
    with pytest.raises(RuntimeError, match="one device: first is on cpu, other on meta"):
        prep(Mixed(torch.ones(2, device="meta").half()), flat_master=True)
    for flat in (False, True):
        with pytest.raises(TypeError, match=r"other: a torch.complex64 parameter"):
            prep(Mixed(torch.ones(2) * 1j), flat_master=flat)
    with pytest.raises(ValueError, match="flat_master: no parameter"):
        prep(nn.ReLU(), flat_master=True)
    assert prep(nn.ReLU()) == ([], [])


def snapshot(*tensors: Tensor) -> list[Any]:
    return [(t.tolist(), None if t.grad is None else t.grad.tolist()) for t in tensors]


@pytest.mark.parametrize(
    "function",
    [fp16_utils.model_grads_to_master_grads, fp16_utils.master_params_to_model_params],
)
def test_lists_that_do_not_fit_are_refused(function: Any) -> None:
    model = nn.Linear(2, 3).half()
    params, masters = fp16_utils.prep_param_lists(model)
    _, flat = fp16_utils.prep_param_lists(model, flat_master=True)
    with torch.no_grad():
        for master in (*masters, *flat):
            master.add_(1.0)
    fill_gradients(params)
    before = snapshot(*params, *masters, *flat)
    for case in (
        (params, masters[:1], False, r"master_params: 1 tensors for 2 in model_params"),
        (params, flat, False, r"1 tensors for 2 in model_params. For one flat .* flat_master=True"),
        (params[:1], flat, False, r"master_params\[0\] is of shape \(9,\), model_params\[0\] of"),
        (params, masters[::-1], False, r"master_params\[0\] is of shape \(3,\)"),
        (params, masters, True, r"flat_master=True needs .* \(9,\), got 2 of shapes"),
        (params[:1], masters[:1], True, r"flat_master=True needs .* \(6,\), got 1 of shapes"),
        (params[:1], flat, True, r"of shape \(6,\), got 1 of shapes \[\(9,\)\]"),
    ):
        with pytest.raises(ValueError, match=case[-1]):
            function(*case[:2], flat_master=case[2])
    assert snapshot(*params, *masters, *flat) == before


def test_sparse_gradients_are_refused() -> None:
    model = nn.Sequential(nn.Linear(1, 3), nn.Embedding(3, 2, sparse=True))
    for flat in (False, True):
        params, masters = fp16_utils.prep_param_lists(model, flat)
        model.zero_grad()
        model[0](torch.ones(1)).sum().backward()
        model[1](torch.tensor([1])).sum().backward()
        before = snapshot(*masters)
        with pytest.raises(RuntimeError, match=r"model_params\[2\].*sparse=False.*to_dense\(\)"):
            fp16_utils.model_grads_to_master_grads(params, masters, flat)
        assert snapshot(*masters) == before


def test_to_python_float() -> None:
    assert fp16_utils.to_python_float(torch.tensor([2.5])) == 2.5
    assert fp16_utils.to_python_float((2.5, 1.0)) == 2.5
