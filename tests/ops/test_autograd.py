"""Activations under autocast, compilers, TorchScript and torch.fx; pickling; bad input.

test_every_function.py has their derivatives and transforms.
"""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fusedtrain.functional as F
import fusedtrain.nn as fnn
from fusedtrain.reference import ACTIVATIONS
from helpers.activations import INPLACE, NAMES, public
from helpers.processes import run_python

ON_THE_GPU_TOO = True  # the tests make tensors on the default device: see conftest.py

MODULES = {
    "Threshold": lambda: fnn.Threshold(0.5, -1.0),
    "GELU tanh": lambda: fnn.GELU("tanh"),
    **{
        name: cls
        for name, cls in vars(fnn.activation).items()
        if name in fnn.__all__ and name != "Threshold"
    },
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_autocast_gives_the_dtype_of_torch(name: str, dtype: torch.dtype) -> None:
    row = ACTIVATIONS[name]
    x = torch.randn(6, 5, dtype=dtype, requires_grad=True)
    with torch.autocast(torch.get_default_device().type, dtype=torch.bfloat16):
        y, want = public(row)(x), row.eager(x)
    assert y.dtype == want.dtype
    torch.testing.assert_close(y, want, rtol=2e-2, atol=2e-2)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == dtype


def test_prelu_under_autocast_takes_a_float32_weight() -> None:
    layer = fnn.PReLU(5)
    conv = nn.Conv2d(3, 5, 1)
    with torch.autocast(torch.get_default_device().type, dtype=torch.bfloat16):
        layer(conv(torch.randn(2, 3, 4, 4))).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name: str) -> None:
    row = ACTIVATIONS[name]
    ops = torch.ops.fusedtrain
    image = torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    inputs = (torch.randn(3, 5, 2), image.bfloat16(), torch.randn(8, 6)[::2, 1:4])
    # Ops without tensors of parameters are made by one template: each has one of the layouts.
    for x in inputs if row.tensors else inputs[NAMES.index(name) % 3 :][:1]:
        arguments = row.arguments_for(x)
        torch.library.opcheck(getattr(ops, name).default, (x, *arguments))
        grad = torch.randn_like(x)
        backward = getattr(ops, f"{name}_backward").default
        saved = x.abs() if row.saves == "output" else x  # outputs of relu_squared
        torch.library.opcheck(backward, (grad, saved, *arguments))
        if not row.tensors:
            torch.library.opcheck(getattr(ops, f"{name}_").default, (x.clone(), *arguments))


@pytest.mark.long  # test_batch_norm_compilers.py compiles with Inductor, too
def test_inductor_fuses_through_the_call() -> None:
    model = nn.Sequential(nn.Linear(8, 8), fnn.Mish(), fnn.QuickGELU(), fnn.LeakyReLU())
    x = torch.randn(4, 8)
    compiled = torch.compile(model, fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x))
    compiled(x).sum().backward()


@pytest.mark.parametrize("name", MODULES)
def test_torchscript_needs_no_fusedtrain(name: str, tmp_path: object) -> None:
    module = MODULES[name]()
    x = torch.randn(3, 1, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(module)
        buffer = io.BytesIO()
        torch.jit.save(scripted, buffer)
    torch.testing.assert_close(scripted(x), module(x))
    text = str(scripted.inlined_graph)
    assert "fusedtrain::" not in text
    if hasattr(module, "inplace"):
        module.inplace = True
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            inplace = torch.jit.script(module)
        y = x.clone()
        result = inplace(y)
        torch.testing.assert_close(y, result)
        torch.testing.assert_close(result, scripted(x))
        inner = x.clone().requires_grad_()
        inplace(inner * 1).sum().backward()


@pytest.mark.slow
def test_saved_script_runs_where_fusedtrain_is_missing(tmp_path) -> None:  # type: ignore[no-untyped-def]
    model = nn.Sequential(*[make() for make in MODULES.values()])
    x = torch.randn(2, 1, 3)
    path = tmp_path / "model.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(model), str(path))
    torch.save(x, tmp_path / "x.pt")
    torch.save(model(x), tmp_path / "y.pt")
    code = f"""
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "fusedtrain":
            raise ImportError("fusedtrain is not installed")
sys.meta_path.insert(0, Block())
import torch
model = torch.jit.load({str(path)!r})
x, y = torch.load({str(tmp_path / "x.pt")!r}), torch.load({str(tmp_path / "y.pt")!r})
torch.testing.assert_close(model(x), y)
assert "fusedtrain" not in sys.modules
"""
    run = run_python("-W", "ignore", "-c", code)
    assert run.returncode == 0, run.stderr


def test_trace_records_plain_aten() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(fnn.Mish(), torch.randn(3))
    assert "fusedtrain::" not in str(traced.inlined_graph)


@pytest.mark.parametrize("name", MODULES)
def test_deepcopy_and_pickle(name: str) -> None:
    module = MODULES[name]()
    x = torch.randn(2, 3)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert type(other) is type(module)
        assert torch.equal(other(x), module(x))


# --- bad input: what torch raises for the same mistake ---


@pytest.mark.parametrize(
    ("call", "exception", "words"),
    [
        (lambda x: F.hardtanh(x, 1.0, -1.0), ValueError, "min_val"),
        (lambda x: F.softshrink(x, -1.0), RuntimeError, "lambda"),
        (lambda x: F.squareplus(x, -1.0), ValueError, "b must be at least 0"),
        (lambda x: torch.jit.script(F.squareplus)(x, -1.0), torch.jit.Error, "b must be at least"),
        (lambda x: F.celu(x, 0.0), RuntimeError, "alpha"),
        (lambda x: F.gelu(x, "sigmoid"), RuntimeError, "approximate"),
        (lambda x: F.leaky_relu(x, "a"), TypeError, ""),
        (lambda x: F.prelu(x, torch.ones(7)), RuntimeError, "channel size"),
        (lambda x: F.prelu(x, torch.ones(3, 1)), RuntimeError, "weight"),
        (lambda x: F.prelu(x, torch.ones(3, dtype=torch.float64)), RuntimeError, ""),
        (lambda x: fnn.SquarePlus(-1.0), ValueError, "b must be"),
        (lambda x: F.leaky_relu(x, torch.tensor(0.1, requires_grad=True)), TypeError, "Number"),
        (lambda x: F.hardshrink(x, "a"), TypeError, ""),
        (lambda x: F.mish([1.0], inplace=True), TypeError, "must be Tensor"),
        (lambda x: F.hardtanh(x.half(), -1e6, 1e6), RuntimeError, "overflow"),
        (lambda x: F.quick_gelu(torch.tensor([1, 2]), inplace=True), RuntimeError, "cast"),
        (lambda x: torch.ops.fusedtrain.mish_backward(x.to("meta"), x), RuntimeError, ""),
        (lambda x: torch.ops.fusedtrain.prelu(x, torch.ones(3, device="meta")), RuntimeError, ""),
    ],
)  # fmt: skip
def test_wrong_arguments(call: Callable[[Tensor], Tensor], exception: type, words: str) -> None:
    x = torch.randn(2, 3)
    if words == "overflow" and x.device.type != "cpu":
        pytest.skip("not a case on CUDA: torch's clamp takes float bounds there")
    before = x.clone()
    with pytest.raises(exception, match=words or None):
        call(x)
    assert torch.equal(x, before)


@pytest.mark.parametrize("name", INPLACE)
def test_wrong_inplace_use_raises_and_modifies_nothing(name: str) -> None:
    row = ACTIVATIONS[name]

    def run(x: Tensor) -> None:
        getattr(F, name)(x, *row.arguments, inplace=True)

    leaf = torch.linspace(-4, 4, 9).requires_grad_()
    view_of_leaf = leaf[2:5]
    expanded = torch.randn(3, 1).expand(3, 4)
    split = (torch.linspace(-4, 4, 8).requires_grad_() * 1).split(4)[0]
    with torch.inference_mode():
        inference = torch.linspace(-4, 4, 9)
    integers = torch.tensor([-3, 5])
    for x, words in (
        (leaf, "leaf"),
        (view_of_leaf, "leaf"),
        (expanded, "memory location|single memory"),
        (split, "multiple views|inplace"),
        (inference, "[Ii]nference"),
    ):
        if name == "threshold" and x is expanded:
            continue  # as torch's: test_torch_parity.py
        before = x.detach().clone()
        with pytest.raises(RuntimeError, match=words):
            run(x)
        assert torch.equal(x.detach(), before)
    if name in ("silu", "mish", "elu", "hardswish"):
        with pytest.raises(RuntimeError):
            run(integers)
        assert integers.tolist() == [-3, 5]


def test_inference_mode_with_gradients_switched_on() -> None:
    x = torch.randn(4, requires_grad=True)
    with torch.inference_mode(), torch.enable_grad():
        for function, native in ((F.relu, torch.relu), (F.silu, nn.functional.silu)):
            assert function(x).requires_grad == native(x).requires_grad
    negative = torch.randn(4, dtype=torch.complex64).conj().imag
    want = nn.functional.silu(negative)
    with torch.no_grad():
        F.silu(negative, inplace=True)
    torch.testing.assert_close(negative, want)


def test_odd_layouts_run_in_torch() -> None:
    sparse = torch.eye(3).to_sparse()
    assert F.relu(sparse).is_sparse
    negative = torch.randn(4, dtype=torch.complex64).conj().imag
    assert negative.is_neg()
    torch.testing.assert_close(F.mish(negative), nn.functional.mish(negative))
    nested = torch.nested.nested_tensor([torch.randn(2), torch.randn(3)], layout=torch.strided)
    torch.testing.assert_close(F.relu(nested).unbind()[1], nested.unbind()[1].relu())
