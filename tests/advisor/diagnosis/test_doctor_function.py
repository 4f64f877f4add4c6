"""`doctor` of a function, in this process: what it sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fusedtrain
from fusedtrain.advisor.diagnosis import RunFacts, Watcher, _trials, doctor
from helpers.diagnosis import Network, images, lines, rules, stepping, training

pytestmark = pytest.mark.usefixtures("one_thread")
Step = Callable[[], None]


def of_second_order() -> tuple[nn.Module, Step]:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1), nn.Sigmoid())

    def loss() -> Tensor:
        x = torch.randn(3, 4, requires_grad=True)
        y = model(x).sum()
        (slope,) = torch.autograd.grad(y, x, create_graph=True)
        return y + slope.square().sum()

    return model, stepping(model, loss)


def of_images() -> tuple[nn.Module, Step]:
    model = Network()
    return model, training(model, images())


@pytest.mark.parametrize("make", [of_images, of_second_order])
def test_training_is_what_it_is_without(make: Callable[[], tuple[nn.Module, Step]]) -> None:
    """Losses, weights, statistics and random numbers."""
    results = []
    for watched in (False, True):
        torch.manual_seed(3)
        model, step = make()
        if watched:
            doctor(step, steps=5)
        else:
            for _ in range(5):
                step()
        results.append([torch.rand(1), *model.state_dict().values()])
    for expected, actual in zip(*results, strict=True):
        assert torch.equal(expected, actual)


class Named(nn.Module):
    """Takes arguments by place and by name."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Network()

    def forward(self, x: Tensor, *, scale: float, **more: Tensor) -> Tensor:
        return self.inner(x) * scale + more["offset"]


class Cloning(nn.Linear):
    """Clones for itself, before an activation in place."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        before = y.clone()
        return y.relu_() + before


def named() -> Step:
    model, offset = Named(), torch.ones(2)
    return stepping(model, lambda: model(images(), scale=0.5, offset=offset).square().mean())


def evaluated_in_float16() -> Step:
    model = Network()

    def evaluate(_: Tensor) -> None:
        model.eval()
        with torch.no_grad(), torch.autocast("cpu", torch.float16):
            model(images())
        model.train()

    return stepping(model, lambda: model(images()).square().mean(), evaluate)


def scaled_by_apex() -> Step:
    from fusedtrain.apex import amp

    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    model, optimizer = amp.initialize(layer, optimizer, opt_level="O1", verbosity=0)

    def step() -> None:
        with torch.autocast("cpu", torch.float16):
            loss = model(x).square().mean()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


EVERY = {"convert-fuses", "bias-before-norm", "in-place-clone"}
# A step, options of `doctor`, rules that speak, rules that are silent.
CASES: dict[str, tuple[Callable[[], Step], dict[str, Any], set[str], set[str]]] = {
    "a model that was made before": (lambda: of_images()[1], {}, EVERY, set()),
    "arguments by name": (named, {}, {"convert-fuses", "bias-before-norm"}, set()),
    "a clone of the user's": (
        lambda: training(Cloning(4, 4), torch.randn(2, 4)), {"trials": False}, set(),
        {"in-place-clone"},
    ),
    "an evaluation's autocast": (
        evaluated_in_float16, {"assume_gpu": True, "trials": False, "steps": 5}, set(),
        {"fp16-without-scaler"},
    ),
    "a loss that Apex scales": (scaled_by_apex, {}, set(), {"fp16-without-scaler"}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_rules(case: str) -> None:
    make, options, speak, silent = CASES[case]
    seen = rules(doctor(make(), **{"steps": 4, **options}))
    assert speak <= seen
    assert not silent & seen


def test_report_in_words() -> None:
    """A layer that was made before has a name, but no line."""
    diagnosis = doctor(of_images()[1], steps=4)
    (bias,) = (f for f in diagnosis.findings if f.rule == "bias-before-norm")
    assert "Conv2d: 0" in bias.evidence
    assert bias.site is None
    text = str(diagnosis)
    assert "PARTIAL" not in text
    for finding in diagnosis.findings:
        assert f"[{finding.rule}]" in text
    assert "not checked, for GPUs" in text
    assert diagnosis.to_json()["steps"] == 4
    assert repr(diagnosis).startswith("Diagnosis(")


def test_only_the_model_of_interest() -> None:
    (model, first), (_, second) = of_images(), of_images()

    def step() -> None:
        first()
        second()

    for options, count in (({}, 2), ({"model": model}, 1)):
        diagnosis = doctor(step, steps=4, **options)
        assert sum(f.rule == "convert-fuses" for f in diagnosis.findings) == count


class Metric(nn.Module):
    """Hashes and compares by its states, which its __init__ sets late, as torchmetrics do."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(1)

    def __hash__(self) -> int:
        return hash((type(self), id(self.total)))

    def __eq__(self, other: object) -> Any:
        return self.total == other


def test_modules_that_hash_their_own_states() -> None:
    step = of_images()[1]

    def with_metric() -> None:
        Metric().total += 1
        step()

    assert doctor(with_metric, steps=4).facts.steps == 4


@pytest.mark.parametrize("evaluates", [False, True])
def test_only_steps_with_an_evaluation_are_not_timed(evaluates: bool) -> None:
    """Trainer calls `train` in each step."""
    model, step = of_images()

    def loop() -> None:
        if evaluates:
            model.eval()
        model.train()
        step()

    assert bool(doctor(loop, steps=8).facts.timed) is not evaluates


def test_a_function_without_a_step() -> None:
    diagnosis = doctor(lambda: None, steps=4)
    assert "no step" in diagnosis.partial
    assert not len(diagnosis)


@pytest.mark.parametrize(
    ("target", "options", "error", "words"),
    [
        ("missing.py", {}, FileNotFoundError, "target"),
        (7, {}, TypeError, "target"),
        (lambda: None, {"steps": 3}, ValueError, "steps"),
    ],
)
def test_errors(target: Any, options: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        fusedtrain.doctor(target, **options)


def test_a_tensor_modified_in_place_is_still_an_error() -> None:
    """Hooks of saved tensors switch torch's check off; the watch's hooks have their own."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())  # tanh keeps its output
    step = stepping(model, lambda: model(torch.randn(2, 4)).add_(1).sum())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        doctor(step, steps=4)


def test_evaluation_within_training() -> None:
    """A teacher under no_grad, one whose output is detached, and one that gradients pass."""
    model, good, wasteful, passing = (nn.Linear(4, 4) for _ in range(4))
    for teacher in (good, wasteful, passing):
        teacher.eval()

    def loss() -> Tensor:
        x = torch.randn(2, 4)
        with torch.no_grad():
            target = good(x)
        target = target + wasteful(x).detach()
        return (passing(model(x)) - target).square().sum()

    seen = lines(doctor(stepping(model, loss), steps=5), "eval-with-grad")
    assert seen == ["target = target + wasteful(x).detach()"]


def test_after_an_interrupt_nothing_is_tried() -> None:
    watcher = Watcher("train.py", steps=8, assume_gpu=False, trials=True)
    model = Network()
    optimizer = torch.optim.Adam(model.parameters())
    count = 0
    watcher.begin()
    try:
        for count in range(1, 7):
            model(images()).square().mean().backward()
            optimizer.step()
            assert not watcher.step(count, optimizer)
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        facts = RunFacts.from_json(watcher.finish())
    assert facts.steps == count
    assert [o.timing for o in facts.optimizers] == [None]
    assert not facts.fusable
    assert facts.clones  # what was seen stays


@pytest.mark.parametrize(
    ("act", "clones"),
    [
        (nn.SiLU, True), (nn.Mish, True), (nn.Hardswish, True), (nn.Hardsigmoid, True),
        (nn.ReLU6, True), (nn.Hardtanh, True), (nn.ReLU, False), (nn.ELU, False),
        (nn.LeakyReLU, False), (nn.SELU, False),
    ],
)  # fmt: skip
def test_activations_in_place(act: Any, clones: bool) -> None:
    """Backward keeps the output, or a clone of the input."""
    model = nn.Sequential(nn.Linear(4, 4), act(inplace=True))
    diagnosis = doctor(training(model, torch.randn(2, 4)), steps=4, trials=False)
    assert ("in-place-clone" in rules(diagnosis)) == clones
    y, kept = torch.randn(4, 4, requires_grad=True) * 1, []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda x: x):
        output = model[1](y)
    assert clones == any(t.data_ptr() != output.data_ptr() for t in kept)


@pytest.mark.parametrize(
    ("compiled", "reason", "left_out"),
    [
        (False, "trials were left out", ("convert-fuses", "bias-before-norm")),
        (True, "torch.compile",
         ("convert-fuses", "in-place-clone", "small-tensors", "frozen-norm-keeps")),
    ],
)  # fmt: skip
def test_rules_that_say_nothing_say_why(
    compiled: bool, reason: str, left_out: tuple[str, ...]
) -> None:
    """A compiled model is left to the compiler; some rules need trials."""
    model: Any = torch.compile(Network(), backend="aot_eager") if compiled else Network()
    diagnosis = doctor(training(model, images()), steps=5, trials=compiled)
    for rule in left_out:
        assert reason in diagnosis.not_checked[rule]
    assert ("bias-before-norm" in rules(diagnosis)) == compiled


def test_several_optimizers_and_accumulated_gradients() -> None:
    """A step ends with the optimizer that steps first."""
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    one, two = (torch.optim.SGD(m.parameters(), 0.1, fused=True) for m in (first, second))
    loader = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=2)
    batches: list[Any] = []

    def step() -> None:
        batches[:] = batches or [iter(loader)]
        for _ in range(3):
            (x,) = next(batches[0])
            second(first(x)).sum().backward()
        one.step()
        two.step()
        one.zero_grad()
        two.zero_grad()

    diagnosis = doctor(step, steps=6)
    assert diagnosis.facts.steps == 6
    assert [len(optimizer.type) for optimizer in diagnosis.facts.optimizers] == [3, 3]
    (seen,) = diagnosis.facts.loaders
    assert seen.batches == 3 * 3  # of the three steps that were timed


def test_an_iterator_that_was_made_before() -> None:
    model = nn.Linear(4, 4)
    batches = iter(DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=2))

    def loss() -> Tensor:
        return model(next(batches)[0]).sum()

    (seen,) = doctor(stepping(model, loss), steps=6).facts.loaders
    assert (seen.batches, seen.workers, seen.site and seen.site.function) == (3, 0, "loss")


@pytest.mark.parametrize(("half", "slow"), [(3.0, True), (0.5, False)])
def test_convolutions_in_16_bits(half: float, slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The convolution with the most work is timed; a clock that is set says how long it takes."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 8, 3), nn.Flatten(), nn.Linear(32, 2))

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(images()).square().mean()

    layers: list[torch.Size] = []
    half_ratio = _trials.half_ratio

    def timed(layer: nn.Module, *rest: Any) -> float:
        layers.append(layer.weight.shape)
        calls = iter([half, 1.0])
        with monkeypatch.context() as patch:
            patch.setattr(_trials, "shortest", lambda call, rounds: call() or next(calls))
            return half_ratio(layer, *rest)

    monkeypatch.setattr(_trials, "half_ratio", timed)
    diagnosis = doctor(stepping(model, loss), steps=4)
    assert layers == [(8, 4, 3, 3)]
    seen = [f for f in diagnosis.findings if f.rule == "slow-16-bit-convolutions"]
    assert len(seen) == slow
    if slow:
        assert str(seen[0].cost) == ("measured: 1 (2x4x4x4) takes 3 times as long as in float32")
        assert seen[0].site is not None
        assert seen[0].site.code == "return model(images()).square().mean()"
