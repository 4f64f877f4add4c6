"""apex.parallel's names over two gloo ranks, against what is computed by hand."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fusedtrain
from fusedtrain.apex.parallel import (
    DistributedDataParallel,
    SyncBatchNorm,
    convert_syncbn_model,
)
from fusedtrain.nn import BatchNormAct2d
from helpers import environment
from helpers.processes import run_python
from helpers.rank_processes import results_of_two_ranks
from helpers.ranks import (
    NORMS,
    OPTIONS,
    Net,
    backward,
    gradients,
    on_a_rank,
    run_norm,
    seeded,
    simple,
    whole_norm,
)

ROOT = Path(fusedtrain.__file__).parent.parent
pytestmark = pytest.mark.skipif(
    not dist.is_available(), reason="needs a torch with torch.distributed"
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return results_of_two_ranks(on_a_rank, tmp_path_factory.mktemp("ranks"))


def _local(rank: int, step: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Gradients that a rank has before they are reduced."""
    model = seeded(0, dtype=dtype)
    backward(model, rank, step)
    return [p.grad for p in model.parameters()]


def _close(a: Any, b: Any, rtol: float = 1e-12) -> None:
    torch.testing.assert_close(a, b, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_are_reduced_as_the_option_says(ranks: list[Any], name: str) -> None:
    _, dtype, factor = OPTIONS[name]
    want = [(a + b) / 2 * factor for a, b in zip(_local(0, 1, dtype), _local(1, 1, dtype))]
    limit = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 2e-3}[dtype]
    for rank in ranks:
        assert all(g.dtype is dtype for g in rank["ddp"][name])
        _close(rank["ddp"][name], want, limit)


def test_float16_overflows_unless_it_is_told_otherwise(ranks: list[Any]) -> None:
    for rank in ranks:
        assert rank["ddp"]["overflow plain"][0].item() == float("inf")
        for name in ("fp32", "predivided"):
            assert rank["ddp"][f"overflow {name}"][0].item() == torch.tensor(4e4).half().item()


def test_parameters_start_as_rank_0_has_them_and_buffers_stay(ranks: list[Any]) -> None:
    for number, rank in enumerate(ranks):
        want = list(seeded(0, Net).parameters())
        _close(rank["ddp"]["parameters"], [p.detach() for p in want])
        assert rank["ddp"]["buffers"] == number + 1


def test_what_no_rank_uses_keeps_no_gradient(ranks: list[Any]) -> None:
    grads = []
    for number in range(2):
        net = seeded(0, Net)
        backward(net, number, branch=number == 1)
        grads.append(gradients(net))
    want = []
    for a, b in zip(*grads, strict=True):
        both = [g for g in (a, b) if g is not None]
        want.append(sum(both) / 2 if both else None)
    assert [w is None for w in want].count(True) == 3  # `never`, and the frozen one
    for rank in ranks:
        for ours, whole in zip(rank["ddp"]["unused"], want, strict=True):
            assert (ours is None) == (whole is None)
            if ours is not None:
                _close(ours, whole)


@pytest.mark.parametrize("between", [False, True], ids=["before", "between"])
@pytest.mark.parametrize("delayed", [False, True], ids=["", "delayed"])
def test_allreduce_can_be_disabled(ranks: list[Any], delayed: bool, between: bool) -> None:
    locals_ = [[_local(rank, step) for step in range(3)] for rank in range(2)]
    for number, rank in enumerate(ranks):
        results = rank["ddp"]["modes"][f"{delayed} {between}"]
        first, second = locals_[number][:2]
        _close(results[0], first)
        _close(results[1], [a + b for a, b in zip(first, second, strict=True)])
        sums = [[sum(steps) for steps in zip(*of_rank, strict=True)] for of_rank in locals_]
        _close(results[2], [(a + b) / 2 for a, b in zip(*sums, strict=True)])


def test_copies_keep_the_options(ranks: list[Any]) -> None:
    want = [a + b for a, b in zip(_local(0), _local(1), strict=True)]
    for rank in ranks:
        for grads in rank["ddp"]["copies"]:
            _close(grads, want)


def test_data_parallel_says_what_is_wrong(ranks: list[Any]) -> None:
    messages = ranks[0]["ddp"]["messages"]
    assert messages["warning"].endswith("without effect here: num_allreduce_streams, prof")
    assert messages["where"] == "ranks.py"
    assert "delay_allreduce=True" in messages["unused"]
    assert messages["bytes"] == str(2**18 * 8)  # elements of float64


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


def test_reducer(ranks: list[Any]) -> None:
    net = seeded(0, Net)
    net.second.half()
    for rank in ranks:
        results = rank["reducer"]
        _close(results["parameters"], [p.detach() for p in net.parameters()])
        for i, (p, grad) in enumerate(zip(net.parameters(), results["module"], strict=True)):
            if p.requires_grad and i != 2:
                assert torch.equal(grad, torch.full_like(p, i + 0.5))
            else:
                assert grad is None
        assert torch.equal(results["list"][0], torch.full((2, 3), 0.5))
        assert torch.equal(results["list"][1], torch.full((4,), 1.5).half())
        assert torch.equal(results["strided"], torch.tensor([[0.0, 1.0], [0.5, 1.5]]))


def _same_as_whole(parts: list[dict[str, Any]], want: dict[str, Any]) -> None:
    for step in ("0", "1", "eval"):
        for mine, others, whole in zip(parts[0][step], parts[1][step], want[step], strict=True):
            _close(torch.cat([mine, others]), whole, 1e-11)
    for mine, others, whole in zip(parts[0]["sums"], parts[1]["sums"], want["sums"], strict=True):
        _close(mine + others, whole, 1e-11)
    for part in parts:
        _close(part["buffers"], want["buffers"], 1e-11)


@pytest.mark.parametrize("case", NORMS, ids=str)
def test_sync_batch_norm_is_one_batch_norm(ranks: list[Any], case: Any) -> None:
    parts = [rank["norm"]["cases"][NORMS.index(case)] for rank in ranks]
    _same_as_whole(parts, run_norm(whole_norm(case[0]), case, slice(0, 9)))


def test_a_converted_norm_is_synchronised_and_a_group_of_one_is_not(ranks: list[Any]) -> None:
    case = ("NCHW", False, False, False)
    want = run_norm(whole_norm("NCHW"), case, slice(0, 9))
    _same_as_whole([rank["norm"]["converted"] for rank in ranks], want)
    for rank, mine in zip(ranks, (slice(0, 4), slice(4, 9)), strict=True):
        expected = run_norm(whole_norm("NCHW"), case, mine)
        for name, values in expected.items():
            _close(rank["norm"]["alone"][name], values, 1e-11)


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
        _close(got.movedim(-1, 1) if channel_last else got, theirs(x))
        _close(ours.running_var, theirs.running_var)
    single = nn.BatchNorm2d(3)
    assert convert_syncbn_model(single) is single
    assert type(single) is SyncBatchNorm
    assert "channel_last" in repr(model) or not channel_last


def test_torch_fx_has_one_call_of_the_module() -> None:
    norm = SyncBatchNorm(3, channel_last=True)
    traced = torch.fx.symbolic_trace(nn.Sequential(norm).eval())
    x = torch.randn(2, 4, 4, 3)
    assert [node.op for node in traced.graph.nodes] == ["placeholder", "call_module", "output"]
    _close(traced(x), norm(x))
