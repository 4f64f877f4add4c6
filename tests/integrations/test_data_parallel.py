"""DistributedDataParallel on two gloo ranks: each way to train equals one process on the whole
batch, which trains in torch's parts and float64."""

from __future__ import annotations

import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helpers import ROOT
from helpers.rank_processes import exit_codes_of_ranks

pytestmark = pytest.mark.skipif(
    not dist.is_available(), reason="needs a torch with torch.distributed"
)
if dist.is_available():
    from helpers.data_parallel import (
        KILLED,
        STEPS,
        WAYS,
        Fused,
        Stock,
        converted,
        network,
        on_a_rank,
        train,
    )
else:  # pragma: no cover
    WAYS = {}

Record = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the files that both ranks leave; rank 1 ends by a signal."""
    path = tmp_path_factory.mktemp("ranks")
    assert exit_codes_of_ranks(on_a_rank, str(path)) == [0, -signal.SIGKILL]
    return path


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[Record]:
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.fixture(scope="module")
def truth() -> dict[bool, Record]:
    """One process with the whole batch; True: in two halves."""
    records = {}
    for halves in (False, True):
        model = network()
        records[halves] = train(model, Stock(model), halves=halves)
    return records


def close(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9, equal_nan=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", WAYS)
def test_equals_one_process_on_the_whole_batch(
    name: str, ranks: list[Record], truth: dict[bool, Record]
) -> None:
    first, second = (rank[f"way {name}"] for rank in ranks)
    want = truth[WAYS[name].halves]
    for part in ("params", "averages", "buffers"):
        close(first[part], want[part])
        assert all(map(torch.equal, first[part], second[part])), part
    count = len(first["losses"])  # the last ones: bucket views train in two parts
    losses = [(a + b) / 2 for a, b in zip(first["losses"], second["losses"], strict=True)]
    close(losses, want["losses"][-count:])
    # After an overflow the stock norm is NaN or infinite, as the sum of scaled gradients comes out.
    for ours, theirs in zip(first["norms"], want["norms"][-count:], strict=True):
        if math.isfinite(theirs):
            assert ours == pytest.approx(theirs, rel=1e-6)
        else:
            assert not math.isfinite(ours)
    assert str(first["norms"]) == str(second["norms"])
    assert first["scales"] == second["scales"] == want["scales"][-count:]
    assert want["scales"] == [8.0, 4.0, 4.0, 8.0]
    if WAYS[name].hook:
        assert first["sent"] == STEPS * sum(p.numel() for p in first["params"])
    if "views" in name:
        assert first["kept"]  # gradients are where they were in memory


def test_without_synchronised_statistics_it_equals_the_stock_model(ranks: list[Record]) -> None:
    for rank in ranks:
        ours, stock = (rank["local_statistics"][kind] for kind in ("ours", "stock"))
        for part in ("losses", "params", "averages", "buffers", "scales"):
            close(ours[part], stock[part])
    losses = [rank["local_statistics"]["ours"]["losses"] for rank in ranks]
    assert losses[0] != losses[1]


def test_gradients_compressed_to_float16(ranks: list[Record]) -> None:
    for rank in ranks:
        close(rank["compressed"]["ours"], rank["compressed"]["stock"])
    assert all(map(torch.equal, *(rank["compressed"]["ours"] for rank in ranks)))


@pytest.mark.parametrize("option", ["stochastic_rounding", "master_weights"])
def test_replicas_of_bfloat16_stay_equal(option: str, ranks: list[Record]) -> None:
    one, other = (rank["rounded"][option] for rank in ranks)
    assert all(map(torch.equal, one["params"], other["params"]))
    assert all(map(torch.equal, one["masters"], other["masters"]))
    assert not torch.equal(one["first"][0], one["params"][0])


def test_zero_redundancy_optimizer(ranks: list[Record]) -> None:
    for rank in ranks:
        close(rank["redundant"]["zero"], rank["redundant"]["plain"])


def test_the_example_runs(ranks: list[Record]) -> None:
    path = ROOT / "examples" / "integrations" / "ddp_checkpoint.py"
    assert len(path.read_text().splitlines()) < 40
    first, second = ranks[0]["example"]
    assert first.startswith("from step 0: ")
    assert second.startswith("from step 20: ")
    assert min(float(text.split()[-1]) for text in (first, second)) > 0.7
    assert ranks[1]["example"] == ["", ""]


def test_a_killed_rank_leaves_a_checkpoint_that_goes_on(
    folder: Path, truth: dict[bool, Record]
) -> None:
    assert "RuntimeError" in (folder / "noticed").read_text()
    saved = torch.load(folder / "checkpoint.pt", weights_only=True)
    model = converted()
    amp = Fused(model)
    model.load_state_dict(saved["model"])
    amp.optimizer.load_state_dict(saved["optimizer"])
    amp.scaler.load_state_dict(saved["scaler"])
    record = train(model, amp, steps=range(KILLED, STEPS))
    for part in ("params", "averages", "buffers"):
        close(record[part], truth[False][part])
    assert record["scales"] == truth[False]["scales"][KILLED:]
