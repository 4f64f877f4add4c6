"""Recipes of torch's functions: the same kernel, random numbers and context as in the forward; and
steps that recompute, in the layout and precision of users, have the bits of those that store."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as T
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import fusedtrain
from fusedtrain._recompute.record import Record
from fusedtrain.planning._meter import Running, recorded
from helpers.recompute import assert_same_bits


class Two(nn.Module):
    """A function between two linear layers."""

    def __init__(self, function: Callable[[Tensor], Tensor], width: int, last: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, width), nn.Linear(last, 3)
        self.bare = nn.Linear(6, 6, bias=False)
        self.weight = nn.Parameter(torch.randn(5, 6))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.function(self, self.first(x))))


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (3, 4, 2)).permute(2, 0, 3, 1, 4)


def attention(_: Two, x: Tensor, dropout: float = 0.0) -> Tensor:
    q, k, v = heads(x)
    y = T.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
    return y.transpose(1, 2).flatten(2)


def by_math(module: Two, x: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return attention(module, x)


def without_autocast(module: Two, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return T.linear(x.float(), module.bare.weight)


FUNCTIONS: dict[str, tuple[Any, int, int]] = {
    "attention": (attention, 24, 8),
    "attention with dropout": (lambda m, x: attention(m, x, 0.3), 24, 8),
    "attention by math": (by_math, 24, 8),
    "pool of a transposed tensor": (
        lambda m, x: T.max_pool1d(x.transpose(1, 2), 2).transpose(1, 2), 6, 6,
    ),
    "product folded by requires_grad": (lambda m, x: torch.matmul(m.weight, x.mT).mT, 6, 5),
    "linear without bias, transposed": (lambda m, x: m.bare(x.mT.contiguous().mT), 6, 6),
    "autocast off within": (without_autocast, 6, 6),
    "dropouts": (lambda m, x: T.dropout(x, 0.2) + T.dropout(x, 0.5), 6, 6),
    "sums and casts": (lambda m, x: (x.double() * 2 + x).float() - x.mean(), 6, 6),
    "concatenation with itself": (lambda m, x: torch.cat([x, x, -x], -1), 6, 18),
    "in place": (lambda m, x: (x * 2).mul_(3).relu_(), 6, 6),
}  # fmt: skip


def all_recomputed(model: nn.Module, x: Any) -> nn.Module:
    """A copy that recomputes all that a plan can."""
    plan = fusedtrain.plan_memory(model, x, 10**9)
    steps = [step._replace(recompute=True) for step in plan.steps]
    planned = copy.deepcopy(model)
    fusedtrain.convert(planned, memory=replace(plan, steps=steps))
    return planned


def record_of(model: nn.Module, x: Tensor) -> Record:
    return recorded(model, lambda: Running(lambda: (None, model(x).sum()), [x]), x.device)


def run(model: nn.Module, x: Any, forward: Any, backward: Any) -> list[Tensor]:
    torch.manual_seed(1)
    with forward:
        output = model(x)
    with backward:
        output.float().square().sum().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [output.detach(), *gradients, torch.get_rng_state()]


def autocast() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16)


def assert_bits_of_store(
    model: nn.Module, x: Any, forward: Any = nullcontext, backward: Any = nullcontext,
    mode: bool = True,
) -> None:  # fmt: skip
    """The copy that recomputes all departs from its plan nowhere. `mode`: of `train`."""
    with forward():
        planned = all_recomputed(model, x).train(mode)
    store = copy.deepcopy(model).train(mode)
    fusedtrain.convert(store)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        ours = run(planned, x, forward(), backward())
    assert_same_bits([ours, run(store, x, forward(), backward())])


@pytest.mark.parametrize("forward", [nullcontext, autocast])
@pytest.mark.parametrize("backward", [nullcontext, autocast])
@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_same_bits(name: str, forward: Any, backward: Any) -> None:
    torch.manual_seed(0)
    assert_bits_of_store(Two(*FUNCTIONS[name]), torch.randn(4, 7, 8), forward, backward)


class Graph(nn.Module):
    """A sparse buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 3)
        self.register_buffer("edges", torch.eye(6).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.tanh(torch.sparse.mm(self.edges, self.one(x)) * 2))


class Idle(nn.Module):
    """Calls that return their input have no step; a dropout behind each keeps its place."""

    def __init__(self, name: str, *arguments: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(4))
        self.name, self.arguments = name, arguments

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = getattr(T.gelu(layer(x)), self.name)(*self.arguments)
            x = T.dropout(x, 0.1)
        return x


def with_dropouts() -> nn.Module:
    layers = [nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.SiLU(), nn.Dropout(0.2)]
    return nn.Sequential(*layers, nn.Linear(8, 8), nn.Linear(8, 8))


# Network, shape of its input, whether it trains.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], bool]] = {
    "dropouts in eval mode": (with_dropouts, (4, 7, 8), False),
    "sparse buffer": (Graph, (6, 8), True),
    "flatten": (lambda: Idle("flatten", 1), (64, 256), True),
    "reshape": (lambda: Idle("reshape", 64, 256), (64, 256), True),
    "float": (lambda: Idle("float"), (64, 256), True),
    "contiguous": (lambda: Idle("contiguous"), (64, 256), True),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_same_bits_of_networks(name: str) -> None:
    make, shape, mode = NETWORKS[name]
    torch.manual_seed(0)
    assert_bits_of_store(make(), torch.randn(shape), mode=mode)


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2).requires_grad_(requires_grad=False)
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        padding = torch.zeros(x.shape[:2], dtype=torch.bool)
        padding[:, -2:] = True
        x = self.encoder(x, src_key_padding_mask=padding)
        return self.two(torch.tanh(self.one(x) * 2))


def test_fast_path_of_torch_stays() -> None:
    torch.manual_seed(0)
    model, x = Frozen(), torch.randn(4, 7, 8)
    model.encoder.eval()
    planned = all_recomputed(model, x)
    with pytest.warns(UserWarning, match="not followed while"):
        output = planned(x)
    assert torch.equal(output, model(x))
    planned.eval(), model.eval()
    with torch.no_grad():
        assert torch.equal(planned(x), model(x))


class Moving(nn.Module):
    """A buffer that a sum reads, and that changes later."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.register_buffer("mean", torch.zeros(32))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x) - self.mean)
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x


def test_inputs_that_change_later_are_not_planned() -> None:
    torch.manual_seed(0)
    model, x = Moving(), torch.randn(64, 32)
    stays = {(output.op, output.stays) for output in record_of(model, x).outputs}
    assert ("sub", False) in stays
    assert ("linear", True) in stays
    assert ("sub", True) not in stays


def test_recipes_of_dropout_keep_the_generators_state() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 8))
    record = record_of(model, torch.randn(4, 8))
    reads = {one.op: {record.bytes[storage] for storage in one.reads} for one in record.outputs}
    assert torch.get_rng_state().nbytes in reads["dropout"]
    assert torch.get_rng_state().nbytes not in reads["linear"]


def test_the_example_is_no_part_of_the_step() -> None:
    """An input that is larger than all that is kept."""
    model, x = nn.Sequential(nn.Linear(512, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(256, 512)
    plan = fusedtrain.plan_memory(model, x, 1.0)
    assert plan.peak <= plan.eager_peak
    assert abs(plan.predicted - plan.peak) <= 0.05 * plan.peak


def test_outputs_carry_no_recipe_out_of_the_forward() -> None:
    model, x = Two(*FUNCTIONS["dropouts"]), torch.randn(4, 7, 8)
    output = all_recomputed(model, x)(x)
    file = io.BytesIO()
    torch.save(output, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True), output)


def test_refusals() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(4, 8)
    with pytest.raises(ValueError, match="optimizer: its states are not known"):
        fusedtrain.plan_memory(model, x, 0.9, optimizer=torch.optim.LBFGS(model.parameters()))
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with profiler, pytest.raises(RuntimeError, match="profiler runs"):
        fusedtrain.plan_memory(model, x, 0.9)


class Written(nn.Module):
    """Tensors that others write to between forward and backward, as stock allows: buffers that are
    added, and an embedding that writes to its weight."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.table = kind, nn.Embedding(50, 16, max_norm=1.0)
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 4)
        self.register_buffer("small", torch.randn(16))
        self.register_buffer("large", torch.randn(8, 12, 16))
        nn.init.normal_(self.table.weight)

    def forward(self, ids: Tensor) -> Tensor:
        y = self.first(self.table(ids))
        if self.kind == "embedding":
            y = y + self.first(self.table(50 - 1 - ids))
        elif self.kind != "bias":
            y = y + getattr(self, self.kind)
        return self.last(torch.tanh(y))

    def write(self) -> None:
        with torch.no_grad():
            if self.kind == "bias":
                self.first.bias.mul_(2)
            elif self.kind != "embedding":
                getattr(self, self.kind).mul_(2)


@pytest.mark.parametrize("kind", ["embedding", "small", "large", "bias"])
def test_writes_between_forward_and_backward(kind: str) -> None:
    torch.manual_seed(0)
    model, ids = Written(kind), torch.randint(50, (8, 12))
    planned = all_recomputed(model, ids)
    fusedtrain.convert(model)
    runs = []
    for one in (planned, model):
        y = one(ids)
        one.write()
        y.square().mean().backward()
        runs.append([p.grad for p in one.parameters()])
    assert all(map(torch.equal, *runs))


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_error_says_what_attention_keeps_inside(dropout: float) -> None:
    """On a CPU torch computes attention with dropout in pieces."""

    def attention(_: Any, x: Tensor) -> Tensor:
        y: Tensor = T.scaled_dot_product_attention(*heads(x), dropout_p=dropout)
        return y.transpose(1, 2).flatten(2)

    model = Two(attention, 24, 8)
    with pytest.raises(ValueError, match="no plan needs less") as error:
        fusedtrain.plan_memory(model, torch.randn(2, 128, 8), 0.01)
    said = "scaled_dot_product_attention keeps" in str(error.value)
    assert said == (dropout > 0), error.value


class Twice(nn.Module):
    """One depthwise layer, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.depthwise = nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, padding=1, groups=8)

    def forward(self, x: Tensor) -> Tensor:
        return self.depthwise(self.depthwise(self.norm(x)).relu())


def norm(**options: Any) -> Callable[[], list[nn.Module]]:
    return lambda: [nn.BatchNorm2d(8, **options)]


class Act(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.depthwise, self.function = nn.Conv2d(8, 8, 3, padding=1, groups=8), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.depthwise(x))


MIDDLES: dict[str, Callable[[], list[nn.Module]]] = {
    "norm": norm(),
    "norm without weight": norm(affine=False),
    "norm without weight and statistics": norm(affine=False, track_running_stats=False),
    "depthwise called twice": lambda: [Twice()],
    "relu": lambda: [Act(torch.relu)],
    "leaky_relu in place": lambda: [Act(lambda y: T.leaky_relu(y, 0.1, inplace=True))],
}


def gradients(model: nn.Module, x: Tensor, autocast: bool, second: bool) -> list[Tensor]:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = model(x)
    loss = y.float().square().mean()
    parameters = list(model.parameters())
    if second:
        first = torch.autograd.grad(loss, parameters, create_graph=True)
        loss = torch.stack([g.square().sum() for g in first]).sum()
    loss.backward()
    return [y.detach(), *(p.grad for p in parameters if p.grad is not None), *model.buffers()]


@pytest.mark.parametrize("second", [False, True], ids=["first", "second"])
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("middle", MIDDLES)
def test_modes_have_the_bits_of_store(middle: str, autocast: bool, second: bool) -> None:
    torch.manual_seed(0)
    stock = nn.Sequential(nn.Conv2d(3, 8, 3), *MIDDLES[middle](), nn.Conv2d(8, 4, 3))
    stock = stock.to(memory_format=torch.channels_last)
    x = torch.randn(4, 3, 12, 12).contiguous(memory_format=torch.channels_last)
    store, recomputing = copy.deepcopy(stock), copy.deepcopy(stock)
    fusedtrain.convert(store)
    fusedtrain.convert(recomputing, memory="recompute")
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        planned = all_recomputed(stock, x)
    expected = gradients(store, x, autocast, second)
    for model in (recomputing, planned):
        assert_same_bits([expected, gradients(model, x, autocast, second)])
