"""The experiments of single measures: their runs, that contestants do the same, and judges."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as T
from torch import Tensor, nn

from benchmarks.experiments import (
    checkpointing,
    conv_autotune,
    conv_bias,
    fused_gelu,
    gains,
    workers,
    zero_grad,
)
from benchmarks.experiments.experiment import Run, Settings
from benchmarks.harness.memory import bytes_of_step, most_allocated
from fusedtrain.advisor.bench.gate import NotTheJob
from helpers.experiments import CPU, CUDA, FAST, NOISE, QUICK, SLOW, Inline, judged, runs_of

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("values", "holds"),
    [
        ([FAST, FAST], True),
        ([FAST, SLOW], False),
        ([FAST, NOISE], None),
        ([SLOW, NOISE], False),
        ([FAST, (1.0, 0.99, 1.01)], False),
        ([FAST, None], None),
    ],
)
def test_judging_a_gain(values: list[gains.Gain | None], holds: bool | None) -> None:
    verdict = gains.judge(dict(zip("ab", values)), "the reason")
    assert verdict.holds is holds
    assert ("the reason" in verdict.words) is (holds is False)
    assert "1.50x (1.40 to 1.60)" in verdict.words or values[0] is not FAST or None in values


# --- zero_grad ---


def _stepped(way: tuple[str, str]) -> tuple[list[nn.Parameter], list[int], list[Tensor]]:
    values, gradients = zero_grad.tensors([(7, 3), (5,), (130,)], QUICK)
    params = [nn.Parameter(value.clone()) for value in values]
    step = zero_grad.step_of(*way, params, gradients, lr=0.1)
    step()
    addresses = [p.grad.data_ptr() for p in params if p.grad is not None]
    others = [torch.empty_like(g) for g in gradients]  # what is freed is taken
    step()
    step()
    del others
    grads = [p.grad for p in params if p.grad is not None]
    assert len(grads) == len(params)
    return params, [a for a, g in zip(addresses, grads) if a == g.data_ptr()], grads


@pytest.mark.parametrize("way", zero_grad.WAYS, ids=": ".join)
def test_gradients_are_reset_in_each_way(way: tuple[str, str]) -> None:
    """Three steps of SGD by hand; a gradient that added up would be three times as large."""
    params, same_memory, grads = _stepped(way)
    values, gradients = zero_grad.tensors([(7, 3), (5,), (130,)], QUICK)
    for param, value, gradient, grad in zip(params, values, gradients, grads):
        momentum = torch.zeros_like(value)
        for _ in range(3):
            momentum = zero_grad.MOMENTUM * momentum + gradient
            value = value - 0.1 * momentum
        torch.testing.assert_close(param.detach(), value)
        left = torch.zeros_like(gradient) if way[1] == zero_grad.WITHIN else gradient
        torch.testing.assert_close(grad, left, rtol=0, atol=0)
    if way[1] != zero_grad.NONE:
        assert len(same_memory) == len(params)


def test_dropped_gradients_are_written_once() -> None:
    """Backward hands its gradient on; a copy of it would be what None is said to save."""
    values, gradients = zero_grad.tensors([(1000, 100)], QUICK)
    peaks = {}
    for way in (zero_grad.MEMSET, zero_grad.NONE):
        params = [nn.Parameter(value.clone()) for value in values]
        step = zero_grad.step_of(zero_grad.TORCH, way, params, gradients)
        step()
        for p in params:
            p.grad = None if way == zero_grad.NONE else p.grad
        peaks[way] = most_allocated(step, "cpu")[0]
    assert peaks[zero_grad.NONE] == pytest.approx(gradients[0].nbytes, rel=0.1)
    assert peaks[zero_grad.MEMSET] == pytest.approx(gradients[0].nbytes, rel=0.1)


def test_lists_of_parameters() -> None:
    lists = zero_grad.lists(CPU)
    assert [len(of) for of in lists.values()] == [161, 400]
    assert "26 million" in zero_grad.EXPERIMENT.setup(CPU)


@pytest.mark.parametrize(
    ("within", "none", "holds"),
    [(FAST, FAST, [True, True]), (SLOW, FAST, [True, False]), (NOISE, SLOW, [False, None])],
)
def test_judge_of_zero_grad(within: gains.Gain, none: gains.Gain, holds: list[bool | None]) -> None:
    label, small = zero_grad.label_of, zero_grad.SMALL
    runs = {
        label(zero_grad.LARGE, zero_grad.TORCH, zero_grad.NONE): none,
        label(zero_grad.LARGE, zero_grad.OURS, zero_grad.WITHIN): within,
        label(small, zero_grad.TORCH, zero_grad.NONE): SLOW,
        label(small, zero_grad.OURS, zero_grad.WITHIN): FAST,
    }
    verdicts = [verdict.holds for verdict in zero_grad.EXPERIMENT.judge(runs_of(runs), QUICK)]
    assert verdicts == [holds[0], False, holds[1], True]


# --- fused_gelu ---


def test_the_composition_is_gelu() -> None:
    x = torch.linspace(-8, 8, 4001, dtype=torch.float64)
    torch.testing.assert_close(fused_gelu.composed(x), T.gelu(x), rtol=1e-12, atol=1e-12)


def _gelu(monkeypatch: pytest.MonkeyPatch, who: str) -> tuple[dict[str, object], dict[str, str]]:
    """Contestants of which one is off by 2 %."""
    makers = {**fused_gelu.MAKERS, who: lambda: lambda x: T.gelu(x) * 1.02}
    monkeypatch.setattr(fused_gelu, "MAKERS", makers)
    x = torch.randn(fused_gelu.GATE)
    functions, left_out = fused_gelu.contestants(QUICK, x, torch.randn_like(x))
    return dict(functions), left_out


@pytest.mark.parametrize("who", [fused_gelu.EAGER, fused_gelu.NATIVE, fused_gelu.OURS])
def test_a_wrong_gelu_is_not_timed(monkeypatch: pytest.MonkeyPatch, who: str) -> None:
    with pytest.raises(NotTheJob):
        _gelu(monkeypatch, who)


def test_a_wrong_scripted_gelu_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    functions, left_out = _gelu(monkeypatch, fused_gelu.SCRIPTED)
    assert list(functions) == [fused_gelu.EAGER, fused_gelu.NATIVE, fused_gelu.OURS]
    assert left_out.keys() == {fused_gelu.SCRIPTED, fused_gelu.COMPILED}
    assert "wrong forward" in left_out[fused_gelu.SCRIPTED]


@pytest.mark.parametrize(
    ("best", "holds"),
    [((5.2, 5.0, 5.4), True), ((4.0, 3.8, 4.2), False), ((4.5, 4.0, 5.0), None)],
)
def test_judge_of_gelu(best: gains.Gain, holds: bool | None) -> None:
    label = fused_gelu.label_of
    numbers = {label("forward", fused_gelu.OURS): best, label("forward", fused_gelu.NATIVE): FAST}
    numbers |= {label("forward", fused_gelu.SCRIPTED): SLOW}
    both = label("forward+backward", fused_gelu.OURS)
    fivefold, faster = fused_gelu.EXPERIMENT.judge(runs_of({**numbers, both: FAST}), QUICK)
    assert (fivefold.holds, faster.holds) == (holds, True)
    assert f"{best[0]:.2f}x" in fivefold.words
    assert "fuses nothing" in fivefold.words
    assert not fused_gelu.EXPERIMENT.judge(runs_of({**numbers, both: SLOW}), QUICK)[1].holds


# --- conv_autotune ---


def test_the_switch_of_the_autotuner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    with conv_autotune.switch_restored():
        off, on = (conv_autotune.calls_of(QUICK, autotune) for autotune in (False, True))
        for calls, expected in ((on, True), (off, False)):
            for call in calls.values():
                torch.backends.cudnn.benchmark = not expected
                call()
                assert torch.backends.cudnn.benchmark is expected
        torch.testing.assert_close(on["forward"](), off["forward"](), rtol=0, atol=0)
        torch.backends.cudnn.benchmark = True
    assert not torch.backends.cudnn.benchmark
    gradients = on["forward+backward"]()
    assert isinstance(gradients, tuple)
    assert [tuple(g.shape) for g in gradients] == [(2, 16, 16, 16), (16, 16, 3, 3), (16,)]


def test_a_setting_in_a_process() -> None:
    with workers.Worker(conv_autotune.build, QUICK, True) as worker:
        assert worker.ask("forward", conv_autotune.LONGEST) > 0
    assert worker._process.exitcode == 0


def test_two_settings_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds come from the worker of the setting, and are those of one call."""
    pauses = {"forward": {False: 2e-4, True: 4e-4}, "forward+backward": {False: 8e-4, True: 16e-4}}

    def calls_of(settings: Settings, autotune: bool) -> dict[str, Callable[[], None]]:
        return {part: partial(time.sleep, pauses[part][autotune]) for part in pauses}

    monkeypatch.setattr(conv_autotune, "Worker", Inline)
    monkeypatch.setattr(conv_autotune, "calls_of", calls_of)
    times = conv_autotune.times_of_processes(QUICK)
    assert list(times.samples) == [
        f"{part}, autotuner {switch}" for part in pauses for switch in ("off", "on")
    ]
    for part, by_setting in pauses.items():
        for autotune, pause in by_setting.items():
            assert times.seconds(conv_autotune.label_of(part, autotune)) > pause


def test_an_error_in_a_process_is_one_of_the_experiment(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(settings: Settings, autotune: bool) -> dict[str, Callable[[], None]]:
        raise ValueError("no plan")

    monkeypatch.setattr(conv_autotune, "Worker", Inline)
    monkeypatch.setattr(conv_autotune, "calls_of", refuse)
    with pytest.raises(ValueError, match="no plan"):
        conv_autotune.times_of_processes(QUICK)


@pytest.mark.parametrize(("gain", "holds"), [(FAST, True), (SLOW, False), (NOISE, None)])
def test_judge_of_the_autotuner(gain: gains.Gain, holds: bool | None) -> None:
    runs = runs_of({conv_autotune.label_of(part, True): gain for part in conv_autotune.PARTS})
    for verdict in conv_autotune.EXPERIMENT.judge(runs, CUDA):
        assert verdict.holds is holds
        assert f"{gain[0]:.2f}x" in verdict.words
    for verdict in conv_autotune.EXPERIMENT.judge(runs, QUICK):
        assert verdict.holds is None
        assert "no cuDNN" in verdict.words


# --- checkpointing ---


def test_recomputed_gradients_are_the_same() -> None:
    models, batch = checkpointing.models(QUICK), checkpointing.batch_of(QUICK)
    got = {who: checkpointing.gradient_of(model, *batch) for who, model in models.items()}
    assert len(got[checkpointing.EAGER]) == sum(
        p.numel() for p in models[checkpointing.EAGER].parameters()
    )
    torch.testing.assert_close(
        got[checkpointing.CHECKPOINT], got[checkpointing.EAGER], rtol=0, atol=0
    )
    torch.testing.assert_close(
        got[checkpointing.RECOMPUTE], got[checkpointing.STORE], rtol=0, atol=0
    )
    torch.testing.assert_close(
        got[checkpointing.STORE], got[checkpointing.EAGER], rtol=1e-9, atol=1e-11
    )
    assert float(got[checkpointing.EAGER].norm()) > 0.1
    kept = {who: bytes_of_step(model, *batch)[1] for who, model in models.items()}
    assert kept[checkpointing.CHECKPOINT] < 0.8 * kept[checkpointing.EAGER]
    assert kept[checkpointing.RECOMPUTE] < 0.8 * kept[checkpointing.STORE]


def _costs(
    checkpoint: gains.Gain,
    ours: gains.Gain,
    gain: gains.Gain,
    peaks: tuple[float, float] = (40.0, 60.0),
) -> list[bool | None]:
    keys = ("cost", "cost_low", "cost_high")
    runs = {
        checkpointing.EAGER: {"peak": 100.0},
        checkpointing.CHECKPOINT: {"peak": peaks[0], **dict(zip(keys, checkpoint))},
        checkpointing.RECOMPUTE: {
            "peak": peaks[1],
            **dict(zip(keys, ours)),
            **gains.numbers_of(gain),
        },
        checkpointing.FORWARD: {"cost": 0.35, "cost_low": 0.34, "cost_high": 0.36},
    }
    return judged("checkpointing", runs)


def test_judge_of_checkpointing() -> None:
    good, dear, wide = (1.25, 1.2, 1.3), (1.5, 1.4, 1.6), (1.25, 1.0, 1.5)
    cheap = (1.02, 1.0, 1.04)
    assert _costs(good, cheap, FAST) == [True, True]
    assert _costs(dear, good, FAST) == [False, True]
    assert _costs(cheap, good, SLOW) == [False, False]
    assert _costs(wide, good, NOISE) == [None, None]
    assert _costs(good, cheap, FAST, peaks=(101.0, 100.0)) == [False, False]


# --- conv_bias ---


def test_a_bias_before_a_norm_is_useless() -> None:
    models, images = conv_bias.models(QUICK), conv_bias.images_of(QUICK)
    biased = models[conv_bias.BIAS]
    assert float(biased[0].bias.detach().abs().max()) > 0.5  # type: ignore[union-attr, operator]
    assert models[conv_bias.NO_BIAS][0].bias is None
    for who in (conv_bias.NO_BIAS, conv_bias.DROPPED):
        assert conv_bias.difference(models[who], biased, images) < conv_bias.USELESS
        conv_bias.step_of(models[who], images)()
    assert not models[conv_bias.DROPPED][0].bias.any()  # type: ignore[union-attr, operator]
    assert conv_bias.bias_gradient(biased, images) < 100
    biased[1].bias.data += 1  # type: ignore[union-attr, operator]
    assert conv_bias.difference(models[conv_bias.NO_BIAS], biased, images) > 1e4


def test_judge_of_the_bias() -> None:
    def holds(dropped: gains.Gain, ppm: float) -> list[bool | None]:
        runs = runs_of({conv_bias.NO_BIAS: FAST, conv_bias.DROPPED: dropped})
        runs = {who: Run(who, {**run.numbers, "difference": ppm}) for who, run in runs.items()} | {
            conv_bias.BIAS: Run(conv_bias.BIAS, {"gradient": 0.1})
        }
        return [verdict.holds for verdict in conv_bias.EXPERIMENT.judge(runs, QUICK)]

    assert holds(FAST, 0.5) == [True, True, True]
    assert holds(SLOW, 500.0) == [False, True, False]
    assert holds(NOISE, math.nan) == [False, True, None]
