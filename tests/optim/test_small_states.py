"""Optimizers with 8-bit states and split masters: skips, checkpoints, copies, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers.optimizer_steps import (
    ALL,
    alike,
    assert_same_bits,
    copies,
    memory,
    parameters,
    saved_and_loaded,
    skipped_step,
    steps,
)
from helpers.optimizers import make

pytestmark = pytest.mark.usefixtures("codes_of_small_parameters")

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
CORRECTIONS = {"split24": torch.int8, "split32": torch.int16}
KINDS = pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (F32, {"state_dtype": "q8"}),
        (F16, {"state_dtype": "q8", "master_weights": True}),
        (BF16, {"state_dtype": "q8", "master_weights": "split24"}),
        *[(dtype, {"master_weights": kind}) for kind in CORRECTIONS for dtype in (BF16, F16)],
    ],
    ids=str,
)


@KINDS
@ALL
def test_a_skipped_step_changes_nothing(
    name: str, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    p = parameters(dtype)
    optimizer = make(name, p, ema_decay=0.9, **options)
    steps(optimizer, p, range(1, 4))
    before = memory(optimizer)
    skipped_step(optimizer, p)
    assert_same_bits(before, memory(optimizer))


@KINDS
@ALL
@pytest.mark.parametrize("compressed", [False, True])
def test_checkpoints(
    name: str, dtype: torch.dtype, options: dict[str, Any], compressed: bool
) -> None:
    """The run goes on bit for bit, whichever of model and optimizer is loaded first."""
    masters = options.get("master_weights")
    runs = []
    for order in (None, "model first", "optimizer first"):
        torch.manual_seed(3)
        p = parameters(dtype)
        optimizer = make(name, p, **options)
        steps(optimizer, p, range(1, 4))
        if order is not None:
            saved = saved_and_loaded(optimizer.state_dict(compressed=compressed))
            dtypes = {v.dtype for s in saved["state"].values() for v in s.values()}
            assert all(d.is_floating_point for d in dtypes) == (not compressed)
            split = compressed and masters in CORRECTIONS
            key = "master_correction" if split else "master_param"
            kept = {"master_correction", "master_param"} & saved["state"][0].keys()
            assert kept == ({key} if masters else set())
            assert not masters or saved["state"][0][key].dtype == (
                CORRECTIONS[masters] if split else F32
            )
            values = copies(p)
            torch.manual_seed(4)
            p = parameters(dtype)
            optimizer = make(name, p, **options)
            steps(optimizer, p, range(7, 9))
            if order == "optimizer first":
                optimizer.load_state_dict(saved)
            with torch.no_grad():
                for x, value in zip(p, values, strict=True):
                    x.copy_(value)
            if order == "model first":
                optimizer.load_state_dict(saved)
        steps(optimizer, p, range(4, 8))
        runs.append((p, optimizer.state_dict(), optimizer.state_dict(compressed=True)))
    assert alike(runs[0], runs[1])
    assert alike(runs[0], runs[2])
