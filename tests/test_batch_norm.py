"""functional.batch_norm_act and the modules against stock PyTorch: checkpoints, derivatives,
transforms, compilers, dtypes, recomputation, what is saved, bad input.

tests/test_batch_norm_kernels.py has the numbers of the ops.
"""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as torch_functional
from _batch_norm_cases import FORMULAS, LAYOUTS, Case
from _models import timm, torchvision
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fusedtrain.functional as F
import fusedtrain.nn as fnn
from fusedtrain.nn.norm import ROW_OF, activation_of, is_stochastic_depth
from fusedtrain.reference.pointwise import POINTWISE

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
MODULES: dict[str, tuple[type[Any], type[nn.Module], tuple[int, ...]]] = {
    "1d, [N, C]": (fnn.BatchNormAct1d, nn.BatchNorm1d, (6, 4)),
    "1d": (fnn.BatchNormAct1d, nn.BatchNorm1d, (3, 4, 5)),
    "2d": (fnn.BatchNormAct2d, nn.BatchNorm2d, (3, 4, 5, 2)),
    "3d": (fnn.BatchNormAct3d, nn.BatchNorm3d, (2, 4, 3, 2, 2)),
    "add": (fnn.BatchNormAddAct, nn.BatchNorm2d, (3, 4, 5, 2)),
}


class Stock(nn.Module):
    """What a module of ours stands for, in stock PyTorch."""

    def __init__(self, ours: Any, norm: type[nn.Module] = nn.BatchNorm2d) -> None:
        super().__init__()
        self.norm: Any = norm(
            ours.num_features, ours.eps, ours.momentum, ours.affine, ours.track_running_stats
        )
        parameter = next(ours.parameters(), None)
        self.norm.to(F32 if parameter is None else parameter.dtype)
        state = {k: v for k, v in ours.state_dict().items() if not k.startswith("act.")}
        self.norm.load_state_dict(state)
        self.drop, self.act = copy.deepcopy(ours.drop), copy.deepcopy(ours.act)
        self.train(ours.training)

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        z = self.drop(self.norm(input))
        return self.act(z if residual is None else z + residual)


def randomized(module: Any) -> Any:
    """Weights of both signs and zero, running statistics that are no one's."""
    with torch.no_grad():
        for t in (module.weight, module.bias, module.running_mean):
            if t is not None:
                t.copy_(torch.randn(t.shape))
        if module.weight is not None:
            module.weight[1] = 0
        if module.running_var is not None:
            module.running_var.copy_(torch.rand(module.running_var.shape) + 0.5)
    return module


def leaf(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.detach().clone().requires_grad_()


def results(module: Any, input: Tensor, residual: Tensor | None = None) -> list[Any]:
    """Output, gradients of inputs and parameters, buffers."""
    inputs = [leaf(t) for t in (input, residual) if t is not None]
    module.zero_grad()
    output = module(*inputs)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        grad = torch.randn(output.shape)
    output.backward(grad.to(output.dtype))
    norm = getattr(module, "norm", module)
    return [
        output.detach(), *(t.grad for t in inputs),
        *(p.grad for p in (norm.weight, norm.bias) if p is not None),
        *(b.clone() for b in norm.buffers()),
    ]  # fmt: skip


def assert_equal_results(ours: list[Any], theirs: list[Any], tolerance: float = 2e-5) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype is b.dtype
        assert a.shape == b.shape
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def assert_same_outcome(ours: Any, theirs: Any) -> None:
    """The same values, or the same type of exception."""
    if isinstance(ours, type) or isinstance(theirs, type):
        assert ours == theirs
    else:
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)


# --- modules, checkpoints ---


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


# --- derivatives ---


def vectors(*which: str) -> dict[str, Tensor]:
    made = {
        "weight": torch.tensor([1.2, -0.7, 0.0, 2.0], dtype=F64, requires_grad=True),
        "bias": torch.tensor([0.3, -0.2, 0.1, 0.0], dtype=F64, requires_grad=True),
        "running_mean": torch.tensor([0.5, -0.5, 0.0, 0.1], dtype=F64),
        "running_var": torch.tensor([1.5, 0.5, 1.0, 0.7], dtype=F64),
    }
    return {name: made[name] for name in which}


AFFINE, RUNNING = ("weight", "bias"), ("running_mean", "running_var")
DERIVATIVES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "training": (AFFINE, {"training": True}),
    "training, moving": (AFFINE + RUNNING, {"training": True}),
    "eval": (AFFINE + RUNNING, {}),
    "frozen": (RUNNING, {}),
    "not affine": ((), {"training": True}),
    "weight": (("weight",), {"training": True}),
    "bias": (("bias", *RUNNING), {}),
}


@pytest.mark.parametrize("kind", DERIVATIVES)
@pytest.mark.parametrize("added", ["", "residual", "branch", "residual, branch"])
def test_first_and_second_derivatives(kind: str, added: str) -> None:
    # Smooth ones: nothing saved, the output, the input.
    names, options = DERIVATIVES[kind]
    at = (list(DERIVATIVES).index(kind) + len(added)) % 3
    fast = at != 0
    tensors = vectors(*names)
    x = torch.randn(3, 4, 2, dtype=F64, requires_grad=True)
    leaves = {"input": x, **{n: t for n, t in tensors.items() if t.requires_grad}}
    if "residual" in added:
        leaves["residual"] = torch.randn(3, 4, 2, dtype=F64, requires_grad=True)
    branch = torch.tensor([0.0, 1.5, 1.5], dtype=F64) if "branch" in added else None
    statistics = {n: t for n, t in tensors.items() if not t.requires_grad}
    for activation in ("identity", "tanh", "silu"):

        def function(*given: Tensor, name: str = activation) -> Tensor:
            named = dict(zip(leaves, given, strict=True))
            moving = {n: t.clone() for n, t in statistics.items()}
            call = {"running_mean": None, "running_var": None, **moving, **named}
            return F.batch_norm_act(**call, activation=name, branch_scale=branch, **options)

        given = tuple(leaves.values())
        assert torch.autograd.gradcheck(function, given, fast_mode=fast)
        assert torch.autograd.gradgradcheck(function, given, fast_mode=True)


def test_third_derivatives() -> None:
    """Against the formula in plain operators: those of torch's batch norm are off by 0.1 to 13."""
    for name in ("identity", "tanh", "silu", "relu"):
        found = []
        for ours in (True, False):
            torch.manual_seed(1)
            x = torch.randn(5, 3, dtype=F64, requires_grad=True)
            w = torch.randn(3, dtype=F64, requires_grad=True)
            if ours:
                y = F.batch_norm_act(x, None, None, w, None, True, activation=name)
            else:
                z = (x - x.mean(0)) / (x.var(0, correction=0) + 1e-5).sqrt() * w
                y = FORMULAS[name].forward(z)
            values = []
            for _ in range(3):
                y, g = torch.autograd.grad((y**2).sum(), (x, w), create_graph=True)
                values += [y, g]
            found.append(values)
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("needs", list(itertools.product((False, True), repeat=4)), ids=str)
def test_gradients_of_some_only(needs: tuple[bool, ...]) -> None:
    shapes = [(3, 4, 5), (3, 4, 5), (4,), (4,)]
    base = [torch.randn(s) for s in shapes]
    for training, name in ((True, "silu"), (False, "relu"), (False, "silu"), (False, "identity")):
        found = []
        for ours in (True, False):
            x, r, w, b = (t.clone().requires_grad_(n) for t, n in zip(base, needs, strict=True))
            rm, rv = torch.zeros(4), torch.ones(4)
            if ours:
                y = F.batch_norm_act(x, rm, rv, w, b, training, activation=name, residual=r)
            else:
                z = torch_functional.batch_norm(x, rm, rv, w, b, training) + r
                y = FORMULAS[name].forward(z)
            assert y.requires_grad is any(needs)
            if any(needs):
                y.backward(torch.ones(3, 1, 1).expand(3, 4, 5))
            found.append([y.detach(), *(t.grad for t in (x, r, w, b))])
        for one, other, needed in zip(*found, (True, *needs), strict=True):
            assert (one is None) is (other is None) is (not needed)
            if needed:
                torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)


def test_one_module_twice_before_backward_and_backward_twice() -> None:
    """Each call keeps statistics of its own (those of apex's groupbn are overwritten)."""
    for name in (nn.ReLU, nn.SiLU, nn.ELU):
        ours = randomized(fnn.BatchNormAct2d(4, act_layer=name))
        theirs = Stock(ours)
        found = []
        for module in (ours, theirs):
            torch.manual_seed(2)
            x, other = (torch.randn(3, 4, 5, 2, requires_grad=True) for _ in range(2))
            y = module(x) + 3 * module(other * 4 + 1)
            z = module(y)
            for _ in range(2):
                z.square().sum().backward(retain_graph=True)
            norm = getattr(module, "norm", module)
            found.append([x.grad, other.grad, norm.weight.grad, *norm.buffers()])
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("name", ["identity", "relu", "silu"])
@pytest.mark.parametrize("changed", ["output", "input", "residual", "weight", "statistics"])
def test_what_changes_after_forward(name: str, changed: str) -> None:
    """Backward is that of the forward that was, or torch's error."""
    for training, add in itertools.product((True, False), repeat=2):
        found = []
        for change in (False, True):
            torch.manual_seed(3)
            leaves = [torch.randn(3, 4, 5, requires_grad=True) for _ in range(2)]
            weight = torch.randn(4, requires_grad=True)
            x, r, w = (t * 1 for t in (*leaves, weight))
            rm, rv = torch.zeros(4), torch.ones(4)
            y = F.batch_norm_act(
                x, rm, rv, w, None, training, activation=name, residual=r if add else None
            )
            if change:
                given = {"output": y, "input": x, "residual": r, "weight": w, "statistics": rm}
                with torch.no_grad():
                    given[changed].add_(1.0)
            try:
                y.backward(torch.ones(3, 4, 5) * torch.arange(5.0))
                found.append([t.grad for t in (leaves[0], weight)])
            except RuntimeError as error:
                if "modified by an inplace operation" not in str(error):
                    raise
                found.append(None)
        assert found[0] is not None
        if found[1] is not None:
            for a, b in zip(*found, strict=True):
                assert torch.equal(a, b)
        elif changed == "statistics":
            pytest.fail("running statistics are not saved")
        if changed == "input" and training:
            assert found[1] is None


# --- what is saved ---


def saved_by(function: Callable[[], Tensor]) -> tuple[Tensor, list[Tensor]]:
    seen: dict[int, Tensor] = {}

    def pack(t: Tensor) -> Tensor:
        seen.setdefault(t.untyped_storage().data_ptr(), t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        output = function()
    return output, list(seen.values())


SAVED = {
    # training, activation, residual, affine gradients -> what of the input's size is saved
    (True, "identity", False, True): {"input"},
    (True, "relu", False, True): {"input"},
    (True, "silu", False, False): {"input"},
    (True, "identity", True, True): {"input"},
    (True, "relu", True, True): {"input", "output"},
    (True, "silu", True, True): {"input", "residual"},
    (False, "relu", False, True): {"input"},
    (False, "silu", True, True): {"input", "residual"},
    (False, "identity", False, False): set(),
    (False, "identity", True, False): set(),
    (False, "relu", False, False): {"output"},
    (False, "relu", True, False): {"output"},
    (False, "silu", False, False): {"input"},
    (False, "silu", True, False): {"input", "residual"},
}


@pytest.mark.parametrize("call", SAVED, ids=str)
def test_what_backward_keeps(call: tuple[bool, str, bool, bool]) -> None:
    training, name, add, affine = call
    x, r = (torch.randn(4, 8, 6, 6, requires_grad=True) for _ in range(2))
    w, b, rm, rv = torch.ones(8), torch.zeros(8), torch.zeros(8), torch.ones(8)
    w.requires_grad_(affine)
    b.requires_grad_(affine)
    output, saved = saved_by(
        lambda: F.batch_norm_act(
            x, rm, rv, w, b, training, activation=name, residual=r if add else None
        )
    )
    named = {t.data_ptr(): n for n, t in (("input", x), ("output", output), ("residual", r))}
    assert {named[t.data_ptr()] for t in saved if t.numel() == x.numel()} == SAVED[call]
    small = [t for t in saved if t.numel() != x.numel()]
    own = [t for t in small if t.data_ptr() not in (w.data_ptr(), b.data_ptr())]
    assert sorted(t.numel() for t in own) == [8, 8]  # mean and invstd, of this call


# --- recomputation ---


class Block(nn.Module):
    def __init__(self, stock: bool, run: Callable[..., Tensor] | None, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(4)
        norm = randomized(fnn.BatchNormAct2d(3, act_layer=nn.SiLU, drop_layer=_drop, **options))
        last_norm = randomized(fnn.BatchNormAddAct(3, drop_path=0.4, **options))
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.norms = nn.ModuleList([Stock(norm), Stock(last_norm)] if stock else [norm, last_norm])
        self.run = run

    def body(self, x: Tensor) -> Tensor:
        y: Tensor = self.norms[1](self.conv(self.norms[0](x)), x)
        return y

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) if self.run is None else self.run(self.body, x)


def _drop() -> nn.Module:
    return fnn.DropPath(0.3)


def _nested(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    def inner(t: Tensor) -> Tensor:
        result: Tensor = checkpoint(function, t, use_reentrant=False)
        return result

    result: Tensor = checkpoint(inner, x, use_reentrant=False)
    return result


RECOMPUTED: dict[str, Callable[..., Any]] = {
    "reentrant": lambda f, x: checkpoint(f, x, use_reentrant=True),
    "not reentrant": lambda f, x: checkpoint(f, x, use_reentrant=False),
    "nested": _nested,
    "nested, reentrant": lambda f, x: checkpoint(
        lambda t: checkpoint(f, t, use_reentrant=True), x, use_reentrant=True
    ),
    "reentrant in not": lambda f, x: checkpoint(
        lambda t: checkpoint(f, t, use_reentrant=True), x, use_reentrant=False
    ),
}


@pytest.mark.parametrize("kind", RECOMPUTED)
def test_statistics_move_once_under_checkpoint(kind: str) -> None:
    for options in ({}, {"momentum": None}, {"track_running_stats": False}):
        found = []
        for run in (None, RECOMPUTED[kind]):
            block = Block(False, run, **options)
            torch.manual_seed(6)
            x = torch.randn(8, 3, 4, 4, requires_grad=True)
            for _ in range(2):
                block(block(x)).square().sum().backward()
            found.append([x.grad, *(p.grad for p in block.parameters()), *block.buffers()])
        exact = "reentrant" not in kind.removeprefix("not reentrant")  # else sums in another order
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-4)
        if not options:
            assert block.norms[0].num_batches_tracked == 4


def test_stock_batch_norm_moves_twice_under_checkpoint() -> None:
    """What the rule above is for (pytorch#96136)."""
    block = Block(True, RECOMPUTED["not reentrant"])
    block(torch.randn(8, 3, 4, 4, requires_grad=True)).sum().backward()
    assert block.norms[0].norm.num_batches_tracked == 2


def test_a_forward_outside_of_backward_moves_them_each_time() -> None:
    module = fnn.BatchNormAct2d(3)
    for count in range(1, 4):
        module(torch.randn(2, 3, 4, 4, requires_grad=True)).sum().backward()
        assert module.num_batches_tracked == count
    with torch.no_grad():
        module(torch.randn(2, 3, 4, 4))
    assert module.num_batches_tracked == 4


# --- dtypes ---


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("kind", ["mixed", "pure"])
def test_16_bit_models(kind: str, dtype: torch.dtype) -> None:
    """float32 or 16-bit weights and statistics: closer to float64 than eager, dtypes as eager's."""
    for training, act in itertools.product((True, False), (nn.ReLU, nn.SiLU)):
        ours = randomized(fnn.BatchNormAct2d(4, act_layer=act)).train(training)
        if kind == "pure":
            ours.to(dtype)
        theirs, exact = Stock(ours), copy.deepcopy(ours).double()
        x, r = torch.randn(5, 4, 6, 3).to(dtype), torch.randn(5, 4, 6, 3).to(dtype)
        found, eager = results(ours, x, r), results(theirs, x, r)
        truth = results(exact, x.double(), r.double())
        for one, other, want in zip(found, eager, truth, strict=True):
            assert one.dtype is other.dtype
            limit = 2 * torch.finfo(dtype).eps * (1 + want.abs().max().item())
            torch.testing.assert_close(one.double(), want.double(), rtol=0, atol=limit)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_autocast(dtype: torch.dtype) -> None:
    """Inputs and residuals of every mix of dtypes."""
    conv = nn.Conv2d(4, 4, 1)
    for act, first, added in itertools.product(
        (nn.ReLU, nn.SiLU, nn.Softplus), ("conv", F32, F64), (None, dtype, F32, F64)
    ):
        ours = randomized(fnn.BatchNormAct2d(4, act_layer=act, inplace=False))
        if first is F64:
            ours.double()
        theirs = Stock(ours)
        x = torch.randn(3, 4, 5, 2, dtype=F32 if first == "conv" else first)
        residual = None if added is None else torch.randn(3, 4, 5, 2, dtype=added)
        found = []
        for module in (ours, theirs):
            inputs = [leaf(t) for t in (x, residual) if t is not None]
            with torch.autocast("cpu", dtype=dtype):
                output = module(conv(inputs[0]) if first == "conv" else inputs[0], *inputs[1:])
            output.square().sum().backward()
            norm = getattr(module, "norm", module)
            found.append([output.detach(), *(t.grad for t in inputs), norm.weight.grad])
        tolerance = 30 * torch.finfo(dtype).eps if first == "conv" or added is dtype else 1e-4
        for a, b in zip(*found, strict=True):
            assert a.dtype is b.dtype, (act, first, added)
            limit = tolerance * (1 + b.abs().max().item())
            torch.testing.assert_close(a, b, rtol=0, atol=limit)


# --- transforms and compilers ---

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


@pytest.mark.parametrize("name", ["relu", "silu", "identity"])
def test_opcheck(name: str) -> None:
    ops = torch.ops.fusedtrain
    kinds = ("channels_last", "sliced", "2-d transposed", "permuted", "one channel, transposed")
    for i, kind in enumerate(kinds):
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
        for op, given in calls.items():
            torch.library.opcheck(getattr(ops, f"batch_norm_{op}").default, given)
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
    found = []
    for training in (True, True, False):
        parameters.train(training)
        torch.manual_seed(7)
        x = torch.randn(4, 3, 6, 5).to(dtype).requires_grad_()
        y = model(x)
        y.square().sum().backward()
        found += [y.detach(), x.grad]
    return found + [p.grad for p in parameters.parameters()] + list(parameters.buffers())


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compile_fullgraph(backend: str) -> None:
    for dtype in (F32, BF16) if backend != "inductor" else (F32,):
        net = Net().to(dtype)
        net.second.drop.drop_prob = 0.0  # Inductor draws other numbers
        twin = copy.deepcopy(net)
        torch._dynamo.reset()
        found = train_twice(torch.compile(net, fullgraph=True, backend=backend), net, dtype)
        want = train_twice(twin, twin, dtype)
        for a, b in zip(found, want, strict=True):
            limit = (1e-4 if dtype is F32 else 0.05) * (1 + b.abs().max().item())
            torch.testing.assert_close(a, b, rtol=0, atol=limit)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_layouts_are_those_that_were_promised(backend: str) -> None:
    """With samples told apart, of inputs whose samples do not lie one after the other."""
    torch._dynamo.reset()

    def function(x: Tensor, scale: Tensor) -> Tensor:
        return F.batch_norm_act(x, None, None, training=True, branch_scale=scale) * 2

    compiled = torch.compile(function, fullgraph=True, backend=backend, dynamic=False)
    for kind in ("2-d transposed", "permuted", "one channel, transposed"):
        x = LAYOUTS[kind]()
        given = (x.requires_grad_(), torch.rand(x.size(0)))
        y = compiled(*given)
        torch.testing.assert_close(y, function(*given))
        (g,) = torch.autograd.grad(y.square().sum(), x)
        (want,) = torch.autograd.grad(function(*given).square().sum(), x)
        torch.testing.assert_close(g, want, rtol=1e-4, atol=1e-4)


def test_export_script_and_trace_need_no_fusedtrain() -> None:
    x = torch.randn(4, 4, 6, 5)
    for training, module in itertools.product(
        (True, False),
        (fnn.BatchNormAct2d(4, act_layer=nn.GELU, inplace=False),
         fnn.BatchNormAct2d(4, momentum=None), fnn.BatchNormAddAct(4),
         fnn.BatchNormAct2d(4, drop_layer=_drop)),
    ):  # fmt: skip
        randomized(module).train(training)
        module.drop.eval()
        given = (x, x.flip(0)) if isinstance(module, fnn.BatchNormAddAct) else (x,)
        want = copy.deepcopy(module)(*given)
        if module.momentum is not None:
            exported = torch.export.export(copy.deepcopy(module), given)
            assert "fusedtrain" not in str(exported.graph)
            torch.testing.assert_close(exported.module()(*given), want)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scripted = torch.jit.script(copy.deepcopy(module))
            buffer = io.BytesIO()
            torch.jit.save(scripted, buffer)
            traced = torch.jit.trace(copy.deepcopy(module).eval(), given)
        torch.testing.assert_close(scripted(*given), want)
        assert "fusedtrain::" not in str(scripted.inlined_graph)
        assert "fusedtrain::" not in str(traced.inlined_graph)
        torch.testing.assert_close(traced(*given), copy.deepcopy(module).eval()(*given))
        if training:
            assert scripted.num_batches_tracked == 1
            again = copy.deepcopy(module)
            again(*given)
            torch.testing.assert_close(scripted.running_var, again.running_var)


def test_fx_has_one_call() -> None:
    """Of the module, as of torch's own batch norm; of the function, as of torch's functions."""
    net = Net().eval()
    traced = torch.fx.symbolic_trace(net)
    calls = [n.target for n in traced.graph.nodes if n.op == "call_module"]
    assert calls == ["conv", "first", "second", "third"]
    x = torch.randn(2, 3, 6, 5)
    assert torch.equal(traced(x), net(x))
    function = torch.fx.symbolic_trace(
        lambda t: F.batch_norm_act(t, None, None, training=True, activation="silu", residual=t)
    )
    assert any(n.target is F.batch_norm_act for n in function.graph.nodes)
    y = torch.randn(3, 4)
    assert torch.equal(
        function(y),
        F.batch_norm_act(y, None, None, training=True, activation="silu", residual=y),
    )


def test_subclasses_of_tensor_stay_subclasses() -> None:
    class Sub(Tensor):
        pass

    x = torch.randn(3, 4)
    y = F.batch_norm_act(x.as_subclass(Sub), None, None, training=True)
    assert type(y) is Sub
    torch.testing.assert_close(
        y.as_subclass(Tensor), F.batch_norm_act(x, None, None, training=True)
    )


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


class _Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("which", [(), ("weight",), ("bias",), AFFINE], ids=str)
def test_weight_without_bias_and_no_look_at_numbers(which: tuple[str, ...]) -> None:
    """inplace_abn ignores a bias alone, and its backward waits for the device."""
    for training, name in itertools.product((True, False), ("relu", "elu", "silu")):
        base = {n: t.detach().float() for n, t in vectors(*which).items()}
        x = torch.randn(6, 4, 5)
        found = []
        for ours in (True, False):
            given = {n: t.clone().requires_grad_() for n, t in base.items()}
            given["input"] = x.clone().requires_grad_()
            statistics = (torch.zeros(4), torch.ones(4))
            with _Ops() as ops:
                call = {"running_mean": statistics[0], "running_var": statistics[1], **given}
                if ours:
                    y = F.batch_norm_act(**call, training=training, activation=name)
                else:
                    z = torch_functional.batch_norm(**call, training=training)
                    y = FORMULAS[name].forward(z)
                y.backward(torch.ones_like(y) * torch.arange(5.0))
            if ours:
                looked = [op for op in ops.seen if "local_scalar" in op or "nonzero" in op]
                assert not looked, looked
                assert any("fusedtrain" in op for op in ops.seen)
            found.append([y.detach(), *(t.grad for t in given.values()), *statistics])
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_elu_at_minus_one() -> None:
    """Where the output rounds to -1 (inplace_abn's gradients are NaN there)."""
    for dtype in (F32, F16, BF16):
        x = (torch.randn(64, 4) * 40).to(dtype).requires_grad_()
        weight = torch.full((4,), 30.0, requires_grad=True)
        y = F.batch_norm_act(x, None, None, weight, None, True, activation="elu")
        assert (y == -1).any()
        y.sum().backward()
        assert x.grad.isfinite().all()
        assert weight.grad.isfinite().all()


# --- what the modules call apart ---


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
    back.register_full_backward_hook(lambda module, given, of_output: (of_output[0] * 7,))
    x, r = torch.randn(3, 4, 5, 2), torch.randn(3, 4, 5, 2)
    for act in (
        Mine(), hooked, replaced, pre, back, nn.PReLU(4), nn.GLU(1), nn.RReLU(0.2, 0.2),
        nn.LeakyReLU(-0.2), nn.CELU(1e-31), nn.Softplus(1.0, 3.0), nn.Softmax(1), nn.Dropout(0.0),
        fnn.StarReLU(),
    ):  # fmt: skip
        ours = randomized(fnn.BatchNormAct2d(4))
        ours.act = act
        assert activation_of(act) is None, act
        for given in ((x,), (x, r)):
            theirs = Stock(ours)
            theirs.act = act
            assert_equal_results(results(ours, *given), results(theirs, *given))
    assert len(calls) == 4


def drop_layers() -> dict[str, Callable[[], nn.Module]]:
    timm()
    import timm.layers as layers

    ops = torchvision().ops

    class DropPath(nn.Module):
        """Of the same name and another meaning."""

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
            found = []
            for module in (ours, theirs):
                torch.manual_seed(8)
                outcome = results(module, x.to(dtype), r.to(dtype))
                found.append([*outcome, torch.rand(3)])  # the generator is where it was
            tolerance = 1e-4 if dtype is F32 else 0.25
            for a, b in zip(*found, strict=True):
                torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_drop_path_draws_as_timm() -> None:
    timm()
    import timm.layers as layers

    x = torch.ones(64, 3, 2)
    for p, scale in itertools.product((0.0, 0.3, 1.0), (True, False)):
        found = []
        for cls in (fnn.DropPath, layers.DropPath):
            torch.manual_seed(9)
            found.append(cls(p, scale)(x))
        assert torch.equal(*found)
    assert torch.equal(fnn.DropPath(0.5).eval()(x), x)
    with pytest.raises(ValueError, match="drop_path"):
        fnn.BatchNormAddAct(3, drop_path=1.5)


def test_conversion_of_torch_does_not_drop_the_activation() -> None:
    for module in (fnn.BatchNormAct2d(4), fnn.BatchNormAddAct(4)):
        for model in (module, nn.Sequential(nn.Conv2d(4, 4, 1), nn.Sequential(module))):
            with pytest.raises(RuntimeError, match="activation"):
                nn.SyncBatchNorm.convert_sync_batchnorm(model)
        assert not hasattr(module, "qconfig")


@pytest.mark.parametrize("threshold", [20.0, 1.0], ids=["kernel", "eager"])
def test_softplus_under_autocast_of_cuda(monkeypatch: pytest.MonkeyPatch, threshold: float) -> None:
    """Is computed in float32, from the norm's 16 bits, as torch does it."""
    x = torch.randn(3, 4, 5, dtype=BF16)
    options = {"training": True, "activation": "softplus", "beta": 2.0, "threshold": threshold}
    assert F.batch_norm_act(x, None, None, **options).dtype is BF16
    monkeypatch.setattr(
        "fusedtrain._calls.autocasts", lambda input, kind="": kind == "cuda" and input.dtype is BF16
    )
    z = torch_functional.batch_norm(x, None, None, training=True)
    y = F.batch_norm_act(x, None, None, **options)
    assert y.dtype is F32
    torch.testing.assert_close(
        y, torch_functional.softplus(z.float(), 2.0, threshold), rtol=1e-2, atol=1e-2
    )


# --- empty and bad input ---


@pytest.mark.parametrize("shape", [(0, 3, 4), (0, 3), (4, 3, 0), (4, 0, 5)], ids=str)
@pytest.mark.parametrize("training", [True, False])
def test_empty_input(shape: tuple[int, ...], training: bool) -> None:
    def outcome(ours: bool) -> Any:
        c = shape[1]
        x = torch.randn(shape, requires_grad=True)
        w, b = torch.ones(c, requires_grad=True), torch.zeros(c, requires_grad=True)
        rm, rv = torch.zeros(c), torch.ones(c)
        try:
            if ours:
                y = F.batch_norm_act(x, rm, rv, w, b, training)
            else:
                y = torch_functional.batch_norm(x, rm, rv, w, b, training).relu()
        except Exception as error:  # the type is what is compared
            return type(error)
        y.sum().backward()
        return y.detach(), x.grad, w.grad, b.grad, rm, rv

    assert_same_outcome(outcome(True), outcome(False))


X = torch.randn(3, 4, 5)
WRONG_CALLS: dict[str, dict[str, Any]] = {
    "one value a channel": {"input": X[:1, :, :1]},
    "one value a channel, 2-d": {"input": X[:1, :, 0]},
    "one dimension": {"input": X[0, 0]},
    "no dimension": {"input": X[0, 0, 0]},
    "integers": {"input": X.long()},
    "booleans": {"input": X > 0},
    "complex": {"input": X.to(torch.complex64)},
    "sparse": {"input": X.to_sparse()},
    "float8": {"input": X.to(torch.float8_e5m2)},
    "channels": {"input": torch.randn(3, 5, 4)},
    "float64": {"input": X.double()},
    "weight too long": {"weight": torch.ones(5)},
    "bias of one": {"bias": torch.ones(1)},
    "weight 2-d": {"weight": torch.ones(4, 1)},
    "weight float64": {"weight": torch.ones(4, dtype=F64)},
    "weight float16": {"weight": torch.ones(4, dtype=F16)},
    # In training torch raises after running statistics have moved.
    "weight meta": {
        "weight": torch.ones(4, device="meta"), "running_mean": None, "running_var": None,
    },
    "mean too short": {"running_mean": torch.zeros(3)},
    "mean alone": {"running_var": None},
    "variance alone": {"running_mean": None},
    "mean meta": {"running_mean": torch.zeros(4, device="meta")},
    "16 bits and float64": {
        "input": X.half(), "weight": torch.ones(4).half(), "running_mean": torch.zeros(4).double(),
        "running_var": torch.ones(4).double(),
    },
    "statistics with gradients": {"running_mean": torch.zeros(4, requires_grad=True) * 1},
    "eps 0": {"eps": 0.0},
    "eps negative": {"eps": -1e-5},
    "eps not a number": {"eps": float("nan")},
}  # fmt: skip


def call_of(changes: dict[str, Any]) -> dict[str, Any]:
    call = {
        "input": X, "running_mean": torch.zeros(4), "running_var": torch.ones(4),
        "weight": torch.ones(4), "bias": torch.zeros(4),
    }  # fmt: skip
    return call | changes


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", WRONG_CALLS)
def test_the_exception_of_torch(kind: str, training: bool) -> None:
    """Or torch's result, where it has one."""

    def outcome(function: Callable[..., Tensor]) -> Any:
        call = call_of(WRONG_CALLS[kind])
        tensors = [t for t in call.values() if isinstance(t, Tensor)]
        tensors = [t for t in tensors if not t.is_meta and not t.is_sparse]
        kept = [t.detach().clone() for t in tensors]
        try:
            return function(**call, training=training)
        except Exception as error:  # the type is what is compared
            assert all(map(torch.equal, [t.detach() for t in tensors], kept))
            return type(error)

    ours = outcome(F.batch_norm_act)
    theirs = outcome(lambda **call: torch_functional.batch_norm(**call).relu())
    if isinstance(theirs, type) or theirs.is_meta:
        assert ours == theirs if isinstance(theirs, type) else ours.is_meta
    else:
        torch.testing.assert_close(ours, theirs, equal_nan=True)


@pytest.mark.parametrize(
    ("options", "exception", "words"),
    [
        ({"activation": "softmax"}, ValueError, "activation: 'softmax' is none of identity, relu"),
        ({"activation": "prelu"}, ValueError, "activation"),
        ({"activation": "relu", "alpha": 1.0}, TypeError, "relu has no parameter 'alpha'"),
        ({"activation": "identity", "alpha": 1.0}, TypeError, "identity has no parameter"),
        ({"activation": "gelu", "approximate": "erf"}, RuntimeError, "approximate"),
        ({"activation": "hardtanh", "min_val": 2.0}, ValueError, "min_val"),
        ({"activation": "softshrink", "lambd": -1.0}, RuntimeError, "lambda"),
        ({"activation": "squareplus", "b": -1.0}, ValueError, "b must be"),
        ({"activation": "celu", "alpha": 0.0}, RuntimeError, "alpha"),
        ({"activation": "elu", "alpha": "a"}, TypeError, "must be"),
        ({"residual": torch.ones(3, 4, 6)}, RuntimeError, "residual"),
        ({"residual": torch.ones(3, 4, 5, device="meta")}, RuntimeError, "residual"),
        ({"residual": [1.0]}, TypeError, "residual"),
        ({"branch_scale": torch.ones(4)}, ValueError, "branch_scale"),
        ({"branch_scale": torch.ones(3, 1, 1)}, ValueError, "branch_scale"),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("grad", [True, False])
def test_mistakes_of_ours(
    options: dict[str, Any], exception: type[Exception], words: str, grad: bool
) -> None:
    call = call_of({"input": X.clone().requires_grad_(grad)})
    with pytest.raises(exception, match=words):
        F.batch_norm_act(**call, training=True, **options)
    assert torch.equal(call["running_mean"], torch.zeros(4))
    assert torch.equal(call["running_var"], torch.ones(4))
    assert torch.equal(call["input"], X)


@pytest.mark.parametrize("shape", [(4, 1), (1, 4, 5), (1,), (), (2, 3, 4, 5)], ids=str)
@pytest.mark.parametrize("dtype", [F32, F16, F64, torch.int64], ids=str)
def test_a_residual_of_another_shape_or_dtype_adds_as_in_torch(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    residual = (torch.randn(shape) * 3).to(dtype)
    for name in ("relu", "silu", "hardtanh"):
        found = []
        for ours in (True, False):
            x = X.clone().requires_grad_()
            r = residual.clone().requires_grad_(dtype.is_floating_point)
            if ours:
                y = F.batch_norm_act(x, None, None, training=True, activation=name, residual=r)
            else:
                z = torch_functional.batch_norm(x, None, None, training=True) + r
                y = getattr(torch_functional, name)(z)
            y.square().sum().backward()
            found.append([y.detach(), x.grad] + [r.grad] * dtype.is_floating_point)
        for a, b in zip(*found, strict=True):
            tolerance = 5e-3 if dtype is F16 else 1e-4
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", MODULES)
def test_wrong_shapes_of_modules(kind: str) -> None:
    cls, stock, _ = MODULES[kind]
    sizes = [
        (4,), (2, 4), (2, 4, 3), (2, 4, 3, 2), (2, 4, 1, 2, 2), (1, 4), (1, 4, 1, 1), (2, 5, 3, 2),
        (2, 5),
    ]  # fmt: skip
    for size in sizes:
        if kind == "add" and 2 <= len(size) != 4:
            continue  # takes what no one of torch's takes
        module, twin, x = cls(4), stock(4), torch.randn(size)
        given = (x, x) if kind == "add" else (x,)
        expected: type[Exception] | None = None
        try:
            twin(x)
        except Exception as error:  # the type is what is compared
            expected = type(error)
        with nullcontext() if expected is None else pytest.raises(expected):
            module(*given)
        assert module.num_batches_tracked == int(expected is None)
        assert torch.equal(module.running_mean, torch.zeros(4)) is (expected is not None)


def test_a_module_whose_call_fails_is_as_before() -> None:
    module = fnn.BatchNormAct2d(4)
    for given, error in (
        ((torch.randn(2, 4, 3, 3), torch.randn(2, 4, 3, 2)), RuntimeError),
        ((torch.randn(2, 4, 3, 3).long(),), NotImplementedError),
        ((torch.randn(2, 4, 3, 3, device="meta"), torch.randn(2, 4, 3, 3)), RuntimeError),
    ):
        with pytest.raises(error):
            module(*given)
        assert module.num_batches_tracked == 0
        assert torch.equal(module.running_mean, torch.zeros(4))
    with pytest.raises(ValueError, match="act_layer"):
        fnn.BatchNormAct2d(4, act_layer="relux")


OPS = torch.ops.fusedtrain


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({0: torch.randn(4)}, "dimensions"),
        ({0: X.long()}, "float32"),
        ({1: torch.randn(3, 4, 6)}, "same shape"),
        ({1: X.half()}, "same dtype"),
        ({2: torch.ones(4)}, "branch_scale must have 3"),
        ({3: torch.ones(5)}, "weight must have 4"),
        ({3: torch.ones(4).half()}, "weight must be float32"),
        ({4: torch.ones(2, 2)}, "bias"),
        ({5: torch.zeros(8)[::2]}, "running_mean must be contiguous"),
        ({5: None}, "running_mean and running_var"),
        ({10: 99}, "no such activation"),
        ({10: -2}, "no such activation"),
    ],
)  # fmt: skip
def test_the_op_checks_what_it_is_given(change: dict[int, Any], words: str) -> None:
    call = [
        X,
        None,
        None,
        torch.ones(4),
        None,
        torch.zeros(4),
        torch.ones(4),
        True,
        0.1,
        1e-5,
        0,
        0.0,
        0.0,
    ]
    for i, value in change.items():
        call[i] = value
    with pytest.raises(RuntimeError, match=words):
        OPS.batch_norm_act(*call)
