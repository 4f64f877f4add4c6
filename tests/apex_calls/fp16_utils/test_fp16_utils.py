"""fusedtrain.apex.fp16_utils: its names, and the conversion of models. The other parts are in
test_fp16_master_params.py, test_fp16_loss_scaler.py and test_fp16_training.py."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedtrain
from fusedtrain._graph.modules import has_own_forward
from fusedtrain.apex import fp16_utils
from helpers.models import build
from helpers.processes import python

pytestmark = pytest.mark.usefixtures("one_thread")

HALF, FLOAT = torch.float16, torch.float32


def test_names_arguments_and_defaults_are_apex_s() -> None:
    """Compares with apex/fp16_utils/ (fp16util.py, loss_scaler.py) at the last commit with them."""
    signatures = {
        "BN_convert_float": "module",
        "network_to_half": "network",
        "convert_module": "module, dtype",
        "convert_network": "network, dtype",
        "FP16Model": "network",
        "prep_param_lists": "model, flat_master=False",
        "model_grads_to_master_grads": "model_params, master_params, flat_master=False",
        "master_params_to_model_params": "model_params, master_params, flat_master=False",
        "to_python_float": "t",
        "tofp16": "",
        "LossScaler": "scale=1",
        "DynamicLossScaler": "init_scale=4294967296, scale_factor=2.0, scale_window=1000",
    }
    for name, expected in signatures.items():
        parameters = inspect.signature(getattr(fp16_utils, name)).parameters.values()
        if name == "tofp16":  # it has no __init__ of its own
            parameters = []
        shown = [str(p.replace(annotation=p.empty)) for p in parameters]
        assert ", ".join(shown) == expected, name
    assert {*signatures, "clip_grad_norm"} <= {*fp16_utils.__all__}
    assert all(hasattr(fp16_utils, name) for name in fp16_utils.__all__)
    assert fp16_utils.clip_grad_norm is torch.nn.utils.clip_grad_norm_


def test_it_is_imported_when_asked_for() -> None:
    code = """
import sys, fusedtrain
assert "fusedtrain.apex.fp16_utils" not in sys.modules
assert "fp16_utils" in dir(fusedtrain.apex)
assert callable(fusedtrain.apex.fp16_utils.network_to_half)
assert "fusedtrain.apex.fp16_utils" in sys.modules
"""
    run = python(code)
    assert run.returncode == 0, run.stderr


def dtypes(module: nn.Module) -> dict[str, torch.dtype]:
    tensors = (*module.named_parameters(), *module.named_buffers())
    return {name: t.dtype for name, t in tensors if name.split(".")[-1] != "num_batches_tracked"}


class Gate(nn.Module):
    """A parameter, buffers of three kinds, and no batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 1e-3]))
        self.phase = nn.Parameter(torch.tensor([1 + 1j]))
        self.register_buffer("shift", torch.tensor([0.1, 0.2]))
        self.register_buffer("index", torch.tensor([1, 2]))
        self.register_buffer("nothing", None)
        self.inner = nn.Linear(2, 2)


def test_convert_module_takes_its_own_tensors_in_place() -> None:
    module = Gate()
    weight, buffer = module.weight, module.shift
    weight.grad = torch.tensor([0.1, 70000.0])
    grad = weight.grad
    fp16_utils.convert_module(module, HALF)
    assert dtypes(module) == {
        "weight": HALF, "phase": torch.complex64, "shift": HALF, "index": torch.int64,
        "inner.weight": FLOAT, "inner.bias": FLOAT,
    }  # fmt: skip
    assert module.weight is weight
    assert module.shift is buffer
    assert weight.grad is grad
    assert torch.equal(grad, torch.tensor([0.1, 70000.0]).half())
    assert torch.equal(weight, torch.tensor([1.0, 1e-3]).half())
    assert torch.equal(module.shift, torch.tensor([0.1, 0.2]).half())


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64])
def test_a_dtype_that_is_not_floating_is_refused(dtype: torch.dtype) -> None:
    module = nn.Linear(2, 2)
    for convert in (fp16_utils.convert_module, fp16_utils.convert_network):
        with pytest.raises(TypeError, match="dtype must be a floating dtype, got torch"):
            convert(module, dtype)
    assert set(dtypes(module).values()) == {FLOAT}


def test_convert_network_leaves_batch_norms_with_weights() -> None:
    network = nn.Sequential(
        nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.BatchNorm2d(3, affine=False),
        nn.Sequential(nn.GroupNorm(1, 3), nn.BatchNorm2d(3).double()),
    )  # fmt: skip
    assert fp16_utils.convert_network(network, torch.bfloat16) is network
    kinds = dtypes(network)
    assert {n for n in kinds if kinds[n] == FLOAT} == {n for n in kinds if n.startswith("1.")}
    assert {n for n in kinds if kinds[n] == torch.float64} == {
        n for n in kinds if n.startswith("3.1.")
    }
    assert kinds["0.weight"] == kinds["2.running_var"] == kinds["3.0.weight"] == torch.bfloat16


def test_tied_parameters_stay_tied() -> None:
    network = nn.Sequential(nn.Embedding(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 5))
    network[2].weight = network[0].weight
    half = fp16_utils.network_to_half(network)
    assert half[1] is network
    assert network[2].weight is network[0].weight
    assert network[0].weight.dtype == HALF


def test_recurrent_layers_are_laid_out_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(
        nn.LSTM, "flatten_parameters", lambda self: seen.append(self.weight_ih_l0.dtype)
    )
    network = nn.Sequential(nn.LSTM(3, 2, 2))
    seen.clear()
    fp16_utils.convert_network(network, HALF)
    assert seen == [HALF]
    monkeypatch.undo()
    output, _ = network(torch.randn(4, 1, 3).half())
    assert output.dtype == HALF


NORMS: list[Callable[[], nn.Module]] = [
    lambda: nn.BatchNorm1d(3),
    lambda: nn.BatchNorm3d(3),
    lambda: nn.SyncBatchNorm(3),
    lambda: fusedtrain.nn.BatchNormAct2d(3),
    lambda: fusedtrain.nn.SyncBatchNormAct(3),
    lambda: fusedtrain.nn.BatchNormAct2d(3, act_layer=nn.PReLU),
]


@pytest.mark.parametrize("norm", NORMS, ids=lambda make: type(make()).__name__)
def test_batch_norms_of_every_kind_are_float32(norm: Callable[[], nn.Module]) -> None:
    for convert in (
        lambda m: fp16_utils.BN_convert_float(m.half()),
        fp16_utils.network_to_half,
        fp16_utils.FP16Model,
        lambda m: fp16_utils.FP16Model(m.double()),
    ):
        network = nn.ModuleDict({"norm": norm(), "last": nn.Linear(2, 2)})
        network["norm"].weight.grad = torch.ones(3)
        convert(network)
        kept = {name.partition("norm.")[2] for name, d in dtypes(network).items() if d == FLOAT}
        assert kept == {"weight", "bias", "running_mean", "running_var"}
        assert network["norm"].weight.grad.dtype == FLOAT
        assert dtypes(network)["last.weight"] == HALF


def test_network_to_half_does_not_round_batch_norms() -> None:
    norm = nn.BatchNorm1d(2)
    norm.running_var.copy_(torch.tensor([1e6, 1 / 3]))
    fp16_utils.network_to_half(nn.Sequential(norm))
    assert torch.equal(norm.running_var, torch.tensor([1e6, 1 / 3]))


def test_a_norm_with_a_weighted_activation_runs() -> None:
    norm = fusedtrain.nn.BatchNormAct2d(3, act_layer=nn.PReLU)
    x = torch.randn(4, 3, 2, 2)
    truth = fusedtrain.nn.BatchNormAct2d(3, act_layer=nn.PReLU).double()(x.half().double())
    torch.testing.assert_close(
        fp16_utils.network_to_half(norm)(x).double(), truth, rtol=2e-3, atol=2e-3
    )


def test_network_to_half_is_a_sequence_with_the_input_s_cast() -> None:
    network = nn.Linear(2, 3)
    half = fp16_utils.network_to_half(network)
    assert type(half) is nn.Sequential
    assert type(half[0]) is fp16_utils.tofp16
    assert half[1] is network
    assert list(half.state_dict()) == ["1.weight", "1.bias"]
    assert half(torch.randn(4, 2, dtype=torch.float64)).dtype == HALF


class Recorder(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs


def test_fp16_model_casts_floating_tensors_and_nothing_else() -> None:
    model = fp16_utils.FP16Model(Recorder())
    index, wave, list_ = torch.tensor([1]), torch.tensor([1j]), [torch.ones(1)]
    args, kwargs = model(torch.ones(1) / 3, index, wave, list_, 2.5, None, mask=torch.ones(1), n=3)
    assert torch.equal(args[0], (torch.ones(1) / 3).half())
    assert all(a is b for a, b in zip(args[1:3], (index, wave), strict=False))
    assert args[3] is list_
    assert list_[0].dtype == FLOAT
    assert args[4:] == (2.5, None)
    assert kwargs["mask"].dtype == HALF
    assert kwargs["n"] == 3


def smooth(model: nn.Module) -> nn.Module:
    """SiLU for ReLU: where a rounding moves an input of ReLU over 0, the derivative jumps. And one
    block a stage instead of two, to save time."""
    for name, child in model.named_children():
        if isinstance(child, nn.ReLU):
            setattr(model, name, nn.SiLU())
        else:
            setattr(model, name, smooth(child[:1] if name.startswith("layer") else child))
    return model


def gradients(model: nn.Module, x: Tensor, y: Tensor, scale: float) -> list[Tensor]:
    output = model(x)
    assert output.isfinite().all()
    loss = nn.functional.cross_entropy(output if output.dtype != HALF else output.float(), y)
    (scale * loss).backward()
    return [p.grad.double() / scale for p in model.parameters()]


@functools.cache
def in_float64(change: Any) -> tuple[nn.Module, Tensor, Tensor, list[Tensor]]:
    """The stock network, what it is trained on, and its gradients."""
    stock = change(build("torchvision:resnet18", torch.float64))
    x, y = torch.randn(8, 3, 16, 16), torch.randint(0, 1000, (8,))
    return stock, x, y, gradients(stock, x.double(), y, 1.0)


# Measured in the worst parameter: 0.20 with ReLU, 0.03 with SiLU.
@pytest.mark.parametrize(
    ("wrap", "converted", "change", "allowed"),
    [
        (fp16_utils.network_to_half, "never", lambda model: model, 0.3),
        (fp16_utils.network_to_half, "before", smooth, 0.05),
        (fp16_utils.FP16Model, "after", smooth, 0.05),
    ],
)
def test_resnet(wrap: Any, converted: str, change: Any, allowed: float) -> None:
    stock, x, y, truth = in_float64(change)
    model = change(build("torchvision:resnet18"))
    if converted == "before":
        fusedtrain.convert(model)
    half = wrap(model)
    if converted == "after":
        fusedtrain.convert(half)
    fused = [m for m in half.modules() if has_own_forward(m)]
    assert bool(fused) == (converted != "never")
    grads = gradients(half, x, y, 1024.0)
    for (name, p), g, expected in zip(stock.named_parameters(), grads, truth, strict=True):
        assert (g - expected).norm() <= allowed * expected.norm(), (name, p.shape)
    of = {n.partition(".")[2]: d for n, d in dtypes(half).items()}
    assert {n for n in of if of[n] == FLOAT} == {n for n in of if "bn" in n or "sample.1" in n}
    assert set(of.values()) == {FLOAT, HALF}
    for ours, theirs in zip(half.buffers(), stock.buffers(), strict=True):
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=1e-2, atol=1e-3)
