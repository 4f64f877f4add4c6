"""Each `memory` of `convert` under DDP, FSDP1 and FSDP2, on two ranks."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import fusedtrain

MEMORIES = ("store", "recompute", "inplace", "q8", "plan")
WRAPPERS = ("DDP", "FSDP1", "FSDP2", "FSDP2, kept")


def network() -> nn.Sequential:
    """Units whose norms lie across their borders."""
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(
            nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.LeakyReLU(0.1),
            nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.BatchNorm2d(4), nn.SiLU(),
        )
        for _ in range(2)
    ]  # fmt: skip
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(4 * 36, 4))


def batch(rank: int) -> Tensor:
    return torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(rank))


def wrapped(model: nn.Sequential, wrapper: str) -> Any:
    if wrapper == "DDP":
        return DistributedDataParallel(model)
    if wrapper == "FSDP1":
        for name in ("0", "1"):
            model[int(name)] = FullyShardedDataParallel(
                model[int(name)], use_orig_params=True, device_id=torch.device("cpu")
            )
        return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    for block in list(model.children())[:2]:
        fully_shard(block, reshard_after_forward=wrapper == "FSDP2")
    return fully_shard(model, reshard_after_forward=wrapper == "FSDP2")


def sharded_units(rank: int, sources: list[str]) -> list[list[float] | str]:
    """Norms of gradients with "store" and with "recompute"; each class `Net` is a unit of FSDP2."""
    torch.manual_seed(0)
    units = []
    for source in sources:
        scope: dict[str, Any] = {
            "N": nn.functional,
            "fusedtrain": fusedtrain,
            "nn": nn,
            "torch": torch,
        }
        exec(source, scope)
        units.append(scope["Net"]())
    results = []
    for memory in ("store", "recompute"):
        model = copy.deepcopy(nn.Sequential(*units))
        fusedtrain.convert(model, memory=memory)
        for unit in model:
            fully_shard(unit)
        torch.manual_seed(rank)
        x = torch.randn(3, 4, 6, 5)
        results.append(norm_of_gradients(fully_shard(model), x))
    return results


def norm_of_gradients(model: Any, x: Tensor) -> list[float] | str:
    """Sums over both ranks; the message instead where backward is refused."""
    try:
        model(x).square().mean().backward()
    except RuntimeError as error:
        return str(error)
    shares = []
    for p in model.parameters():
        grad: Any = p.grad
        if grad is not None and hasattr(grad, "to_local"):
            grad = grad.to_local()
        shares.append(torch.zeros(()) if grad is None else grad.double().square().sum().float())
    total = torch.stack(shares).double()
    if not isinstance(model, DistributedDataParallel):
        torch.distributed.all_reduce(total)
    return total.sqrt().tolist()


def on_a_rank(rank: int) -> dict[tuple[str, str], Any]:
    model = network()
    plan = fusedtrain.plan_memory(copy.deepcopy(model), batch(0), 0.9)
    results: dict[tuple[str, str], Any] = {}
    for wrapper in WRAPPERS:
        for memory in ("stock", *MEMORIES):
            one = copy.deepcopy(model)
            if memory != "stock":
                fusedtrain.convert(one, memory=plan if memory == "plan" else memory)
            results[wrapper, memory] = norm_of_gradients(wrapped(one, wrapper), batch(rank))
    return results
