"""convert gives depthwise convolutions the class of fusedtrain.nn."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import fusedtrain
from fusedtrain import nn as fused

pytestmark = pytest.mark.usefixtures("one_thread")

LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "1-d": (nn.Conv1d(6, 6, 31, padding=15, groups=6), (2, 6, 40)),
    "2-d": (nn.Conv2d(6, 6, 5, stride=2, padding=2, groups=6, bias=False), (2, 6, 40, 41)),
    "3-d": (nn.Conv3d(4, 4, 3, padding=1, groups=4), (2, 4, 3, 7, 8)),
    "multiplier": (nn.Conv2d(4, 12, 3, groups=4, padding="same"), (2, 4, 20, 20)),
    "reflect": (nn.Conv2d(4, 4, 7, groups=4, padding=3, padding_mode="reflect"), (2, 4, 20, 20)),
    "dilated": (nn.Conv2d(4, 4, (3, 5), dilation=(2, 1), groups=4), (2, 4, 20, 20)),
}


def results(model: nn.Module, x: Tensor) -> list[Tensor]:
    input = x.clone().requires_grad_()
    output = model(input)
    leaves = [input, *model.parameters()]
    return [output, *torch.autograd.grad((output * output).sum(), leaves)]


@pytest.mark.parametrize("name", LAYERS)
def test_numbers_names_and_revert(name: str) -> None:
    layer, shape = LAYERS[name]
    stock = nn.Sequential(copy.deepcopy(layer).double())
    model, x = copy.deepcopy(stock), torch.randn(shape, dtype=torch.float64)
    report = fusedtrain.convert(model, x)
    kind = f"Depthwise{type(layer).__name__}"
    assert [entry.target for entry in report.converted] == [f"fusedtrain.nn.{kind}"]
    assert type(model[0]) is getattr(fused, kind)
    assert isinstance(model[0], type(layer))
    assert [*model.state_dict()] == [*stock.state_dict()]
    for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for ours, torchs in zip(results(one, x), results(stock, x), strict=True):
            torch.testing.assert_close(ours, torchs, rtol=1e-12, atol=1e-12)
            assert ours.stride() == torchs.stride()
    assert str(fusedtrain.convert(model)).startswith("converted 0 modules")
    assert fusedtrain.revert(model) == 1
    assert type(model[0]) is type(layer)
    assert vars(model[0]).keys() == vars(stock[0]).keys()


def test_our_kernel_runs() -> None:
    """The test above would see nothing if torch's ran."""
    model = nn.Sequential(nn.Conv2d(8, 8, 5, padding=2, groups=8, bias=False))
    fusedtrain.convert(model)
    with torch.profiler.profile() as profiler:
        model(torch.randn(2, 8, 30, 30)).sum().backward()
    names = {event.key for event in profiler.key_averages()}
    assert {"fusedtrain::depthwise_conv", "fusedtrain::depthwise_conv_backward"} <= names


class Own(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 1


def stays() -> dict[str, tuple[nn.Module, dict[str, Any], str]]:
    def depthwise(kind: type = nn.Conv2d, **rest: Any) -> Any:
        return kind(4, 4, 3, groups=4, **rest)

    patched = depthwise()
    patched.forward = lambda input: input
    return {
        "subclass": (depthwise(Own), {}, "subclass of torch.nn.Conv2d"),
        "parametrized": (parametrizations.weight_norm(depthwise()), {}, "parametrized"),
        "patched": (patched, {}, "its forward is patched"),
        "excluded": (depthwise(), {"exclude": ["0"]}, "excluded"),
        "elsewhere": (depthwise(device="meta"), {}, "torch's own kernels run on meta"),
    }


@pytest.mark.parametrize("name", stays())
def test_what_stays(name: str) -> None:
    layer, options, reason = stays()[name]
    cls = type(layer)
    report = fusedtrain.convert(nn.Sequential(layer), **options)
    assert type(layer) is cls
    assert not report.converted
    assert [left.name for left in report.left] == ["0"]
    assert reason in report.left[0].reason


@pytest.mark.parametrize(
    "layer", [nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3, groups=2), nn.Conv2d(1, 4, 3)], ids=str
)
def test_other_convolutions_have_no_line(layer: nn.Module) -> None:
    report = fusedtrain.convert(nn.Sequential(layer))
    assert not report.converted
    assert not report.left


def test_hooks_see_what_they_saw() -> None:
    """weight_norm of old is a hook that sets the weight."""

    def network() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(4, 4, 3, groups=4), nn.BatchNorm2d(4), nn.ReLU()).double()
        with pytest.warns(FutureWarning):
            torch.nn.utils.weight_norm(model[0])
        return model

    stock, model, x = network(), network(), torch.randn(2, 4, 9, 9, dtype=torch.float64)
    fusedtrain.convert(model, x)
    assert type(model[0]) is fused.DepthwiseConv2d
    seen: list[Tensor] = []
    for one in (stock, model):
        one[0].register_forward_hook(lambda module, args, output: seen.append(output))
        one[0].register_full_backward_hook(lambda module, grads, _: seen.append(grads[0]))
    for ours, torchs in zip(results(model, x), results(stock, x), strict=True):
        torch.testing.assert_close(ours, torchs, rtol=1e-10, atol=1e-10)
    for ours, torchs in zip(seen[:2], seen[2:], strict=True):
        torch.testing.assert_close(ours, torchs, rtol=1e-10, atol=1e-10)
