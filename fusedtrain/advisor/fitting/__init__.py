"""`fit`: the largest batch, or the fastest way to train a batch, in so much memory.

`_trainer` runs steps and counts their memory, `_affine` predicts the memory of other batches,
`_fitter` has the order, `_checkpoint` a rival for the curve, `_report` the words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..._graph.tracer import same_generators
from ..._text import bytes_in
from ..bench.clock import device_name
from ..tuning._job import checked_job
from ..tuning._worker import model_function
from ._fitter import Fitter
from ._report import HEADINGS, FitReport, FitRow
from ._trainer import PROBES, Trainer

__all__ = ["HEADINGS", "FitReport", "FitRow", "fit"]


def fit(
    build_model: Callable[[], torch.nn.Module] | str,
    example: Sequence[int] | torch.Tensor,
    memory: int | str,
    *,
    batch: int | None = None,
    classes: int = 1000,
    tokens: int = 0,
    optimizer: str = "sgd",
    device: str | None = None,
    config: Mapping[str, Any] | None = None,
    curve: bool = False,
    compiled: bool = False,
    begin: Callable[[str], None] | None = None,
) -> FitReport:
    """Finds the largest batch that trains in so much memory, or the fastest way to train a batch.

    Tries eager PyTorch, `convert`, `convert(memory="recompute")` and a plan of
    :func:`fusedtrain.plan_memory`'s kind, all in fp32; the last three have the same losses, bit for
    bit. Two small batches predict the bytes of others, steps of the predicted batch correct them. A
    step that is predicted above the memory that is available is never tried: half of it on the CPU,
    nine tenths of the free memory of a GPU. Runs in this process, and takes as much memory as the
    largest step.

    Args:
        build_model: a function without arguments that returns a module; or ``"path.py:FUNCTION"``,
            ``"torchvision:NAME"``, ``"timm:NAME"``, ``"transformers:CONFIGCLASS"``. The model
            returns a tensor [batch, classes, ...].
        example: one sample, or its shape: ``(3, 224, 224)``.
        memory: bytes, or text as ``"4GiB"``, for parameters, buffers, inputs, gradients, the
            optimizer's states and all that a step allocates besides. Gradients are freed by
            `zero_grad()` before the forward.
        batch: samples in a step; None: the largest.
        classes: of a model of the three libraries.
        tokens: inputs are integers below this number; 0: normal random numbers.
        optimizer: "sgd" (momentum 0.9) or "adamw", of torch.optim.
        device: "cpu" or "cuda"; cuda if there is one.
        config: for ``transformers:``, arguments of the configuration.
        curve: also time the ways to train the batch of the first row, with plans of eight budgets
            and torch.utils.checkpoint around every block, every 2nd and every 4th one, for a
            picture of time over peak.
        compiled: of a curve also torch.compile with four activation memory budgets, each compiled.
        begin: called with the name of each stage when it begins.

    Returns:
        a :class:`FitReport`: print it, or read its rows; its `plan` is for
        `convert(model, memory=plan)`.

    Raises:
        TypeError: an argument has another type; the model returns no [batch, classes, ...].
        ValueError: an argument has no sense.

    The model's errors are passed on.

    Example:
        >>> import fusedtrain
        >>> from torch.nn import Conv2d, Flatten, Sequential, SiLU
        >>> def build_model():
        ...     return Sequential(Conv2d(3, 8, 3), SiLU(), Conv2d(8, 8, 3), Flatten(1))
        >>> report = fusedtrain.fit(build_model, (3, 16, 16), "1MB", batch=4, device="cpu")
        >>> [row.way for row in report.rows]
        ['eager', 'convert', 'recompute', 'plan']
    """
    size = _size(memory)
    if batch is not None and (isinstance(batch, bool) or not isinstance(batch, int)):
        raise TypeError(f"batch: expected an int or None, got {type(batch).__name__}")
    place = build_model if isinstance(build_model, str) else _name(build_model)
    least = PROBES[0] if batch is None else batch
    job = checked_job(
        place, example, least, classes, tokens, "", optimizer, None, device, config
    )  # fmt: skip
    begin = begin or (lambda stage: None)
    begin("the model")
    with same_generators(), torch.enable_grad():
        build = model_function(job) if isinstance(build_model, str) else build_model
        report = FitReport(job.model, device_name(job.device), size)
        fitter = Fitter(Trainer(job, build), report, batch, begin)
        try:
            fitter.run(curve, compiled)
        except KeyboardInterrupt:
            report.partial = "stopped"
        fitter.finish()
    return report


def _size(memory: Any) -> int:
    if isinstance(memory, bool) or not isinstance(memory, int | str):
        raise TypeError(f"memory: expected bytes or text as '4GiB', got {type(memory).__name__}")
    size = bytes_in(memory) if isinstance(memory, str) else memory
    if size is None:
        raise ValueError(f"memory: {memory!r} is no size, like '800MB' or '4GiB'")
    if size <= 0:
        raise ValueError(f"memory: must be positive, not {memory}")
    return size


def _name(build_model: Any) -> str:
    if not callable(build_model):
        raise TypeError(
            "build_model: expected a function or the name of a model, got "
            f"{type(build_model).__name__}"
        )
    name = getattr(build_model, "__qualname__", type(build_model).__name__)
    return f"{getattr(build_model, '__module__', '')}:{name}"
