"""apex.parallel's names over two gloo ranks, against what each rank computes by hand.

A rank knows the other's data: they follow from its number. So both assert all results.
"""

from __future__ import annotations

import copy
import io
import itertools
import warnings
from collections.abc import Callable
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
from fusedtrain.nn import BatchNormAct2d
from helpers import environment
from helpers.processes import run_python
from helpers.rank_processes import results_of_two_ranks

pytestmark = pytest.mark.skipif(
    not dist.is_available(), reason="needs a torch with torch.distributed"
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


def inputs(rank: int, step: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(5 + rank, 3, generator=generator, dtype=torch.float64).to(dtype)


def backward(model: nn.Module, rank: int, step: int = 0, **kwargs: Any) -> None:
    dtype = next(model.parameters()).dtype
    model(inputs(rank, step, dtype), **kwargs).square().sum().backward()


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def local(rank: int, step: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Gradients that a rank has before they are reduced."""
    model = seeded(0, dtype=dtype)
    backward(model, rank, step)
    return [p.grad for p in model.parameters()]


def close(a: Any, b: Any, rtol: float = 1e-12) -> None:
    torch.testing.assert_close(a, b, rtol=rtol, atol=rtol)


# --- on a rank


def gradients_are_reduced_as_the_option_says(rank: int) -> None:
    for options, dtype, factor in OPTIONS.values():
        # Rank 1 starts with other parameters. All ranks get those of rank 0.
        model = DistributedDataParallel(seeded(rank, dtype=dtype), **options)
        for step in range(2):  # torch's reducer makes its buckets anew after the first
            model.zero_grad()
            backward(model, rank, step)
        want = [(a + b) / 2 * factor for a, b in zip(local(0, 1, dtype), local(1, 1, dtype))]
        limit = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 2e-3}[dtype]
        assert all(p.grad.dtype is dtype for p in model.parameters())
        close(gradients(model), want, limit)


def float16_overflows_unless_it_is_told_otherwise(rank: int) -> None:
    """Neither float32 nor a division beforehand overflows."""
    right = torch.tensor(4e4).half().item()
    for options, want in (
        ({}, float("inf")), ({"allreduce_always_fp32": True}, right),
        ({"gradient_predivide_factor": 2.0}, right),
    ):  # fmt: skip
        weight = nn.Linear(1, 1, bias=False).half()
        model = DistributedDataParallel(weight, **options)
        model(torch.full((1, 1), 4e4, dtype=torch.float16)).backward()
        assert weight.weight.grad.item() == want


def parameters_start_as_rank_0_has_them_and_buffers_stay(rank: int) -> None:
    net = seeded(rank, Net)
    net.norm.running_mean.fill_(rank + 1.0)
    model = DistributedDataParallel(net, delay_allreduce=True)
    close(
        [p.detach() for p in model.parameters()], [p.detach() for p in seeded(0, Net).parameters()]
    )
    assert float(net.norm.running_mean[0]) == rank + 1
    # A parameter that no rank uses has no gradient.
    backward(model, rank, branch=rank == 1)
    grads = []
    for number in range(2):
        one = seeded(0, Net)
        backward(one, number, branch=number == 1)
        grads.append(gradients(one))
    wanted = 0
    for ours, *both in zip(gradients(model), *grads, strict=True):
        parts = [g for g in both if g is not None]
        assert (ours is None) == (not parts)
        if parts:
            close(ours, sum(parts) / 2)
            wanted += 1
    assert wanted == len(grads[0]) - 3  # without `never` and the frozen one


def allreduce_can_be_disabled(rank: int) -> None:
    """Before forward and backward, or between them."""
    by_rank = [[local(number, step) for step in range(3)] for number in range(2)]
    sums = [[sum(steps) for steps in zip(*grads, strict=True)] for grads in by_rank]
    first, second = by_rank[rank][:2]
    want = [
        first, [a + b for a, b in zip(first, second, strict=True)],
        [(a + b) / 2 for a, b in zip(*sums, strict=True)],
    ]  # fmt: skip
    for delayed, between in itertools.product((False, True), repeat=2):
        model = DistributedDataParallel(seeded(0), delay_allreduce=delayed)
        backward(model, rank, 9)
        model.zero_grad()
        for step, enabled in enumerate((False, False, True)):
            switch = model.enable_allreduce if enabled else model.disable_allreduce
            if not between:
                switch()
            loss = model(inputs(rank, step)).square().sum()
            if between:
                switch()
            loss.backward()
            close(gradients(model), want[step])


def copies_keep_the_options(rank: int) -> None:
    model = DistributedDataParallel(seeded(0), gradient_average=False)
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    for one in (copy.deepcopy(model), torch.load(stream, weights_only=False)):
        backward(one, rank)
        close(gradients(one), [a + b for a, b in zip(local(0), local(1), strict=True)])


def data_parallel_says_what_is_wrong(rank: int) -> None:
    with pytest.raises(ValueError, match="shared_param is not supported"):
        DistributedDataParallel(seeded(0), shared_param=True)
    with pytest.raises(RuntimeError, match=r"no parameter requires a gradient.*use the module"):
        DistributedDataParallel(seeded(0).requires_grad_(False))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        DistributedDataParallel(seeded(0), prof=True, num_allreduce_streams=2)
    (warning,) = caught
    message = str(warning.message)
    assert message.endswith("without effect here: num_allreduce_streams, prof")
    assert Path(warning.filename).name == Path(__file__).name
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = DistributedDataParallel(seeded(0, Net))
    assert isinstance(model, nn.parallel.DistributedDataParallel)
    backward(model, rank)
    with pytest.raises(RuntimeError, match="delay_allreduce=True"):
        model(inputs(rank))
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        DistributedDataParallel(seeded(0))(torch.zeros(1, 9, dtype=torch.float64))
    sized = DistributedDataParallel(seeded(0), message_size=2**18)
    assert sized.bucket_bytes_cap == 2**18 * 8  # elements of float64


def reducer(rank: int) -> None:
    net, first = seeded(rank, Net), seeded(0, Net)
    net.second.half()
    first.second.half()
    reducer = Reducer(net)
    close([p.detach() for p in net.parameters()], [p.detach() for p in first.parameters()])
    for i, p in enumerate(net.parameters()):
        if p.requires_grad and i != 2:
            p.grad = torch.full_like(p, rank + i)
    reducer.reduce()
    for i, p in enumerate(net.parameters()):
        if p.requires_grad and i != 2:
            assert torch.equal(p.grad, torch.full_like(p, i + 0.5))
        else:
            assert p.grad is None
    both = torch.full((2, 3), float(rank)), [torch.full((4,), 3.0 * rank).half(), None]
    Reducer(both).reduce()
    assert torch.equal(both[0], torch.full((2, 3), 0.5))
    assert torch.equal(both[1][0], torch.full((4,), 1.5).half())
    many = torch.arange(4.0).reshape(2, 2).t() * rank  # not contiguous
    Reducer([many]).reduce()
    assert torch.equal(many, torch.tensor([[0.0, 1.0], [0.5, 1.5]]))
    Reducer(nn.Identity()).reduce()
    for wrong in (3.0, [object()], "grads"):
        with pytest.raises(TypeError, match="module_or_grads_list"):
            Reducer(wrong)


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
        results[step] = [y.detach(), leaves[0].grad]
        results[step] += [leaves[1].grad] if adds else []
    results["sums"] = [p.grad for p in norm.parameters()]
    results["buffers"] = [b.clone() for b in norm.buffers()]
    return results


def whole_norm(shape: str) -> nn.Module:
    cls = nn.BatchNorm2d if shape == "NCHW" else nn.BatchNorm1d
    return cls(5).double()


MINE = (slice(0, 4), slice(4, 9))


def assert_part_of_whole(norm: SyncBatchNorm, case: Any, rank: int) -> None:
    """The norm computes for this rank's samples what a norm of all samples does."""
    want = run_norm(whole_norm(case[0]), case, slice(0, 9))
    results = run_norm(norm, case, MINE[rank])
    for step in ("0", "1", "eval"):
        for ours, whole in zip(results[step], want[step], strict=True):
            close(ours, whole[MINE[rank]], 1e-11)
    for ours, whole in zip(results["sums"], want["sums"], strict=True):
        dist.all_reduce(ours)
        close(ours, whole, 1e-11)
    close(results["buffers"], want["buffers"], 1e-11)


def sync_batch_norm_is_one_batch_norm(rank: int) -> None:
    for case in NORMS:
        shape, last, relu, _ = case
        norm = SyncBatchNorm(5, channel_last=last, fuse_relu=relu).double()
        norm.load_state_dict(whole_norm(shape).state_dict())
        assert_part_of_whole(norm, case, rank)


def a_converted_norm_is_synchronised_and_a_group_of_one_is_not(rank: int) -> None:
    case = ("NCHW", False, False, False)
    group = create_syncbn_process_group(1)
    alone = SyncBatchNorm(5, process_group=group).double()
    want = run_norm(whole_norm("NCHW"), case, MINE[rank])
    for name, values in run_norm(alone, case, MINE[rank]).items():
        close(values, want[name], 1e-11)
    everybody = create_syncbn_process_group(2)
    assert dist.get_world_size(everybody) == 2
    assert dist.get_world_size(group) == 1
    for wrong in (3, -1):
        with pytest.raises(ValueError, match="group_size"):
            create_syncbn_process_group(wrong)
    converted = convert_syncbn_model(nn.Sequential(whole_norm("NCHW")), everybody)
    assert_part_of_whole(converted[0], case, rank)


CHECKS: dict[str, tuple[Callable[[int], None], ...]] = {
    "data parallel": (
        gradients_are_reduced_as_the_option_says, float16_overflows_unless_it_is_told_otherwise,
        parameters_start_as_rank_0_has_them_and_buffers_stay, allreduce_can_be_disabled,
        copies_keep_the_options, data_parallel_says_what_is_wrong,
    ),
    "others": (
        reducer, sync_batch_norm_is_one_batch_norm,
        a_converted_norm_is_synchronised_and_a_group_of_one_is_not,
    ),
}  # fmt: skip


def on_a_rank(rank: int, name: str) -> None:
    for check in CHECKS[name]:
        check(rank)


@pytest.mark.parametrize("name", CHECKS)
def test_on_two_ranks(name: str, tmp_path: Path) -> None:
    results_of_two_ranks(on_a_rank, tmp_path, name)


# --- in this process


def test_without_a_process_group() -> None:
    with pytest.raises((RuntimeError, ValueError), match="process group"):
        DistributedDataParallel(simple())


ENDINGS = """
import copy, sys, torch
import torch.distributed as dist
from fusedtrain.apex.parallel import DistributedDataParallel
for number in range(60):
    dist.init_process_group("gloo", f"file://{sys.argv[1]}/{number}", rank=0, world_size=1)
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    if number % 2:
        model = copy.deepcopy(model)
    model(torch.ones(3, 2)).sum().backward()
    dist.destroy_process_group()
    del model
"""


def test_a_model_that_outlives_the_process_group_ends(tmp_path: Path) -> None:
    """The reducer waited for a thread of Gloo that waited for Python: mostly before the 50th."""
    run = run_python("-c", ENDINGS, tmp_path, timeout=120, env=environment())
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("channel_last", [False, True])
def test_conversion_keeps_what_a_model_is(channel_last: bool) -> None:
    model = nn.Sequential(
        nn.BatchNorm2d(3, eps=0.1, momentum=None),
        nn.InstanceNorm2d(3, affine=True),
        BatchNormAct2d(3, act_layer=nn.SiLU),
        nn.Sequential(SyncBatchNorm(3, fuse_relu=True), nn.BatchNorm1d(3, affine=False)),
    ).double()
    model[2].eval()
    x = torch.randn(4, 3, 3, 3, dtype=torch.float64)
    want = copy.deepcopy(model)
    tensors = [*model.parameters(), *model.buffers()]
    converted = convert_syncbn_model(model, "group", channel_last=channel_last)
    assert converted is model
    assert type(model[1]) is nn.InstanceNorm2d
    assert all(a is b for a, b in zip(tensors, [*model.parameters(), *model.buffers()]))
    norms = [model[0], model[2], *model[3]]
    assert all(type(norm) is SyncBatchNorm for norm in norms)
    assert [norm.training for norm in norms] == [True, False, True, True]
    assert all(norm.process_group == "group" for norm in norms)
    assert [norm.fuse_relu for norm in norms] == [False, False, True, False]
    for ours, theirs in zip((model[0], model[2], model[3][0]), (want[0], want[2], want[3][0])):
        argument = x.movedim(1, -1).contiguous() if channel_last else x
        got = ours(argument)
        close(got.movedim(-1, 1) if channel_last else got, theirs(x))
        close(ours.running_var, theirs.running_var)
    single = nn.BatchNorm2d(3)
    assert convert_syncbn_model(single) is single
    assert type(single) is SyncBatchNorm
    assert "channel_last" in repr(model) or not channel_last


def test_torch_fx_has_one_call_of_the_module() -> None:
    norm = SyncBatchNorm(3, channel_last=True)
    traced = torch.fx.symbolic_trace(nn.Sequential(norm).eval())
    x = torch.randn(2, 4, 4, 3)
    assert [node.op for node in traced.graph.nodes] == ["placeholder", "call_module", "output"]
    close(traced(x), norm(x))
