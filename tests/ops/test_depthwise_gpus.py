"""GPUs choose depthwise kernels by benchmark rows of their own."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from fusedtrain.ops import depthwise_gpus
from fusedtrain.ops.depthwise_autograd import Faster
from helpers import ROOT

sys.path.append(str(ROOT / "tools"))
import depthwise_gpus as tool

GPU = torch.device("cuda", 0)
CALL = (torch.bfloat16, [3, 3], [1, 1], [1, 1], 3136, True)


def entry(part: str, ours: float, side: int = 56, **more: Any) -> dict[str, Any]:
    row = {
        "family": "depthwise", "device": "A", "device_type": "cuda", "op": "2-d 3/1",
        "dtype": "bfloat16", "layout": "channels_last", "shape": [64, 8, side, side],
        "pass": part, "ns": {"eager": 100.0, "fusedtrain": ours}, "date": "2027-01-01T00:00:00",
    }  # fmt: skip
    return {"extra_info": {**row, **more}}


@pytest.fixture
def rule(monkeypatch: pytest.MonkeyPatch) -> Any:
    def of(*entries: dict[str, Any], name: str = "A") -> Any:
        monkeypatch.setattr(depthwise_gpus, "_devices", lambda: depthwise_gpus.rows_of(entries))
        monkeypatch.setattr(depthwise_gpus, "_NAMES", {"cuda": lambda _: name})
        depthwise_gpus.rule_of.cache_clear()
        return depthwise_gpus.rule_of(GPU)

    yield of
    depthwise_gpus.rule_of.cache_clear()


def test_each_pass_has_its_winner(rule: Any) -> None:
    assert rule(entry("forward", 50), entry("backward", 200))(*CALL) == Faster(True, False, False)
    assert rule(entry("forward", 200), entry("backward", 50))(*CALL) == Faster(False, True, True)
    assert rule(entry("forward+backward", 50))(*CALL) == Faster(True, True, True)
    both = rule(entry("forward+backward", 50), entry("forward", 101))
    assert both(*CALL) == Faster(False, True, True)


@pytest.mark.parametrize(
    "changed",
    [
        (0, torch.float32), (1, [5, 5]), (1, [3, 5]), (1, [3]), (2, [2, 2]), (2, [1, 2]),
        (3, [2, 2]), (4, 3136 * 5), (4, 3136 // 5), (5, False),
    ],
)  # fmt: skip
def test_a_call_that_no_row_is_like_is_torchs(rule: Any, changed: tuple[int, Any]) -> None:
    place, value = changed
    call = (*CALL[:place], value, *CALL[place + 1 :])
    assert rule(entry("forward+backward", 50))(*call) == Faster(False, False, False)


def test_the_row_of_the_nearest_size_counts(rule: Any) -> None:
    chosen = rule(entry("forward+backward", 200, 56), entry("forward+backward", 50, 28))
    sizes = {outputs: chosen(*CALL[:4], outputs, True).forward for outputs in (196, 1000, 3136)}
    assert sizes == {196: True, 1000: True, 3136: False}
    strided = rule(entry("forward+backward", 50, 55, op="2-d 3/2"))
    assert strided(*CALL[:2], [2, 2], [1, 1], 28 * 28, True).forward


def test_a_device_without_rows_has_torchs(rule: Any) -> None:
    assert rule(entry("forward", 50), name="B") is None
    assert rule(entry("forward", 50, device_type="cpu")) is None
    assert rule(entry("forward", 50, family="pool")) is None
    assert rule(entry("forward", 50, date="2026-11-28T06:57:46+00:00")) is None  # other kernels
    assert depthwise_gpus.rule_of(torch.device("meta")) is None


def test_the_table_is_made_of_the_results() -> None:
    assert tool.text() == depthwise_gpus.FILE.read_text()
