"""Programs of the ranks of test_fsdp2.py, and the same training in one process."""

from __future__ import annotations

import os
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import fusedtrain
from helpers.optimizer_steps import alike
from helpers.optimizers import CLASSES, NAMES, make
from helpers.rank_processes import example

STEPS, SAVED, BAD = 5, 3, 1  # rank 1 has an infinite gradient in step BAD
_GENERATOR = torch.Generator().manual_seed(5)
INPUTS = torch.randn(STEPS, 2, 3, 5, generator=_GENERATOR, dtype=torch.float64)  # step, rank
OPTIONS: dict[str, Any] = {"max_grad_norm": 0.5, "ema_decay": 0.9}
# Name -> optimizer, dtype of the model, options.
KINDS: dict[str, tuple[str, torch.dtype, dict[str, Any]]] = {
    **{name: (name, torch.float64, OPTIONS) for name in NAMES},
    **{
        f"{name}, masters": (name, torch.bfloat16, {**OPTIONS, "master_weights": True})
        for name in ("SGD", "AdamW", "Adagrad", "LAMB", "NovoGrad")
    },
}


def network(dtype: torch.dtype = torch.float64, normed: bool = False) -> nn.Sequential:
    """The last weight has one row: a rank of two holds nothing of it."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(7) if normed else nn.LayerNorm(7)
    last = nn.Linear(7, 1, bias=False)
    return nn.Sequential(nn.Linear(5, 7), norm, nn.SiLU(), last).to(dtype)


def sharded(model: nn.Sequential, **options: Any) -> nn.Sequential:
    for layer in (model[0], model):
        fully_shard(layer, **options)
    return model


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on every rank."""
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().clone()


def give_gradients(params: list[Any], step: int, scaler: torch.amp.GradScaler) -> None:
    """The same for all ranks: those of a backward pass in bfloat16 differ in their last bits."""
    generator = torch.Generator().manual_seed(step)
    for p in params:
        grad = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        grad = scaler.scale(grad.float()).to(p.dtype)
        if isinstance(p, DTensor):
            grad = distribute_tensor(grad, p.device_mesh, p.placements)
        p.grad = grad


class Run:
    """A model, its optimizer and its scaler."""

    def __init__(self, kind: str, model: nn.Module) -> None:
        name, _, options = KINDS[kind]
        self.model, self.params = model, list(model.parameters())
        self.optimizer = make(name, self.params, **options)
        self.scaler = fusedtrain.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
        self.unscales = False  # and clips by torch's function

    def train(self, steps: range, rank: int | None = None) -> dict[str, Any]:
        """Trains on one rank's samples, or on all; rank 1 has the infinite gradient."""
        record: dict[str, Any] = {"norms": [], "skipped": [], "scales": []}
        for step in steps:
            self.optimizer.zero_grad()
            if self.params[0].dtype is torch.float64:
                samples = INPUTS[step].flatten(0, 1) if rank is None else INPUTS[step, rank]
                self.scaler.scale(self.model(samples).square().mean()).backward()
            else:
                give_gradients(self.params, step, self.scaler)
            if step == BAD and rank != 0:
                grad = self.params[0].grad
                assert grad is not None
                part = grad.to_local() if rank else grad
                part[0, 0] = float("inf")
            if self.unscales:
                self.scaler.unscale_(self.optimizer)
                nn.utils.clip_grad_norm_(self.params, OPTIONS["max_grad_norm"])
            self.scaler.step(self.optimizer)
            self.scaler.update()
            norm = self.optimizer.grad_norm
            record["norms"].append(None if norm is None else float(norm))
            record["skipped"].append(bool(self.optimizer.last_step_skipped))
            record["scales"].append(self.scaler.get_scale())
        return {**record, "tensors": self.tensors()}

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and states, whole."""
        tensors = {}
        for i, p in enumerate(self.params):
            tensors[f"{i}"] = whole(p)
            for name, value in self.optimizer.state[p].items():
                tensors[f"{i} {name}"] = whole(value)
        return tensors


def close(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Within rounding, which AdamW raises where a gradient is nearly 0: 1.3e-9 with one thread. A
    bfloat16 weight may be the neighbour."""
    limits = {torch.float64: 1e-8, torch.float32: 1e-5, torch.bfloat16: 2**-7}
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        limit = limits[value.dtype]
        if theirs[name.split()[0]].dtype is torch.float64:
            assert value.dtype is torch.float64 or value.dim() == 0, name
        error = (ours[name] - value).abs() / value.abs().clamp_min(1)
        assert (error <= limit).all(), (name, error.max())


def saved(runs: dict[str, Run]) -> dict[str, Any]:
    """Contents of a checkpoint of several runs."""
    parts = {}
    for kind, run in runs.items():
        model, optimizer = get_state_dict(run.model, run.optimizer)
        parts[kind] = {"model": model, "optimizer": optimizer, "scaler": run.scaler.state_dict()}
    return parts


def save(runs: dict[str, Run], folder: str) -> None:
    dcp.save(saved(runs), checkpoint_id=folder, no_dist=not dist.is_initialized())


def load(runs: dict[str, Run], folder: str) -> None:
    parts = saved(runs)
    dcp.load(parts, checkpoint_id=folder, no_dist=not dist.is_initialized())
    for kind, run in runs.items():
        part = parts[kind]
        set_state_dict(
            run.model, run.optimizer,
            model_state_dict=part["model"], optim_state_dict=part["optimizer"],
        )  # fmt: skip
        run.scaler.load_state_dict(part["scaler"])


def other_weights(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
    return model


def _resharded(rank: int, folder: str) -> dict[str, Any]:
    """From one process to two; and what two processes save for one."""
    results: dict[str, Any] = {}
    runs = {kind: Run(kind, sharded(network(KINDS[kind][1]))) for kind in KINDS}
    first = {kind: run.train(range(SAVED), rank) for kind, run in runs.items()}
    save(runs, f"{folder}/of two")
    for kind, run in runs.items():
        results[kind] = [first[kind], run.train(range(SAVED, STEPS), rank)]
    resumed = {kind: Run(kind, sharded(other_weights(network(KINDS[kind][1])))) for kind in KINDS}
    load(resumed, f"{folder}/of one")
    for kind, run in resumed.items():
        results[f"resumed {kind}"] = run.train(range(SAVED, STEPS), rank)
    return results


# Kinds of `Coded` whose checkpoints any number of ranks loads.
ANY_RANKS = ("codes", "float32", "float32 odd")


class Coded:
    """A bfloat16 model with 8-bit states. Rows are whole groups of 32, but in "odd" models."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        self.compressed = kind.startswith("codes")
        widths = (80, 40) if kind.endswith("odd") else (64, 96)
        self.model = nn.Sequential(nn.Linear(widths[0], 101), nn.Linear(widths[1], 110)).bfloat16()
        if dist.is_initialized():
            fully_shard(self.model)
        self.params = list(self.model.parameters())
        self.optimizer = fusedtrain.optim.AdamW(
            self.params, lr=0.01, state_dtype="q8", master_weights="split24"
        )

    def train(self, steps: range) -> None:
        for step in steps:
            give_gradients(self.params, step, fusedtrain.amp.GradScaler("cpu", enabled=False))
            self.optimizer.step()

    def parts(self) -> dict[str, Any]:
        states = self.optimizer.state_dict(compressed=self.compressed)["state"]
        return {"model": self.model.state_dict(), "states": {str(i): states[i] for i in states}}

    def save(self, folder: str) -> None:
        dcp.save(self.parts(), checkpoint_id=folder, no_dist=not dist.is_initialized())

    def load(self, folder: str) -> None:
        groups, parts = self.optimizer.state_dict()["param_groups"], self.parts()
        dcp.load(parts, checkpoint_id=folder, no_dist=not dist.is_initialized())
        self.model.load_state_dict(parts["model"])
        states = {int(i): state for i, state in parts["states"].items()}
        self.optimizer.load_state_dict({"state": states, "param_groups": groups})

    def tensors(self) -> dict[str, Tensor]:
        parts = self.parts()
        states = {f"{i} {n}": t for i, s in parts["states"].items() for n, t in s.items()}
        return {name: whole(t) for name, t in {**parts["model"], **states}.items()}


def coded(folder: str, saves: str, loads: dict[str, str]) -> dict[str, Any]:
    """Saves 8-bit states under a name, and loads those of others: by kind of `Coded`."""
    results: dict[str, Any] = {}
    for kind in ("codes", "float32", "codes odd", "float32 odd"):
        run = Coded(kind)
        run.train(range(SAVED))
        if saves:
            run.save(f"{folder}/{kind} of {saves}")
        results[f"{kind} saved"] = run.tensors()
        if kind in loads:
            run = Coded(kind)
            run.train(range(9, 10))  # makes the states that are loaded
            run.load(f"{folder}/{kind} of {loads[kind]}")
            results[f"{kind} loaded"] = run.tensors()
            run.train(range(SAVED, STEPS))
            results[f"{kind} trained"] = run.tensors()
    return results


def _whole_state(rank: int) -> None:
    """A state dict of whole tensors, which rank 0 alone loads, goes to the shards of both."""
    run = Run("AdamW", sharded(network()))
    run.train(range(SAVED), rank)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_optimizer_state_dict(run.model, run.optimizer, options=options)
    assert bool(state) == (rank == 0)
    model = sharded(network())
    model.load_state_dict(run.model.state_dict())
    other = Run("AdamW", model)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(model, other.optimizer, state, options=options)
    assert alike(other.tensors(), run.tensors())


def _collectives(rank: int) -> None:
    """A step has one all-reduce, and one for an update that is tried first."""
    for name in NAMES:
        run = Run(name, sharded(network()))
        run.train(range(1), rank)
        real = dist.all_reduce
        with mock.patch.object(dist, "all_reduce", side_effect=real) as counter:
            run.optimizer.step()
        tries = run.optimizer._tries or run.optimizer.param_groups[0].get("caution", False)
        assert counter.call_count == (2 if tries else 1), name


def _converted(rank: int) -> None:
    """A model with synchronised statistics; converted before it is sharded."""
    model, plain = network(normed=True), network(normed=True)
    fusedtrain.convert(model)
    fusedtrain.nn.convert_sync_batchnorm(model)
    run, one = Run("AdamW", sharded(model)), Run("AdamW", plain)
    record, want = run.train(range(STEPS), rank), one.train(range(STEPS))
    close(record["tensors"], want["tensors"])
    assert record["scales"] == want["scales"]
    x = INPUTS[0].flatten(0, 1)
    plain.eval()
    with run.optimizer.swap_averages(), one.optimizer.swap_averages():
        model.eval()
        torch.testing.assert_close(model(x), plain(x), rtol=1e-9, atol=1e-9)
        model.reshard()
    torch.testing.assert_close(model(x), plain(x), rtol=1e-9, atol=1e-9)


def _torch_scaler(rank: int) -> None:
    """torch's GradScaler, with and without unscale_ and torch's clipping."""
    want = Run("AdamW", network()).train(range(SAVED))["tensors"]
    for unscales in (False, True):
        run = Run("AdamW", sharded(network()))
        run.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
        run.unscales = unscales
        if unscales:
            run.optimizer.max_grad_norm = None
        close(run.train(range(SAVED), rank)["tensors"], want)


def _rounded(rank: int) -> None:
    """Equal weights with equal gradients, rounded at random: by shards, and by replicas of them."""
    results = {}
    for name, shape in (("shards", (1, 2)), ("replicas", (2, 1))):
        torch.manual_seed(rank)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards"))
        model = nn.Linear(512, 64, bias=False).bfloat16()
        with torch.no_grad():
            model.weight.fill_(1.0)
        fully_shard(model, mesh=mesh)
        optimizer = fusedtrain.optim.SGD(model.parameters(), lr=1.0, stochastic_rounding=True)
        (p,) = model.parameters()
        p.grad = torch.full_like(p, 1 / 512)  # the next smaller number is 1 - 1 / 256
        optimizer.step()
        # full_tensor would take one replica's values for both.
        part = p.detach().to_local()
        parts = [torch.empty_like(part) for _ in range(2)]
        dist.all_gather(parts, part.contiguous())
        results[name] = torch.stack(parts)
        assert set(results[name].unique().tolist()) == {1.0, 1 - 1 / 256}
    shards, replicas = results["shards"], results["replicas"]
    assert torch.equal(replicas[0], replicas[1])
    # 16384 pairs of coins: half of them agree, with a standard deviation of 0.004.
    agree = (shards[0] == shards[1]).float().mean().item()
    assert agree == pytest.approx(0.5, abs=0.02)
    assert (shards == 1.0).float().mean().item() == pytest.approx(0.5, abs=0.02)


def _refused(rank: int) -> None:
    """Everything that raises, without a change of the optimizer."""
    model = sharded(network())
    params = list(model.parameters())
    adamw = fusedtrain.optim.AdamW
    with pytest.raises(RuntimeError, match=r"agc is not supported for sharded .*max_grad_norm"):
        adamw(params, agc=0.01)
    plain = nn.Parameter(torch.ones(3, 2, dtype=torch.float64))
    clipped = adamw([plain], agc=0.01)
    with pytest.raises(RuntimeError, match="agc is not supported for sharded"):
        clipped.add_param_group({"params": params})
    assert len(clipped.param_groups) == 1
    optimizer = adamw(params)
    with pytest.raises(RuntimeError, match="agc is not supported for sharded"):
        optimizer.agc = 0.01
    assert optimizer.agc is None

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, that FSDP1 is deprecated
        for original in (False, True):
            flat = FullyShardedDataParallel(
                network(), device_id=torch.device("cpu"), use_orig_params=original
            )
            for name in CLASSES:
                with pytest.raises(RuntimeError, match=r"FSDP1.*fully_shard.*torch\.optim"):
                    make(name, flat.parameters())
            with pytest.raises(RuntimeError, match="FSDP1"):
                optimizer.add_param_group({"params": list(flat.parameters())})
            assert len(optimizer.param_groups) == 1

    run, one = Run("AdamW", sharded(network())), Run("AdamW", network())
    run.train(range(1), rank)
    one.train(range(1))
    remedy = r"torch\.distributed\.checkpoint"
    for target, source, place in (
        (run, one, r"'exp_avg' is a whole tensor.*parameter is placed as"),
        (one, run, r"'exp_avg' is placed as S.*parameter is a whole tensor"),
    ):
        before = target.tensors()
        for message in (place, remedy):
            with pytest.raises(ValueError, match=message):
                target.optimizer.load_state_dict(source.optimizer.state_dict())
        assert alike(target.tensors(), before)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
    hybrid = Run("AdamW", sharded(network(), mesh=mesh))
    with pytest.raises(ValueError, match=remedy):
        hybrid.optimizer.load_state_dict(run.optimizer.state_dict())
    # The same sharding loads.
    again = Run("AdamW", sharded(network()))
    again.optimizer.load_state_dict(run.optimizer.state_dict())


def on_a_rank(rank: int, folder: str) -> dict[str, Any]:
    results = _resharded(rank, folder)
    for check in (_whole_state, _collectives, _converted, _torch_scaler, _rounded, _refused):
        check(rank)
    # Codes of odd rows are for the same number of ranks alone.
    loads = {**dict.fromkeys(ANY_RANKS, "one"), "codes odd": "two"}
    results["coded"] = coded(folder, "two", loads)
    os.makedirs(f"{folder}/example", exist_ok=True)
    os.chdir(f"{folder}/example")
    results["example"] = [example("fsdp2_checkpoint.py") for _ in range(2)]
    return results
