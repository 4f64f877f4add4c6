"""fold_frozen_norms: gradients of a convolution and a frozen norm, without what the norm saves."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fusedtrain
from fusedtrain._graph.modules import has_own_forward
from fusedtrain.folding import _verify
from fusedtrain.ops.fold import fold_weight
from fusedtrain.reference import fold as reference
from helpers.folding import CONVS, ByNames, Functional, Twice, channels, difference, waken
from helpers.models import build, timm
from helpers.observed import saved_bytes

pytestmark = pytest.mark.usefixtures("one_thread")


def run(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Output, gradient of the input and of every parameter."""
    x = x.detach().clone().requires_grad_()
    y = model(x)
    leaves = [x, *(p for p in model.parameters() if p.requires_grad)]
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    return [y.detach(), *torch.autograd.grad((y * weights).sum(), leaves, materialize_grads=True)]


def assert_same_gradients(tuned: nn.Module, plain: nn.Module, x: Tensor, limit: float) -> None:
    for a, b in zip(run(tuned, x), run(plain, x), strict=True):
        assert a.shape == b.shape
        scale = b.double().abs().max().item() or 1.0
        assert (a.double() - b.double()).abs().max().item() <= limit * scale


@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
@pytest.mark.parametrize("name", CONVS)
def test_every_convolution(name: str, affine: bool) -> None:
    make, norm, shape = CONVS[name]
    conv = make()
    model = waken(nn.Sequential(conv, norm(channels(conv), affine=affine), nn.SiLU())).double()
    if affine:
        with torch.no_grad():
            model[1].weight[0], model[1].weight[1] = 0, -1
    tuned = copy.deepcopy(model)
    assert len(fusedtrain.fold_frozen_norms(tuned)) == 1
    x = torch.randn(shape).double()
    assert_same_gradients(tuned, model, x, 1e-12)
    names = [n for n, _ in tuned.named_parameters()]
    values = [p.detach().requires_grad_() for p in tuned.parameters()]

    def function(x: Tensor, *parameters: Tensor) -> Tensor:
        return torch.func.functional_call(tuned, dict(zip(names, parameters, strict=True)), (x,))

    small = torch.randn((2, *shape[1:])).double().requires_grad_()
    assert torch.autograd.gradcheck(function, (small, *values), fast_mode=True)


@pytest.mark.parametrize(("transposed", "groups"), [(False, 1), (True, 1), (True, 2), (True, 4)])
@pytest.mark.parametrize("full", [True, False], ids=["all", "weight only"])
def test_folded_weight_gradcheck(transposed: bool, groups: int, full: bool) -> None:
    """First and second derivatives; a gamma of zero and one below."""
    weight = torch.randn(4, 3, 2, 2, dtype=torch.float64, requires_grad=True)
    n = 3 * groups if transposed else 4
    bias, gamma, beta = (torch.randn(n, dtype=torch.float64, requires_grad=True) for _ in "abc")
    with torch.no_grad():
        gamma[0], gamma[1] = 0, -1
    mean, var = torch.randn(n).double(), torch.rand(n).double() + 0.5
    rest = (mean, var, 1e-5, transposed, groups)
    tensors = (weight, bias, gamma, beta) if full else (weight,)

    def function(*t: Tensor) -> Any:
        return fold_weight(*(t if full else (*t, None, None, None)), *rest)

    assert torch.autograd.gradcheck(function, tensors)
    assert torch.autograd.gradgradcheck(function, tensors)


def test_follows_the_norm_from_step_to_step() -> None:
    model = waken(nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU())).double()
    tuned = copy.deepcopy(model)
    before = copy.deepcopy(tuned.state_dict())
    fusedtrain.fold_frozen_norms(tuned)
    x = torch.randn(3, 4, 6, 6).double()
    for training in (False, True, False, True):
        model[1].train(training)
        tuned[1].train(training)
        assert_same_gradients(tuned, model, x, 1e-12)
        ours, plain = tuned.state_dict(), model.state_dict()
        assert list(ours) == list(plain) == list(before)
        assert all(torch.equal(ours[k], plain[k]) for k in plain)
        if not training and not model[1].num_batches_tracked:
            assert all(torch.equal(ours[k], before[k]) for k in plain)


def test_undo() -> None:
    model = waken(nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)))
    before = [dict(vars(m)) for m in model.modules()]
    fusedtrain.fold_frozen_norms(model)
    assert len(fusedtrain.fold_frozen_norms(model)) == 1  # again
    assert fusedtrain.revert(model) == 1
    assert [dict(vars(m)) for m in model.modules()] == before
    assert fusedtrain.revert(model) == 0


def test_saves_a_third_less() -> None:
    """conv, norm, relu, conv: input, norm's input, relu's output; now without the norm's."""
    layers = (nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
    model = waken(nn.Sequential(*layers, nn.Conv2d(8, 8, 3, padding=1)))
    x = torch.randn(4, 8, 32, 32)
    unit = x.numel() * 4
    eager = saved_bytes(lambda: model(x), (*model.parameters(), *model.buffers()))
    fusedtrain.fold_frozen_norms(model)
    tuned = saved_bytes(lambda: model(x), (*model.parameters(), *model.buffers()))
    assert 3 * unit <= sum(eager.values()) < 3.05 * unit
    assert 2 * unit <= sum(tuned.values()) < 2.05 * unit
    assert sorted(size for size in tuned.values() if size >= unit) == [unit, unit]


class Heads(ByNames):
    """A block called for each of several inputs, as in detection."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x[..., ::2]).sum() + self.head(x[..., 1::2]).pow(2).sum()


def test_block_called_twice() -> None:
    head = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    model = waken(Heads(head=head)).double()
    tuned = copy.deepcopy(model)
    assert len(fusedtrain.fold_frozen_norms(tuned)) == 1
    assert_same_gradients(tuned, model, torch.randn(2, 4, 6, 8).double(), 1e-12)


def test_left() -> None:
    model = Twice(conv=nn.Conv2d(4, 4, 1), norm=nn.BatchNorm2d(4))
    assert fusedtrain.fold_frozen_norms(model).left[0].reason == "conv is called 2 times"
    assert "a call" in str(fusedtrain.fold_frozen_norms(Functional()))
    for layer in (nn.Dropout(), nn.ReLU()):
        model = nn.Sequential(nn.Conv2d(4, 4, 1), layer, nn.BatchNorm2d(4)).eval()
        assert len(fusedtrain.fold_frozen_norms(model)) == 0
    with pytest.raises(TypeError, match="model must be"):
        fusedtrain.fold_frozen_norms(None)
    with pytest.raises(TypeError, match="example_inputs"):
        fusedtrain.fold_frozen_norms(model, "eval")


class ByMode(ByNames):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.a(x) if self.training else self.b(x))


def test_different_flow_by_mode_is_left() -> None:
    model = ByMode(a=nn.Conv2d(4, 4, 1), b=nn.Conv2d(4, 4, 1), norm=nn.BatchNorm2d(4))
    assert "different convolutions" in fusedtrain.fold_frozen_norms(model).left[0].reason


def test_linear_on_three_dimensions_stays() -> None:
    model = waken(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))).double()
    tuned = copy.deepcopy(model)
    assert len(fusedtrain.fold_frozen_norms(tuned)) == 1
    for shape in ((5, 6), (3, 6, 6)):
        assert_same_gradients(tuned, model, torch.randn(shape).double(), 1e-12)


def test_copies_pickles_and_compiles() -> None:
    model = waken(nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU()))
    fusedtrain.fold_frozen_norms(model)
    x = torch.randn(2, 4, 6, 6)
    expected = model(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), expected)
        with torch.no_grad():
            other[1].bias.add_(1)  # of the copy only
        assert torch.equal(model(x), expected)
        assert not torch.equal(other(x), expected)

    class Net(ByNames):  # torch.compile skips the frames of nn.Sequential itself
        def forward(self, x: Tensor) -> Tensor:
            return self.part(x)

    net = Net(part=model)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    for a, b in zip(run(compiled, x), run(net, x), strict=True):
        assert difference(a, b) < 1e-5


def test_mixed_dtypes() -> None:
    model = waken(nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)))
    model[0].bfloat16()
    tuned = copy.deepcopy(model)
    fusedtrain.fold_frozen_norms(tuned)
    x = torch.randn(2, 4, 6, 6).bfloat16()
    assert_same_gradients(tuned, model, x, 0.04)
    single = waken(nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)))
    expected = run(single, x.float())
    fusedtrain.fold_frozen_norms(single)
    with torch.autocast("cpu", torch.bfloat16):
        assert single(x.float()).dtype == torch.bfloat16
        for a, b in zip(run(single, x.float()), expected, strict=True):
            assert difference(a, b) < 0.04


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["torchvision:resnet18", "timm:efficientnet_b0", "torchvision:googlenet"]
)
@pytest.mark.filterwarnings("ignore:The default weight initialization")
def test_models(name: str) -> None:
    """Norms frozen, the rest in training mode. Dropout is off in these models."""
    torch.manual_seed(1)
    model = waken(build(name, torch.float64))
    if "efficientnet" in name:
        model.train()
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
    tuned = copy.deepcopy(model)
    report = fusedtrain.fold_frozen_norms(tuned)
    norms = sum(isinstance(m, nn.BatchNorm2d) for m in model.modules())
    assert (len(report), len(report.left)) == (norms, 0)
    assert_same_gradients(tuned, model, torch.randn(2, 3, 64, 64).double(), 1e-9)


def test_frozen_norms_of_timm_and_torchvision() -> None:
    timm()
    from timm.layers import BatchNormAct2d, FrozenBatchNormAct2d
    from torchvision.ops import FrozenBatchNorm2d

    for norm in (FrozenBatchNorm2d(6), FrozenBatchNormAct2d(6), BatchNormAct2d(6)):
        model = nn.Sequential(nn.Conv2d(4, 6, 3), norm).double()
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
        norm.train(not isinstance(norm, BatchNormAct2d))
        tuned = copy.deepcopy(model)
        assert len(fusedtrain.fold_frozen_norms(tuned)) == 1
        assert_same_gradients(tuned, model, torch.randn(2, 4, 6, 6).double(), 1e-12)


def test_reference_before_and_after_agree_for_a_linear_layer() -> None:
    """W (s x + t) + b, and s (W x + b) + t."""
    weight, bias = torch.randn(3, 3).double(), torch.randn(3).double()
    stats = [torch.rand(3).double() + 0.5 for _ in range(4)]
    x = torch.randn(5, 3).double()
    norm = nn.BatchNorm1d(3).double().eval()
    norm.weight.data, norm.bias.data, norm.running_mean, norm.running_var = stats
    after = F.linear(x, *reference.fold_weight(weight, bias, *stats, norm.eps, False, 1))
    torch.testing.assert_close(after, norm(F.linear(x, weight, bias)))
    before = F.linear(x, *reference.fold_weight_before(weight, bias, *stats, norm.eps, 1))
    torch.testing.assert_close(before, F.linear(norm(x), weight, bias))


def test_an_example_compares(monkeypatch: pytest.MonkeyPatch) -> None:
    model = waken(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))
    report = fusedtrain.fold_frozen_norms(model, example_inputs=(2, 3, 8, 8))
    assert report.error is not None
    assert 0 < report.error < 1e-5
    monkeypatch.setattr(_verify, "TOLERANCES", {})  # not even rounding
    with pytest.raises(RuntimeError, match=r"fold_frozen_norms: the outputs .* is undone"):
        fusedtrain.fold_frozen_norms(model, example_inputs=(2, 3, 8, 8))
    assert not any(has_own_forward(module) for module in model)
