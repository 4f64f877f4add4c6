"""docs/distributed.md, memory modes: gradients of two ranks, converted models beside stock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from helpers.rank_processes import results_of_two_ranks
from helpers.shared import made_once

if not dist.is_available():
    pytest.skip("needs a torch with torch.distributed", allow_module_level=True)

from helpers.rank_modes import MEMORIES, WRAPPERS, on_a_rank


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Any]:
    def make() -> Any:
        folder: Path = tmp_path_factory.mktemp("ranks")
        return results_of_two_ranks(on_a_rank, folder)[0]

    made: dict[tuple[str, str], Any] = made_once(tmp_path_factory, "memory modes", make)
    return made


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("memory", MEMORIES)
def test_gradients_are_stocks_or_refused(
    results: dict[tuple[str, str], Any], memory: str, wrapper: str
) -> None:
    ours, stock = results[wrapper, memory], results[wrapper, "stock"]
    limit = 2e-2 if memory == "q8" else 1e-4
    assert ours == pytest.approx(stock, rel=limit, abs=limit * max(stock))
