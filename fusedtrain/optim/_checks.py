"""Checks of optimizer arguments, with the messages of torch and timm."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import required

from .._graph.warning import level_outside
from ._distributed import local

_WORDS = {"lr": "learning rate", "eps": "epsilon value"}
_TWO = "expected two numbers, such as (0.9, 0.999)"
# Keywords of torch's optimizers: why an optimizer that lacks one needs none.
_FUSED = "leave it out, since the step is fused in any case"
_NOT_TAKEN = {
    "foreach": _FUSED,
    "fused": _FUSED,
    "capturable": "leave it out, since a CUDA graph can capture any step",
    "differentiable": "leave it out, since no fused step is differentiable; torch.optim has it",
}
_DTYPES = frozenset((torch.float32, torch.float64, torch.float16, torch.bfloat16))


def check_not_negative(**values: Any) -> None:
    """Raises ValueError for the first value that is negative or NaN."""
    for name, value in values.items():
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise ValueError(f"Tensor {name} must be 1-element")
        elif value is not required and not value >= 0:
            raise ValueError(f"Invalid {_WORDS.get(name, f'{name} value')}: {value}")


def check_betas(betas: tuple[float, float]) -> None:
    """Raises TypeError or ValueError unless these are two numbers in [0, 1)."""
    for index, beta in enumerate(two(betas)):
        try:
            valid = 0.0 <= beta < 1.0
        except TypeError:
            raise TypeError(f"betas: {_TWO}, got {betas!r}") from None
        if not valid:
            raise ValueError(f"Invalid beta parameter at index {index}: {beta}")


def two(betas: tuple[float, float]) -> tuple[float, float]:
    """Both betas; TypeError or ValueError for anything else than two."""
    try:
        beta1, beta2 = betas
    except (TypeError, ValueError) as error:
        raise type(error)(f"betas: {_TWO}, got {betas!r}") from None
    return beta1, beta2


def check_keywords(kind: str, keywords: Iterable[str], known: Collection[str]) -> None:
    """Raises TypeError for the first keyword that an optimizer, `kind`, does not know."""
    for name in keywords:
        if name not in known:
            words = {word for word in name.split("_") if len(word) > 2} - {"max", "min"}
            alike = difflib.get_close_matches(name, known, n=1)
            alike = alike or [other for other in known if words & {*other.split("_")}]
            advice = _NOT_TAKEN.get(name) or (
                f"did you mean {alike[0]!r}?" if alike else f"it takes {', '.join(known)}"
            )
            raise TypeError(
                f"{kind}.__init__() got an unexpected keyword argument {name!r}: {advice}"
            )


def check_arguments(values: Mapping[str, Any], not_negative: Iterable[str]) -> None:
    """Raises the error of torch or timm for the first wrong argument of a constructor."""
    if values.get("differentiable"):
        raise RuntimeError("`fused` does not support `differentiable`")
    check_not_negative(**{name: values[name] for name in not_negative if name in values})
    if "betas" in values:
        check_betas(values["betas"])
    if values.get("nesterov") and (values["momentum"] <= 0 or values["dampening"] != 0):
        raise ValueError("Nesterov momentum requires a momentum and zero dampening")


def warn_of_rounding(options: Mapping[str, Any], params: list[Tensor]) -> None:
    """Warns if stochastic rounding, which is asked for, has nothing to round."""
    if not options["stochastic_rounding"]:
        return
    dtypes = {p.dtype for p in params}
    if torch.bfloat16 not in dtypes:
        kinds = ", ".join(sorted(map(str, dtypes)))
        warnings.warn(
            f"stochastic_rounding=True has no effect: it rounds bfloat16 parameters, and these are "
            f"{kinds}",
            stacklevel=level_outside(),
        )


def check_parameter(p: Tensor, kind: str) -> None:
    """Raises RuntimeError for a parameter that the kernels do not update; `kind`: the optimizer."""
    if p.is_complex():
        raise RuntimeError(f"{kind} does not support complex parameters")
    if p.dtype not in _DTYPES:
        raise RuntimeError(
            f"{kind} supports float32, float64, float16 and bfloat16 parameters, got {p.dtype}"
        )
    if p.is_neg():
        raise RuntimeError(f"{kind} does not support negated views as parameters")
    inner = local(p)
    if inner.numel() and _overlaps(inner):
        raise RuntimeError(
            f"a parameter of shape {tuple(p.shape)} has several elements at one place in memory"
        )


def is_supported(p: Tensor) -> bool:
    try:
        check_parameter(p, "")
    except RuntimeError:
        return False
    return True


def check_written(grads: list[list[Tensor]]) -> None:
    """Raises RuntimeError if a gradient that will be written overlaps itself."""
    for grad in (grad for some in grads for grad in some):
        if _overlaps(grad):
            raise RuntimeError(
                f"gradient_writeback: a gradient of shape {tuple(grad.shape)} has several elements "
                "at one place in memory"
            )


def _overlaps(tensor: Tensor) -> bool:
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride()))
