"""One row of a benchmark of tensors: its rivals take turns, and what came of it is stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks._measure import (
    Call,
    Clock,
    Effort,
    FlushingCudaClock,
    ReplayClock,
    interleave,
    row,
)


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
