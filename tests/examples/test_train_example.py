"""examples/train.py: it says what was won, and a mistake in the fused runs fails it."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedtrain
from helpers import ROOT

pytest.importorskip("sklearn")
sys.path.insert(0, str(ROOT / "examples"))

import train

QUICK = ["--batch-size", "8", "--steps", "2"]
Damage = Callable[[Tensor], Tensor]


@pytest.fixture(autouse=True)
def _small_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "STAGES", ((1, 3, 2, 8, 1), (6, 3, 2, 16, 2)))
    torch.set_num_threads(1)


def run(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, list[str]]:
    status = train.main([*QUICK, *options])
    return status, capsys.readouterr().out.splitlines()


def failures(lines: list[str]) -> str:
    return "\n".join(line for line in lines if line.startswith("FAILED"))


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", pytest.param("float16", marks=pytest.mark.slow)]
)
def test_the_last_three_lines_say_what_was_won(
    capsys: pytest.CaptureFixture[str], dtype: str
) -> None:
    status, lines = run(capsys, "--dtype", dtype)
    assert status == 0, lines
    assert lines[0] == f"EfficientNet-B0 on digits: 2 steps, {dtype}; converting"
    losses, memory, times = lines[-3:]
    assert losses.startswith("Losses: the same to rounding; ")
    words = r"Memory: backward needs (\S+)x of .* (\S+)x: (\d+) images fit where 8 did\."
    match = re.fullmatch(words, memory)
    assert match is not None, memory
    plain, again = float(match[1]), float(match[2])
    assert again < 0.6
    assert again < plain < 1
    assert int(match[3]) == pytest.approx(8 / again, rel=0.1)
    assert re.fullmatch(r"Time: a step takes \S+x of stock's time, .* \S+x\.", times)
    assert sum("ms a step" in line for line in lines) == 4


def plant(monkeypatch: pytest.MonkeyPatch, damage: Damage, first: int) -> None:
    """fusedtrain.convert, with one block's output sent through the damage from a call on."""
    convert = fusedtrain.convert

    def damaged(model: nn.Module, *arguments: Any, **options: Any) -> Any:
        report, calls = convert(model, *arguments, **options), count(1)
        blocks = [module for module in model.modules() if isinstance(module, train.Block)]
        blocks[1].register_forward_hook(lambda _m, _i, y: damage(y) if next(calls) >= first else y)
        return report

    monkeypatch.setattr(fusedtrain, "convert", damaged)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda x: 1.05 * x - 0.05 * x.detach(), id="5-percent"),
        pytest.param(lambda x: 2 * x.detach() - x, id="sign", marks=pytest.mark.slow),
        pytest.param(lambda x: x.detach(), id="no-gradient", marks=pytest.mark.slow),
        pytest.param(lambda x: x + 0.1 * x.relu(), id="forward", marks=pytest.mark.slow),
        pytest.param(lambda x: x * float("nan"), id="nan", marks=pytest.mark.slow),
    ],
)
def test_a_wrong_block_fails_the_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, damage: Damage
) -> None:
    plant(monkeypatch, damage, 1)
    status, lines = run(capsys, "--dtype", "float32")
    assert status == 1
    for mode in ("fusedtrain", "fusedtrain, recompute"):
        assert f"FAILED: {mode}, first gradient" in failures(lines)
    assert lines[-3].startswith("Losses: NOT shown to be the same, see FAILED above")


@pytest.mark.slow
def test_a_curve_that_leaves_stocks_fails_the_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault that the first gradient cannot show: a block that goes wrong after some steps."""
    plant(monkeypatch, lambda x: x * 0, 23)
    status, lines = run(capsys, "--dtype", "float32", "--steps", "40", "--lr", "0.01")
    assert status == 1
    assert "mean losses of 10 steps" in failures(lines)
    assert "first gradient" not in failures(lines)


@pytest.mark.parametrize(
    "change",
    [
        {"lr": 1.02e-3},
        *(
            pytest.param(change, marks=pytest.mark.slow)
            for change in ({"lr": 0.0}, {"max_grad_norm": 1.1}, {"betas": (0.8, 0.999)})
        ),
    ],
    ids=str,
)
def test_a_wrong_optimizer_fails_the_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    optimizer = fusedtrain.optim.AdamW
    monkeypatch.setattr(
        fusedtrain.optim, "AdamW", lambda params, **options: optimizer(params, **options | change)
    )
    status, lines = run(capsys, "--dtype", "float32")
    assert status == 1
    assert "three equal steps" in failures(lines)
    assert "first gradient" not in failures(lines)


@pytest.mark.parametrize(
    "options", [["--batch-size", "1"], ["--steps", "0"], ["--lr", "nan"], ["--dtype", "fp8"]]
)
def test_wrong_options(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        train.main(options)
    assert stopped.value.code == 2
    assert options[0] in capsys.readouterr().err


def test_without_scikit_learn(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(SystemExit) as stopped:
        train.main(QUICK)
    assert stopped.value.code == 2
    assert "pip install scikit-learn" in capsys.readouterr().err
