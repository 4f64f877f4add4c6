"""Activations that torch does not have; :mod:`fusedtrain.functional` has their names, and says what
they all have in common."""

from __future__ import annotations

from torch import Tensor
from torch.jit import is_scripting as _scripting  # type: ignore[attr-defined]
from torch.overrides import has_torch_function_unary as _has

from .._calls import autocasts
from .._graph.fx import handle as _handle
from ..reference import activations_beyond_torch as _reference
from . import few_bit as _few_bit
from .activations import FUNCTIONS as _F, KERNELS as _K

__all__ = ["hard_mish", "quick_gelu", "relu_squared", "squareplus"]

_quick_gelu, _relu_squared = _F["quick_gelu"], _F["relu_squared"]
_hard_mish, _squareplus = _F["hard_mish"], _F["squareplus"]


def quick_gelu(input: Tensor, inplace: bool = False, save: str | None = None) -> Tensor:
    """``x * sigmoid(1.702 * x)`` (arXiv:1606.08415, section 2); saves the input.

    ``save`` keeps the derivative in few bits. Its error, at most and rms for x ~ N(0, 1):
    q8 0.0024, 0.0014; q4 0.046, 0.021; q3 0.090, 0.041; q2 0.187, 0.085.

    Example:
        >>> quick_gelu(torch.tensor([-1.0, 2.0]))
        tensor([-0.1542,  1.9357])
    """
    if _scripting():
        if inplace:
            return input.copy_(_reference.quick_gelu(input.clone()))
        return _reference.quick_gelu(input)
    if _has(input):
        return _handle(quick_gelu, (input,), input, inplace=inplace, save=save)
    if save is not None:
        return _few_bit.run(_K["quick_gelu"], input, inplace, save)
    return _quick_gelu(input, inplace)


def relu_squared(input: Tensor, inplace: bool = False) -> Tensor:
    """``max(x, 0)^2`` (arXiv:2109.08668); saves the input: in float16 the square of a number below
    2e-4 is 0, and the gradient is not.

    Under autocast on CUDA the result is float32, as torch's square is, unless in place.

    Example:
        >>> relu_squared(torch.tensor([-1.0, 3.0]))
        tensor([0., 9.])
    """
    if _scripting():
        if inplace:
            return input.copy_(_reference.relu_squared(input.clone()))
        return _reference.relu_squared(input)
    if _has(input):
        return _handle(relu_squared, (input,), input, inplace=inplace)
    if not inplace and autocasts(input, "cuda"):
        input = input.float()
    return _relu_squared(input, inplace)


def hard_mish(input: Tensor, inplace: bool = False) -> Tensor:
    """``x * min(max(x + 2, 0), 2) / 2`` (as timm); saves the input.

    Example:
        >>> hard_mish(torch.tensor([-1.0, 3.0]))
        tensor([-0.5000,  3.0000])
    """
    if _scripting():
        if inplace:
            return input.copy_(_reference.hard_mish(input.clone()))
        return _reference.hard_mish(input)
    if _has(input):
        return _handle(hard_mish, (input,), input, inplace=inplace)
    return _hard_mish(input, inplace)


def squareplus(input: Tensor, b: float = 4.0) -> Tensor:
    """``(x + sqrt(x^2 + b)) / 2`` (arXiv:2112.11687); saves the input.

    Raises:
        ValueError: ``b`` is negative.

    Example:
        >>> squareplus(torch.tensor([0.0, 1.5]))
        tensor([1., 2.])
    """
    if _scripting():
        return _reference.squareplus(input, b)
    if _has(input):
        return _handle(squareplus, (input,), input, b=b)
    return _squareplus(input, False, b)
