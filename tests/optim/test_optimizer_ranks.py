"""Sharded parameters on two ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedtrain
from helpers.optimizer_steps import alike, assert_close, give_gradients, parameters, started, step
from helpers.optimizers import NAMES, make
from helpers.rank_processes import results_of_two_ranks

MODEL = [(7, 5), (3, 7), (3,), (1,)]  # the last one is empty on one of two ranks


def _on_a_rank(rank: int) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    results: dict[str, Any] = {}
    for name in NAMES:
        for kind in (ShardedGradScaler, fusedtrain.amp.GradScaler):
            values = [p.detach() for p in parameters(torch.float64, MODEL)]
            p = [nn.Parameter(distribute_tensor(v, mesh, [Shard(0)])) for v in values]
            optimizer = make(name, p, max_grad_norm=1.0, ema_decay=0.9)
            scaler = started(kind("cpu", init_scale=8.0, growth_interval=1000))
            scales = []
            for seed in range(4):
                whole = parameters(torch.float64, MODEL)
                give_gradients(whole, seed, scaler.get_scale())
                for x, y in zip(p, whole, strict=True):
                    assert y.grad is not None
                    x.grad = distribute_tensor(y.grad, mesh, [Shard(0)])
                if seed == 1 and rank == 1:
                    p[0].grad.to_local()[0, 0] = float("inf")
                scaler.step(optimizer)
                skipped = bool(optimizer.last_step_skipped)
                scaler.update()
                assert optimizer.grad_norm is not None
                scales.append((skipped, scaler.get_scale(), float(optimizer.grad_norm)))
            saved = optimizer.state_dict()["state"]
            results[f"{name} {kind.__module__}"] = {
                "params": [x.full_tensor().detach() for x in p],
                "averages": [saved[i]["ema"].full_tensor() for i in range(len(p))],
                "scales": scales,
            }
    results["FSDP2"] = _fully_sharded()
    values = [p.detach() for p in parameters(torch.bfloat16, MODEL)]
    p = [nn.Parameter(distribute_tensor(v, mesh, [Shard(0)])) for v in values]
    masters = _split_masters(p, lambda grad: distribute_tensor(grad, mesh, [Shard(0)]))
    results["split masters"] = {
        "params": [x.full_tensor().detach() for x in p],
        "masters": [x.full_tensor() for x in masters],
    }
    results["written gradients"] = {"params": _written_gradients(mesh)}
    return results


def _written_gradients(mesh: Any) -> list[Tensor]:
    """Gradients with other placements than their parameter's, after steps that write them."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

    left = []
    for kind in ("zero", "unscaled"):
        p = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate()]))
        p.grad = DTensor.from_local(torch.full((4,), 1.0 + mesh.get_rank()), mesh, [Partial()])
        fusedtrain.optim.SGD([p], max_grad_norm=2.0, gradient_writeback=kind).step()
        left.append(p.grad.full_tensor())
    return left


def _split_masters(p: list[Any], distributed: Callable[[Tensor], Tensor]) -> list[Any]:
    """Masters after steps with both kinds, a checkpoint of each form, and a write by others."""
    optimizer = make("AdamW", p, master_weights="split24")
    for seed in range(4):
        whole = parameters(torch.bfloat16, MODEL)
        give_gradients(whole, seed)
        for x, y in zip(p, whole, strict=True):
            assert y.grad is not None
            x.grad = distributed(y.grad)
        optimizer.step()
        if seed == 2:
            optimizer.load_state_dict(optimizer.state_dict(compressed=True))
        else:
            optimizer.load_state_dict(optimizer.state_dict())
        optimizer.master_weights = "split32"
    masters = [optimizer.state_dict()["state"][i]["master_param"] for i in range(len(p))]
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    with torch.no_grad():
        p[0].mul_(2)
    masters.append(optimizer.state_dict()["state"][0]["master_param"])
    optimizer.master_weights = True
    optimizer.step()
    with torch.no_grad():
        p[0].mul_(2)
    optimizer.step()
    return [*masters, optimizer.state_dict()["state"][0]["master_param"]]


def _small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def _train(model: nn.Module) -> list[float]:
    optimizer = make("AdamW", model.parameters(), max_grad_norm=0.1)
    scaler = started(fusedtrain.amp.GradScaler("cpu", init_scale=8.0))
    generator = torch.Generator().manual_seed(3)
    norms = []
    for number in range(4):
        x = torch.randn(4, 5, generator=generator, dtype=torch.float64)
        loss = model(x).square().mean()
        if number == 1:
            loss = loss * float("inf")
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert optimizer.grad_norm is not None
        norms.append(float(optimizer.grad_norm))
    assert optimizer.skipped_steps == 1
    return norms


def _fully_sharded() -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard

    model = _small_model()
    fully_shard(model[0])
    fully_shard(model)
    norms = _train(model)
    return {"params": [x.full_tensor().detach() for x in model.parameters()], "norms": norms}


@pytest.mark.slow
@pytest.mark.skipif(
    not torch.distributed.is_available(), reason="needs a torch with torch.distributed"
)
def test_two_ranks_agree_with_an_unsharded_run(tmp_path: Path) -> None:
    ranks = results_of_two_ranks(_on_a_rank, tmp_path)
    for case in ranks[0]:
        assert alike(ranks[0][case]["params"], ranks[1][case]["params"]), case
    for name in NAMES:
        p = parameters(torch.float64, MODEL)
        optimizer = make(name, p, max_grad_norm=1.0, ema_decay=0.9)
        for seed in (0, 2, 3):
            step(optimizer, p, seed)
        for kind in (
            "torch.distributed.fsdp.sharded_grad_scaler",
            "fusedtrain.amp.grad_scaler",
        ):
            results = ranks[0][f"{name} {kind}"]
            assert [skipped for skipped, _, _ in results["scales"]] == [False, True, False, False]
            assert [scale for _, scale, _ in results["scales"]] == [8.0, 4.0, 4.0, 4.0]
            assert_close(results["params"], p, 64)
            assert_close(results["averages"], [optimizer.state[x]["ema"] for x in p], 64)
            others = ranks[1][f"{name} {kind}"]["scales"]
            assert str(results["scales"]) == str(others)  # nan and all
    assert_close(ranks[0]["written gradients"]["params"], [torch.zeros(4), torch.ones(4)])
    p = parameters(torch.bfloat16, MODEL)
    masters = _split_masters(p, lambda grad: grad)
    assert alike(ranks[0]["split masters"], {"params": [x.detach() for x in p], "masters": masters})
    assert torch.equal(masters[-2] * 2, masters[-1])  # others wrote twice
    assert torch.equal(masters[-1], p[0].detach().float())
    model = _small_model()
    norms = _train(model)
    assert_close(ranks[0]["FSDP2"]["params"], list(model.parameters()), 64)
    for ours, want in zip(ranks[0]["FSDP2"]["norms"], norms, strict=True):
        assert ours == pytest.approx(want, rel=1e-6, nan_ok=True)
