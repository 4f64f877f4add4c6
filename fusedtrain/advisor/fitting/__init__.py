"""`fit`: the largest batch, or the fastest way to train a batch, in so much memory.

`_trainer` runs steps and counts their memory, `_losses` makes batches and losses, `_affine`
predicts the memory of other batches, `_fitter` has the order, `_checkpoint` a rival for the curve,
`_report` the words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ..._graph.compiled import original_of
from ..._graph.state import duplicate
from ..._graph.tracer import same_generators
from ..._text import bytes_in
from ...planning._meter import autocast_dtype, without_autocast
from ..bench.clock import device_name
from ..tuning._job import checked_job
from ..tuning._worker import model_function
from ._affine import PROBES
from ._fitter import Fitter
from ._losses import checked_call, draw_of, is_sized, loss_of
from ._report import HEADINGS, FitReport, FitRow
from ._trainer import Trainer

__all__ = ["HEADINGS", "FitReport", "FitRow", "fit"]

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}  # of autocast


def fit(
    build_model: nn.Module | Callable[[], nn.Module] | str,
    example: Any,
    memory: int | str,
    *,
    batch: int | None = None,
    step: Callable[[Any, Any], torch.Tensor] | str | None = None,
    precision: str | None = None,
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
    :func:`fusedtrain.plan_memory`'s kind; the last three have the same losses, bit for bit. Two
    small batches predict the bytes of others, steps of the predicted batch correct them. A step
    that is predicted above the memory that is available is never tried: half of it on the CPU, nine
    tenths of the free memory of a GPU. Runs in this process, and takes as much memory as the
    largest step.

    Args:
        build_model: a model, of which a copy is trained; a function without arguments that returns
            one; or ``"path.py:FUNCTION"``, ``"torchvision:NAME"``, ``"timm:NAME"``,
            ``"transformers:CONFIGCLASS"``.
        example: the shape of one sample, ``(3, 224, 224)``; one sample, ``dataset[0]``, which is
            repeated; or a function of the number of samples that returns a batch of tensors, or its
            ``"path.py:FUNCTION"``.
        memory: bytes, or text as ``"4GiB"``, for parameters, buffers, inputs, gradients, the
            optimizer's states and all that a step allocates besides. Gradients are freed by
            `zero_grad()` before the forward.
        batch: samples in a step; None: the largest.
        step: called with the model and a batch, as in your loop, returns the loss; or its
            ``"path.py:FUNCTION"``. None: cross-entropy for inputs, or a pair of inputs and targets;
            the model's own loss for a dict of its arguments. Inputs alone get random targets, of a
            model that returns a tensor [batch, classes, ...].
        precision: "fp32", or "bf16" or "fp16" for forwards under autocast, without a GradScaler;
            None: the caller's autocast. A step may enter its own.
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
        TypeError: an argument has another type; there is no usual loss, and no `step`.
        ValueError: an argument has no sense.

    The model's errors are passed on.

    Example:
        >>> import fusedtrain, torch
        >>> from torch.nn import Conv2d, Flatten, Sequential, SiLU
        >>> def build_model():
        ...     return Sequential(Conv2d(3, 8, 3), SiLU(), Conv2d(8, 8, 3), Flatten(1))
        >>> report = fusedtrain.fit(build_model, (3, 16, 16), "1MB", batch=4, device="cpu")
        >>> [row.way for row in report.rows]
        ['eager', 'convert', 'recompute', 'plan']

        A model and a loss of one's own, in bfloat16:

        >>> model, mse_loss = build_model(), torch.nn.functional.mse_loss
        >>> report = fusedtrain.fit(
        ...     model, lambda n: {"x": torch.randn(n, 3, 16, 16), "y": torch.zeros(n, 1152)}, "1MB",
        ...     step=lambda model, batch: mse_loss(model(batch["x"]), batch["y"]),
        ...     batch=4, precision="bf16", device="cpu",
        ... )
        >>> report.rows[-1].fits
        True
    """
    size = _size(memory)
    if batch is not None and (isinstance(batch, bool) or not isinstance(batch, int)):
        raise TypeError(f"batch: expected an int or None, got {type(batch).__name__}")
    place, builder = _source(build_model)
    if isinstance(build_model, nn.Module):
        first = next(build_model.parameters(), None)
        device = device or (first.device.type if first is not None else None)
    least = PROBES[0] if batch is None else batch
    sized = example if is_sized(example) else (1,)  # others are not drawn by the job
    job = checked_job(place, sized, least, classes, tokens, "", optimizer, None, device, config)
    if precision is not None and precision not in PRECISIONS:
        raise ValueError(f"precision: expected {', '.join(PRECISIONS)}, got {precision!r}")
    dtype = PRECISIONS[precision] if precision else autocast_dtype(job.device)
    begin = begin or (lambda stage: None)
    begin("the model")
    with same_generators(), torch.enable_grad(), without_autocast(job.device):
        draw, loss = draw_of(example, job), None if step is None else loss_of(step)
        trainer = Trainer(job, builder or model_function(job), draw, loss, dtype)
        names = {value: name for name, value in PRECISIONS.items()}
        report = FitReport(job.model, device_name(job.device), size, names[dtype])
        fitter = Fitter(trainer, report, batch, begin)
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


def _source(build_model: Any) -> tuple[str, Callable[[], Any] | None]:
    """The model's name, and the function that makes it; None: the name is enough."""
    if isinstance(build_model, str):
        return build_model, None
    kind = type(build_model)
    if isinstance(build_model, nn.Module):
        original = original_of(build_model, "fit")
        return f"{kind.__module__}:{kind.__qualname__}", lambda: duplicate(original)
    builder = checked_call(build_model, "build_model", "no arguments, or a model or its name")
    return f"{builder.__module__}:{getattr(builder, '__qualname__', kind.__name__)}", builder
