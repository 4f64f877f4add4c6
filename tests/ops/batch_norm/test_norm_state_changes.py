"""Between two calls of a module anything may change: the next call must see the change.

A usual call takes a short way through `run` of ops/batch_norm.py. Each case calls a module and its
stock twin twice, changes both alike, and compares the next two calls."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import fusedtrain
from fusedtrain.nn import BatchNormAct1d, BatchNormAct2d, BatchNormAct3d, BatchNormAddAct
from fusedtrain.ops import batch_norm
from helpers.models import Parts

CHANNELS = 3


class Stock(nn.Module):
    """Stock modules that the fused module replaces."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.norm: Any = nn.BatchNorm2d(CHANNELS)
        self.drop: nn.Module = nn.Identity()
        self.act = act

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        z = self.drop(self.norm(input))
        return self.act(z if residual is None else z + residual)


class Twins:
    """Modules with equal state."""

    def __init__(self, cls: Any = BatchNormAct2d, act: type[nn.Module] = nn.LeakyReLU) -> None:
        self.ours: Any = cls(CHANNELS, act_layer=act, inplace=False)
        self.theirs: Any = Stock(act())
        with torch.no_grad():
            for name in ("weight", "bias"):
                values = torch.rand(CHANNELS) + 0.5
                for norm in self.norms:
                    getattr(norm, name).copy_(values)

    @property
    def norms(self) -> tuple[Any, Any]:
        return self.ours, self.theirs.norm

    @property
    def both(self) -> tuple[Any, Any]:
        return self.ours, self.theirs

    def call(self, *inputs: Tensor, run: Callable[..., Any] | None = None) -> None:
        """Calls both and compares outputs, gradients and state."""
        seen = []
        for module, norm in zip(self.both, self.norms, strict=True):
            leaves = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
            output = module(*leaves) if run is None else run(module, *leaves)
            parameters = {n: p for n, p in norm.named_parameters() if not n.startswith("act.")}
            for p in parameters.values():
                p.grad = None
            if output.requires_grad:
                output.backward(torch.linspace(-1, 2, output.numel()).view_as(output))
            gradients = [leaf.grad for leaf in leaves] + [p.grad for p in parameters.values()]
            buffers = dict(norm.named_buffers())
            seen.append([output.detach(), output.requires_grad, gradients, buffers])
        (y, *others), (expected, *expected_others) = seen
        close = {"rtol": 2e-2, "atol": 2e-2} if y.dtype.itemsize == 2 else {}
        torch.testing.assert_close(y, expected, **close)
        torch.testing.assert_close(others, expected_others, **close)


def _inputs(residual: bool = False, grad: bool = True) -> list[Tensor]:
    count = 1 + residual
    return [torch.randn(4, CHANNELS, 2, 3).requires_grad_(grad) for _ in range(count)]


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def _both_acts(change: Callable[[Any], object]) -> Callable[[Twins], None]:
    def run(twins: Twins) -> None:
        for module in twins.both:
            change(module.act)

    return run


def _both_norms(change: Callable[[Any], object]) -> Callable[[Twins], None]:
    def run(twins: Twins) -> None:
        for norm in twins.norms:
            change(norm)

    return run


def _both(change: Callable[[Any], object]) -> Callable[[Twins], None]:
    def run(twins: Twins) -> None:
        for module in twins.both:
            change(module)

    return run


def _set(**values: Any) -> Callable[[Any], None]:
    def run(module: Any) -> None:
        for name, value in values.items():
            setattr(module, name, copy.deepcopy(value))

    return run


def _set_data(module: Any) -> None:
    module.weight.data = 3 * module.weight.data
    module.running_mean.data = module.running_mean.data + 1


def _load(module: Any) -> None:
    state = {k: v + 1 for k, v in module.state_dict().items()}
    module.load_state_dict(state)


def _copied(twins: Twins) -> None:
    twins.ours = copy.deepcopy(twins.ours)
    twins.theirs = copy.deepcopy(twins.theirs)
    _set(negative_slope=0.4)(twins.ours.act)
    _set(negative_slope=0.4)(twins.theirs.act)


def _pickled(twins: Twins) -> None:
    twins.ours = pickle.loads(pickle.dumps(twins.ours))
    file = io.BytesIO()
    torch.save(twins.ours, file)
    file.seek(0)
    twins.ours = torch.load(file, weights_only=False)


def _new_class(act: Any) -> None:
    act.__class__ = nn.Tanh


def _subclass(twins: Twins) -> None:
    class Doubled(BatchNormAct2d):
        def _check_input_dim(self, input: Tensor) -> None:
            self.eps = 0.5

    twins.ours.__class__ = Doubled
    twins.theirs.norm.eps = 0.5


def _forget(name: str) -> Callable[[Any], None]:
    return lambda norm: setattr(norm, name, None)


def _parametrised(norm: Any) -> None:
    parametrize.register_parametrization(norm, "weight", Twice())


HOOKED, PATCHED = nn.Identity(), nn.Identity()
HOOKED.register_forward_hook(lambda m, i, y: 2 * y)
setattr(PATCHED, "forward", torch.tanh)  # noqa: B010 (mypy knows the method)
CHANGES: dict[str, Callable[[Twins], None]] = {
    "nothing": lambda twins: None,
    "another activation": _both(_set(act=nn.SiLU())),
    "an activation with numbers": _both(_set(act=nn.ELU(0.7))),
    "gelu, tanh": _both(_set(act=nn.GELU("tanh"))),
    "a module that no op replaces": _both(_set(act=nn.PReLU())),
    "its number": _both_acts(_set(negative_slope=0.3)),
    "its number, negative": _both_acts(_set(negative_slope=-0.3)),
    "its class": _both_acts(_new_class),
    "its forward": _both_acts(_set(forward=torch.tanh)),
    "forward hook": _both_acts(lambda act: act.register_forward_hook(lambda m, i, y: 2 * y)),
    "forward pre-hook": _both_acts(
        lambda act: act.register_forward_pre_hook(lambda m, i: 2 * i[0])
    ),
    "backward hook": _both_acts(
        lambda act: act.register_full_backward_hook(lambda m, gi, go: (2 * gi[0],))
    ),
    "no activation, but a hook": _both(_set(act=HOOKED)),
    "no activation, but a forward": _both(_set(act=PATCHED)),
    "no drop layer, but a hook": _both(_set(drop=HOOKED)),
    "no drop layer, but a forward": _both(_set(drop=PATCHED)),
    "hook of the norm": _both(lambda m: m.register_forward_hook(lambda m, i, y: 2 * y)),
    "drop layer": _both(_set(drop=Twice())),
    "weight replaced": _both_norms(_set(weight=nn.Parameter(torch.tensor([1.0, -2.0, 3.0])))),
    "weight frozen": _both_norms(lambda norm: norm.weight.requires_grad_(False)),
    "bias frozen": _both_norms(lambda norm: norm.bias.requires_grad_(False)),
    "weight changed in place": _both_norms(lambda norm: norm.weight.data.mul_(2)),
    "data replaced": _both_norms(_set_data),
    "no weight": _both_norms(_forget("weight")),
    "no bias": _both_norms(_forget("bias")),
    "a weight that is computed": _both_norms(_parametrised),
    "eval": _both(lambda module: module.eval()),
    "momentum": _both_norms(_set(momentum=0.7)),
    "momentum, a whole number": _both_norms(_set(momentum=1)),
    "cumulative average": _both_norms(_set(momentum=None)),
    "eps": _both_norms(_set(eps=0.3)),
    "statistics not tracked": _both_norms(_set(track_running_stats=False)),
    "no running statistics": _both_norms(_set(running_mean=None, running_var=None)),
    "running mean replaced": _both_norms(_set(running_mean=torch.ones(CHANNELS))),
    "batches not counted": _both_norms(_forget("num_batches_tracked")),
    "state loaded": _both_norms(_load),
    "statistics reset": _both_norms(lambda norm: norm.reset_running_stats()),
    "deepcopy": _copied,
    "pickle": _pickled,
    "a subclass": _subclass,
}  # fmt: skip


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("residual", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_acts_at_the_next_call(change: str, residual: bool, training: bool) -> None:
    twins = Twins()
    for module in twins.both:
        module.train(training)
    for grad in (True, False):
        twins.call(*_inputs(residual, grad))
    CHANGES[change](twins)
    for grad in (True, False):
        twins.call(*_inputs(residual, grad))
    if change == "eval":
        for module in twins.both:
            module.train()
        twins.call(*_inputs(residual))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_a_cast_module(dtype: torch.dtype) -> None:
    twins = Twins()
    twins.call(*_inputs())
    for module in twins.both:
        module.to(dtype)
    for _ in range(2):
        twins.call(*[x.detach().to(dtype).requires_grad_() for x in _inputs()])
    for module in twins.both:
        module.float()
    twins.ours.load_state_dict(twins.theirs.norm.state_dict())  # rounded in another order
    twins.call(*_inputs())


def test_another_input_than_before() -> None:
    twins = Twins()
    x = torch.randn(4, CHANNELS, 2, 3)
    twins.call(x.clone().requires_grad_())
    for other in (
        x.bfloat16().requires_grad_(), x.to(memory_format=torch.channels_last), x[:, :, ::2],
        x[:2, :, :1], torch.randn(0, CHANNELS, 2, 2), x.clone().requires_grad_(),
    ):  # fmt: skip
        twins.call(other)
    for module in twins.both:
        module.requires_grad_(False)
        module.eval()
    twins.call(x)
    twins.call(x.clone().requires_grad_())
    twins.call(x.double().float()[:1])


@pytest.mark.parametrize(
    "shape",
    [(4, CHANNELS), (4, CHANNELS, 2), (4, CHANNELS + 1, 2, 2), (1, CHANNELS, 1, 1)],
    ids=str,
)
def test_mistakes_after_right_calls(shape: tuple[int, ...]) -> None:
    twins = Twins()
    twins.call(*_inputs())
    before = copy.deepcopy(twins.ours.state_dict())
    with pytest.raises((ValueError, RuntimeError)) as theirs:
        twins.theirs(torch.randn(shape))
    with pytest.raises(theirs.type):
        twins.ours(torch.randn(shape))
    torch.testing.assert_close(twins.ours.state_dict(), before)


@pytest.mark.parametrize(
    ("cls", "good", "bad"),
    [(BatchNormAct1d, (2, 3), (4, 5)), (BatchNormAct2d, (4,), (2, 3, 5)),
     (BatchNormAct3d, (5,), (2, 3, 4)), (BatchNormAddAct, (2, 3, 4, 5), (1,))],
)  # fmt: skip
def test_ranks(cls: Any, good: tuple[int, ...], bad: tuple[int, ...]) -> None:
    norm = cls(CHANNELS)
    for rank in (*good, *bad):
        shape = (5, CHANNELS, *(2,) * (rank - 2))[:rank]
        args = (torch.randn(shape),) * (2 if cls is BatchNormAddAct else 1)
        if rank in bad:
            with pytest.raises(ValueError, match="expected"):
                norm(*args)
        else:
            z = F.batch_norm(args[0], None, None, training=True)
            expected = (z + args[0] if len(args) == 2 else z).relu()
            torch.testing.assert_close(norm(*args), expected)


@pytest.mark.filterwarnings("ignore:register_forward_hook")
def test_convert_and_revert() -> None:
    class Block(Parts):
        def forward(self, x: Tensor, r: Tensor) -> Tensor:
            return self.act(self.bn(x) + r)

    ours = Block(bn=nn.BatchNorm2d(CHANNELS), act=nn.ReLU())
    theirs = copy.deepcopy(ours)

    def compare() -> None:
        x, r = _inputs(residual=True)
        torch.testing.assert_close(ours(x, r), theirs(x, r))
        torch.testing.assert_close(ours.state_dict(), theirs.state_dict())

    for change in (fusedtrain.convert, fusedtrain.revert, fusedtrain.convert):
        change(ours)
        compare()
        compare()
    ours.act.register_forward_hook(lambda m, i, y: 2 * y)
    theirs.act.register_forward_hook(lambda m, i, y: 2 * y)
    compare()
    x = _inputs()[0]
    torch.testing.assert_close(ours.bn(x), theirs.bn(x))


# --- what surrounds a call ---


class Tagged(Tensor):
    """A subclass whose operators are torch's."""


def _in(context: Callable[[], AbstractContextManager[Any]]) -> Callable[..., Any]:
    def run(module: Any, x: Tensor) -> Any:
        with context():
            return module(x)

    return run


def _forward_ad(module: Any, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.detach(), torch.ones_like(x))
        return torch.stack(list(forward_ad.unpack_dual(module(dual))))


def _traced(module: Any, x: Tensor) -> Tensor:
    if isinstance(module, Stock):
        return module(x)
    graph: Tensor = fx.symbolic_trace(nn.Sequential(module))(x)
    return graph


def _jit_traced(module: Any, x: Tensor) -> Tensor:
    module.eval()
    result: Tensor = torch.jit.trace(module, x.detach())(x)
    module.train()
    return result


SURROUNDINGS: dict[str, Callable[..., Any]] = {
    "no_grad": _in(torch.no_grad),
    "inference_mode": _in(torch.inference_mode),
    "autocast": _in(lambda: torch.autocast("cpu", torch.bfloat16)),
    "recompute": _in(fusedtrain.recompute),
    "save_on_cpu": _in(torch.autograd.graph.save_on_cpu),
    "anomaly": _in(torch.autograd.detect_anomaly),
    "subclass": lambda module, x: module(x.as_subclass(Tagged)).as_subclass(Tensor),
    "functional_call": lambda module, x: torch.func.functional_call(module, {}, (x,)),
    "grad of func": lambda module, x: torch.func.grad(lambda x: module(x).square().sum())(x),
    "forward AD": _forward_ad,
    "fx": _traced,
    "jit.trace": _jit_traced,
    "jit.script": lambda module, x: torch.jit.script(module)(x),
    "gradients in reverse twice": lambda module, x: torch.autograd.grad(
        module(x).square().sum(), x, create_graph=True
    )[0],
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SURROUNDINGS)
def test_surroundings(name: str) -> None:
    twins = Twins(act=nn.SiLU)
    twins.call(*_inputs())
    twins.call(*_inputs(grad=False))
    inputs = _inputs(grad=name != "forward AD")
    if name in ("forward AD", "grad of func"):  # which write to no running statistics
        for norm in twins.norms:
            norm.eval()
    twins.call(*inputs, run=SURROUNDINGS[name])
    for module in twins.both:
        module.train()
    twins.call(*_inputs())


def test_checkpoint() -> None:
    """Running statistics move once."""
    twins = Twins()
    twins.call(*_inputs())
    (x,) = _inputs()
    expected = copy.deepcopy(twins.ours)
    y, wanted = checkpoint(twins.ours, x, use_reentrant=False), expected(x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(y, wanted)
    torch.testing.assert_close(gradient, torch.autograd.grad(wanted.sum(), x)[0])
    torch.testing.assert_close(twins.ours.state_dict(), expected.state_dict())


def test_compile() -> None:
    twins = Twins()
    twins.call(*_inputs())
    compiled = torch.compile(twins.ours, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        (x,) = _inputs()
        torch.testing.assert_close(compiled(x), twins.theirs(x))
    twins.call(*_inputs())


def test_unusual_calls_take_no_short_way(monkeypatch: Any) -> None:
    """And usual ones do: the cases above would pass without it."""
    run, unusual = Mock(wraps=batch_norm.run), Mock(wraps=batch_norm._unusual)
    monkeypatch.setattr(batch_norm, "run", run)
    monkeypatch.setattr(batch_norm, "_unusual", unusual)
    norm = BatchNormAct2d(CHANNELS)
    for x in (*_inputs(), *_inputs(grad=False)):
        norm(x)
        norm.eval()
    assert (run.call_count, unusual.call_count) == (2, 0)
    norm.train()
    with forward_ad.dual_level():
        norm(forward_ad.make_dual(_inputs()[0], torch.ones(4, CHANNELS, 2, 3)))
    assert unusual.call_count == 1
    norm.double()(_inputs()[0].double())
    assert (run.call_count, unusual.call_count) == (4, 1)
