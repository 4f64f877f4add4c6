"""Activation modules: those of ``torch.nn`` as subclasses with a fused ``forward``, and more.

A subclass keeps everything of its torch module: arguments, defaults, attributes, state_dict,
``isinstance``. Shapes, dtypes and what backward saves: see :mod:`fusedtrain.functional`.
"""

import torch
from torch import Tensor, nn
from torch.jit import is_scripting  # type: ignore[attr-defined]

from .. import functional as F
from .._graph.hooks import all_are_hooked, is_untouched
from .saving import SavingActivation


class ReLU(SavingActivation, nn.ReLU):
    """Fused :class:`torch.nn.ReLU`; see :func:`fusedtrain.functional.relu`.

    Example:
        >>> ReLU()(torch.tensor([-1.0, 2.0]))
        tensor([0., 2.])
    """

    _op = "relu"

    def forward(self, input: Tensor) -> Tensor:
        return F.relu(input, self.inplace, save=self.save)


class ReLU6(nn.ReLU6):
    """Fused :class:`torch.nn.ReLU6`; see :func:`fusedtrain.functional.relu6`.

    Example:
        >>> ReLU6()(torch.tensor([-1.0, 7.0]))
        tensor([0., 6.])
    """

    def forward(self, input: Tensor) -> Tensor:
        return F.relu6(input, self.inplace)


class LeakyReLU(nn.LeakyReLU):
    """Fused :class:`torch.nn.LeakyReLU`; see :func:`fusedtrain.functional.leaky_relu`.

    Example:
        >>> LeakyReLU(0.5)(torch.tensor([-1.0, 2.0]))
        tensor([-0.5000,  2.0000])
    """

    def forward(self, input: Tensor) -> Tensor:
        return F.leaky_relu(input, self.negative_slope, self.inplace)


class PReLU(nn.PReLU):
    """Fused :class:`torch.nn.PReLU`; see :func:`fusedtrain.functional.prelu`.

    Example:
        >>> PReLU()(torch.tensor([-1.0, 2.0]))
        tensor([-0.2500,  2.0000], grad_fn=<PreluBackward>)
    """

    def forward(self, input: Tensor) -> Tensor:
        return F.prelu(input, self.weight)


class ELU(nn.ELU):
    """Fused :class:`torch.nn.ELU`; see :func:`fusedtrain.functional.elu`.

    Example:
        >>> ELU()(torch.tensor([-1.0, 2.0]))
        tensor([-0.6321,  2.0000])
    """

    def forward(self, input: Tensor) -> Tensor:
        return F.elu(input, self.alpha, self.inplace)


class CELU(nn.CELU):
    """Fused :class:`torch.nn.CELU`; see :func:`fusedtrain.functional.celu`.

    Example:
        >>> CELU(2.0)(torch.tensor([-1.0, 2.0]))
        tensor([-0.7869,  2.0000])
    """

    def forward(self, input: Tensor) -> Tensor:
        return F.celu(input, self.alpha, self.inplace)


class SELU(nn.SELU):
    """Fused :class:`torch.nn.SELU`; see :func:`fusedtrain.functional.selu`.

    Example:
        >>> SELU()(torch.tensor([-1.0, 2.0]))
        tensor([-1.1113,  2.1014])
    """

    def forward(self, input: Tensor) -> Tensor:
        return F.selu(input, self.inplace)


class SiLU(SavingActivation, nn.SiLU):
    """Fused :class:`torch.nn.SiLU`; see :func:`fusedtrain.functional.silu`.

    Example:
        >>> SiLU()(torch.tensor([-1.0, 2.0]))
        tensor([-0.2689,  1.7616])
    """

    _op = "silu"

    def forward(self, input: Tensor) -> Tensor:
        return F.silu(input, self.inplace, save=self.save)


class Mish(SavingActivation, nn.Mish):
    """Fused :class:`torch.nn.Mish`; see :func:`fusedtrain.functional.mish`.

    Example:
        >>> Mish()(torch.tensor([-1.0, 2.0]))
        tensor([-0.3034,  1.9440])
    """

    _op = "mish"

    def forward(self, input: Tensor) -> Tensor:
        return F.mish(input, self.inplace, save=self.save)


class GELU(SavingActivation, nn.GELU):
    """Fused :class:`torch.nn.GELU`; see :func:`fusedtrain.functional.gelu`.

    Example:
        >>> GELU("tanh")(torch.tensor([-1.0, 2.0]))
        tensor([-0.1588,  1.9546])
    """

    __constants__ = ["approximate", "save"]  # noqa: RUF012 (as torch has it)
    _op = "gelu"

    def __init__(self, approximate: str = "none", save: str | None = None) -> None:
        nn.GELU.__init__(self, approximate)
        self._keep(save)

    def forward(self, input: Tensor) -> Tensor:
        return F.gelu(input, self.approximate, save=self.save)


class Sigmoid(nn.Sigmoid):
    """Fused :class:`torch.nn.Sigmoid`; see :func:`fusedtrain.functional.sigmoid`.

    Example:
        >>> Sigmoid()(torch.tensor([-1.0, 2.0]))
        tensor([0.2689, 0.8808])
    """

    def forward(self, input: Tensor) -> Tensor:
        return F.sigmoid(input)


class LogSigmoid(nn.LogSigmoid):
    """Fused :class:`torch.nn.LogSigmoid`; see :func:`fusedtrain.functional.logsigmoid`.

    Example:
        >>> LogSigmoid()(torch.tensor([-1.0, 2.0]))
        tensor([-1.3133, -0.1269])
    """

    def forward(self, input: Tensor) -> Tensor:
        return F.logsigmoid(input)


class Tanh(nn.Tanh):
    """Fused :class:`torch.nn.Tanh`; see :func:`fusedtrain.functional.tanh`.

    Example:
        >>> Tanh()(torch.tensor([-1.0, 2.0]))
        tensor([-0.7616,  0.9640])
    """

    def forward(self, input: Tensor) -> Tensor:
        return F.tanh(input)


class Tanhshrink(nn.Tanhshrink):
    """Fused :class:`torch.nn.Tanhshrink`; see :func:`fusedtrain.functional.tanhshrink`.

    Example:
        >>> Tanhshrink()(torch.tensor([-1.0, 2.0]))
        tensor([-0.2384,  1.0360])
    """

    def forward(self, input: Tensor) -> Tensor:
        return F.tanhshrink(input)


class Softplus(nn.Softplus):
    """Fused :class:`torch.nn.Softplus`; see :func:`fusedtrain.functional.softplus`.

    Example:
        >>> Softplus()(torch.tensor([-1.0, 2.0]))
        tensor([0.3133, 2.1269])
    """

    def forward(self, input: Tensor) -> Tensor:
        return F.softplus(input, self.beta, self.threshold)


class Softsign(nn.Softsign):
    """Fused :class:`torch.nn.Softsign`; see :func:`fusedtrain.functional.softsign`.

    Example:
        >>> Softsign()(torch.tensor([-1.0, 3.0]))
        tensor([-0.5000,  0.7500])
    """

    def forward(self, input: Tensor) -> Tensor:
        return F.softsign(input)


class Hardswish(SavingActivation, nn.Hardswish):
    """Fused :class:`torch.nn.Hardswish`; see :func:`fusedtrain.functional.hardswish`.

    Example:
        >>> Hardswish()(torch.tensor([-1.0, 2.0]))
        tensor([-0.3333,  1.6667])
    """

    _op = "hardswish"

    def forward(self, input: Tensor) -> Tensor:
        return F.hardswish(input, self.inplace, save=self.save)


class Hardsigmoid(nn.Hardsigmoid):
    """Fused :class:`torch.nn.Hardsigmoid`; see :func:`fusedtrain.functional.hardsigmoid`.

    Example:
        >>> Hardsigmoid()(torch.tensor([-1.5, 4.0]))
        tensor([0.2500, 1.0000])
    """

    def forward(self, input: Tensor) -> Tensor:
        return F.hardsigmoid(input, self.inplace)


class Hardtanh(nn.Hardtanh):
    """Fused :class:`torch.nn.Hardtanh`; see :func:`fusedtrain.functional.hardtanh`.

    Example:
        >>> Hardtanh(-2.0, 2.0)(torch.tensor([-3.0, 1.0]))
        tensor([-2.,  1.])
    """

    def forward(self, input: Tensor) -> Tensor:
        return F.hardtanh(input, self.min_val, self.max_val, self.inplace)


class Hardshrink(nn.Hardshrink):
    """Fused :class:`torch.nn.Hardshrink`; see :func:`fusedtrain.functional.hardshrink`.

    Example:
        >>> Hardshrink()(torch.tensor([-1.0, 0.25]))
        tensor([-1.,  0.])
    """

    def forward(self, input: Tensor) -> Tensor:
        return F.hardshrink(input, self.lambd)


class Softshrink(nn.Softshrink):
    """Fused :class:`torch.nn.Softshrink`; see :func:`fusedtrain.functional.softshrink`.

    Example:
        >>> Softshrink()(torch.tensor([-1.0, 0.75]))
        tensor([-0.5000,  0.2500])
    """

    def forward(self, input: Tensor) -> Tensor:
        return F.softshrink(input, self.lambd)


class Threshold(nn.Threshold):
    """Fused :class:`torch.nn.Threshold`; see :func:`fusedtrain.functional.threshold`.

    Example:
        >>> Threshold(0.5, -3.0)(torch.tensor([-1.0, 2.0]))
        tensor([-3.,  2.])
    """

    def forward(self, input: Tensor) -> Tensor:
        return F.threshold(input, self.threshold, self.value, self.inplace)


def changed_relu(module: nn.Module) -> nn.Module | None:
    """The ReLU in a module that had a class of timm, if a call of it is not that of a plain one."""
    relu = module._modules.get("relu")
    if relu is None or (
        type(relu) in (nn.ReLU, ReLU)
        and is_untouched(relu, type(relu))
        and not (relu.inplace or all_are_hooked())
    ):
        return None
    return relu


class _InPlace(nn.Module):
    """An activation that torch.nn does not have, with the argument that its own ones have."""

    def __init__(self, inplace: bool = False) -> None:
        super().__init__()
        self.inplace = inplace


class QuickGELU(SavingActivation, _InPlace):
    """``x * sigmoid(1.702 * x)``; see :func:`fusedtrain.functional.quick_gelu`.

    Example:
        >>> QuickGELU()(torch.tensor([-1.0, 2.0]))
        tensor([-0.1542,  1.9357])
    """

    _op = "quick_gelu"

    def forward(self, input: Tensor) -> Tensor:
        return F.quick_gelu(input, self.inplace, save=self.save)


class ReLUSquared(_InPlace):
    """``max(x, 0)^2``; see :func:`fusedtrain.functional.relu_squared`.

    Example:
        >>> ReLUSquared()(torch.tensor([-1.0, 3.0]))
        tensor([0., 9.])
    """

    def forward(self, input: Tensor) -> Tensor:
        if not is_scripting():
            relu = changed_relu(self)
            if relu is not None:
                return torch.square(relu(input))
        return F.relu_squared(input, self.inplace)


class StarReLU(nn.Module):
    """``scale * max(x, 0)^2 + bias`` with a trained scale and bias (arXiv:2210.13452).

    Parameters ``scale`` and ``bias`` have the shape (1,), as timm's. For an input of unit variance
    the paper's constants are 0.8944 and -0.4472.

    Args:
        scale_value: initial scale.
        bias_value: initial bias.
        scale_learnable: whether the scale is trained.
        bias_learnable: whether the bias is trained.
        device: of the two parameters.
        dtype: of the two parameters.

    Example:
        >>> StarReLU(0.5, 0.25, False, False)(torch.tensor([-1.0, 2.0]))
        tensor([0.2500, 2.2500])
    """

    def __init__(
        self,
        scale_value: float = 1.0,
        bias_value: float = 0.0,
        scale_learnable: bool = True,
        bias_learnable: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.scale = nn.Parameter(
            torch.full((1,), scale_value, device=device, dtype=dtype), requires_grad=scale_learnable
        )
        self.bias = nn.Parameter(
            torch.full((1,), bias_value, device=device, dtype=dtype), requires_grad=bias_learnable
        )

    def forward(self, input: Tensor) -> Tensor:
        if not is_scripting():
            relu = changed_relu(self)
            if relu is not None:
                return self.scale * relu(input) ** 2 + self.bias
        return F.star_relu(input, self.scale, self.bias)


class HardMish(_InPlace):
    """``x * min(max(x + 2, 0), 2) / 2``; see :func:`fusedtrain.functional.hard_mish`.

    Example:
        >>> HardMish()(torch.tensor([-1.0, 3.0]))
        tensor([-0.5000,  3.0000])
    """

    def forward(self, input: Tensor) -> Tensor:
        return F.hard_mish(input, self.inplace)


class SquarePlus(nn.Module):
    """``(x + sqrt(x^2 + b)) / 2``; see :func:`fusedtrain.functional.squareplus`.

    Raises:
        ValueError: ``b`` is negative.

    Example:
        >>> SquarePlus()(torch.tensor([0.0, 1.5]))
        tensor([1., 2.])
    """

    def __init__(self, b: float = 4.0) -> None:
        super().__init__()
        if b < 0:
            raise ValueError(f"SquarePlus: b must be at least 0, not {b}")
        self.b = b

    def forward(self, input: Tensor) -> Tensor:
        return F.squareplus(input, self.b)

    def extra_repr(self) -> str:
        return f"b={self.b}"
