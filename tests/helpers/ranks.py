"""Programs of the ranks of test_apex_parallel.py."""

from __future__ import annotations

import copy
import io
import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fusedtrain.apex.parallel import (
    DistributedDataParallel,
    Reducer,
    SyncBatchNorm,
    convert_syncbn_model,
    create_syncbn_process_group,
)

# Name -> arguments, dtype of the model, factor of the gradients' mean.
OPTIONS: dict[str, tuple[dict[str, Any], torch.dtype, float]] = {
    "default": ({}, torch.float64, 1),
    "sum": ({"gradient_average": False}, torch.float64, 2),
    "predivided": ({"gradient_predivide_factor": 8.0}, torch.float64, 1),
    "predivided sum": (
        {"gradient_predivide_factor": 8.0, "gradient_average": False}, torch.float64, 2 / 8,
    ),
    "small messages": ({"message_size": 3}, torch.float64, 1),
    "no messages": ({"message_size": 0}, torch.float64, 1),
    "delayed": ({"delay_allreduce": True}, torch.float64, 1),
    "float32": ({"allreduce_always_fp32": True}, torch.float32, 1),
    "float32 for float64": ({"allreduce_always_fp32": True}, torch.float64, 1),
    "float16 in float32": (
        {"allreduce_always_fp32": True, "gradient_predivide_factor": 2.0}, torch.float16, 1,
    ),
}  # fmt: skip


class Net(nn.Module):
    """Linear, batch norm, and a branch that is not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)
        self.second, self.branch, self.never = nn.Linear(4, 2), nn.Linear(4, 2), nn.Linear(4, 2)
        self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)

    def forward(self, input: Tensor, branch: bool = False) -> Tensor:
        hidden = self.norm(self.first(input)).tanh()
        return self.branch(hidden) if branch else self.second(hidden)


def simple() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def seeded(seed: int, make: Any = simple, dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(seed)
    return make().to(dtype)


def _input(rank: int, step: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(5 + rank, 3, generator=generator, dtype=torch.float64).to(dtype)


def backward(model: nn.Module, rank: int, step: int = 0, **kwargs: Any) -> None:
    dtype = next(model.parameters()).dtype
    model(_input(rank, step, dtype), **kwargs).square().sum().backward()


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def _data_parallel(rank: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, (options, dtype, _) in OPTIONS.items():
        # Rank 1 starts with other parameters. All ranks get those of rank 0.
        model = DistributedDataParallel(seeded(rank, dtype=dtype), **options)
        for step in range(2):  # torch's reducer makes its buckets anew after the first
            model.zero_grad()
            backward(model, rank, step)
        results[name] = gradients(model)

    # float16 overflows. float32 does not, and dividing first prevents the overflow.
    for name, options in {
        "plain": {}, "fp32": {"allreduce_always_fp32": True},
        "predivided": {"gradient_predivide_factor": 2.0},
    }.items():  # fmt: skip
        weight = nn.Linear(1, 1, bias=False).half()
        model = DistributedDataParallel(weight, **options)
        model(torch.full((1, 1), 4e4, dtype=torch.float16)).backward()
        results[f"overflow {name}"] = gradients(model)

    results["parameters"] = [p.detach() for p in _wrapped(rank).parameters()]
    model = _wrapped(rank)
    results["buffers"] = float(model.module.norm.running_mean[0])
    backward(model, rank, branch=rank == 1)
    results["unused"] = gradients(model)
    results["modes"] = _modes(rank)
    results["copies"] = _copies(rank)
    results["messages"] = _messages(rank)
    return results


def _wrapped(rank: int, delay_allreduce: bool = True) -> Any:
    net = seeded(rank, Net)
    net.norm.running_mean.fill_(rank + 1.0)
    return DistributedDataParallel(net, delay_allreduce=delay_allreduce)


def _modes(rank: int) -> dict[str, Any]:
    """When allreduce is enabled: before forward and backward, or between them."""
    by_mode: dict[str, Any] = {}
    for delayed in (False, True):
        for between in (False, True):
            model = DistributedDataParallel(seeded(0), delay_allreduce=delayed)
            backward(model, rank, 9)
            model.zero_grad()
            results = []
            for step, enabled in enumerate((False, False, True)):
                switch = model.enable_allreduce if enabled else model.disable_allreduce
                if not between:
                    switch()
                loss = model(_input(rank, step)).square().sum()
                if between:
                    switch()
                loss.backward()
                results.append(gradients(model))
            by_mode[f"{delayed} {between}"] = results
    return by_mode


def _copies(rank: int) -> list[list[Tensor | None]]:
    """Gradients of a copied and of a loaded model: with the options of the first."""
    model = DistributedDataParallel(seeded(0), gradient_average=False)
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    copies = [copy.deepcopy(model), torch.load(stream, weights_only=False)]
    for one in copies:
        backward(one, rank)
    return [gradients(one) for one in copies]


def _messages(rank: int) -> dict[str, str]:
    messages = {}
    with pytest.raises(ValueError, match="shared_param is not supported"):
        DistributedDataParallel(seeded(0), shared_param=True)
    with pytest.raises(RuntimeError, match=r"no parameter requires a gradient.*use the module"):
        DistributedDataParallel(seeded(0).requires_grad_(False))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        DistributedDataParallel(seeded(0), prof=True, num_allreduce_streams=2)
    (warning,) = caught
    messages["warning"] = str(warning.message)
    messages["where"] = Path(warning.filename).name
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = DistributedDataParallel(seeded(0, Net))
    assert isinstance(model, nn.parallel.DistributedDataParallel)
    backward(model, rank)
    with pytest.raises(RuntimeError) as raised:
        model(_input(rank))
    messages["unused"] = str(raised.value)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        DistributedDataParallel(seeded(0))(torch.zeros(1, 9, dtype=torch.float64))
    sized = DistributedDataParallel(seeded(0), message_size=2**18)
    messages["bytes"] = str(sized.bucket_bytes_cap)
    return messages


def _reducers(rank: int) -> dict[str, Any]:
    net = seeded(rank, Net)
    net.second.half()
    reducer = Reducer(net)
    results: dict[str, Any] = {"parameters": [p.detach().clone() for p in net.parameters()]}
    for i, p in enumerate(net.parameters()):
        if p.requires_grad and i != 2:
            p.grad = torch.full_like(p, rank + i)
    reducer.reduce()
    results["module"] = gradients(net)
    whole = torch.full((2, 3), float(rank)), [torch.full((4,), 3.0 * rank).half(), None]
    Reducer(whole).reduce()
    results["list"] = [whole[0], whole[1][0]]
    many = torch.arange(4.0).reshape(2, 2).t() * rank  # not contiguous
    Reducer([many]).reduce()
    results["strided"] = many
    Reducer(nn.Identity()).reduce()
    for wrong in (3.0, [object()], "grads"):
        with pytest.raises(TypeError, match="module_or_grads_list"):
            Reducer(wrong)
    return results


SHAPES = {"NC": (9, 5), "NCL": (9, 5, 4), "NCHW": (9, 5, 4, 3)}
# Shape, channel_last, fuse_relu, whether z is added.
NORMS = list(itertools.product(SHAPES, (False, True), (False, True), (False, True)))


def run_norm(norm: nn.Module, case: Any, samples: slice) -> dict[str, list[Tensor]]:
    """Two training steps and an evaluation of samples that are [N, C, ...]."""
    shape, last, relu, adds = case
    ours = isinstance(norm, SyncBatchNorm)
    torch.manual_seed(4)
    with torch.no_grad():
        for p in norm.parameters():
            p.normal_()
    results: dict[str, list[Tensor]] = {}
    for step in ("0", "1", "eval"):
        x, z, grad = (torch.randn(SHAPES[shape], dtype=torch.float64)[samples] for _ in range(3))
        norm.train(step != "eval")
        leaves = [x.requires_grad_(), z.requires_grad_()]
        if ours:
            inputs = [t.movedim(1, -1).contiguous() if last else t for t in leaves]
            y = norm(inputs[0], z=inputs[1]) if adds else norm(inputs[0])
            assert y.is_contiguous()
            y = y.movedim(-1, 1) if last else y
        else:
            y = norm(x) + z if adds else norm(x)
            y = y.relu() if relu else y
        y.backward(grad)
        results[step] = [y.detach(), leaves[0].grad]  # type: ignore[list-item]
        results[step] += [leaves[1].grad] if adds else []  # type: ignore[list-item]
    results["sums"] = [p.grad for p in norm.parameters()]  # type: ignore[misc]
    results["buffers"] = list(norm.buffers())
    return results


def whole_norm(shape: str) -> nn.Module:
    cls = nn.BatchNorm2d if shape == "NCHW" else nn.BatchNorm1d
    return cls(5).double()


def _norms(rank: int) -> dict[str, Any]:
    mine = slice(0, 4) if rank == 0 else slice(4, 9)
    results: dict[str, Any] = {"cases": []}
    for case in NORMS:
        shape, last, relu, _ = case
        norm = SyncBatchNorm(5, channel_last=last, fuse_relu=relu).double()
        norm.load_state_dict(whole_norm(shape).state_dict())
        results["cases"].append(run_norm(norm, case, mine))
    group = create_syncbn_process_group(1)
    alone = SyncBatchNorm(5, process_group=group).double()
    results["alone"] = run_norm(alone, ("NCHW", False, False, False), mine)
    everybody = create_syncbn_process_group(2)
    assert dist.get_world_size(everybody) == 2
    assert dist.get_world_size(group) == 1
    for wrong in (3, -1):
        with pytest.raises(ValueError, match="group_size"):
            create_syncbn_process_group(wrong)
    converted = convert_syncbn_model(nn.Sequential(whole_norm("NCHW")), everybody)
    results["converted"] = run_norm(converted[0], ("NCHW", False, False, False), mine)
    return results


def on_a_rank(rank: int) -> dict[str, Any]:
    return {"ddp": _data_parallel(rank), "reducer": _reducers(rank), "norm": _norms(rank)}
