"""The modules of batch norm against stock PyTorch: checkpoints, steps, activations and drops."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as torch_functional
from torch import Tensor, nn

import fusedtrain.functional as F
import fusedtrain.nn as fnn
from fusedtrain.nn.parts import ROW_OF, activation_of, is_stochastic_depth
from fusedtrain.reference.pointwise import POINTWISE
from helpers.batch_norm_modules import (
    MODULES,
    Stock,
    assert_equal_results,
    randomized,
    results,
)
from helpers.models import timm, torchvision

BF16, F32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize("kind", MODULES)
def test_standard_checkpoints_both_ways(kind: str) -> None:
    ours, theirs, _ = MODULES[kind]
    for options in ({}, {"affine": False}, {"track_running_stats": False}):
        a, b = ours(4, **options), theirs(4, **options)
        assert list(a.state_dict()) == list(b.state_dict())
        assert str(a.load_state_dict(b.state_dict())) == "<All keys matched successfully>"
        assert str(b.load_state_dict(a.state_dict())) == "<All keys matched successfully>"
        assert isinstance(a, nn.modules.batchnorm._BatchNorm)
    assert kind == "add" or isinstance(ours(4), theirs)


def test_arguments_and_results_of_timm() -> None:
    from inspect import signature

    timm()
    import timm.layers as layers

    theirs = list(signature(layers.BatchNormAct2d).parameters)
    assert list(signature(fnn.BatchNormAct2d).parameters) == [*theirs, "bias", "overwrite_input"]
    x = torch.randn(3, 4, 5, 2)
    for options in (
        {}, {"apply_act": False}, {"act_layer": "silu"}, {"act_layer": nn.Hardswish},
        {"act_layer": nn.LeakyReLU, "act_kwargs": {"negative_slope": 0.3}},
        {"act_layer": "gelu_tanh", "inplace": False}, {"act_layer": None},
        {"act_layer": "hard_swish"}, {"act_layer": "mish"},
        {"act_layer": nn.PReLU, "inplace": False},
    ):  # fmt: skip
        theirs = layers.BatchNormAct2d(4, **options)
        ours = fnn.BatchNormAct2d(4, **options)
        assert list(ours.state_dict()) == list(theirs.state_dict())
        ours.load_state_dict(randomized(theirs).state_dict())
        assert_equal_results(results(ours, x), results(theirs, x))


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize(
    "options",
    [{}, {"momentum": None}, {"momentum": 0.0}, {"momentum": 1.0}, {"affine": False}, {"eps": 0.1},
     {"track_running_stats": False}, {"act_layer": nn.SiLU, "track_running_stats": False},
     {"apply_act": False}, {"act_layer": nn.PReLU, "inplace": False},
     {"momentum": 0.2, "stop": True}],
    ids=str,
)  # fmt: skip
def test_steps_of_training_and_evaluation(kind: str, options: dict[str, Any]) -> None:
    ours_type, theirs_type, shape = MODULES[kind]
    options = dict(options)
    stop = options.pop("stop", False)
    ours = randomized(ours_type(4, **options))
    theirs = Stock(ours, theirs_type)
    if stop:  # it has them, and is not to move them
        ours.track_running_stats = theirs.norm.track_running_stats = False
    for training in (True, True, False, True, False):
        ours.train(training)
        theirs.train(training)
        inputs = [torch.randn(shape) * 2 + 1 for _ in range(2 if kind == "add" else 1)]
        assert_equal_results(results(ours, *inputs), results(theirs, *inputs))


@pytest.mark.parametrize("cls", ROW_OF, ids=lambda c: f"{c.__module__}.{c.__name__}")
def test_every_activation_module_is_part_of_the_op(cls: type[nn.Module]) -> None:
    act = cls(0.3, -0.7) if cls.__name__ == "Threshold" else cls()
    for name, value in (("negative_slope", 0.3), ("alpha", 0.6), ("lambd", 0.4), ("max_val", 0.8)):
        if name in vars(act) and cls.__name__ != "ReLU6":
            setattr(act, name, value)
    ours = randomized(fnn.BatchNormAct2d(4))
    ours.act = act
    assert activation_of(act) is not None
    x, theirs = torch.randn(3, 4, 5, 2), Stock(ours)
    assert_equal_results(results(ours, x), results(theirs, x))


def test_every_function_by_its_name() -> None:
    x, r = torch.randn(3, 4, 5, 2), torch.randn(3, 4, 5, 2)
    z = torch_functional.batch_norm(x, None, None, training=True) + r
    for row in POINTWISE:
        parameters = dict(zip(row.parameters, row.example, strict=True))
        y = F.batch_norm_act(
            x, None, None, training=True, activation=row.name, residual=r, **parameters
        )
        torch.testing.assert_close(y, row.eager(z), rtol=2e-5, atol=2e-5)
    tanh = F.batch_norm_act(
        x, None, None, training=True, activation="gelu", residual=r, approximate="tanh"
    )
    torch.testing.assert_close(tanh, torch_functional.gelu(z, approximate="tanh"))
    # Parameters for which no kernel is exact.
    for name, value in (("leaky_relu", {"negative_slope": -0.5}), ("softplus", {"threshold": 3})):
        y = F.batch_norm_act(x, None, None, training=True, activation=name, residual=r, **value)
        torch.testing.assert_close(y, getattr(torch_functional, name)(z, **value))


def test_without_gradients() -> None:
    module = randomized(fnn.BatchNormAct2d(4))
    x = torch.randn(3, 4, 5, 2)
    for training in (True, False):
        module.train(training)
        want = copy.deepcopy(module)(x)
        for mode in (torch.no_grad, torch.inference_mode):
            other = copy.deepcopy(module)
            with mode():
                y = other(x)
            assert not y.requires_grad
            assert torch.equal(y, want)
            assert other.num_batches_tracked == int(training)
    # Made in inference mode, used outside of it: torch's answer.
    with torch.inference_mode():
        inner = torch.randn(3, 4, 5, 2)
    for f in (module, Stock(module)):
        with pytest.raises(RuntimeError, match=r"[Ii]nference tensors"):
            f(inner)


def test_deepcopy_and_pickle() -> None:
    module = randomized(fnn.BatchNormAddAct(4, drop_path=0.5, act_layer=nn.SiLU))
    x, r = torch.randn(3, 4, 5, 2), torch.randn(3, 4, 5, 2)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        torch.manual_seed(0)
        first = copy.deepcopy(module)(x, r)
        torch.manual_seed(0)
        assert torch.equal(other(x, r), first)


def test_activations_that_are_not_part_of_the_op() -> None:
    class Mine(nn.ReLU):
        def forward(self, input: Tensor) -> Tensor:
            return input * 2

    calls = []
    hooked, replaced = nn.ReLU(), nn.ReLU()
    hooked.register_forward_hook(lambda module, args, output: calls.append(1) or output + 1)
    replaced.forward = lambda input: input * 3  # type: ignore[method-assign]
    pre = nn.ReLU()
    pre.register_forward_pre_hook(lambda module, args: (args[0] + 5,))
    back = nn.ReLU()
    back.register_full_backward_hook(lambda module, of_input, of_output: (of_output[0] * 7,))
    x, r = torch.randn(3, 4, 5, 2), torch.randn(3, 4, 5, 2)
    for act in (
        Mine(), hooked, replaced, pre, back, nn.PReLU(4), nn.GLU(1), nn.RReLU(0.2, 0.2),
        nn.LeakyReLU(-0.2), nn.CELU(1e-31), nn.Softplus(1.0, 3.0), nn.Softmax(1), nn.Dropout(0.0),
        fnn.StarReLU(),
    ):  # fmt: skip
        ours = randomized(fnn.BatchNormAct2d(4))
        ours.act = act
        assert activation_of(act) is None, act
        for inputs in ((x,), (x, r)):
            theirs = Stock(ours)
            theirs.act = act
            assert_equal_results(results(ours, *inputs), results(theirs, *inputs))
    assert len(calls) == 4


def drop_layers() -> dict[str, Callable[[], nn.Module]]:
    timm()
    import timm.layers as layers

    ops = torchvision().ops

    class DropPath(nn.Module):
        """A layer of the same name and another meaning."""

        drop_prob = 0.5

        def forward(self, input: Tensor) -> Tensor:
            return input * 3

    def hooked() -> nn.Module:
        module = layers.DropPath(0.4)
        module.register_forward_hook(lambda module, args, output: output * 2)
        return module

    return {
        "fused timm": lambda: layers.DropPath(0.4),
        "fused timm, not scaled": lambda: layers.DropPath(0.4, scale_by_keep=False),
        "fused timm, never": lambda: layers.DropPath(0.0),
        "fused timm, always": lambda: layers.DropPath(1.0),
        "fused torchvision": lambda: ops.StochasticDepth(0.3, "row"),
        "torchvision, whole batch": lambda: ops.StochasticDepth(0.3, "batch"),
        "fused ours": lambda: fnn.DropPath(0.4),
        "dropout": lambda: nn.Dropout(0.4),
        "timm's DropBlock": lambda: layers.DropBlock2d(0.3, 2),
        "of another": DropPath,
        "timm, hooked": hooked,
    }


def test_drops_draw_and_give_what_they_do_alone() -> None:
    x, r = torch.randn(16, 4, 5, 6), torch.randn(16, 4, 5, 6)
    for kind, make in drop_layers().items():
        for dtype, training in itertools.product((F32, BF16), (True, False)):
            ours = randomized(fnn.BatchNormAct2d(4, drop_layer=make)).train(training)
            assert is_stochastic_depth(ours.drop) is ("fused" in kind), kind
            theirs = Stock(ours)
            theirs.drop = ours.drop
            runs = []
            for module in (ours, theirs):
                torch.manual_seed(8)
                outcome = results(module, x.to(dtype), r.to(dtype))
                runs.append([*outcome, torch.rand(3)])  # the generator is where it was
            tolerance = 1e-4 if dtype is F32 else 0.25
            for a, b in zip(*runs, strict=True):
                torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_stochastic_depth_takes_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> Any:
        raise AssertionError("the long way")

    x = torch.randn(4, 3, 5, 5)
    monkeypatch.setattr(fnn.DropPath, "forward", refuse)
    fnn.BatchNormAct2d(3, drop_layer=lambda: fnn.DropPath(0.0))(x)
    norm = fnn.BatchNormAct2d(3, drop_layer=lambda: fnn.DropPath(0.5))
    norm(x)
    norm.eval()(x)
    norm.drop.register_forward_hook(lambda module, args, output: output * 2)
    with pytest.raises(AssertionError, match="the long way"):
        norm(x)


def test_drop_path_draws_as_timm() -> None:
    timm()
    import timm.layers as layers

    x = torch.ones(64, 3, 2)
    for p, scale in itertools.product((0.0, 0.3, 1.0), (True, False)):
        drawn = []
        for cls in (fnn.DropPath, layers.DropPath):
            torch.manual_seed(9)
            drawn.append(cls(p, scale)(x))
        assert torch.equal(*drawn)
    assert torch.equal(fnn.DropPath(0.5).eval()(x), x)
    with pytest.raises(ValueError, match="drop_path"):
        fnn.BatchNormAddAct(3, drop_path=1.5)


def test_conversion_of_torch_does_not_drop_the_activation() -> None:
    for module in (fnn.BatchNormAct2d(4), fnn.BatchNormAddAct(4)):
        for model in (module, nn.Sequential(nn.Conv2d(4, 4, 1), nn.Sequential(module))):
            with pytest.raises(RuntimeError, match="activation"):
                nn.SyncBatchNorm.convert_sync_batchnorm(model)
        assert not hasattr(module, "qconfig")


@pytest.mark.parametrize("mode", ["eval", "untracked"])
def test_a_counter_that_is_not_needed_may_be_missing(mode: str) -> None:
    norm, x = fnn.BatchNormAct2d(4, track_running_stats=mode == "eval"), torch.randn(2, 4, 3, 3)
    stock = nn.BatchNorm2d(4, track_running_stats=mode == "eval")
    for module in (norm, stock):
        module.train(mode != "eval")
        del module.num_batches_tracked
    torch.testing.assert_close(norm(x), stock(x).relu())


def test_a_class_that_answers_for_its_parameters() -> None:
    class Tripled(fnn.BatchNormAct2d):
        def __getattr__(self, name: str) -> Any:
            value = super().__getattr__(name)
            return value * 3 if name == "weight" else value

    norm, x = Tripled(4), torch.randn(2, 4, 3, 3)
    nn.init.ones_(norm._parameters["weight"])
    torch.testing.assert_close(norm(x), 3 * fnn.BatchNormAct2d(4)(x))
