"""One row of a benchmark of tensors: its rivals take turns, and what came of it is stored."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks._measure import (
    Call,
    Clock,
    Effort,
    FlushingCudaClock,
    ReplayClock,
    TensorFunction,
    interleave,
    row,
)

# Of a function of one tensor, which in all of them requires a gradient.
PASSES = ("forward", "backward", "forward+backward")


def call_of(function: TensorFunction, pass_name: str, x: Tensor, gradient: Tensor) -> Call:
    """What is timed of a pass in training: forward keeps what backward needs, and backward alone
    repeats itself on what one forward kept."""
    leaf = x.detach().requires_grad_()
    if pass_name == "forward":
        return lambda: function(leaf)
    if pass_name == "backward":
        y = function(leaf)
        return lambda: torch.autograd.grad(y, leaf, gradient, retain_graph=True)
    return lambda: torch.autograd.grad(function(leaf), leaf, gradient)


def kept_bytes(run: Callable[[], object], without: Iterable[Tensor] = ()) -> int:
    """What a call keeps for backward: storages, each once, but for those of ``without``."""
    known = {t.untyped_storage().data_ptr() for t in without}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()  # lives until all is counted: no address has two storages
    del result
    return sum(kept.values())


def race(
    benchmark: Any,
    replay: ReplayClock,
    calls: Mapping[str, Call],
    source: Tensor,
    clock: Clock,
    effort: Effort,
    *,
    op: str,
    pass_name: str,
    tensors: float = 0,
    **info: Any,
) -> None:
    """Times the calls beside copies of ``source``, and makes a row of it, with ``info``.

    ``tensors``: of the size of ``source``, as in ``_measure.row``.
    """
    out = torch.empty_like(source)
    copies: dict[str, Call] = {"copy": lambda: out.copy_(source), "copy_fresh": source.clone}
    samples = interleave({**calls, **copies}, clock, effort)
    benchmark.extra_info["l2_flushed"] = isinstance(clock, FlushingCudaClock)
    benchmark.extra_info.update(
        row(
            op=op,
            pass_name=pass_name,
            dtype=source.dtype,
            numel=source.numel(),
            device=source.device.type,
            samples=samples,
            tensors=tensors,
        ),
        **info,
    )
    replay.replay(benchmark, samples["fusedtrain"])
