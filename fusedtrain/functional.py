"""The names, arguments and numerics of ``torch.nn.functional``; the rules below are of activations.

Shared by all activations: ``input`` has any shape, dtype float32, float64, float16 or bfloat16
(other dtypes run in eager torch, with its results and errors). The result has the shape, dtype and
layout of the input. 16-bit math is done in float32. ``inplace=True`` overwrites and returns the
input. Backward saves one tensor: the output if the derivative is an exact function of the output,
else the input. Mistakes raise torch's errors, and nothing is modified. With the keyword ``out``
torch's function runs.
``save="q8"``, ``"q4"``, ``"q3"`` or ``"q2"`` keeps the derivative instead, in so many bits per
element (uint8): backward multiplies by the nearest level of a table (reference/few_bit.py, with its
source). The output is exact except for its last bit. Another ``save`` raises ValueError, a second
derivative (create_graph=True) RuntimeError. If torch must see plain operators (torch.compile,
TorchScript, functorch), nothing is rounded.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.jit import is_scripting as _scripting  # type: ignore[attr-defined]
from torch.overrides import has_torch_function_unary as _has

from . import _calls
from ._graph.fx import handle as _handle
from .ops import activations as _activations, few_bit as _few_bit
from .ops._library import public_in as _public_in
from .ops.activations_beyond_torch import *  # noqa: F403
from .ops.attention import *  # noqa: F403
from .ops.batch_norm import *  # noqa: F403
from .ops.bias_act import *  # noqa: F403
from .ops.channelwise import *  # noqa: F403
from .ops.depthwise import *  # noqa: F403
from .ops.gated import *  # noqa: F403
from .ops.group_norm import *  # noqa: F403
from .ops.images import *  # noqa: F403
from .ops.pool import *  # noqa: F403
from .ops.row_norm import *  # noqa: F403
from .ops.scale_add import *  # noqa: F403
from .reference import activations as _reference

_K, _F = _activations.KERNELS, _activations.FUNCTIONS
_relu, _relu6, _leaky_relu = _F["relu"], _F["relu6"], _F["leaky_relu"]
_elu, _celu, _selu, _silu, _mish = _F["elu"], _F["celu"], _F["selu"], _F["silu"], _F["mish"]
_sigmoid, _logsigmoid, _softplus = _F["sigmoid"], _F["logsigmoid"], _F["softplus"]
_tanh, _tanhshrink, _softsign = _F["tanh"], _F["tanhshrink"], _F["softsign"]
_hardswish, _hardsigmoid, _hardtanh = _F["hardswish"], _F["hardsigmoid"], _F["hardtanh"]
_hardshrink, _softshrink, _threshold = _F["hardshrink"], _F["softshrink"], _F["threshold"]


def relu(input: Tensor, inplace: bool = False, save: str | None = None) -> Tensor:
    """``max(x, 0)``; saves the output. See :func:`torch.nn.functional.relu`.

    ``save="q1"`` keeps 1 bit per element instead, and stays exact: for an output that no other
    backward saves (before a pooling, a sum, a layer that is not trained).

    Example:
        >>> relu(torch.tensor([-1.0, 2.0]))
        tensor([0., 2.])
    """
    if _scripting():
        return input.copy_(_reference.relu(input.clone())) if inplace else _reference.relu(input)
    if _has(input):
        return _handle(relu, (input,), input, inplace=inplace, save=save)
    if save is not None:
        return _few_bit.run(_K["relu"], input, inplace, save)
    return _relu(input, inplace)


def relu6(input: Tensor, inplace: bool = False) -> Tensor:
    """``min(max(x, 0), 6)``; saves the output. See :func:`torch.nn.functional.relu6`.

    Example:
        >>> relu6(torch.tensor([-1.0, 2.0, 7.0]))
        tensor([0., 2., 6.])
    """
    if _scripting():
        return input.copy_(_reference.relu6(input.clone())) if inplace else _reference.relu6(input)
    if _has(input):
        return _handle(relu6, (input,), input, inplace=inplace)
    return _relu6(input, inplace)


def leaky_relu(input: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> Tensor:
    """``x if x > 0 else negative_slope * x``; saves the output if ``negative_slope >= 0``, else
    runs eager torch. See :func:`torch.nn.functional.leaky_relu`.

    Example:
        >>> leaky_relu(torch.tensor([-1.0, 2.0]), 0.5)
        tensor([-0.5000,  2.0000])
    """
    if _scripting():
        if inplace:
            return input.copy_(_reference.leaky_relu(input.clone(), negative_slope))
        return _reference.leaky_relu(input, negative_slope)
    if _has(input):
        return _handle(leaky_relu, (input,), input, negative_slope=negative_slope, inplace=inplace)
    return _leaky_relu(input, inplace, negative_slope)


def elu(input: Tensor, alpha: float = 1.0, inplace: bool = False) -> Tensor:
    """``x if x > 0 else alpha * (exp(x) - 1)``; saves the input. ``inplace=True`` saves only the
    output, as torch does: for outputs near ``-alpha`` gradients lose digits. See
    :func:`torch.nn.functional.elu`.

    Example:
        >>> elu(torch.tensor([-1.0, 2.0]))
        tensor([-0.6321,  2.0000])
    """
    if _scripting():
        if inplace:
            return input.copy_(_reference.elu(input.clone(), alpha))
        return _reference.elu(input, alpha)
    if _has(input):
        return _handle(elu, (input,), input, alpha=alpha, inplace=inplace)
    return _elu(input, inplace, alpha)


def celu(input: Tensor, alpha: float = 1.0, inplace: bool = False) -> Tensor:
    """``max(x, 0) + min(0, alpha * (exp(x / alpha) - 1))``; saves the input, or in place the
    output, as :func:`elu`. See :func:`torch.nn.functional.celu`.

    Example:
        >>> celu(torch.tensor([-1.0, 2.0]), 2.0)
        tensor([-0.7869,  2.0000])
    """
    if _scripting():
        if inplace:
            return input.copy_(_reference.celu(input.clone(), alpha))
        return _reference.celu(input, alpha)
    if _has(input):
        return _handle(celu, (input,), input, alpha=alpha, inplace=inplace)
    return _celu(input, inplace, alpha)


def selu(input: Tensor, inplace: bool = False) -> Tensor:
    """``scale * (max(x, 0) + min(0, alpha * (exp(x) - 1)))`` with the constants of
    arXiv:1706.02515; saves the input, in place the output, as :func:`elu`. See
    :func:`torch.nn.functional.selu`.

    Example:
        >>> selu(torch.tensor([-1.0, 2.0]))
        tensor([-1.1113,  2.1014])
    """
    if _scripting():
        return input.copy_(_reference.selu(input.clone())) if inplace else _reference.selu(input)
    if _has(input):
        return _handle(selu, (input,), input, inplace=inplace)
    return _selu(input, inplace)


def silu(input: Tensor, inplace: bool = False, save: str | None = None) -> Tensor:
    """``x * sigmoid(x)`` (arXiv:1702.03118); saves the input. 0 at -inf, where torch has nan.
    See :func:`torch.nn.functional.silu`.

    ``save`` keeps the derivative in few bits. Its largest and rms errors for x ~ N(0, 1):
    q8 0.0024, 0.0014; q4 0.041, 0.022; q3 0.080, 0.045; q2 0.158, 0.089.

    Example:
        >>> silu(torch.tensor([-1.0, 2.0]))
        tensor([-0.2689,  1.7616])
    """
    if _scripting():
        return input.copy_(_reference.silu(input.clone())) if inplace else _reference.silu(input)
    if _has(input):
        return _handle(silu, (input,), input, inplace=inplace, save=save)
    if save is not None:
        return _few_bit.run(_K["silu"], input, inplace, save)
    return _silu(input, inplace)


def mish(input: Tensor, inplace: bool = False, save: str | None = None) -> Tensor:
    """``x * tanh(softplus(x))`` (arXiv:1908.08681); saves the input. 0 at -inf, where torch
    has nan. See :func:`torch.nn.functional.mish`.

    ``save`` keeps the derivative in few bits. Its largest and rms errors for x ~ N(0, 1):
    q8 0.0024, 0.0014; q4 0.044, 0.022; q3 0.085, 0.043; q2 0.172, 0.088.

    Example:
        >>> mish(torch.tensor([-1.0, 2.0]))
        tensor([-0.3034,  1.9440])
    """
    if _scripting():
        return input.copy_(_reference.mish(input.clone())) if inplace else _reference.mish(input)
    if _has(input):
        return _handle(mish, (input,), input, inplace=inplace, save=save)
    if save is not None:
        return _few_bit.run(_K["mish"], input, inplace, save)
    return _mish(input, inplace)


def sigmoid(input: Tensor, out: Tensor | None = None) -> Tensor:
    """``1 / (1 + exp(-x))``; saves the output. See :func:`torch.sigmoid`.

    Example:
        >>> sigmoid(torch.tensor([-1.0, 2.0]))
        tensor([0.2689, 0.8808])
    """
    if out is not None:
        return torch.sigmoid(input, out=out)
    if _scripting():
        return _reference.sigmoid(input)
    if _has(input):
        return _handle(sigmoid, (input,), input)
    return _sigmoid(input, False)


def logsigmoid(input: Tensor, out: Tensor | None = None) -> Tensor:
    """``log(sigmoid(x))``; saves the output. See :func:`torch.nn.functional.logsigmoid`. On the
    CPU the output is contiguous, as torch's.

    Example:
        >>> logsigmoid(torch.tensor([-1.0, 2.0]))
        tensor([-1.3133, -0.1269])
    """
    if out is not None:
        return torch.nn.functional.logsigmoid(input, out=out)  # type: ignore[call-arg]
    if _scripting():
        return _reference.logsigmoid(input)
    if _has(input):
        return _handle(logsigmoid, (input,), input)
    return _logsigmoid(_calls.for_logsigmoid(input), False)


def tanh(input: Tensor, out: Tensor | None = None) -> Tensor:
    """Hyperbolic tangent; saves the output. See :func:`torch.tanh`.

    Example:
        >>> tanh(torch.tensor([-1.0, 2.0]))
        tensor([-0.7616,  0.9640])
    """
    if out is not None:
        return torch.tanh(input, out=out)
    if _scripting():
        return _reference.tanh(input)
    if _has(input):
        return _handle(tanh, (input,), input)
    return _tanh(input, False)


def tanhshrink(input: Tensor) -> Tensor:
    """``x - tanh(x)``; saves the input. See :func:`torch.nn.functional.tanhshrink`.

    Example:
        >>> tanhshrink(torch.tensor([-1.0, 2.0]))
        tensor([-0.2384,  1.0360])
    """
    if _scripting():
        return _reference.tanhshrink(input)
    if _has(input):
        return _handle(tanhshrink, (input,), input)
    return _tanhshrink(input, False)


def softsign(input: Tensor) -> Tensor:
    """``x / (1 + |x|)``; saves the output. +-1 at +-inf, where torch has nan. See
    :func:`torch.nn.functional.softsign`.

    Example:
        >>> softsign(torch.tensor([-1.0, 3.0]))
        tensor([-0.5000,  0.7500])
    """
    if _scripting():
        return _reference.softsign(input)
    if _has(input):
        return _handle(softsign, (input,), input)
    return _softsign(input, False)


def hardswish(input: Tensor, inplace: bool = False, save: str | None = None) -> Tensor:
    """``x * min(max(x + 3, 0), 6) / 6`` (arXiv:1905.02244); saves the input. 0 at -inf, where
    torch has nan. See :func:`torch.nn.functional.hardswish`.

    ``save`` keeps the derivative in few bits. Its largest and rms errors for x ~ N(0, 1):
    q8 0.0040, 0.0023; q4 0.177, 0.030; q3 0.313, 0.059; q2 0.507, 0.110.

    Example:
        >>> hardswish(torch.tensor([-1.0, 2.0]))
        tensor([-0.3333,  1.6667])
    """
    if _scripting():
        if inplace:
            return input.copy_(_reference.hardswish(input.clone()))
        return _reference.hardswish(input)
    if _has(input):
        return _handle(hardswish, (input,), input, inplace=inplace, save=save)
    if save is not None:
        return _few_bit.run(_K["hardswish"], input, inplace, save)
    return _hardswish(input, inplace)


def hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    """``min(max(x + 3, 0), 6) / 6``; saves the output. See
    :func:`torch.nn.functional.hardsigmoid`.

    Example:
        >>> hardsigmoid(torch.tensor([-1.5, 4.0]))
        tensor([0.2500, 1.0000])
    """
    if _scripting():
        if inplace:
            return input.copy_(_reference.hardsigmoid(input.clone()))
        return _reference.hardsigmoid(input)
    if _has(input):
        return _handle(hardsigmoid, (input,), input, inplace=inplace)
    return _hardsigmoid(input, inplace)


def hardtanh(
    input: Tensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False
) -> Tensor:
    """``min(max(x, min_val), max_val)``; saves the output. See
    :func:`torch.nn.functional.hardtanh`.

    Raises:
        ValueError: ``min_val`` is greater than ``max_val``.

    Example:
        >>> hardtanh(torch.tensor([-2.0, 0.5]))
        tensor([-1.0000,  0.5000])
    """
    if _scripting():
        if inplace:
            return input.copy_(_reference.hardtanh(input.clone(), min_val, max_val))
        return _reference.hardtanh(input, min_val, max_val)
    if _has(input):
        return _handle(hardtanh, (input,), input, min_val=min_val, max_val=max_val, inplace=inplace)
    return _hardtanh(input, inplace, min_val, max_val)


def hardshrink(input: Tensor, lambd: float = 0.5, out: Tensor | None = None) -> Tensor:
    """``x if |x| > lambd else 0``; saves the output. See
    :func:`torch.nn.functional.hardshrink`.

    Example:
        >>> hardshrink(torch.tensor([-1.0, 0.25]))
        tensor([-1.,  0.])
    """
    if out is not None:
        return torch.hardshrink(input, lambd, out=out)
    if _scripting():
        return _reference.hardshrink(input, lambd)
    if _has(input):
        return _handle(hardshrink, (input,), input, lambd=lambd)
    return _hardshrink(input, False, lambd)


def softshrink(input: Tensor, lambd: float = 0.5, out: Tensor | None = None) -> Tensor:
    """``sign(x) * max(|x| - lambd, 0)``; saves the output. See
    :func:`torch.nn.functional.softshrink`.

    Raises:
        RuntimeError: ``lambd`` is negative.

    Example:
        >>> softshrink(torch.tensor([-1.0, 0.75]))
        tensor([-0.5000,  0.2500])
    """
    if out is not None:
        return torch.nn.functional.softshrink(input, lambd, out=out)  # type: ignore[call-arg]
    if _scripting():
        return _reference.softshrink(input, lambd)
    if _has(input):
        return _handle(softshrink, (input,), input, lambd=lambd)
    return _softshrink(input, False, lambd)


def threshold(input: Tensor, threshold: float, value: float, inplace: bool = False) -> Tensor:
    """``x if x > threshold else value``; saves the input. Without gradients `inplace` takes
    expanded tensors, too, as in torch. See :func:`torch.nn.functional.threshold`.

    Example:
        >>> threshold(torch.tensor([-1.0, 2.0]), 0.5, -3.0)
        tensor([-3.,  2.])
    """
    if _scripting():
        if inplace:
            return input.copy_(_reference.threshold(input.clone(), threshold, value))
        return _reference.threshold(input, threshold, value)
    if _has(input):
        return _handle(
            _public_threshold, (input,), input, threshold=threshold, value=value, inplace=inplace
        )
    if inplace and _calls.takes(input) and 0 in input.stride() and not _calls.needs_grad(input):
        return torch.nn.functional.threshold(input, threshold, value, True)
    return _threshold(input, inplace, threshold, value)


_public_threshold = threshold  # inside the function an argument has this name


def gelu(
    input: Tensor,
    approximate: str = "none",
    save: str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """``x * Phi(x)`` (arXiv:1606.08415); saves the input. See :func:`torch.nn.functional.gelu`.

    Args:
        input: any shape.
        approximate: ``"none"`` for the exact form, ``"tanh"`` for
            ``x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))``.
        save: ``None``, ``"q8"``, ``"q4"``, ``"q3"`` or ``"q2"``.

    ``save`` keeps the derivative in few bits. Its largest and rms errors for x ~ N(0, 1):
    q8 0.0025, 0.0015; q4 0.047, 0.022; q3 0.092, 0.044; q2 0.190, 0.090.

    Example:
        >>> gelu(torch.tensor([-1.0, 2.0]))
        tensor([-0.1587,  1.9545])
    """
    if out is not None:
        return torch.nn.functional.gelu(input, approximate=approximate, out=out)  # type: ignore[call-arg]
    if _scripting():
        return torch.nn.functional.gelu(input, approximate=approximate)
    if _has(input):
        return _handle(gelu, (input,), input, approximate=approximate, save=save)
    if approximate not in ("none", "tanh"):
        raise RuntimeError("approximate argument must be either none or tanh.")
    name = "gelu" if approximate == "none" else "gelu_tanh"
    if save is not None:
        return _few_bit.run(_K[name], input, False, save)
    return _F[name](input, False)


def softplus(
    input: Tensor, beta: float = 1.0, threshold: float = 20.0, out: Tensor | None = None
) -> Tensor:
    """``log(1 + exp(beta * x)) / beta``; ``x`` where ``beta * x > threshold``. Saves the output.

    Eager torch runs for a ``threshold`` below 20, because the output then does not determine the
    branch, and for a ``beta`` outside of 0.001 ... 1000. Autocast on CUDA computes in float32, as
    in torch. See :func:`torch.nn.functional.softplus`.

    Example:
        >>> softplus(torch.tensor([-1.0, 2.0]))
        tensor([0.3133, 2.1269])
    """
    if out is not None:
        return torch.nn.functional.softplus(input, beta, threshold, out=out)  # type: ignore[call-arg]
    if _scripting():
        return _reference.softplus(input, beta, threshold)
    if _has(input):
        return _handle(softplus, (input,), input, beta=beta, threshold=threshold)
    if _calls.autocasts(input, "cuda"):
        input = input.float()
    return _softplus(input, False, beta, threshold)


__all__ = _public_in(vars())
