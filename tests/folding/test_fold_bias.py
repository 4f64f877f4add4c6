"""drop_redundant_bias: the same outputs, checkpoints both ways, no gradient."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import fusedtrain
from fusedtrain._graph.modules import has_own_forward
from helpers.folding import CONVS, channels, difference, waken


def pair(name: str = "2d") -> tuple[nn.Module, nn.Module, Tensor]:
    make, norm, shape = CONVS[name]
    conv = make()
    layers = [conv, norm(channels(conv)), nn.ReLU()]
    if isinstance(conv, nn.Linear):
        layers.insert(0, nn.Flatten())
    plain = waken(nn.Sequential(*layers)).double().train()
    return plain, copy.deepcopy(plain), torch.randn(shape).double()


def same(a: nn.Module, b: nn.Module, x: Tensor) -> bool:
    """Outputs in eval mode."""
    a.eval()
    b.eval()
    with torch.no_grad():
        result = difference(a(x), b(x)) < 1e-12
    a.train()
    b.train()
    return result


@pytest.mark.parametrize("name", [n for n in CONVS if n != "no bias"])
def test_trains_alike(name: str) -> None:
    plain, dropped, x = pair(name)
    report = fusedtrain.drop_redundant_bias(dropped)
    assert (len(report), report.left) == (1, [])
    at = 1 if name == "linear" else 0
    assert same(dropped, plain, x)
    optimizers = [torch.optim.SGD(m.parameters(), 1e-3, weight_decay=0.1) for m in (plain, dropped)]
    for _ in range(3):
        for model, optimizer in zip((plain, dropped), optimizers, strict=True):
            optimizer.zero_grad()
            model(x).pow(2).sum().backward()
            optimizer.step()
    assert dropped[at].bias.grad is None
    assert not dropped[at].bias.any()
    assert not optimizers[1].state.get(dropped[at].bias)
    assert plain[at].bias.grad.abs().max() < 1e-10
    torch.testing.assert_close(dropped[at].weight, plain[at].weight)
    shifted = plain[at + 1].running_mean - plain[at].bias
    # Weight decay moved the plain bias: that of before counts until the running mean has forgotten.
    assert (dropped[at + 1].running_mean - shifted).abs().max() < 1e-3
    with torch.no_grad():
        assert difference(dropped(x), plain(x)) < 1e-10
    expected = copy.deepcopy(plain)
    expected.load_state_dict(dropped.state_dict())
    assert same(expected, dropped, x)


@pytest.mark.parametrize("order", [("conv", "norm"), ("norm", "conv")])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_checkpoints_go_both_ways(order: tuple[str, str], compiled: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            made = {"conv": nn.Conv2d(4, 6, 3), "norm": nn.BatchNorm2d(6)}
            for name in order:
                self.add_module(name, made[name])

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.conv(x))

    plain, other = (waken(Net()).double().train() for _ in "ab")
    dropped = copy.deepcopy(other)
    fusedtrain.drop_redundant_bias(dropped)
    assert list(dropped.state_dict()) == list(plain.state_dict())
    x = torch.randn(2, 4, 6, 6).double()
    run = torch.compile(dropped, backend="eager", fullgraph=True) if compiled else dropped
    dropped.eval()
    run(x)
    dropped.train()
    dropped.load_state_dict(plain.state_dict())
    assert same(run, plain, x)
    fresh = copy.deepcopy(other)
    fresh.load_state_dict(dropped.state_dict())
    assert same(fresh, plain, x)
    # Before the next call, and by assignment.
    dropped.load_state_dict(other.state_dict(), assign=True)
    fresh.load_state_dict(dropped.state_dict())
    assert same(fresh, other, x)


def test_written_bias_counts() -> None:
    plain, dropped, x = pair()
    fusedtrain.drop_redundant_bias(dropped)
    for model in (plain, dropped):
        with torch.no_grad():
            model[0].bias.copy_(torch.arange(6.0))
    if not same(dropped, plain, x):  # the old bias is in the running mean, the new one replaces it
        fresh, _, _ = pair()
        fresh.load_state_dict(dropped.state_dict())
        assert same(dropped, fresh, x)


def test_undo_is_exact() -> None:
    plain, dropped, x = pair()
    before = copy.deepcopy(plain.state_dict())
    fusedtrain.drop_redundant_bias(dropped)
    duplicate = pickle.loads(pickle.dumps(copy.deepcopy(dropped)))
    assert fusedtrain.revert(dropped) == 1
    assert fusedtrain.revert(duplicate) == 1
    for model in (dropped, duplicate):
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
        assert all(p.requires_grad for p in model.parameters())
        assert not has_own_forward(model[0])
        assert not any(m._load_state_dict_post_hooks for m in model.modules())
    fusedtrain.drop_redundant_bias(dropped)
    for model in (plain, dropped):
        model(x)
    fusedtrain.revert(dropped)
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(dropped.state_dict()[key], value)


def test_without_running_statistics() -> None:
    layers = (nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6, track_running_stats=False))
    plain = nn.Sequential(*layers).double()
    dropped = copy.deepcopy(plain)
    assert len(fusedtrain.drop_redundant_bias(dropped)) == 1
    x = torch.randn(2, 4, 6, 6).double()
    assert difference(dropped(x).detach(), plain(x).detach()) < 1e-12
    fusedtrain.revert(dropped)
    assert torch.equal(dropped[0].bias, plain[0].bias)


def test_left() -> None:
    frozen = nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)).eval()
    assert "eval mode" in fusedtrain.drop_redundant_bias(frozen).left[0].reason
    dropout = nn.Sequential(nn.Conv2d(4, 6, 3), nn.Dropout(), nn.BatchNorm2d(6))
    assert len(fusedtrain.drop_redundant_bias(dropout)) == 0
    linear = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
    assert "three dimensions" in fusedtrain.drop_redundant_bias(linear).left[0].reason
    assert len(fusedtrain.drop_redundant_bias(linear, torch.randn(3, 4))) == 1
    with pytest.raises(RuntimeError, match="made for inputs of 2 dimensions, not 3"):
        linear(torch.randn(2, 6, 4))
    with pytest.raises(TypeError, match="model must be"):
        fusedtrain.drop_redundant_bias([])
    with pytest.raises(TypeError, match="example_inputs"):
        fusedtrain.drop_redundant_bias(linear, 1)


def test_functional_call_writes_nothing() -> None:
    """The tensors of a functional call are somebody else's: their bias is added, and stays."""
    plain, dropped, x = pair()
    fusedtrain.drop_redundant_bias(dropped)
    values = {k: v.detach().clone() for k, v in plain.named_parameters()}
    before = {k: v.clone() for k, v in (values | dict(dropped.named_buffers())).items()}
    expected = copy.deepcopy(plain).eval()
    expected.load_state_dict(dropped.state_dict())
    for model in (plain, dropped):
        model.eval()
    call = torch.func.functional_call
    assert difference(call(dropped, values, x), call(expected, values, x)) < 1e-12
    after = values | dict(dropped.named_buffers())
    assert all(torch.equal(after[k], v) for k, v in before.items())

    def loss(values: dict[str, Tensor]) -> Tensor:
        return call(dropped, values, x).pow(2).sum()

    parameters = {k: v.detach() for k, v in dropped.named_parameters()}
    assert torch.func.grad(loss)(parameters)["0.bias"].any()
    stacked = {k: torch.stack([v, v]) for k, v in parameters.items()}
    assert torch.func.vmap(loss)(stacked).shape == (2,)
    assert same(dropped, plain, x)


def test_assigned_tensors_stay_their_owner_s() -> None:
    plain, dropped, x = pair()
    other = waken(copy.deepcopy(plain)).train()
    fusedtrain.drop_redundant_bias(dropped)
    state = other.state_dict()
    before = {k: v.clone() for k, v in state.items()}
    dropped.load_state_dict(state, assign=True)
    assert all(torch.equal(state[k], v) for k, v in before.items())
    assert other[0].bias.requires_grad
    assert not dropped[0].bias.requires_grad
    assert same(dropped, other, x)
    # A bias that is set is one of the model's own again.
    dropped[0].bias = nn.Parameter(torch.ones(6).double())
    plain.load_state_dict(dropped.state_dict())
    assert same(dropped, plain, x)
    dropped(x).pow(2).sum().backward()
    assert dropped[0].bias.grad is not None
    fusedtrain.revert(dropped)
    assert bool((dropped[0].bias == 1).all())
