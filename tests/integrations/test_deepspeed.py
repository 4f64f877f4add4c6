"""DeepSpeed's ZeRO-1 on two ranks of a CPU: with fusedtrain's optimizers as with torch's."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
import torch
from torch import nn

import fusedtrain
from helpers.rank_processes import results_of_two_ranks

pytest.importorskip("deepspeed", reason="pip install deepspeed", exc_type=ImportError)
KINDS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 0.1, "weight_decay": 0.1},
    # Two groups step one after the other. Dampening tells whether momentum lasts in between.
    "SGD": {"lr": 0.1, "momentum": 0.9, "dampening": 0.5},
}


def _network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.SiLU(), nn.Linear(7, 3))


def _train(module: Any, kind: str, rank: int) -> list[torch.Tensor]:
    """Four steps of ZeRO-1, clipped by DeepSpeed."""
    import deepspeed

    model = _network()
    if module is fusedtrain.optim:
        fusedtrain.convert(model)
    weights, biases = ([p for p in model.parameters() if p.dim() == d] for d in (2, 1))
    optimizer = getattr(module, kind)([{"params": weights}, {"params": biases}], **KINDS[kind])
    config = {
        "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1},
        "gradient_clipping": 0.1, "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    engine, wrapped, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    assert wrapped.optimizer is optimizer  # not one of DeepSpeed's
    generator = torch.Generator().manual_seed(3)
    for _ in range(4):
        x = torch.randn(2, 4, 5, generator=generator)
        engine.backward(engine(x[rank]).square().mean())
        engine.step()
    return [p.detach() for p in model.parameters()]


def _on_a_rank(rank: int) -> dict[str, Any]:
    os.environ.update(
        DS_ACCELERATOR="cpu", RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_SIZE="2",
        MASTER_ADDR="127.0.0.1", MASTER_PORT="0",
    )  # fmt: skip
    import deepspeed  # noqa: F401

    # DeepSpeed would compile its shared memory for minutes. Gloo is enough.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    return {
        kind: [_train(module, kind, rank) for module in (fusedtrain.optim, torch.optim)]
        for kind in KINDS
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return results_of_two_ranks(_on_a_rank, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("kind", KINDS)
def test_zero_1_trains_as_with_torchs_optimizer(kind: str, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        ours, theirs = rank[kind]
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        assert not torch.equal(ours[0], _network()[0].weight)
    assert all(map(torch.equal, ranks[0][kind][0], ranks[1][kind][0]))
