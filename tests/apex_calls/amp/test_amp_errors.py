"""Mistakes with Apex's calls: what is raised, what the message names, that nothing has changed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import fusedtrain
from fusedtrain.apex import amp
from fusedtrain.apex.fp16_utils import FP16_Optimizer
from helpers.amp_runs import network


def _sgd(model: nn.Module) -> Any:
    return fusedtrain.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"opt_level": "02"}, RuntimeError, "letter O, not the number zero"),
        ({"opt_level": "O4"}, RuntimeError, "Unexpected optimization level O4"),
        ({"opt_level": "O1", "cast_model_type": torch.float16}, RuntimeError, "opt_level='O2'"),
        ({"opt_level": "O2", "cast_model_type": torch.int8}, TypeError, "cast_model_type"),
        ({"opt_level": "O2", "patch_torch_functions": True}, RuntimeError, r"torch\.autocast"),
        ({"opt_level": "O1", "keep_batchnorm_fp32": True}, RuntimeError, "keep_batchnorm_fp32"),
        ({"opt_level": "O2", "keep_batchnorm_fp32": "yes"}, TypeError, "keep_batchnorm_fp32"),
        ({"opt_level": "O1", "master_weights": True}, RuntimeError, "master_weights"),
        ({"opt_level": "O2", "loss_scale": "static"}, ValueError, "loss_scale"),
        ({"opt_level": "O2", "loss_scale": -1.0}, ValueError, "loss_scale"),
        ({"opt_level": "O2", "cast_model_outputs": torch.int64}, TypeError, "cast_model_outputs"),
        ({"opt_level": "O2", "cast_model_outputs": "half"}, TypeError, "cast_model_outputs"),
        ({"opt_level": "O2", "num_losses": 0}, ValueError, "num_losses"),
        ({"opt_level": "O2", "min_loss_scale": 2.0**30}, ValueError, "min_loss_scale"),
    ],
)
def test_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    model = network()
    before = copy.deepcopy(model.state_dict())
    optimizer = _sgd(model)
    with pytest.raises(error, match=message):
        amp.initialize(model, optimizer, verbosity=0, **options)
    _assert_untouched(model, before, optimizer)


def _assert_untouched(model: nn.Module, before: dict[str, Any], optimizer: Any) -> None:
    assert not amp._amp_state.initialized
    assert not torch.is_autocast_enabled("cpu")
    for name, value in model.state_dict().items():
        assert value.dtype == before[name].dtype
        assert torch.equal(value, before[name])
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert not hasattr(optimizer, "_amp_stash")
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_models_that_are_wrapped_half_or_no_models() -> None:
    model = network()
    before = copy.deepcopy(model.state_dict())
    optimizer = _sgd(model)
    with pytest.raises(RuntimeError, match=r"(?s)DataParallel.*AFTER the model"):
        amp.initialize(nn.DataParallel(model), optimizer)
    with pytest.raises(RuntimeError, match=r"Found 0\.weight of dtype torch\.float16.*\.half"):
        amp.initialize([model, network().half()], optimizer)
    with pytest.raises(TypeError, match="models must be either"):
        amp.initialize((model,), optimizer)
    with pytest.raises(TypeError, match="models must be either"):
        amp.initialize([model, 3], optimizer)
    _assert_untouched(model, before, optimizer)


def test_optimizers() -> None:
    model = network()
    before = copy.deepcopy(model.state_dict())
    optimizer = _sgd(model)
    with pytest.raises(TypeError, match="optimizers must be either"):
        amp.initialize(model, (optimizer,))
    with pytest.raises(TypeError, match="optimizers must be either"):
        amp.initialize(model, [optimizer, "SGD"])
    with pytest.raises(RuntimeError, match="FP16_Optimizer"):
        amp.initialize(model, FP16_Optimizer(torch.optim.SGD(network().parameters(), lr=0.1)))
    with pytest.raises(RuntimeError, match=r"shape \(6, 1, 3, 3\) is in two of the optimizers"):
        amp.initialize(model, [optimizer, _sgd(model)])
    _assert_untouched(model, before, optimizer)
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    with pytest.raises(RuntimeError, match=r"only be passed through amp\.initialize once"):
        amp.initialize(model, optimizer, opt_level="O1", verbosity=0)


def test_scale_loss_before_initialize_and_of_a_stranger() -> None:
    model = network()
    loss = model(torch.rand(2, 1, 8, 8)).sum()
    with (
        pytest.raises(RuntimeError, match=r"amp\.initialize.*GradScaler"),
        amp.scale_loss(loss, _sgd(model)),
    ):
        pass
    model, optimizer = amp.initialize(model, _sgd(model), opt_level="O2", verbosity=0)
    loss = model(torch.rand(2, 1, 8, 8)).sum()
    stranger = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    with (
        pytest.raises(RuntimeError, match=r"SGD has not been through amp\.initialize"),
        amp.scale_loss(loss, [optimizer, stranger]),
    ):
        pass
    for loss_id in (1, -1):
        with (
            pytest.raises(IndexError, match="loss_id must be from 0 to 0"),
            amp.scale_loss(loss, optimizer, loss_id=loss_id),
        ):
            pass


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_sparse_gradients(level: str, fused: bool) -> None:
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Flatten(), nn.Linear(6, 1))
    kind = fusedtrain.optim.SGD if fused else torch.optim.SGD
    model, optimizer = amp.initialize(
        model, kind(model.parameters(), lr=0.1), opt_level=level, verbosity=0
    )
    loss = model(torch.tensor([[1, 2]])).mean()
    with (
        pytest.raises(RuntimeError, match=r"\(5, 3\) has a sparse gradient.*GradScaler"),
        amp.scale_loss(loss, optimizer) as scaled_loss,
    ):
        scaled_loss.backward()


@pytest.mark.parametrize("fused", [True, False])
def test_closures(fused: bool) -> None:
    model = network()
    kind = fusedtrain.optim.SGD if fused else torch.optim.SGD
    model, optimizer = amp.initialize(
        model, kind(model.parameters(), lr=0.1), opt_level="O2", verbosity=0
    )
    with pytest.raises(RuntimeError, match="does not support closure use"):
        optimizer.step(lambda: 1.0)


def test_a_model_that_moves_away_from_its_masters() -> None:
    model = nn.Linear(2, 2)
    model, optimizer = amp.initialize(model, _sgd(model), opt_level="O2", verbosity=0)
    loss = model(torch.ones(1, 2)).sum()
    masters = optimizer._amp_stash.masters.masters
    masters[1] = torch.empty_like(masters[1], device="meta")
    with (
        pytest.raises(RuntimeError, match=r"on cpu, its master weights on meta.*before amp"),
        amp.scale_loss(loss, optimizer),
    ):
        pass


def test_state_dicts() -> None:
    model = network()
    amp.initialize(model, _sgd(model), opt_level="O2", verbosity=0, num_losses=2)
    saved = amp.state_dict()
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"scaler"'):
        amp.load_state_dict({**saved, "scaler": {}})
    with pytest.raises(ValueError, match="No function named no_such in module"):
        amp.register_half_function(torch, "no_such")
