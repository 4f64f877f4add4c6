"""FSDP2 on two gloo ranks: every optimizer equals one process on the whole batch, and checkpoints
go from two ranks to one and back. helpers/fully_sharded.py has what the ranks assert themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from helpers import ROOT
from helpers.optimizer_steps import alike
from helpers.rank_processes import results_of_two_ranks
from helpers.shared import made_once

if not dist.is_available():
    pytest.skip("needs a torch with torch.distributed", allow_module_level=True)

from helpers.fully_sharded import (
    ANY_RANKS,
    BAD,
    KINDS,
    SAVED,
    STEPS,
    Run,
    close,
    coded,
    load,
    network,
    on_a_rank,
    other_weights,
    save,
)


class Facts:
    """Results of one process, and of two."""

    def __init__(self, folder: Path) -> None:
        runs = {kind: Run(kind, network(KINDS[kind][1])) for kind in KINDS}
        self.first = {kind: run.train(range(SAVED)) for kind, run in runs.items()}
        save(runs, f"{folder}/of one")
        self.last = {kind: run.train(range(SAVED, STEPS)) for kind, run in runs.items()}
        self.coded = coded(f"{folder}", "one", {})
        self.ranks = results_of_two_ranks(on_a_rank, folder, str(folder))
        self.coded_of_two = coded(f"{folder}", "", dict.fromkeys(ANY_RANKS, "two"))
        resumed = {kind: Run(kind, other_weights(network(KINDS[kind][1]))) for kind in KINDS}
        load(resumed, f"{folder}/of two")
        self.last_of_two = {kind: run.train(range(SAVED, STEPS)) for kind, run in resumed.items()}


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    def make() -> Facts:
        return Facts(tmp_path_factory.mktemp("ranks"))

    result: Facts = made_once(tmp_path_factory, "fsdp2", make)  # 20 s
    return result


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_equal_one_process(kind: str, facts: Facts) -> None:
    for part, want in enumerate((facts.first[kind], facts.last[kind])):
        got, other = (rank[kind][part] for rank in facts.ranks)
        close(got["tensors"], want["tensors"])
        assert all(torch.equal(t, other["tensors"][n]) for n, t in got["tensors"].items())
        assert got["skipped"] == other["skipped"] == want["skipped"]
        assert got["scales"] == other["scales"] == want["scales"]
        assert str(got["norms"]) == str(other["norms"])
        for ours, theirs in zip(got["norms"], want["norms"], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-6)
    assert facts.first[kind]["skipped"] == [step == BAD for step in range(SAVED)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_of_one_process_goes_on_in_two(kind: str, facts: Facts) -> None:
    for rank in facts.ranks:
        close(rank[f"resumed {kind}"]["tensors"], facts.last[kind]["tensors"])
        assert rank[f"resumed {kind}"]["scales"] == facts.last[kind]["scales"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_of_two_ranks_goes_on_in_one(kind: str, facts: Facts) -> None:
    close(facts.last_of_two[kind]["tensors"], facts.ranks[0][kind][1]["tensors"])
    assert facts.last_of_two[kind]["scales"] == facts.last[kind]["scales"]


@pytest.mark.parametrize("kind", [*ANY_RANKS, "codes odd"])
def test_eight_bit_states_of_other_numbers_of_ranks(kind: str, facts: Facts) -> None:
    """Bit for bit what was saved; codes as codes."""
    one, two = facts.coded[f"{kind} saved"], facts.ranks[0]["coded"][f"{kind} saved"]
    into_two = facts.ranks[0]["coded"][f"{kind} loaded"]
    assert alike(into_two, two if kind == "codes odd" else one)
    if kind in ANY_RANKS:
        assert alike(facts.coded_of_two[f"{kind} loaded"], two)
    code = torch.int8 if kind == "codes" else torch.float32
    assert two["0 exp_avg"].dtype is code  # "odd" rows are values where they are sharded
    assert one["0 exp_avg"].dtype is (torch.int8 if kind == "codes odd" else code)
    assert two["0 master_correction" if kind.startswith("codes") else "0 master_param"].any()
    for results in (facts.coded_of_two, facts.ranks[0]["coded"], facts.ranks[1]["coded"]):
        if f"{kind} trained" in results:
            trained = results[f"{kind} trained"]
            assert all(t.isfinite().all() for t in trained.values())
            assert not alike(trained, results[f"{kind} loaded"])


def test_the_example_runs(facts: Facts) -> None:
    path = ROOT / "examples" / "integrations" / "fsdp2_checkpoint.py"
    assert len(path.read_text().splitlines()) < 40
    first, second = (float(text.split()[1].strip(",")) for text in facts.ranks[0]["example"])
    assert second < first / 2
    assert facts.ranks[1]["example"] == ["", ""]
