"""The fuzz (tests/fuzz, `make fuzz`) calls every public name."""

from __future__ import annotations

import ast
import inspect

import pytest

import fusedtrain
from fusedtrain import functional, optim
from fuzz import engine

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]
GENERATORS = [(family, name) for family, names in engine.FAMILIES.items() for name in names]


def test_every_public_name_is_called() -> None:
    """And every program is Python."""
    every = dict.fromkeys(engine.FAMILIES, "")
    for family, name in GENERATORS:
        task = engine.Task(family, name, 3, 2)
        for source in engine.run_task(task, keep=True, run=False).programs:
            ast.parse(source)
            every[family] += source
    functions = [n for n, f in vars(functional).items() if n[0] != "_" and inspect.isfunction(f)]
    for name in functions:
        assert f"F.{name}(" in every["ops"], name
    for name in fusedtrain.nn.__all__:
        assert f"fusedtrain.nn.{name}(" in every["ops"] or name == "SyncBatchNormAct", name
    for name in set(optim.__all__) - {"FusedOptimizer", "FusedOptions"}:
        assert f"fusedtrain.optim.{name}(" in every["optimizers"], name
    for name in ("convert", "fold_conv_bn", "fold_frozen_norms", "drop_redundant_bias", "revert"):
        assert f"fusedtrain.{name}(" in every["models"], name
