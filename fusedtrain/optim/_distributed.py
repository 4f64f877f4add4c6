"""Parameters sharded over ranks or on several devices: steps, state dicts, random numbers."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch_private import FSDP1_MARK
from ..reference.optimizers import MEASURE_FINITE, StepOptions


def is_distributed(tensor: Tensor) -> bool:
    """Whether the tensor is a DTensor (FSDP2, tensor parallelism)."""
    # A script with DTensors has imported this module already; importing it takes a second.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Any) -> Tensor:
    """The tensor, or this rank's part of it."""
    part: Tensor = tensor.to_local() if is_distributed(tensor) else tensor
    return part


def check_sharding(params: Iterable[Tensor], options: Mapping[str, Any], kind: str) -> None:
    """Raises RuntimeError for parameters whose sharding an optimizer, `kind`, cannot serve."""
    for p in params:
        if getattr(p, FSDP1_MARK, False):
            raise RuntimeError(
                f"{kind} does not support FullyShardedDataParallel (FSDP1), whose flattened "
                "parameters have no norms of their own. Shard with "
                "torch.distributed.fsdp.fully_shard (FSDP2), or take an optimizer of torch.optim"
            )
        if options["agc"] is not None and is_distributed(p):
            raise RuntimeError(
                "agc is not supported for sharded parameters (DTensor); take max_grad_norm"
            )


def check_state(name: str, value: Any, p: Any) -> None:
    """Raises ValueError for a loaded state that is not sharded as its parameter is."""
    if not isinstance(value, Tensor):
        return
    if is_distributed(value) != is_distributed(p) or (
        is_distributed(p) and (value.device_mesh, value.placements) != (p.device_mesh, p.placements)  # type: ignore[attr-defined]
    ):
        raise ValueError(
            f"state_dict: {name!r} is {_sharding(value)}, its parameter is {_sharding(p)}. "
            "Use torch.distributed.checkpoint, whose get_state_dict and set_state_dict reshard"
        )


def _sharding(tensor: Any) -> str:
    if not is_distributed(tensor):
        return "a whole tensor"
    placements = ", ".join(map(str, tensor.placements))
    return f"placed as {placements} on {tensor.device_mesh}"


def shard_number(tensor: Any) -> int:
    """The number of this rank's part, counted over the ranks that hold others; 0 if it is whole."""
    number = 0
    if is_distributed(tensor):
        mesh = tensor.device_mesh
        for dimension, placement in enumerate(tensor.placements):
            if not placement.is_replicate():
                number = number * mesh.size(dimension) + mesh.get_local_rank(dimension)
    return number


def first_seed() -> int:
    """The seed of stochastic rounding, the same on all ranks.

    Replicas stay equal only if they round alike, and scripts often seed each rank differently.
    """
    ranks = torch.distributed
    several = ranks.is_available() and ranks.is_initialized() and ranks.get_world_size() > 1
    return 0 if several else torch.initial_seed() % 2**64


def local_grad(grad: Any, param: Any) -> Tensor:
    """The gradient of this rank's part of the parameter."""
    if not is_distributed(param):
        return local(grad)
    if not is_distributed(grad):
        raise RuntimeError("a gradient of a DTensor parameter must be a DTensor")
    if grad.placements != param.placements or grad.device_mesh != param.device_mesh:
        grad = grad.redistribute(param.device_mesh, param.placements)
    return local(grad)


def give_back(params: Sequence[Any], grads: Sequence[Tensor]) -> None:
    """Copies what a step has written to copies of gradients, which it made of those with other
    placements than their parameters' (Partial, say) and of negated ones."""
    for p, grad in zip(params, grads, strict=True):
        if local(p.grad) is grad:
            continue
        if is_distributed(p):
            from torch.distributed.tensor import DTensor

            grad = DTensor.from_local(
                grad, p.device_mesh, p.placements,
                run_check=False, shape=p.shape, stride=p.stride(),
            )  # fmt: skip
        p.grad.copy_(grad)


def sum_over_ranks(sums: Tensor, params: Sequence[Any]) -> None:
    """Adds the rows of sharded parameters over the ranks that hold their parts.

    A count of non-finite gradients that is above zero on one rank is then above zero on all ranks.
    """
    by_group: dict[Any, list[int]] = {}
    for row, p in enumerate(params):
        if is_distributed(p):
            for dimension, placement in enumerate(p.placements):
                if not placement.is_replicate():
                    group = p.device_mesh.get_group(dimension)
                    by_group.setdefault(group, []).append(row)
    for group, rows in by_group.items():
        index = torch.tensor(rows, device=sums.device)
        part = sums.index_select(0, index)
        torch.distributed.all_reduce(part, group=group)
        sums.index_copy_(0, index, part)


def step(calls: list[tuple[Any, list[Any]]], trial: bool) -> None:
    """Measures everywhere, adds up over ranks and devices, then updates."""
    ops = torch.ops.fusedtrain
    for plan, arguments in calls:
        plan.sums = ops.measure_gradients(*arguments)
        sum_over_ranks(plan.sums, plan.params)
    norm = None
    if len(calls) > 1:
        norm = _across_devices(calls)
    for plan, arguments in calls:
        trial_sums = None
        if trial:
            trial_sums = ops.try_update(*arguments, plan.sums)
            sum_over_ranks(trial_sums, plan.params)
            # The kernel divides the count of agreeing elements by the size of this rank's part.
            shares = [local(p).numel() / max(p.numel(), 1) for p in plan.params]
            trial_sums[:, 0] *= torch.tensor(shares, dtype=torch.float64).to(trial_sums.device)
        ops.optimizer_step(*arguments, plan.sums, trial_sums)
        if norm is not None:
            plan.store.last_step.grad_norm.copy_(norm[0], non_blocking=True)
            plan.store.last_step.clip.copy_(norm[1], non_blocking=True)


_TABLE, _SCALE, _FOUND_INF = 9, 11, 12  # places in the arguments
_MAX_NORM = StepOptions._fields.index("max_norm")


def _across_devices(calls: list[tuple[Any, list[Any]]]) -> tuple[Tensor, Tensor]:
    """Makes every call skip and clip by the measurements of all devices.

    The clip coefficient goes into the loss scale of each call. Returns norm and coefficient.
    """
    first = calls[0][0].sums.device
    # Blocking copies: a CPU tensor would be read before the copy has arrived.
    totals = [plan.sums.sum(0).to(first) for plan, _ in calls]
    total = torch.stack(totals).sum(0)
    norm = total[1].sqrt()
    coefficient = torch.ones_like(norm)
    options = StepOptions.of(calls[0][1][_TABLE][0].tolist())
    checks = int(options.measures) & MEASURE_FINITE
    if options.max_norm:
        coefficient = (options.max_norm / (norm + options.norm_eps)).clamp(max=1)
    if checks:  # a skipped step clips nothing, but may write unscaled gradients
        coefficient = torch.where(total[0] != 0, 1.0, coefficient)
    for plan, arguments in calls:
        device = plan.sums.device
        clip = coefficient.to(device)
        plan.sums[:, 1] *= clip * clip
        arguments[_TABLE][0, _MAX_NORM] = 0.0  # the scale clips
        scale = arguments[_SCALE]
        one = (
            torch.ones((), dtype=torch.float32, device=device)
            if scale is None
            else scale.reshape(())
        )
        arguments[_SCALE] = (one / clip).to(torch.float32)
        if checks:
            overflow = (total[:1] != 0).to(device, torch.float32)
            found_inf = arguments[_FOUND_INF]
            arguments[_FOUND_INF] = (
                overflow if found_inf is None else overflow + found_inf.reshape(1)
            )
    return norm, coefficient
