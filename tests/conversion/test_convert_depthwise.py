"""convert gives depthwise convolutions the forward of fusedtrain.nn; their class stays."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import fusedtrain
from fusedtrain.conversion._classes import is_swapped
from fusedtrain.conversion._rules import TORCH_IS_FASTER
from fusedtrain.nn.depthwise import passes_of
from fusedtrain.ops import depthwise as depthwise_ops
from helpers.conversion import compared, outline, reasons
from helpers.models import transformers

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
    report = compared(copy.deepcopy(stock), x, x, 1e-12)
    assert outline(report) == [f"0: module Depthwise{type(layer).__name__}"]
    assert str(fusedtrain.convert(model, x)).startswith("converted 1 module")
    assert is_swapped(model[0])
    assert type(model[0]) is type(layer)
    for ours, torchs in zip(results(model, x), results(stock, x), strict=True):
        assert ours.stride() == torchs.stride()
    assert fusedtrain.revert(model) == 1
    assert vars(model[0]).keys() == vars(stock[0]).keys()


class Standardized(nn.Conv2d):
    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(input, weight - weight.mean(), bias)


def _tiles(layer: nn.Module) -> None:  # as diffusers' pictures are made to tile
    layer._conv_forward = lambda x, weight, bias: nn.functional.conv2d(
        nn.functional.pad(x, (1, 1, 1, 1), "circular"), weight, bias, groups=layer.groups
    )


EDITS: dict[str, Callable[[nn.Module], object]] = {
    "its own way to convolve": _tiles,
    "another class": lambda layer: setattr(layer, "__class__", Standardized),
    "padding": lambda layer: setattr(layer, "padding_mode", "circular"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_layer_that_convolves_otherwise_now(edit: str) -> None:
    stock = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, groups=4)).double()
    model = copy.deepcopy(stock)
    fusedtrain.convert(model)
    x = torch.randn(2, 4, 20, 20, dtype=torch.float64)
    for one in (stock, model):
        EDITS[edit](one[0])
    for ours, torchs in zip(results(model, x), results(stock, x), strict=True):
        torch.testing.assert_close(ours, torchs)


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
    assert (outline(report), reasons(report)) == ([], [f"0: {reason}"])


@pytest.mark.parametrize("example", [None, (2, 4, 8, 8)])
def test_a_weight_whose_reading_changes_buffers_is_not_read(example: Any) -> None:
    model = nn.Sequential(parametrizations.spectral_norm(nn.Conv2d(4, 4, 3, groups=4)), nn.SiLU())
    before = copy.deepcopy(model.state_dict())
    fusedtrain.convert(model, example)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    "layer", [nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3, groups=2), nn.Conv2d(1, 4, 3)], ids=str
)
def test_other_convolutions_have_no_line(layer: nn.Module) -> None:
    report = fusedtrain.convert(nn.Sequential(layer))
    assert (outline(report), reasons(report)) == ([], [])


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
    assert is_swapped(model[0])
    seen: list[Tensor] = []
    for one in (stock, model):
        one[0].register_forward_hook(lambda module, args, output: seen.append(output))
        one[0].register_full_backward_hook(lambda module, grads, _: seen.append(grads[0]))
    for ours, torchs in zip(results(model, x), results(stock, x), strict=True):
        torch.testing.assert_close(ours, torchs, rtol=1e-10, atol=1e-10)
    for ours, torchs in zip(seen[:2], seen[2:], strict=True):
        torch.testing.assert_close(ours, torchs, rtol=1e-10, atol=1e-10)


def left_or_not() -> dict[str, tuple[nn.Module, tuple[int, ...], bool]]:
    """Sizes on both sides of limits of the rule, and whether the layer is left."""

    def conv(kernel: int, kind: type = nn.Conv2d, channels: int = 4, **rest: Any) -> Any:
        return kind(channels, channels, kernel, groups=channels, **rest)

    return {
        "small plane": (conv(3, padding=1), (2, 4, 9, 9), True),
        "one sample": (conv(3, padding=1), (4, 9, 9), True),
        "large plane": (conv(3, padding=1), (1, 4, 40, 40), False),
        "gradient of the weight": (conv(5, padding=2), (2, 4, 9, 9), False),
        "gradient of the input": (conv(3, stride=2).bfloat16(), (2, 4, 9, 9), False),
        "1-d": (conv(8, nn.Conv1d, padding=4), (2, 4, 99), False),
        "reflect": (conv(3, padding=1, padding_mode="reflect"), (2, 4, 9, 9), True),
        "unequal sides": (conv(2, padding="same"), (2, 4, 9, 9), False),
        # A copy pads unequal sides before the kernel, in our class, too.
        "reflect, unequal": (conv(2, padding="same", padding_mode="reflect"), (2, 4, 9, 9), True),
        "float64": (conv(3, padding=1).double(), (2, 4, 9, 9), False),
        "excluded": (conv(3, padding=1), (2, 4, 9, 9), True),
    }


@pytest.fixture
def _fast_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch has kernels of float32 and 16 bits on any machine."""
    fast = lambda dtype: dtype is not torch.float64  # noqa: E731
    monkeypatch.setattr(depthwise_ops, "_torch_has_kernels", fast)
    depthwise_ops._plan.cache_clear()
    yield
    depthwise_ops._plan.cache_clear()


def example(shape: tuple[int, ...], layer: nn.Module) -> Tensor:
    return torch.randn(shape, dtype=next(layer.parameters()).dtype)


@pytest.mark.usefixtures("_fast_torch")
@pytest.mark.parametrize("name", left_or_not())
def test_layers_that_gain_nothing_are_left(name: str) -> None:
    layer, shape, left = left_or_not()[name]
    model, x = nn.Sequential(layer, nn.Identity()), example(shape, layer)
    kind, state = type(layer), dict(vars(layer))
    exclude = ["0"] if name == "excluded" else []
    report = fusedtrain.convert(model, x, exclude=exclude)
    assert is_swapped(layer) == (not left)
    assert type(layer) is kind
    reasons = [entry.reason for entry in report.left]
    assert reasons == ["excluded" if exclude else TORCH_IS_FASTER] * left
    assert (TORCH_IS_FASTER in str(report)) == (left and not exclude)
    assert len(report) == len(report.converted) == (not left)
    if left:
        assert vars(layer) == state
    assert fusedtrain.revert(model) == (not left)
    assert type(layer) is kind


@pytest.mark.usefixtures("_fast_torch")
def test_a_layer_that_gains_under_autocast_alone_is_converted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Most people convert outside autocast, and train within."""
    monkeypatch.setattr(depthwise_ops, "_torch_has_kernels", lambda dtype: dtype is torch.float32)
    depthwise_ops._plan.cache_clear()
    stock = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, groups=4))
    model, x = copy.deepcopy(stock), torch.randn(2, 4, 9, 9)
    report = fusedtrain.convert(model, x)
    assert is_swapped(model[0])
    assert not report.left
    assert torch.equal(model(x), stock(x))  # the same kernel
    with torch.autocast("cpu", torch.bfloat16):
        assert any(passes_of(model[0], x))
        torch.testing.assert_close(model(x), stock(x), rtol=2e-2, atol=2e-2)


@pytest.mark.usefixtures("_fast_torch")
@pytest.mark.parametrize(
    "options",
    [{"example_inputs": None}, {"verify": False}, {"memory": "recompute"}, {"memory": "q8"}],
    ids=str,
)
def test_without_an_example_or_with_another_memory_they_are_converted(options: Any) -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3, groups=4))
    report = fusedtrain.convert(model, **{"example_inputs": (2, 4, 9, 9), **options})
    assert is_swapped(model[0])
    assert not report.left
    assert fusedtrain.revert(model) == 1 + (options.get("memory") == "recompute")


class Two(nn.Module):
    """Calls one convolution on a small and another on a large input as well, a third not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.both, self.idle = (nn.Conv2d(4, 4, 3, groups=4) for _ in range(3))

    def forward(self, input: Tensor) -> Tensor:
        few = input[..., :9, :9]
        result: Tensor = self.small(input=few) + self.both(few) + self.both(input).mean()
        return result


@pytest.mark.usefixtures("_fast_torch")
def test_every_call_of_the_example_counts() -> None:
    model, x = Two(), torch.randn(1, 4, 40, 40)
    stock = copy.deepcopy(model)
    for _ in range(2):  # a second convert finds the same, but for what is fused already
        report = fusedtrain.convert(model, x)
        assert [(left.name, left.reason) for left in report.left] == [("small", TORCH_IS_FASTER)]
        assert [is_swapped(part) for part in model.children()] == [False, True, True]
    assert report.already == 2
    for one in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert [is_swapped(part) for part in one.children()] == [False, True, True]
        torch.testing.assert_close(one(x), stock(x))
        assert fusedtrain.revert(one) == 2
        assert not is_swapped(one.both)
    # Without an example nothing is known of the sizes.
    assert [entry.name for entry in fusedtrain.convert(model).converted] == ["small"]
    assert fusedtrain.revert(model) == 3
    report = fusedtrain.convert(model, x, dry_run=True)
    assert [left.name for left in report.left] == ["small"]
    assert not any(map(is_swapped, model.children()))


@pytest.mark.usefixtures("_fast_torch")
def test_the_example_may_autocast_and_change_the_layout() -> None:
    """The class chooses by the dtype and the layout that reach the kernel."""

    class Cast(nn.Sequential):
        def forward(self, input: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                result: Tensor = super().forward(input)
            return result

    # Contiguous float32 gains.
    for cls, x in (
        (Cast, torch.randn(1, 4, 40, 40)),
        (nn.Sequential, torch.randn(1, 4, 40, 40).contiguous(memory_format=torch.channels_last)),
    ):
        model = cls(nn.Conv2d(4, 4, 3, groups=4))
        report = fusedtrain.convert(model, x)
        assert [left.reason for left in report.left] == [TORCH_IS_FASTER]


@pytest.mark.usefixtures("_fast_torch")
def test_other_layers_of_the_network_are_converted() -> None:
    """The norm behind a layer that is left becomes one op all the same."""
    layers = (nn.Conv2d(4, 4, 3, groups=4, bias=False), nn.BatchNorm2d(4), nn.ReLU())
    model, x = nn.Sequential(*layers), torch.randn(2, 4, 9, 9)
    stock = copy.deepcopy(model)
    report = fusedtrain.convert(model, x)
    assert [norm.name for norm in report.norms] == ["1"]
    assert [left.name for left in report.left] == ["0"]
    for ours, torchs in zip(results(model, x), results(stock, x), strict=True):
        torch.testing.assert_close(ours, torchs, rtol=1e-4, atol=1e-4)
    assert fusedtrain.revert(model) > 0
    assert [type(part) for part in model] == [type(part) for part in stock]


def block() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8), nn.ReLU()
    )


def prepared(model: nn.Module) -> nn.Module:
    quantization = torch.ao.quantization
    model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
    return quantization.prepare_qat(model.train())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_quantisation_finds_the_layers() -> None:
    stock, model, x = block(), block(), torch.randn(2, 3, 8, 8)
    fusedtrain.convert(model)
    assert is_swapped(model[1])
    model, stock = prepared(model), prepared(stock)
    assert isinstance(model.get_submodule("1"), torch.ao.nn.qat.Conv2d)
    torch.testing.assert_close(model(x), stock(x), rtol=1e-4, atol=1e-4)
    late = prepared(block())
    report = fusedtrain.convert(late)
    assert "subclass of torch.nn.Conv2d" in str(report)
    torch.testing.assert_close(late(x), prepared(block())(x), rtol=1e-4, atol=1e-4)


def test_adapters_of_peft() -> None:
    transformers()
    peft: Any = pytest.importorskip("peft")
    results = []
    for convert in (True, False):
        model = block()
        if convert:
            fusedtrain.convert(model)
        torch.manual_seed(1)
        wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["0", "1"], r=8))
        output = wrapped(torch.ones(2, 3, 8, 8))
        output.sum().backward()
        results.append((wrapped.get_nb_trainable_parameters(), output))
    assert results[0][0] == results[1][0]
    torch.testing.assert_close(results[0][1], results[1][1])


def test_the_class_of_a_layer_builds_another() -> None:
    layer = nn.Conv2d(8, 8, 3, groups=8)
    fusedtrain.convert(nn.Sequential(layer))
    assert is_swapped(layer)
    assert type(layer)(8, 16, 3).groups == 1
