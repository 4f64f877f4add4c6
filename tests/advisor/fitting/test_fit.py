"""`fit`: batches and peaks within the memory, the plan, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

import fusedtrain
from fusedtrain._graph.modules import has_own_forward
from fusedtrain._torch_private import compiled_within
from fusedtrain.advisor.fitting import FitRow, _fitter, _trainer
from fusedtrain.advisor.fitting._affine import largest_fitting, predicted
from fusedtrain.advisor.fitting._checkpoint import (
    blocks_of,
    checkpoint_blocks,
    restore_blocks,
)
from fusedtrain.advisor.fitting._report import sentences
from fusedtrain.advisor.fitting._trainer import Trainer
from fusedtrain.planning._meter import Meter
from helpers.planned_networks import Convolutions

SAMPLE = (3, 16, 16)
MEMORY = 3_000_000


def build() -> nn.Module:
    return Convolutions(8, 4)


other = build()


@pytest.fixture(scope="module")
def largest() -> fusedtrain.FitReport:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    report = fusedtrain.fit(build, SAMPLE, MEMORY, device="cpu")
    assert torch.equal(torch.get_rng_state(), state)
    torch.set_num_threads(threads)
    return report


def measured(model: nn.Module, x: Tensor, bf16: bool = False) -> int:
    """The peak of a step of a training loop."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    y = torch.randint(4, (len(x),))

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            output = model(x)  # held during backward, as in training loops
            loss = nn.functional.cross_entropy(output, y)
        loss.backward()
        optimizer.step()

    step()
    optimizer.zero_grad()
    states = [s["momentum_buffer"] for s in optimizer.state.values()]
    tensors = [*model.parameters(), *model.buffers(), *states, x, y]
    with Meter(torch.device("cpu")) as meter:
        step()
    return meter.peak + sum(t.nbytes for t in tensors)


def test_the_largest_batches_fit_and_larger_ones_do_not(largest: fusedtrain.FitReport) -> None:
    rows = {row.way: row for row in largest.rows}
    assert list(rows) == ["eager", "convert", "recompute", "plan"]
    assert rows["eager"].batch < rows["convert"].batch < rows["recompute"].batch
    assert rows["recompute"].batch < rows["plan"].batch
    for row in rows.values():
        assert row.fits
        assert row.measured
        assert 0.9 * MEMORY < row.peak <= MEMORY
        assert row.seconds is not None
        assert row.image == row.seconds / row.batch
    batch, most = rows["plan"].batch, rows["eager"].batch
    won = f"plan: batch {batch} instead of {most} in 3 MB, "
    assert any(line.startswith(won) for line in largest.summary)
    assert won in str(largest)


@pytest.mark.usefixtures("one_thread")
def test_the_plan_has_the_peak_that_was_reported(largest: fusedtrain.FitReport) -> None:
    assert largest.plan is not None
    assert largest.plan.recomputed
    row, model = largest.rows[-1], build()
    fusedtrain.convert(model, memory=largest.plan)
    assert measured(model, torch.randn(row.batch, *SAMPLE)) == row.peak
    assert abs(largest.plan.predicted - largest.plan.peak) <= 0.05 * largest.plan.peak


@pytest.mark.usefixtures("one_thread")
def test_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    stages: list[str] = []
    report = fusedtrain.fit(
        build, torch.randn(SAMPLE), "700kB", batch=8, optimizer="adamw", device="cpu",
        begin=stages.append,
    )  # fmt: skip
    assert [(row.way, row.batch) for row in report.rows] == [
        (way, 8) for way in ("eager", "convert", "recompute", "plan")
    ]
    fits = {row.way: row.fits for row in report.rows}
    assert fits["plan"]
    assert not fits["eager"]
    assert report.summary[0].startswith("The fastest way to train batch 8 in 700 kB: ")
    assert report.summary[0].endswith("eager does not fit.")
    assert stages[0] == "the model"
    # Where memory is short, larger steps are predicted and not run.
    tried: list[int] = []
    peak = Trainer.peak
    monkeypatch.setattr(Trainer, "_available", lambda self: 400_000)
    monkeypatch.setattr(Trainer, "peak", lambda self, n: tried.append(n) or peak(self, n))
    short = fusedtrain.fit(build, SAMPLE, "700kB", batch=32, optimizer="adamw", device="cpu")
    assert max(tried) == 4
    for row in short.rows:
        assert not row.measured
        assert row.seconds is None
    assert short.plan is None
    assert short.summary[0].startswith("No way trains batch 32 in 700 kB: the lowest peak is")
    assert "larger ones are predicted, not tried" in short.summary[-1]
    assert short.rows[0].peak == pytest.approx(4 * report.rows[0].peak, rel=0.2)


def test_lines() -> None:
    def bytes_of(batch: int) -> int:  # workspaces of large batches are not on the line
        return 1000 + 70 * batch + (5000 if batch > 100 else 0)

    measured: list[int] = []

    def measure(batch: int) -> int:
        measured.append(batch)
        return bytes_of(batch)

    for limit in (1200, 3000, 8000, 20_000, 1_000_000):
        measured.clear()
        batch = largest_fitting(measure, {2: bytes_of(2), 4: bytes_of(4)}, limit)
        if limit == 1200:
            assert batch == 2
            continue
        assert bytes_of(batch) <= limit
        assert bytes_of(round(1.03 * batch) + 1) > limit
        assert len(measured) <= 5
    assert largest_fitting(measure, {2: 50, 4: 60}, 40) == 0
    assert predicted({2: 10, 4: 14, 8: 22}, 16) == 38
    # An allocator that refuses a batch that was predicted to fit.
    assert 4 <= largest_fitting(lambda n: None if n > 30 else 10 * n, {2: 20, 4: 40}, 1000) <= 30


def test_words() -> None:
    eager, plan = FitRow("eager", 40, 4, True, 4.0), FitRow("plan", 96, 4, True, 10.368)
    assert sentences([eager, plan], 4 * 10**9, None)[0] == (
        "plan: batch 96 instead of 40 in 4.00 GB, 1.08x of the time an image."
    )
    assert sentences([plan], 4 * 10**9, None) == [
        "plan: batch 96 in 4.00 GB, where eager fits none."
    ]
    assert "no other way fits a larger one" in sentences([eager], 10**9, None)[0]
    assert sentences([eager], 10**9, 40) == ["The fastest way to train batch 40 in 1.00 GB: eager."]


class Tagged(nn.Module):
    """Named arguments, a dict with the loss, a part that is frozen; as transformers has them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(9, 4), nn.BatchNorm1d(4), nn.Linear(4, 9)
        self.norm.eval()

    def forward(self, tokens: Tensor, labels: Tensor, mask: Tensor) -> dict[str, Tensor]:
        assert not self.norm.training
        x = self.norm(self.embed(tokens).transpose(1, 2)).transpose(1, 2)
        logits = self.head(x * mask.unsqueeze(2))
        return {"loss": nn.functional.cross_entropy(logits.mT, labels), "logits": logits}


@pytest.mark.usefixtures("one_thread")
def test_batches_of_several_tensors_and_losses() -> None:
    """A model is copied; a sample is repeated; a function may make the batch."""
    tagged = Tagged()
    x, state = torch.zeros(6, dtype=torch.int64), [p.clone() for p in tagged.state_dict().values()]
    sample = {"tokens": x, "labels": x, "mask": torch.ones(6)}
    report = fusedtrain.fit(tagged, sample, "1MB", batch=8, optimizer="adamw", device="cpu")
    assert report.model.endswith("test_fit:Tagged")
    assert all(row.fits and row.measured for row in report.rows)
    assert all(map(torch.equal, state, tagged.state_dict().values()))
    assert all(p.grad is None for p in tagged.parameters())
    seen: list[torch.dtype] = []

    def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        labels = batch.pop("labels")
        output = model(**batch, labels=labels)
        seen.append(output["logits"].dtype)
        return -output["logits"].logsumexp(2).mean()

    with torch.autocast("cpu", torch.bfloat16):
        again = fusedtrain.fit(
            Tagged, lambda n: default_collate([sample] * n), "1MB", batch=8, device="cpu", step=step
        )
        assert again.precision == "bf16"
        assert torch.is_autocast_enabled("cpu")
    assert {*seen} == {torch.bfloat16}
    pair = (torch.ones(SAMPLE), 3)
    peaks = {fusedtrain.fit(build, example, MEMORY, batch=4, device="cpu").rows[0].peak
             for example in (pair, SAMPLE)}  # fmt: skip
    assert len(peaks) == 1


def last_channels(samples: int) -> Tensor:
    return torch.randn(samples, *SAMPLE).to(memory_format=torch.channels_last)


@pytest.mark.usefixtures("one_thread")
def test_peaks_under_autocast() -> None:
    """A training loop in bfloat16 has the peaks that were reported, within the memory."""
    model = build().to(memory_format=torch.channels_last)
    report = fusedtrain.fit(model, last_channels, "700kB", precision="bf16")
    assert report.precision == "bf16"
    assert report.plan is not None
    for row, memory in zip(report.rows[1:], ("store", "recompute", report.plan)):
        fusedtrain.convert(model, memory=memory)
        assert 0.9 * 700_000 < row.peak <= 700_000
        assert measured(model, last_channels(row.batch), bf16=True) == pytest.approx(
            row.peak, rel=0.02
        )
    assert report.rows[3].batch > report.rows[0].batch


def failing() -> nn.Module:
    raise KeyError("in build")


def flat() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Flatten(0))


BAD: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (TypeError, "memory: expected bytes", {"memory": 0.5}),
    (ValueError, "memory: 'much' is no size", {"memory": "much"}),
    (ValueError, "memory: must be positive", {"memory": 0}),
    (TypeError, "batch: expected an int", {"batch": 2.0}),
    (ValueError, "batch: expected 2 or more", {"batch": 1}),
    (TypeError, "build_model: expected a function of no arg", {"build_model": 3}),
    (TypeError, "build_model: expected a function of no", {"build_model": Convolutions.forward}),
    (ValueError, "precision: expected fp32, bf16, fp16, got 'half'", {"precision": "half"}),
    (TypeError, "example: expected one sample", {"example": 3.0}),
    (TypeError, "example: expected a function of the number", {"example": build}),
    (ValueError, "example: 2 samples are .* grow", {"example": lambda n: torch.ones(4, 3)}),
    (TypeError, "step: expected a function of model and batch, got float", {"step": 0.5}),
    (TypeError, "step: expected a function of model and batch", {"step": lambda model: 0}),
    (TypeError, "step: expected the loss, .* got NoneType", {"step": lambda m, x: None}),
    (TypeError, r"step: expected the loss, .* got \(2, 4\)", {"step": lambda m, x: m(x)}),
    (ValueError, "the loss depends on no parameter", {"step": lambda m, x: other(x).sum()}),
    (TypeError, "step: pass `lambda .* is no pair", {"example": [torch.ones(2)] * 3}),
    (TypeError, "and no dict for which the model", {"example": {"x": torch.ones(SAMPLE)}}),
    (ValueError, "expected torchvision:NAME", {"build_model": "resnet50"}),
    (ValueError, "example: expected the shape", {"example": (0, 3)}),
    (ValueError, "optimizer: expected sgd", {"optimizer": "lion"}),
    (ValueError, "device: expected cpu", {"device": "tpu"}),
    (TypeError, "returned int, not a module", {"build_model": int}),
    (TypeError, "cross-entropy needs a tensor", {"build_model": flat, "example": (2,)}),
    (KeyError, "in build", {"build_model": failing}),
]


@pytest.mark.parametrize(("error", "text", "arguments"), BAD)
def test_bad_input(error: type[Exception], text: str, arguments: dict[str, Any]) -> None:
    words = {"build_model": build, "example": SAMPLE, "memory": MEMORY, "device": "cpu"}
    with pytest.raises(error, match=text):
        fusedtrain.fit(**{**words, **arguments})


def test_blocks_that_are_checkpointed() -> None:
    def block() -> nn.Sequential:
        return nn.Sequential(nn.Linear(4, 4), nn.SiLU())

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = block()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.part(x)

    stages = nn.Sequential(nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block()))
    model = nn.Sequential(nn.Linear(4, 4), stages, nn.Linear(4, 4))
    blocks = blocks_of(model)
    assert [type(one) for one in blocks] == 4 * [Block]
    assert len(blocks_of(nn.Sequential(block(), block()))) == 2
    assert not blocks_of(block())
    x = torch.randn(2, 4)
    y = model(x)
    checkpoint_blocks(blocks)
    assert torch.equal(model(x), y)
    restore_blocks(blocks)
    assert not any(has_own_forward(one) for one in blocks)


@pytest.mark.usefixtures("one_thread")
def test_rivals_of_a_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of steps that were timed before do not lower a peak, and each budget of
    torch.compile is compiled once."""
    budgets: list[float] = []

    def compiled_within(model: nn.Module, budget: float) -> nn.Module:
        budgets.append(budget)
        return model

    monkeypatch.setattr(_trainer, "compiled_within", compiled_within)
    report = fusedtrain.fit(build, SAMPLE, MEMORY, batch=8, device="cpu", curve=True, compiled=True)
    curve = {row.way: row for row in report.curve}
    assert budgets == list(_trainer.COMPILED.values())
    for way in ("eager", *_trainer.COMPILED):
        assert curve[way].peak == report.rows[0].peak
    plans = [row for row in report.curve if row.way == "plan"]
    budgets = [float(row.remark.removeprefix("budget ")) for row in plans]
    assert budgets == sorted(budgets, reverse=True)
    assert plans[-1].peak == min(row.peak for row in plans)
    assert budgets[-1] not in _fitter._BUDGETS  # the lowest peak, between two of them


@pytest.mark.slow
def test_each_budget_of_torch_compile_has_code_of_its_own() -> None:
    layers = [(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)) for _ in range(4)]
    model, x = nn.Sequential(*sum(layers, ())), torch.randn(512, 64)
    for each in range(9):  # more variants of nn.Sequential than Dynamo keeps of one function
        torch.compile(model[:each], backend="eager")(x)
    peaks, gradients = [], []
    for budget in (1.0, 0.5):
        compiled = compiled_within(model, budget)
        for _ in range(2):  # the first step compiles
            model.zero_grad()
            with Meter(torch.device("cpu")) as meter:
                compiled(x).sum().backward()
        peaks.append(meter.peak)
        gradients.append([p.grad for p in model.parameters()])
    assert peaks[1] < 0.9 * peaks[0]
    torch.testing.assert_close(*gradients)
