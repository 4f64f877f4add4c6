"""The rule `convert-fuses` speaks of a quarter of the kept bytes, or of passes that gain time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusedtrain.advisor._views import Site
from fusedtrain.advisor.bench import clock
from fusedtrain.advisor.diagnosis import Finding, RunFacts, _trials, decide, doctor
from fusedtrain.advisor.diagnosis._facts import Fusable
from helpers.diagnosis import training

pytestmark = pytest.mark.usefixtures("one_thread")

FIRST = 1e6, 1.2e6, 0.9e6, 1.1e6, 1e6, 1.3e6, 0.8e6, 1e6  # nanoseconds of passes as they are


class Residual(nn.Module):
    """x + layers(x)"""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class Attention(nn.Module):
    def __init__(self, width: int, causal: bool) -> None:
        super().__init__()
        self.qkv, self.out, self.causal = (
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
            causal,
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).flatten(2))


def transformer(causal: bool) -> nn.Module:
    width = 16
    blocks = []
    for _ in range(2):
        blocks.append(Residual(nn.LayerNorm(width), Attention(width, causal), nn.Dropout(0.1)))
        mlp = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)
        blocks.append(Residual(nn.LayerNorm(width), *mlp))
    return nn.Sequential(*blocks, nn.LayerNorm(width), nn.Linear(width, 64))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.down, self.deep, self.up = self.block(8), self.block(16), self.block(16)
        self.smaller = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.larger = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.head = nn.Conv2d(16, 3, 3, padding=1)

    @staticmethod
    def block(channels: int) -> nn.Module:
        norms = nn.GroupNorm(4, channels), nn.GroupNorm(4, channels)
        first, second = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        return Residual(norms[0], nn.SiLU(), first, norms[1], nn.SiLU(), nn.Dropout(0.1), second)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(self.stem(x))
        deep = self.larger(self.deep(self.smaller(x)))
        return self.head(self.up(torch.cat([x, deep], 1)))


def mobilenet() -> nn.Module:
    def conv(a: int, b: int, size: int = 1, groups: int = 1) -> list[nn.Module]:
        one = nn.Conv2d(a, b, size, padding=size // 2, groups=groups, bias=False)
        return [one, nn.BatchNorm2d(b)]

    blocks = []
    for _ in range(2):
        layers = [*conv(8, 32), nn.Hardswish(), *conv(32, 32, 3, 32), nn.Hardswish(), *conv(32, 8)]
        blocks.append(Residual(*layers))
    return nn.Sequential(*conv(3, 8, 3), nn.Hardswish(), *blocks)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(2))
        self.bn1, self.bn2, self.relu = nn.BatchNorm2d(8), nn.BatchNorm2d(8), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        return self.relu(x + self.bn2(self.conv2(y)))


def resnet() -> nn.Module:
    stem = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
    return nn.Sequential(*stem, Block(), Block(), Block())


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "GPT": (lambda: transformer(True), (2, 12, 16)),
    "BERT": (lambda: transformer(False), (2, 12, 16)),
    "U-Net": (UNet, (2, 3, 16, 16)),
    "MobileNet": (mobilenet, (2, 3, 16, 16)),
    "ResNet": (resnet, (2, 3, 16, 16)),
}


def examined(name: str) -> tuple[list[Finding], list[Fusable]]:
    make, shape = NETWORKS[name]
    report = doctor(training(make(), torch.ones(shape)), steps=4)
    return [f for f in report.findings if f.rule == "convert-fuses"], report.facts.fusable


def clocked(monkeypatch: pytest.MonkeyPatch, factor: float, last: float) -> None:
    """Converted passes take `factor` times as long as the others, and `last` in the last round."""
    order: list[str] = []

    def interleaved(calls: Mapping[str, Any], *_: Any) -> dict[str, list[float]]:
        for name, call in calls.items():
            order.append(name)
            call()
        converted = [factor * ns for ns in FIRST[:-1]] + [last * FIRST[-1]]
        return {name: list(FIRST if name == "now" else converted) for name in order}

    monkeypatch.setattr(_trials, "interleave", interleaved)


def test_silence_where_little_is_saved() -> None:
    found, (model,) = examined("U-Net")
    assert 0.01 < 1 - min(model.store, model.recompute) / model.before < 0.25
    assert model.passes["now"] == [1e-3, 1.0]
    assert not found


@pytest.mark.parametrize(
    ("name", "fused"),
    [
        ("GPT", "5 x LayerNorm, 2 x GELU, 2 x Attention"),
        ("BERT", "5 x LayerNorm, 2 x GELU, 2 x Attention"),
        ("MobileNet", "7 x BatchNorm2d, 5 x Hardswish, 2 x Conv2d"),
        ("ResNet", "7 x BatchNorm2d, 4 x ReLU"),
    ],
)
def test_networks_of_norms_and_activations(name: str, fused: str) -> None:
    """The layers are named, bytes are the cost; the time of both ways is told, and is no gain."""
    (finding,), (model,) = examined(name)
    assert finding.evidence.startswith(f"`convert` would fuse {fused} in ")
    assert finding.cost.seconds is None
    assert finding.cost.bytes == model.before - model.recompute >= 0.25 * model.before
    assert str(finding.cost).endswith(" kept for backward")
    times = '1 ms now, 1 ms converted, 1 ms with memory="recompute"'
    assert f"; forward and backward take {times}" in finding.evidence
    assert 'example, memory="recompute")' in finding.remedy


@pytest.mark.parametrize(
    ("factor", "last", "speaks"), [(0.8, 0.8, True), (0.8, 1.01, False), (0.97, 0.97, False)]
)
def test_time_must_be_gained_beyond_noise(
    monkeypatch: pytest.MonkeyPatch, factor: float, last: float, speaks: bool
) -> None:
    """In every round, and by 5 %."""
    clocked(monkeypatch, factor, last)
    found, _ = examined("U-Net")
    assert len(found) == speaks
    if speaks:
        assert found[0].cost.seconds == pytest.approx(0.2e-3)
        assert "200 us of " in str(found[0].cost)


def test_the_trial_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes take turns, of copies that are converted; nothing of the model or of random numbers
    changes."""
    monkeypatch.setattr(_trials, "interleave", clock.interleave)
    monkeypatch.setattr(_trials, "_PASSES", clock.Effort(2, 2, 0.0, 0.0))
    model, x = NETWORKS["MobileNet"][0](), torch.randn(2, 3, 16, 16)
    before = [t.clone() for t in (*model.state_dict().values(), torch.get_rng_state())]
    modes = ("store", "recompute")
    passes = _trials.pass_seconds(model, x, modes, torch.bfloat16)
    assert list(passes) == ["now", *modes]
    assert passes["now"][1] == 1.0
    assert all(seconds > 0 < gain for seconds, gain in passes.values())
    after = (*model.state_dict().values(), torch.get_rng_state())
    assert all(map(torch.equal, before, after))
    assert all(p.grad is None for p in model.parameters())


def test_the_way_that_gains() -> None:
    """A quarter of the bytes goes before time; a mode that is slower is not asked for."""
    fusable = Fusable("Net", Site(__file__, 1, "main"), "9 x SiLU", 1000, 990, 900)

    def remedies(**changes: Any) -> list[str]:
        facts = RunFacts(steps=6, timed=3, step=10e-3, fusable=[replace(fusable, **changes)])
        return [f.remedy for f in decide(facts).findings if f.rule == "convert-fuses"]

    passes = {"now": [5e-3, 1.0], "store": [4e-3, 1.1], "recompute": [6e-3, 0.8]}
    assert not remedies()
    (remedy,) = remedies(passes=passes)
    assert "(model, example) before" in remedy
    (remedy,) = remedies(passes=passes, recompute=700)
    assert 'memory="recompute"' in remedy
    (remedy,) = remedies(passes=passes | {"dropout": [3e-3, 1.2]}, masks=100)
    assert 'dropout="fused") before' in remedy
    assert "other random numbers" in remedy
    (remedy,) = remedies(passes=passes | {"dropout": [4.5e-3, 1.1]}, masks=100)
    assert "dropout" not in remedy
