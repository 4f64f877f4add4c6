"""Plans: same bits as "store", a peak within the budget, and nothing left behind."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

import fusedtrain
from fusedtrain import MemoryPlan, plan_memory
from fusedtrain._graph.modules import has_own_forward
from fusedtrain._torch_private import top_saved_tensors_hooks
from fusedtrain.planning._meter import Meter
from helpers.planned_networks import EXAMPLES, Convolutions


def made(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return EXAMPLES[name]()


def step(model: nn.Module, x: Any, passes: int = 1) -> list[Tensor]:
    """Loss, gradients and buffers."""
    torch.manual_seed(1)
    for _ in range(passes):
        loss = model(x).float().square().mean()
        loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [loss.detach(), *gradients, *model.buffers()]


def assert_same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs):
        assert torch.equal(one, other)


def peak_of(model: nn.Module, x: Any) -> int:
    with Meter(torch.device("cpu")) as meter:
        torch.manual_seed(1)
        model(x).float().sum().backward()
    return meter.peak


def test_garbage_of_earlier_steps_is_no_part_of_a_peak() -> None:
    threshold = gc.get_threshold()
    gc.enable()  # an earlier test's library may have left it off
    gc.set_threshold(1 << 20)  # no collection before the meter runs
    with Meter(torch.device("cpu")):  # the profiler counts what it has seen allocated
        ring: list[Any] = [torch.empty(1 << 20)]
        ring.append(ring)
        del ring
    with Meter(torch.device("cpu")) as meter:
        gc.set_threshold(10)
        lists: list[Any] = [[] for _ in range(100)]
        held = torch.empty(1 << 20)
    gc.set_threshold(*threshold)
    assert meter.peak >= held.nbytes
    assert gc.isenabled()
    assert lists


def converted(model: nn.Module, plan: MemoryPlan) -> tuple[nn.Module, nn.Module]:
    """The model under the plan, and a copy with "store"."""
    store = copy.deepcopy(model)
    fusedtrain.convert(store)
    fusedtrain.convert(model, memory=plan)
    return model, store


@pytest.fixture(scope="module", params=list(EXAMPLES))
def planned(request: Any) -> tuple[str, MemoryPlan]:
    model, x = made(request.param)
    return request.param, plan_memory(model, x, 0.72)


def test_bits_and_peak(planned: tuple[str, MemoryPlan]) -> None:
    name, plan = planned
    model, x = made(name)
    model, store = converted(model, plan)
    assert_same(step(model, x), step(store, x))
    assert_same(step(model, x, 2), step(store, x, 2))  # accumulated
    assert plan.recomputed > 0
    model.zero_grad()
    peak = peak_of(model, x)
    assert peak <= plan.budget
    assert abs(peak - plan.predicted) <= 0.05 * peak
    assert plan.peak <= 0.72 * plan.eager_peak


def test_peaks_of_other_batches(planned: tuple[str, MemoryPlan]) -> None:
    name, plan = planned
    model, x = made(name)
    assert (plan.batch, plan.peak_at(len(x))) == (len(x), plan.predicted)
    fusedtrain.convert(model, memory=plan)
    for times in (2, 5):
        larger = torch.cat([x] * times)
        peak = peak_of(model, larger)
        model.zero_grad()
        # Mostly equal; torch's libraries choose other kernels for larger tensors.
        assert abs(plan.peak_at(len(larger)) - peak) <= 0.15 * peak


def test_a_plan_that_knows_its_example_alone() -> None:
    model, x = made("convolutions")
    target = torch.randn(len(x), 4)

    def loss(y: Tensor) -> Tensor:
        return (y.reshape(4, 4) - target).square().mean()

    plan = plan_memory(model, x, 0.9, loss=loss)
    with pytest.raises(ValueError, match="batch: the plan knows the peak of its example alone"):
        plan.peak_at(8)
    with pytest.raises(ValueError, match="batch: must be at least 1"):
        plan.peak_at(0)


def test_the_model_stays_and_revert_undoes(planned: tuple[str, MemoryPlan]) -> None:
    name, plan = planned
    model, x = made(name)
    before = copy.deepcopy(model)
    state = torch.get_rng_state()
    plan_memory(model, x, plan.budget / plan.eager_peak)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())
    assert_same(step(model, x), step(before, x))
    report = str(fusedtrain.convert(model, x, memory=plan))
    assert f"backward computes {plan.recomputed} of {len(plan.steps)} outputs again" in report
    assert f"the plan's step is {plan.peak / plan.eager_peak:.2f}x of eager's" in report
    fusedtrain.revert(model)
    model.zero_grad(), before.zero_grad()
    assert_same(step(model, x), step(before, x))
    assert not has_own_forward(model)


def test_saved_loaded_pickled_copied(planned: tuple[str, MemoryPlan], tmp_path: Path) -> None:
    name, plan = planned
    plan.save(tmp_path / "plan.json")
    loaded = MemoryPlan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert str(loaded) == str(plan)
    model, x = made(name)
    model, store = converted(model, loaded)
    expected = step(store, x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same(step(twin, x), expected)
        twin.zero_grad()
        assert peak_of(twin, x) <= plan.budget


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_peaks_under_autocast_count_the_casts(layout: torch.memory_format) -> None:
    """Wide layers, whose 16-bit weights are as large as their outputs. A training step casts them
    anew, and leaves autocast before backward."""
    torch.manual_seed(0)
    blocks = [
        (nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.SiLU()) for _ in range(4)
    ]  # fmt: skip
    stock = nn.Sequential(*itertools.chain(*blocks)).to(memory_format=layout)
    x = torch.randn(2, 64, 16, 16).to(memory_format=layout)
    with torch.autocast("cpu", torch.bfloat16):
        plan = plan_memory(stock, x, 0.9)
        assert torch.is_autocast_enabled("cpu")
    model = copy.deepcopy(stock)
    fusedtrain.convert(model, memory=plan)
    for one, promised in ((stock, plan.eager_peak), (model, plan.peak)):
        for _ in range(2):  # the first step may set something up
            one.zero_grad()
            with Meter(torch.device("cpu")) as meter:
                with torch.autocast("cpu", torch.bfloat16):
                    output = one(x)
                    loss = output.float().sum()
                loss.backward()
            del output, loss
        assert promised == pytest.approx(meter.peak, rel=0.01)


def test_another_batch_and_another_forward() -> None:
    model, x = made("convolutions")
    plan = plan_memory(model, x, 0.75)
    model, store = converted(model, plan)
    twice = torch.randn(8, 3, 24, 24)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(step(model, twice), step(store, twice))
        model.eval(), store.eval()
        assert_same(step(model, x), step(store, x))
        with torch.no_grad():
            assert torch.equal(model(x), store(x))
    # A forward that the plan does not know keeps its outputs.
    for one in (model, store):
        one.norms[0] = nn.Identity()
        one.act = nn.Softplus()
        one.zero_grad()
    with pytest.warns(UserWarning, match="plan"):
        ours = step(model, x)
    assert_same(ours, step(store, x))


class Checkpointed(Convolutions):
    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.part, x, use_reentrant=False)
        return super().forward(x[:, :3])

    def part(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.sigmoid(x) * x.exp())


def test_within_checkpoint_nothing_is_planned() -> None:
    torch.manual_seed(0)
    model, x = Checkpointed(), torch.randn(4, 3, 24, 24, requires_grad=True)
    plan = plan_memory(model, x, 0.8)
    model, store = converted(model, plan)
    assert_same(step(model, x), step(store, x))


class Breaking(Convolutions):
    calls, breaks_at = 0, 0

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.calls += 1
        if self.calls == self.breaks_at:
            raise KeyError("in the middle")
        return y


def test_an_exception_leaves_nothing_behind() -> None:
    torch.manual_seed(0)
    model, x = Breaking(), torch.randn(4, 3, 24, 24)
    plan = plan_memory(model, x, 0.8)
    fusedtrain.convert(model, memory=plan)
    again = lambda: plan_memory(model, x, 0.8)  # noqa: E731
    # The call, eager's forward of a plan, and a later one that is measured.
    for call, number in ((lambda: model(x), 1), (again, 1), (again, 7)):
        model.calls, model.breaks_at = 0, number
        with pytest.raises(KeyError, match=r"^'in the middle'$"):
            call()
        assert not _get_current_function_mode_stack()
        assert top_saved_tensors_hooks(True) is None
    model.breaks_at = 0
    model(x).sum().backward()


def test_smaller_budgets_have_smaller_peaks() -> None:
    model, x = made("convolutions")
    peaks, extra = [], []
    for budget in (0.9, 0.8, 0.7):
        plan = plan_memory(model, x, budget)
        peaks.append(plan.peak)
        extra.append(plan.recomputed)
    assert peaks == sorted(peaks, reverse=True)
    assert extra == sorted(extra)


def test_bytes_and_optimizer() -> None:
    model, x = made("convolutions")
    optimizer = torch.optim.AdamW(model.parameters())
    fraction = plan_memory(model, x, 0.8)
    parameters = sum(t.nbytes for t in (*model.parameters(), *model.buffers(), x))
    states = sum(2 * p.nbytes + 4 for p in model.parameters())
    total = fraction.budget + parameters + states
    plan = plan_memory(model, x, total, optimizer=optimizer)
    assert plan.budget == fraction.budget
    assert not optimizer.state
    assert plan_memory(model, x, f"{total / 1e3:.3f} kB").budget - states == plan.budget


@pytest.mark.parametrize(
    ("error", "text", "arguments", "named"),
    [
        (TypeError, "model: expected", ("net", 3, 0.5), {}),
        (TypeError, "budget: expected", (None, None, None), {}),
        (TypeError, "the example comes before", (None, 0.5, torch.ones(2)), {}),
        (TypeError, "budget: expected", (None, None, True), {}),
        (ValueError, "budget: '60%' is no size, .* a float, such as 0.6", (None, None, "60%"), {}),
        (ValueError, "60 are bytes; a fraction .* a float", (None, None, 60), {}),
        (ValueError, "budget: a float is a fraction", (None, None, 1.5), {}),
        (ValueError, "budget: must be positive", (None, None, -4), {}),
        (ValueError, r"no plan needs less than .*backward of .* lowest peak is 0\.\d\d of eager's",
         (None, None, 0.01), {}),
        (ValueError, "of these parameters", (None, None, "2kB"), {}),
        (TypeError, "example_inputs: expected", (None, 3, 0.5), {}),
        (TypeError, "loss: expected", (None, None, 0.5), {"loss": 3}),
        (ValueError, "loss: must return", (None, None, 0.5), {"loss": lambda y: y.detach()}),
        (TypeError, "optimizer: expected", (None, None, 0.5), {"optimizer": 3}),
    ],
)  # fmt: skip
def test_bad_input(
    error: type[Exception], text: str, arguments: Any, named: dict[str, Any]
) -> None:
    network, x = made("convolutions")
    model, example, budget = arguments
    with pytest.raises(error, match=text):
        plan_memory(
            network if model is None else model, x if example is None else example, budget, **named
        )


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_lowest_peak_of_the_message_can_be_had(name: str) -> None:
    model, x = made(name)
    with pytest.raises(ValueError, match="lowest peak is") as raised:
        plan_memory(model, x, 0.01)
    lowest = float(str(raised.value).partition("lowest peak is ")[2].split()[0])
    plan = plan_memory(model, x, lowest)
    assert plan.peak <= lowest * plan.eager_peak


def test_a_plan_of_another_model_is_refused(tmp_path: Path) -> None:
    model, x = made("convolutions")
    plan = plan_memory(model, x, 0.9)
    with pytest.raises(ValueError, match="memory: the plan was made for a model with other"):
        fusedtrain.convert(Convolutions(blocks=5), memory=plan)
    with pytest.raises(TypeError, match="pass memory=plan"):
        fusedtrain.convert(model, plan)
    with pytest.raises(ValueError, match=r"memory: must be a MemoryPlan or one of .*plan_memory"):
        fusedtrain.convert(model, memory=3)  # type: ignore[arg-type]
    path = tmp_path / "plan.json"
    path.write_text("{}")
    with pytest.raises(ValueError, match="has no memory plan"):
        MemoryPlan.load(path)
    plan.save(path)
    path.write_text(path.read_text().replace('_plan": 3', '_plan": 9'))
    with pytest.raises(ValueError, match="of format 9"):
        MemoryPlan.load(path)
