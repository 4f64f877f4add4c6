"""Cases that gradient release refuses, with the reason, before anything is modified."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fusedtrain
from helpers.optimizer_steps import alike
from helpers.optimizers import make


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)


def released(**options: Any) -> tuple[nn.Sequential, Any]:
    model = network()
    optimizer = make("AdamW", model.parameters(), **options)
    optimizer.release_gradients(model)
    return model, optimizer


def loss_of(model: nn.Module) -> Tensor:
    loss: Tensor = model(torch.ones(3, 4)).square().mean()
    return loss


@contextmanager
def refused(match: str, model: nn.Module) -> Iterator[None]:
    """The body raises RuntimeError, and changes nothing of the model."""
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match=match):
        yield
    assert alike(dict(before), dict(model.state_dict()))


def assert_works(model: nn.Module, optimizer: Any) -> None:
    before = copy.deepcopy(model.state_dict())
    loss_of(model).backward()
    optimizer.step()
    assert int(optimizer.applied_steps) == 1
    assert not alike(dict(before), dict(model.state_dict()))


def assert_refused(error: type[Exception], match: str, model: Any, optimizer: Any) -> None:
    with pytest.raises(error, match=match):
        optimizer.release_gradients(model)
    assert optimizer._release is None
    assert not any(p._post_accumulate_grad_hooks for p in optimizer.param_groups[0]["params"])


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"max_grad_norm": 1.0}, "max_grad_norm clips"),
        ({"gradient_writeback": "zero"}, "got 'zero'"),
        ({"gradient_writeback": "unscaled"}, "got 'unscaled'"),
    ],
)
def test_options_that_need_all_gradients(options: dict[str, Any], match: str) -> None:
    model = network()
    assert_refused(ValueError, match, model, make("AdamW", model.parameters(), **options))
    model, optimizer = released()
    for name, value in options.items():
        before = getattr(optimizer, name)
        with pytest.raises(ValueError, match=match):
            setattr(optimizer, name, value)
        assert getattr(optimizer, name) == before
    assert_works(model, optimizer)


def test_defaults_that_clip() -> None:
    """LAMB's default is timm's."""
    model = network()
    optimizer = fusedtrain.optim.LAMB(model.parameters())
    assert_refused(ValueError, "max_grad_norm clips", model, optimizer)


def test_models() -> None:
    model = network()
    optimizer = make("AdamW", model.parameters())
    assert_refused(TypeError, "must be a torch.nn.Module, got list", [model], optimizer)
    assert_refused(ValueError, "has no parameter of the model", network(), optimizer)
    for p in model.parameters():
        p.requires_grad_(False)
    assert_refused(ValueError, "has no parameter of the model", model, optimizer)


def test_twice() -> None:
    model, optimizer = released()
    with pytest.raises(RuntimeError, match=r"released already.*ModuleList"):
        optimizer.release_gradients(model)
    other = make("SGD", model.parameters())
    with pytest.raises(RuntimeError, match="another optimizer releases"):
        other.release_gradients(model)
    assert other._release is None
    assert_works(model, optimizer)


def test_unsupported_parameters() -> None:
    model = nn.ParameterList([nn.Parameter(torch.ones(2, dtype=torch.complex64))])
    optimizer = make("AdamW", model.parameters())
    assert_refused(RuntimeError, "complex", model, optimizer)


def test_several_passes_before_a_step() -> None:
    model, optimizer = released()
    loss_of(model).backward()
    with refused("second time since the last", model):
        loss_of(model).backward()
    assert all(p.grad is None for p in model.parameters())
    optimizer.step()
    loss_of(model).backward()
    optimizer.step()
    assert int(optimizer.applied_steps) == 2


def test_reentrant_checkpoints_with_a_shared_parameter() -> None:
    """The gradient of the first use is complete before the second block runs backward."""
    results = []
    for reentrant in (False, True):
        model = nn.Sequential(nn.Linear(4, 4))
        optimizer = make("AdamW", model.parameters())
        optimizer.release_gradients(model)
        x = torch.ones(2, 4).requires_grad_()
        for _ in range(2):
            x = checkpoint(model, x, use_reentrant=reentrant)
        try:
            x.sum().backward()
        except RuntimeError as error:
            results.append(str(error))
    assert len(results) == 1
    assert "need use_reentrant=False" in results[0]


def test_a_weight_that_backward_still_needs() -> None:
    """torch notices a write to a tensor that was saved for backward."""
    model = nn.ParameterList([nn.Parameter(torch.ones(3))])
    optimizer = make("AdamW", model.parameters())
    optimizer.release_gradients(model)
    x = torch.ones(3, requires_grad=True)
    y = x * model[0].detach()  # saves the weight; its backward needs no gradient of the weight
    loss = y.sum() + (model[0] * 2).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_closures() -> None:
    model, optimizer = released()

    def closure() -> Tensor:
        raise AssertionError("must not be called")

    with refused("takes no closure", model):
        optimizer.step(closure)
    optimizer.step(None)
    assert int(optimizer.applied_steps) == 0


def test_a_scaler_of_fusedtrain_does_not_scale() -> None:
    model, optimizer = released()
    scaler = fusedtrain.amp.GradScaler("cpu")
    loss = loss_of(model)
    with pytest.raises(RuntimeError, match="a GradScaler finds out"):
        scaler.scale([loss, torch.ones(())])
    other = network()
    scaler.scale(loss_of(other)).backward()  # of another model
    with pytest.raises(RuntimeError, match="a GradScaler finds out"):
        scaler.step(optimizer)
    optimizer._release.remove()
    scaler = fusedtrain.amp.GradScaler("cpu")
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    assert int(optimizer.applied_steps) == 1


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("kind", [torch.amp.GradScaler, fusedtrain.amp.GradScaler])
def test_a_scaler_does_not_step(kind: Any, unscale: bool) -> None:
    model, optimizer = released()
    scaler = kind("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    if unscale:
        model[0].weight.grad = torch.ones(4, 4)
        scaler.unscale_(optimizer)
    with refused("a GradScaler finds out", model):
        scaler.step(optimizer)


def test_scalers_that_are_off() -> None:
    for kind in (torch.amp.GradScaler, fusedtrain.amp.GradScaler):
        model, optimizer = released()
        scaler = kind("cpu", enabled=False)
        scaler.scale(loss_of(model)).backward()
        scaler.step(optimizer)
        scaler.update()
        assert int(optimizer.applied_steps) == 1


def test_attributes_of_a_scaler_in_backward() -> None:
    model, optimizer = released()
    optimizer.grad_scale = torch.tensor(4.0)
    with refused("a GradScaler finds out", model):
        loss_of(model).backward()


def test_apex_amp() -> None:
    model, optimizer = released()
    with pytest.raises(RuntimeError, match="the optimizer releases gradients"):
        fusedtrain.apex.amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    assert_works(model, optimizer)
    model = network()
    model, optimizer = fusedtrain.apex.amp.initialize(
        model, make("AdamW", model.parameters()), opt_level="O1", verbosity=0
    )
    assert_refused(RuntimeError, "has been through amp.initialize", model, optimizer)


def test_captured_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _optimizer = released()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with refused("a CUDA graph is being captured", model):
        loss_of(model).backward()


def test_averages_in_the_place_of_parameters() -> None:
    model, optimizer = released(ema_decay=0.9)
    assert_works(model, optimizer)
    with optimizer.swap_averages():
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(RuntimeError, match="step within swap_averages"):
            loss_of(model).backward()
        assert alike(dict(before), dict(model.state_dict()))
    optimizer.zero_grad()
    loss_of(model).backward()
    optimizer.step()
    assert int(optimizer.applied_steps) == 2


def test_checkpoints_and_copies_of_half_a_step() -> None:
    model, optimizer = released()
    loss_of(model).backward()
    for make_copy in (optimizer.state_dict, lambda: copy.deepcopy(optimizer)):
        with pytest.raises(RuntimeError, match="between a backward pass and step"):
            make_copy()
    optimizer.step()
    assert optimizer.state_dict()["state"]


def test_sparse_gradients() -> None:
    model = nn.Embedding(5, 3, sparse=True)
    optimizer = make("AdamW", model.parameters())
    optimizer.release_gradients(model)
    before = model.weight.detach().clone()
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        model(torch.tensor([1, 2])).sum().backward()
    assert torch.equal(before, model.weight)


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_distributed_data_parallel() -> None:
    model = network()
    optimizer = make("AdamW", model.parameters())
    wrapped = DistributedDataParallel(model)
    whole = nn.ModuleDict({"inside": wrapped})
    for passed in (wrapped, model, model[0], whole):
        assert_refused(RuntimeError, "DistributedDataParallel sums", passed, optimizer)
    other = network()
    free = make("AdamW", other.parameters())
    with free.release_gradients(other):
        assert_works(other, free)


@pytest.mark.usefixtures("one_rank")
def test_distributed_data_parallel_around_a_released_model() -> None:
    model, optimizer = released()
    wrapped = DistributedDataParallel(model)
    with refused("DistributedDataParallel sums", model):
        loss_of(wrapped).backward()
    optimizer._release.remove()
