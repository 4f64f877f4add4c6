"""The functions that torch has too: ours, torch's, and samples of torch's OpInfo for both."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from _tables import op_info, sample_input, tensors
from torch import Tensor
from torch.utils import _pytree as pytree

from fusedtrain import functional
from fusedtrain.ops import group_norm
from fusedtrain.reference.pointwise import POINTWISE

torch_functional: Any = torch.nn.functional

NAMES = [
    "celu", "dropout", "elu", "gelu", "glu", "hardshrink", "hardsigmoid", "hardswish", "hardtanh",
    "layer_norm", "leaky_relu", "logsigmoid", "max_pool2d", "mish", "prelu", "relu", "relu6",
    "rms_norm", "selu", "sigmoid", "silu", "softplus", "softshrink", "softsign", "tanh",
    "tanhshrink", "threshold",
]  # fmt: skip
INPLACE = [n for n in NAMES if "inplace" in inspect.signature(getattr(functional, n)).parameters]
# batch_norm_act with an activation against the two functions of torch.
ACTIVATED = [row.name for row in POINTWISE if row.name in NAMES]
CASES = [*NAMES, "batch_norm", "group_norm", *(f"batch_norm+{name}" for name in ACTIVATED)]
_ELSE = ("dropout", "glu", "layer_norm", "max_pool2d", "prelu", "rms_norm")
POINTWISE_NAMES = [n for n in NAMES if n not in _ELSE]


def theirs_of(case: str) -> Callable[..., Any]:
    if case.startswith("batch_norm+"):
        row = next(row for row in POINTWISE if row.name == case.partition("+")[2])
        return lambda *args, **kwargs: row.eager(torch_functional.batch_norm(*args, **kwargs))
    function: Callable[..., Any] = getattr(torch_functional, case)
    return function


def ours_of(case: str) -> Callable[..., Any]:
    name, _, activation = case.partition("+")
    if name == "group_norm":
        return _group_norm
    if name != "batch_norm":
        function: Callable[..., Any] = getattr(functional, name)
        return function
    row = next((row for row in POINTWISE if row.name == activation), None)
    parameters = dict(zip(row.parameters, row.example)) if row is not None else {}
    return functools.partial(
        functional.batch_norm_act, activation=activation or "identity", **parameters
    )


def _group_norm(*args: Any, **kwargs: Any) -> Tensor:
    """The op, for which samples are too small."""
    with patch.object(group_norm, "_gains", lambda *_: True):
        return functional.group_norm_act(*args, **kwargs)


def _seeded(inputs: Iterable[Any]) -> Iterator[Any]:
    """As info.sample_inputs() does it, which looks for the test in the stack each time, and takes
    half the time of these tests."""
    end, each = object(), iter(inputs)
    while True:
        torch.default_generator.manual_seed(1234)
        if (sample := next(each, end)) is end:
            return
        yield sample


def samples(case: str, dtype: torch.dtype) -> Iterator[Any]:
    """OpInfo's samples, those drawn at random left out; each also with gaps in its memory.

    max_pool2d has 1440, of which float32 gets each seventh, the other dtypes each 13th.
    """
    info = op_info(case.partition("+")[0])
    drawn = _seeded(info.sample_inputs_func(info, "cpu", dtype, True))
    for number, sample in enumerate(drawn):
        if case == "dropout":
            random = sample.kwargs.get("training", True) and sample.kwargs.get("p", 0.5) == 0.5
            if random:
                continue
        if case == "max_pool2d":  # the indices are eager torch's
            sample.kwargs["return_indices"] = False
            if number % (7 if dtype is torch.float32 else 13):
                continue
        yield sample
        yield sample.noncontiguous()
        if case == "softplus":  # OpInfo's threshold of 0.2 is eager torch's
            yield sample_input(sample.input, beta=3.0)


def few_samples(case: str) -> Iterator[Any]:
    """In float64; of those of max_pool2d a fraction, and a third of those of each activation
    after a batch norm: another third with the next activation."""
    of_each, first = 19 if case == "max_pool2d" else 1, 0
    if case.startswith("batch_norm+"):
        of_each, first = 3, CASES.index(case) % 3
    for number, sample in enumerate(samples(case, torch.float64)):
        if number % of_each == first:
            yield sample


def fresh(sample: Any, dtype: torch.dtype | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments that the call may modify, with the strides of the sample's."""

    def copy(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        new = torch.empty_strided(value.shape, value.stride(), dtype=dtype or value.dtype)
        return new.copy_(value.detach()).requires_grad_(value.requires_grad)

    copied: Any = pytree.tree_map(copy, ((sample.input, *sample.args), dict(sample.kwargs)))
    return copied


def weights_like(output: Tensor, dtype: torch.dtype) -> Tensor:
    """A gradient of random numbers that `dtype` holds."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(output.shape, generator=generator, dtype=torch.float64).to(dtype)


def run(
    function: Callable[..., Any], sample: Any, dtype: torch.dtype | None = None
) -> list[Tensor | None]:
    """Output, gradients, and tensors that the call has modified; in `dtype` instead."""
    args, kwargs = fresh(sample, dtype)
    output = function(*args, **kwargs)
    leaves = [t for t in tensors((args, kwargs)) if t.requires_grad]
    rest = [t for t in tensors((args, kwargs)) if not t.requires_grad]
    gradients: list[Tensor | None] = []
    if output.requires_grad:
        weights = weights_like(output, sample.input.dtype).to(output.dtype)
        gradients = list(torch.autograd.grad(output, leaves, weights, allow_unused=True))
    return [output.detach(), *gradients, *rest]


def same_layout(a: Tensor, b: Tensor) -> bool:
    """Whether strides agree, where a stride means something."""
    pairs = zip(a.shape, a.stride(), b.stride())
    return a.numel() < 2 or all(x == y for size, x, y in pairs if size > 1)


def kind(value: Any) -> str:
    return value.__name__ if isinstance(value, type) else type(value).__name__
