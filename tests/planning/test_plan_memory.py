"""Plans: same bits as "store", a peak within the budget, and nothing left behind."""

from __future__ import annotations

import copy
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
from fusedtrain.planning._profile import Profile, Running, Save, Step, profile
from fusedtrain.planning._search import Search
from fusedtrain.planning._simulate import Simulator, peak_lines
from helpers.planned_networks import EXAMPLES, Attention, Convolutions


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


def test_autocast() -> None:
    model, x = made("attention")
    with torch.autocast("cpu", torch.bfloat16):
        plan = plan_memory(model, x, 0.7)
    assert plan.peak <= plan.budget
    assert plan.recomputed
    model, store = converted(model, plan)
    results = []
    for one in (model, store):
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16):
            loss = one(x).float().square().mean()
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in one.parameters())])
    assert_same(*results)


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


def test_recipes_of_dropout_keep_the_generators_state() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 8))
    x = torch.randn(4, 8)

    def forward() -> tuple[Tensor, Tensor]:
        output = model(x)
        return output, output.sum()

    measured = profile(model, lambda: Running(forward, [x]), torch.device("cpu"))
    reads = {step.op: {measured.bytes[one] for one in step.reads} for step in measured.steps}
    assert torch.get_rng_state().nbytes in reads["dropout"]
    assert torch.get_rng_state().nbytes not in reads["linear"]


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
    breaks = False

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.breaks:
            raise KeyError("in the middle")
        return y


def test_an_exception_leaves_nothing_behind() -> None:
    torch.manual_seed(0)
    model, x = Breaking(), torch.randn(4, 3, 24, 24)
    plan = plan_memory(model, x, 0.8)
    fusedtrain.convert(model, memory=plan)
    model.breaks = True
    for call in (lambda: model(x), lambda: plan_memory(model, x, 0.8)):
        with pytest.raises(KeyError, match="in the middle"):
            call()
        assert not _get_current_function_mode_stack()
        assert top_saved_tensors_hooks(True) is None
    model.breaks = False
    model(x).sum().backward()


def test_an_error_of_the_measured_step_is_the_models_own() -> None:
    class Moody(Convolutions):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls == 7:  # eager, two profiles, three that are timed, the plan's
                raise ValueError("the model's own")
            return super().forward(x)

    torch.manual_seed(0)
    with pytest.raises(ValueError, match=r"^the model's own$"):
        plan_memory(Moody(), torch.randn(4, 3, 24, 24), 0.8)


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
    path.write_text(path.read_text().replace('_plan": 2', '_plan": 9'))
    with pytest.raises(ValueError, match="of format 9"):
        MemoryPlan.load(path)


def chain(sizes: list[int], costs: list[float]) -> Profile:
    """A profile of layers that each save their input; the loss comes last."""
    count = len(sizes)
    profile = Profile(bytes=sizes, nodes=count, totals=[0] * (2 * count + 1))
    for number, cost in enumerate(costs):
        inputs = [number - 1] if number else []
        profile.steps.append(Step("op", "", number, inputs, [], number, number + 1, cost))
        profile.saves.append(Save(number, number, number, count - 1 - number))
    stored = Simulator(profile)
    profile.totals = [-rest for rest in stored._rest]
    return profile


def test_peak_lines_are_the_largest_of_all_moments() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        sizes = [torch.randint(1, 50, (12,), generator=generator).tolist() for _ in range(2)]
        small, large = (chain(row, [1.0] * 12) for row in sizes)
        choice = (torch.rand(12, generator=generator) < 0.5).tolist()
        one, other = (Simulator(profile).totals(choice)[0] for profile in (small, large))
        lines = peak_lines(choice, (2, small), (5, large))
        for batch in (0, 2, 3, 5, 40):
            expected = max(a + (b - a) / 3 * (batch - 2) for a, b in zip(one, other))
            result = max(base + each * batch for base, each in lines)
            assert result == pytest.approx(expected)


def test_search_is_near_the_best_of_all_choices() -> None:
    torch.manual_seed(0)
    ratios = []
    for _ in range(8):
        count = 9
        sizes = torch.randint(1, 20, (count,)).tolist()
        costs = (torch.rand(count) * 10).tolist()
        simulator = Simulator(chain(sizes, costs))
        search = Search(simulator)
        search.run()
        search.deepen()
        every = [simulator.run(choice) for choice in itertools.product((False, True), repeat=count)]
        lowest = min(outcome.peak for outcome in every)
        assert search.least()[1].peak <= 1.1 * lowest
        full = simulator.run([False] * count).peak
        for share in (0.9, 0.7, 0.5):
            budget = int(share * full)
            fitting = [o.milliseconds for o in every if o.peak <= budget]
            if fitting and search.least()[1].peak <= budget:
                search.refine(budget)
                best = search.best(budget)
                assert best is not None
                ratios.append(best[1].milliseconds / max(min(fitting), 1e-9))
    assert len(ratios) > 10
    assert sum(ratios) / len(ratios) < 1.1
    assert max(ratios) < 1.6


def test_a_training_run_has_the_losses_of_store() -> None:
    torch.manual_seed(0)
    model = Attention()
    tokens = torch.randint(50, (6, 4, 24))
    plan = plan_memory(model, tokens[0], 0.8)
    losses = []
    for memory in ("store", plan):
        twin = copy.deepcopy(model)
        fusedtrain.convert(twin, memory=memory)
        optimizer = fusedtrain.optim.AdamW(twin.parameters(), lr=1e-2)
        torch.manual_seed(3)
        row = []
        for batch in tokens:
            loss = twin(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            row.append(loss.item())
        losses.append(row)
    assert losses[0] == losses[1]
