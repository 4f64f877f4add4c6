"""examples/train.py and short runs of it; skips the tests if a library is missing."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers import ROOT

for library in ("rich", "matplotlib", "sklearn", "PIL.Image"):
    pytest.importorskip(library)
sys.path.insert(0, str(ROOT / "examples"))

import train  # noqa: E402
from _train import data as train_data, modes as train_modes  # noqa: E402
from _train.checks import compare_gradients, compare_runs, compare_updates  # noqa: E402
from _train.models import MODELS, build_model  # noqa: E402
from _train.optimizers import MASTERS, RECIPES, Settings, Stepper, updates  # noqa: E402

__all__ = [
    "MASTERS", "MODELS", "QUICK", "RECIPES", "Settings", "Stepper", "build_model",
    "compare_gradients", "compare_runs", "compare_updates", "failed", "losses", "run", "train",
    "train_data", "train_modes", "updates",
]  # fmt: skip

QUICK = ["--width", "8", "--batch-size", "8", "--steps", "4", "--test-images", "32"]
QUICK += ["--model", "resnet18", "--optimizer", "sgd", "--clip", "off", "--ema", "off"]
QUICK += ["--device", "cpu", "--no-progress", "--threads", "1", "--amp", "bf16"]


def run(output: Path, *options: str) -> tuple[int, dict[str, Any]]:
    status = train.main([*QUICK, "--output", str(output), *options])
    return status, json.loads((output / "results.json").read_text())


def losses(results: dict[str, Any]) -> list[list[float]]:
    return [mode["losses"] for mode in results["modes"]]


def failed(results: dict[str, Any]) -> list[str]:
    return [check["name"] for check in results["checks"] if not check["passed"]]
