"""`doctor` of a function, in this process: what it sees."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fusedtrain
from fusedtrain.advisor.diagnosis import Facts, Watcher, _trials, doctor
from helpers.diagnosis import lines, rules, training

pytestmark = pytest.mark.usefixtures("one_thread")


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.SiLU(inplace=True), nn.Flatten(), nn.Linear(64, 2)
    )


def test_training_is_what_it_is_without() -> None:
    """Losses, weights, statistics and random numbers."""
    results = []
    for watched in (False, True):
        torch.manual_seed(3)
        model = network()
        step = training(model, torch.randn(2, 3, 6, 6))
        if watched:
            doctor(step, steps=5)
        else:
            for _ in range(5):
                step()
        results.append([torch.rand(1), *model.state_dict().values()])
    for expected, actual in zip(*results, strict=True):
        assert torch.equal(expected, actual)


def test_layers_that_were_made_before_are_named() -> None:
    diagnosis = doctor(training(network(), torch.randn(2, 3, 6, 6)), steps=4)
    assert {"bias-before-norm", "in-place-clone", "convert-fuses"} <= rules(diagnosis)
    (finding,) = (f for f in diagnosis.findings if f.rule == "bias-before-norm")
    assert "Conv2d: 0" in finding.evidence
    assert finding.site is None
    assert "PARTIAL" not in str(diagnosis)


def test_only_the_model_of_interest() -> None:
    model, other = network(), network()
    first, second = (training(m, torch.randn(2, 3, 6, 6)) for m in (model, other))

    def step() -> None:
        first()
        second()

    every = doctor(step, steps=4)
    one = doctor(step, steps=4, model=model)
    for diagnosis, count in ((every, 2), (one, 1)):
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
    step = training(network(), torch.randn(2, 3, 6, 6))

    def with_metric() -> None:
        Metric().total += 1
        step()

    assert doctor(with_metric, steps=4).facts.steps == 4


@pytest.mark.parametrize("evaluates", [False, True])
def test_only_steps_with_an_evaluation_are_not_timed(evaluates: bool) -> None:
    """Trainer calls `train` in each step."""
    model = network()
    step = training(model, torch.randn(2, 3, 6, 6))

    def loop() -> None:
        if evaluates:
            model.eval()
        model.train()
        step()

    assert bool(doctor(loop, steps=8).facts.timed) is not evaluates


def test_a_loss_that_apex_calls_scale() -> None:
    from fusedtrain.apex import amp

    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.randn(2, 4)

    def step() -> None:
        with torch.autocast("cpu", torch.float16):
            loss = model(x).square().mean()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    assert "fp16-without-scaler" not in rules(doctor(step, steps=4))


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
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step() -> None:
        y = model(torch.randn(2, 4))
        y.add_(1)  # tanh keeps its output
        y.sum().backward()
        optimizer.step()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        doctor(step, steps=4)


def test_evaluation_within_training() -> None:
    """A teacher under no_grad, one whose output is detached, and one that gradients pass."""
    model, good, wasteful, passing = (nn.Linear(4, 4) for _ in range(4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=True)
    for teacher in (good, wasteful, passing):
        teacher.eval()

    def step() -> None:
        optimizer.zero_grad()
        x = torch.randn(2, 4)
        with torch.no_grad():
            target = good(x)
        target = target + wasteful(x).detach()
        (passing(model(x)) - target).square().sum().backward()
        optimizer.step()

    found = lines(doctor(step, steps=5), "eval-with-grad")
    assert found == ["target = target + wasteful(x).detach()"]


def test_after_an_interrupt_nothing_is_tried() -> None:
    watcher = Watcher("train.py", steps=8, assume_gpu=False, trials=True)
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    count = 0
    watcher.begin()
    try:
        for count in range(1, 7):
            model(torch.randn(2, 3, 6, 6)).square().mean().backward()
            optimizer.step()
            assert not watcher.step(count, optimizer)
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        facts = Facts.from_json(watcher.finish())
    assert facts.steps == count
    assert [o.timing for o in facts.optimizers] == [None]
    assert not facts.fusable
    assert facts.clones  # what was seen stays


def test_autocast_of_an_evaluation_is_not_that_of_training() -> None:
    model = network()
    train = training(model, torch.randn(2, 3, 6, 6))

    def step() -> None:
        train()
        model.eval()
        with torch.no_grad(), torch.autocast("cpu", torch.float16):
            model(torch.randn(2, 3, 6, 6))
        model.train()

    diagnosis = doctor(step, steps=5, assume_gpu=True, trials=False)
    assert "fp16-without-scaler" not in rules(diagnosis)


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


def test_a_clone_of_the_users_own_is_no_finding() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x)
            before = y.clone()
            return y.relu_() + before

    diagnosis = doctor(training(Net(), torch.randn(2, 4)), steps=4, trials=False)
    assert "in-place-clone" not in rules(diagnosis)


class Named(nn.Module):
    """Takes arguments by place and by name."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: torch.Tensor, *, scale: float, **more: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * scale + more["offset"]


def test_a_model_that_takes_named_arguments() -> None:
    model = Named()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        y = model(torch.randn(2, 3, 6, 6), scale=0.5, offset=torch.ones(2))
        y.square().mean().backward()
        optimizer.step()

    assert {"convert-fuses", "bias-before-norm"} <= rules(doctor(step, steps=4))


def test_rules_that_need_trials_say_so() -> None:
    diagnosis = doctor(training(network(), torch.randn(2, 3, 6, 6)), steps=4, trials=False)
    for rule in ("convert-fuses", "bias-before-norm"):
        assert "trials were left out" in diagnosis.not_checked[rule]


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
    optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=True)
    batches = iter(DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=2))

    def step() -> None:
        optimizer.zero_grad()
        model(next(batches)[0]).sum().backward()
        optimizer.step()

    (seen,) = doctor(step, steps=6).facts.loaders
    assert (seen.batches, seen.workers, seen.site and seen.site.function) == (3, 0, "step")


def test_report_in_words() -> None:
    diagnosis = doctor(training(network(), torch.randn(2, 3, 6, 6)), steps=4)
    text = str(diagnosis)
    for finding in diagnosis.findings:
        assert f"[{finding.rule}]" in text
    assert "not checked, for GPUs" in text
    assert diagnosis.to_json()["steps"] == 4
    assert repr(diagnosis).startswith("Diagnosis(")


def test_a_compiled_model_is_left_to_the_compiler() -> None:
    model = network()
    step = training(torch.compile(model, backend="aot_eager"), torch.randn(2, 3, 6, 6))
    diagnosis = doctor(step, steps=5)
    for rule in ("convert-fuses", "in-place-clone", "small-tensors", "frozen-norm-keeps"):
        assert "torch.compile" in diagnosis.not_checked[rule]
    assert "bias-before-norm" in rules(diagnosis)


def test_second_derivatives_are_those_without_the_watch() -> None:
    results = []
    for watched in (False, True):
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1), nn.Sigmoid())
        optimizer = torch.optim.SGD(model.parameters(), 0.5)

        def step(model: nn.Module = model, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            x = torch.randn(3, 4, requires_grad=True)
            y = model(x).sum()
            (slope,) = torch.autograd.grad(y, x, create_graph=True)
            (y + slope.square().sum()).backward()
            optimizer.step()

        if watched:
            doctor(step, steps=4, trials=False)
        else:
            for _ in range(4):
                step()
        results.append([p.detach() for p in model.parameters()])
    for expected, actual in zip(*results, strict=True):
        assert torch.equal(expected, actual)


@pytest.mark.parametrize(("half", "slow"), [(3.0, True), (0.5, False)])
def test_convolutions_in_16_bits(half: float, slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The convolution with the most work is timed; a clock that is set says how long it takes."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 8, 3), nn.Flatten(), nn.Linear(32, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.randn(2, 3, 6, 6)).square().mean()
        loss.backward()
        optimizer.step()

    calls = iter([half, 1.0])
    layers: list[torch.Size] = []
    half_ratio = _trials.half_ratio

    def timed(layer: nn.Module, *rest: Any) -> float:
        layers.append(layer.weight.shape)
        monkeypatch.setattr(_trials, "shortest", lambda call, rounds: call() or next(calls))
        ratio = half_ratio(layer, *rest)
        monkeypatch.setattr(_trials, "shortest", shortest)
        return ratio

    shortest = _trials.shortest
    monkeypatch.setattr(_trials, "half_ratio", timed)
    diagnosis = doctor(step, steps=4)
    assert layers == [(8, 4, 3, 3)]
    found = [f for f in diagnosis.findings if f.rule == "slow-16-bit-convolutions"]
    assert len(found) == slow
    if slow:
        assert str(found[0].cost) == ("measured: 1 (2x4x4x4) takes 3 times as long as in float32")
        assert found[0].site is not None
        assert found[0].site.code == "loss = model(torch.randn(2, 3, 6, 6)).square().mean()"
