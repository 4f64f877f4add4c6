"""Batch norm under the transforms and the compilers of PyTorch."""

from __future__ import annotations

import copy
import io
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as torch_functional
from torch import Tensor, nn

import fusedtrain.functional as F
import fusedtrain.nn as fnn
from helpers.batch_norm import FORMULAS, LAYOUTS, Case
from helpers.batch_norm_modules import (
    assert_same_outcome,
    drop_path,
    randomized,
)

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64

TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "vmap": lambda f, x: torch.vmap(f)(x.expand(2, *x.shape)),
    "grad": lambda f, x: torch.func.grad(lambda t: f(t).square().sum())(x),
    "vmap of grad": lambda f, x: torch.vmap(torch.func.grad(lambda t: f(t).square().sum()))(
        x.expand(2, *x.shape)
    ),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x).cumsum(0),)),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "hessian": lambda f, x: torch.func.hessian(lambda t: f(t).square().sum())(x),
    "batched grad": lambda f, x: torch.autograd.grad(
        f(y := x.clone().requires_grad_()), y, torch.eye(12).view(12, *x.shape),
        is_grads_batched=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("kind", ["training", "eval", "moving"])
def test_transforms_as_of_torch(name: str, kind: str) -> None:
    x, r = torch.randn(3, 2, 2), torch.randn(3, 2, 2)

    def outcome(ours: bool, activation: str) -> Any:
        rm, rv = (None, None) if kind == "training" else (torch.zeros(2), torch.ones(2))

        def function(t: Tensor) -> Tensor:
            if ours:
                return F.batch_norm_act(
                    t, rm, rv, training=kind != "eval", residual=r, activation=activation
                )
            z = torch_functional.batch_norm(t, rm, rv, training=kind != "eval") + r
            return FORMULAS[activation].forward(z)

        try:
            return TRANSFORMS[name](function, x), rm, rv
        except Exception as error:  # the type is what is compared
            return type(error)

    for activation in ("relu", "silu"):
        assert_same_outcome(outcome(True, activation), outcome(False, activation))


@pytest.mark.parametrize(
    "name", ["silu", *(pytest.param(n, marks=pytest.mark.slow) for n in ("relu", "identity"))]
)
def test_opcheck(name: str) -> None:
    ops = torch.ops.fusedtrain
    kinds = ("channels_last", "sliced", "2-d transposed", "permuted", "one channel, transposed")
    at = ("relu", "silu", "identity").index(name)
    for i, kind in enumerate(kinds):
        if (i + at) % 3 == 2:
            continue  # the two others have the layout
        dtype = (F32, BF16, F64)[i % 3]
        options = {"residual": i % 2 == 0, "branch": i > 0, "training": i != 3}
        case = Case(LAYOUTS[kind](), dtype, name, **options)
        arguments = case.forward()
        output, mean, invstd = ops.batch_norm_act(*arguments)
        saved, shared = case.saved(output), case.shared(mean, invstd)
        sums = torch.randn(2, case.x.size(1), dtype=F64)
        calls = {
            "stats": (case.x,),
            "act": arguments,
            "act_functional": (*arguments[:8], *arguments[9:]),
            "act_apply": (case.x, case.residual, *shared, *case.formula),
            "act_backward": case.backward(output, mean, invstd),
            "act_backward_reduce": (case.grad, case.x, saved, *shared, *case.formula, True),
            "act_backward_apply": (case.grad, case.x, saved, *shared, sums, *case.formula, True),
        }
        for op, values in calls.items():
            torch.library.opcheck(getattr(ops, f"batch_norm_{op}").default, values)
        if name != "silu":
            call = list(case.backward(output, mean, invstd, True, True, False))
            call[1], call[2], call[8] = None, None if name == "identity" else output, False
            torch.library.opcheck(ops.batch_norm_act_backward.default, tuple(call))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.first = randomized(fnn.BatchNormAct2d(4, act_layer=nn.SiLU))
        self.second = randomized(fnn.BatchNormAddAct(4, drop_path=0.5))
        self.third = randomized(fnn.BatchNormAct2d(4, momentum=0.3, affine=False))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(self.conv(x))
        # Samples innermost: told apart, they are copied to lie one after the other.
        y = self.second(y, y.permute(3, 1, 2, 0).contiguous().permute(3, 1, 2, 0))
        z: Tensor = self.third(y, y.mean((2, 3), keepdim=True))
        return z


def train_twice(model: Any, parameters: nn.Module, dtype: torch.dtype) -> list[Tensor]:
    results = []
    for training in (True, True, False):
        parameters.train(training)
        torch.manual_seed(7)
        x = torch.randn(4, 3, 6, 5).to(dtype).requires_grad_()
        y = model(x)
        y.square().sum().backward()
        results += [y.detach(), x.grad]
    return results + [p.grad for p in parameters.parameters()] + list(parameters.buffers())


@pytest.mark.parametrize("backend", [pytest.param("aot_eager", marks=pytest.mark.slow), "inductor"])
def test_compile_fullgraph(backend: str) -> None:
    for dtype in (F32, BF16) if backend != "inductor" else (F32,):
        net = Net().to(dtype)
        net.second.drop.drop_prob = 0.0  # Inductor draws other numbers
        twin = copy.deepcopy(net)
        torch._dynamo.reset()
        results = train_twice(torch.compile(net, fullgraph=True, backend=backend), net, dtype)
        want = train_twice(twin, twin, dtype)
        for a, b in zip(results, want, strict=True):
            limit = (1e-4 if dtype is F32 else 0.05) * (1 + b.abs().max().item())
            torch.testing.assert_close(a, b, rtol=0, atol=limit)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_layouts_are_those_that_were_promised(backend: str) -> None:
    """With a scale for each sample. The samples of the inputs are not one after the other."""
    torch._dynamo.reset()

    def function(x: Tensor, scale: Tensor) -> Tensor:
        return F.batch_norm_act(x, None, None, training=True, branch_scale=scale) * 2

    compiled = torch.compile(function, fullgraph=True, backend=backend, dynamic=False)
    for kind in ("2-d transposed", "permuted", "one channel, transposed"):
        x = LAYOUTS[kind]()
        inputs = (x.requires_grad_(), torch.rand(x.size(0)))
        y = compiled(*inputs)
        torch.testing.assert_close(y, function(*inputs))
        (g,) = torch.autograd.grad(y.square().sum(), x)
        (want,) = torch.autograd.grad(function(*inputs).square().sum(), x)
        torch.testing.assert_close(g, want, rtol=1e-4, atol=1e-4)


def test_export_script_and_trace_need_no_fusedtrain() -> None:
    x = torch.randn(4, 4, 6, 5)
    for training, module in itertools.product(
        (True, False),
        (fnn.BatchNormAct2d(4, act_layer=nn.GELU, inplace=False),
         fnn.BatchNormAct2d(4, momentum=None), fnn.BatchNormAddAct(4),
         fnn.BatchNormAct2d(4, drop_layer=drop_path)),
    ):  # fmt: skip
        randomized(module).train(training)
        module.drop.eval()
        inputs = (x, x.flip(0)) if isinstance(module, fnn.BatchNormAddAct) else (x,)
        want = copy.deepcopy(module)(*inputs)
        if module.momentum is not None:
            exported = torch.export.export(copy.deepcopy(module), inputs)
            assert "fusedtrain" not in str(exported.graph)
            torch.testing.assert_close(exported.module()(*inputs), want)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scripted = torch.jit.script(copy.deepcopy(module))
            buffer = io.BytesIO()
            torch.jit.save(scripted, buffer)
            traced = torch.jit.trace(copy.deepcopy(module).eval(), inputs)
        torch.testing.assert_close(scripted(*inputs), want)
        assert "fusedtrain::" not in str(scripted.inlined_graph)
        assert "fusedtrain::" not in str(traced.inlined_graph)
        torch.testing.assert_close(traced(*inputs), copy.deepcopy(module).eval()(*inputs))
        if training:
            assert scripted.num_batches_tracked == 1
            again = copy.deepcopy(module)
            again(*inputs)
            torch.testing.assert_close(scripted.running_var, again.running_var)


def test_an_ensemble_behind_a_convolution() -> None:
    """A convolution under vmap returns an output that is not contiguous."""
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Conv2d(3, 4, 3), fnn.BatchNormAct2d(4)) for _ in range(3)]
    parameters, buffers = torch.func.stack_module_state(models)
    x = torch.randn(3, 4, 3, 8, 8)

    def forward(parameters: Any, buffers: Any, x: Tensor) -> Tensor:
        output: Tensor = torch.func.functional_call(models[0], (parameters, buffers), (x,))
        return output

    want = torch.stack([copy.deepcopy(model)(one) for model, one in zip(models, x, strict=True)])
    torch.testing.assert_close(torch.vmap(forward)(parameters, buffers, x), want)
