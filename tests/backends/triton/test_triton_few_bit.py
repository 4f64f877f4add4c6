"""Every number of bits in Triton. Of the table of cases the interpreter runs each fourth: those of
8 bits, which have no thresholds, and of 1."""

from __future__ import annotations

import pytest
import torch

from fusedtrain.reference import few_bit
from helpers.backends import BACKENDS
from helpers.few_bit import check

pytest.importorskip("triton", reason="triton is not installed")

CASES = [(name, bits) for name in ("silu", "gelu") for bits in few_bit.TABLES[name].bits()]


@pytest.mark.parametrize(("name", "bits"), CASES)
def test_bits(name: str, bits: int) -> None:
    ops = BACKENDS["triton"]()
    x = (torch.randn(300) * 2.5).to(ops.device)
    check(ops, name, bits, x)
