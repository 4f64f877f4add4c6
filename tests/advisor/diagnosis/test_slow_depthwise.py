"""The rule `slow-depthwise`: its message, its silence, and that its trials change nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedtrain
from fusedtrain._text import shape_text
from fusedtrain.advisor._views import Site
from fusedtrain.advisor.diagnosis import Finding, RunFacts, _depthwise, decide, doctor
from fusedtrain.advisor.diagnosis._facts import Depthwise, Fusable
from helpers.diagnosis import training

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = (2, 16, 28, 28)
LINE = Site(__file__, 1, "main")


@pytest.fixture(autouse=True)
def _two_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_depthwise, "_BUDGET", 0.0)


def depthwise(kernel: int = 7, cls: type[nn.Conv2d] = nn.Conv2d) -> nn.Conv2d:
    return cls(16, 16, kernel, padding=kernel // 2, groups=16)


def findings(model: nn.Module, x: Tensor, **options: Any) -> list[Finding]:
    report = doctor(training(model, x), steps=6, **options)
    return [finding for finding in report.findings if finding.rule == "slow-depthwise"]


def test_message(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = _depthwise._seconds  # on a busy machine ours may be slower
    monkeypatch.setattr(_depthwise, "_seconds", lambda *call: (10 * sum(seconds(*call)), 0.0))
    model = nn.Sequential(depthwise(5), depthwise(), nn.Conv2d(16, 4, 1))
    x = torch.ones(SHAPE)
    (finding,) = findings(model, x)
    assert finding.number == 2
    assert finding.evidence.startswith(
        "2 depthwise convolutions of Sequential: 1 (2x16x28x28) and 1 more; forward and backward "
    )
    assert " a step in torch's kernels, " in finding.evidence
    assert finding.cost.kind == "measured"
    assert finding.cost.seconds is not None
    # Recomputed, the output of the first keeps nothing.
    assert "the fusedtrain.convert that `convert-fuses` asks for does this" in finding.remedy
    fusedtrain.convert(model)
    assert not findings(model, x)


def test_seconds_are_those_of_all_calls_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that is called twice counts twice; calls of other steps do not count."""
    monkeypatch.setattr(_depthwise, "_seconds", lambda layer, call: (2.0, 0.5))
    layer = depthwise()
    for calls in (1, 2):
        watched = training(nn.Sequential(*[layer] * calls), torch.ones(SHAPE))
        (slow,) = doctor(watched, steps=4).facts.depthwise
        assert (slow.layers, slow.name) == (1, "0 (2x16x28x28)")
        assert (slow.now, slow.converted) == (2.0 * calls, 0.5 * calls)
    call = _depthwise.DepthwiseCall(SHAPE, torch.float32, False, False, True)
    counts = {id(layer): Counter({(1, call): 2, (2, call): 4, (9, call): 8})}
    slow = _depthwise.slow_layers(nn.Sequential(layer), counts, range(1, 3))
    assert slow == Depthwise("Sequential", None, 1, "0 (2x16x28x28)", 6.0, 1.5)


class Own(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 1


class Frozen(nn.Module):
    """A trunk that trains nothing, before a head."""

    def __init__(self, no_grad: bool) -> None:
        super().__init__()
        self.trunk, self.head = depthwise().requires_grad_(False), nn.Conv2d(16, 4, 1)
        self.no_grad = no_grad

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(not self.no_grad):
            x = self.trunk(x)
        return self.head(x)


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


SILENT: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    # torch's kernel is as fast as ours without gradients.
    "frozen": lambda: (Frozen(False), _channels_last(torch.ones(SHAPE))),
    "no_grad": lambda: (Frozen(True), torch.ones(SHAPE)),
    "eval": lambda: (nn.Sequential(depthwise(), nn.Conv2d(16, 4, 1)).eval(), torch.ones(SHAPE)),
    "subclass": lambda: (nn.Sequential(depthwise(cls=Own)), torch.ones(SHAPE)),
    "not depthwise": lambda: (nn.Sequential(nn.Conv2d(16, 16, 5, groups=4)), torch.ones(SHAPE)),
    "3 x 3, channels_last": lambda: (
        nn.Sequential(depthwise(3), nn.Conv2d(16, 4, 1)), _channels_last(torch.ones(SHAPE))
    ),
    "tiny": lambda: (
        nn.Sequential(
            nn.Conv2d(3, 64, 3), nn.Conv2d(64, 16, 3, stride=8), nn.Conv2d(16, 16, 5, groups=16)
        ),
        torch.ones(4, 3, 64, 64),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SILENT)
def test_silence(case: str) -> None:
    assert not findings(*SILENT[case]())


def test_silence_where_nothing_can_be_said() -> None:
    model, x = nn.Sequential(depthwise()), torch.ones(SHAPE)
    assert not findings(model, x, trials=False)
    assert not findings(model, x, assume_gpu=True)  # torch's kernels run on GPUs


def test_nothing_changes() -> None:
    """Parameters, gradients, buffers, random numbers; hooks of the layer are not called."""
    model = nn.Sequential(depthwise(), nn.BatchNorm2d(16))
    step = training(model, torch.ones(SHAPE))
    step()
    hooked: list[int] = []
    model[0].register_forward_hook(lambda *_: hooked.append(1))
    key = _depthwise.DepthwiseCall(SHAPE, torch.float32, False, True, True)

    def state() -> list[Tensor]:
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        state = [t.clone() for t in model.state_dict().values()]
        return [*state, *gradients, torch.get_rng_state()]

    before, attributes = state(), list(vars(model[0]))
    slow = _depthwise.slow_layers(model, {id(model[0]): Counter([(0, key)])}, [0])
    assert slow is not None
    assert slow.now > 0 < slow.converted
    assert type(model[0]) is nn.Conv2d
    assert list(vars(model[0])) == attributes
    assert not hooked
    for expected, actual in zip(before, state(), strict=True):
        assert torch.equal(expected, actual)


@pytest.mark.parametrize(
    ("layer", "shape", "dtype"),
    [
        (nn.Conv1d(8, 8, 31, padding="same", groups=8), (2, 8, 60), torch.float32),
        (nn.Conv2d(8, 16, 5, stride=2, groups=8, bias=False), (8, 40, 40), torch.float32),
        (nn.Conv2d(8, 8, 5, padding=2, groups=8, padding_mode="reflect"), (2, 8, 20, 20),
         torch.bfloat16),
        (nn.Conv3d(4, 4, 3, groups=4), (2, 4, 5, 8, 8), torch.float64),
    ],
)  # fmt: skip
def test_every_kind_is_timed(layer: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Under autocast in its dtype."""
    layer = layer.to(torch.float64 if dtype is torch.float64 else torch.float32)
    x = torch.ones(shape, dtype=layer.weight.dtype)
    with torch.autocast("cpu", dtype, enabled=dtype is torch.bfloat16):
        call = _depthwise.call_of(layer, x)
    assert call is not None
    assert call == (shape, dtype, False, False, True)
    model = nn.Sequential(layer)
    slow = _depthwise.slow_layers(model, {id(layer): Counter([(0, call)])}, [0])
    assert slow is not None
    assert (slow.layers, slow.name) == (1, f"0 ({shape_text(shape)})")


def test_convert_is_asked_for_once() -> None:
    """Beside `convert-fuses`, of the same model, the remedy points there and has no change."""
    slow = Depthwise("Net", LINE, 3, "block.0 (8x16x28x28)", now=5e-3, converted=2e-3)
    fusable = Fusable("Net", LINE, "9 x SiLU", 1000, 500, 500)
    facts = RunFacts(steps=6, timed=3, step=10e-3, depthwise=[slow], fusable=[fusable])

    def remedies(facts: RunFacts) -> dict[str, tuple[str, bool]]:
        return {f.rule: (f.remedy, bool(f.changes)) for f in decide(facts).findings}

    both = remedies(facts)
    assert "`convert-fuses` asks for" in both["slow-depthwise"][0]
    assert (both["slow-depthwise"][1], both["convert-fuses"][1]) == (False, True)
    for other in (replace(fusable, type="Other"), replace(fusable, store=999, recompute=999)):
        remedy, changes = remedies(replace(facts, fusable=[other]))["slow-depthwise"]
        assert remedy.startswith("Call fusedtrain.convert(model)")
        assert changes
