"""Gated linear units as modules of a packed input; see :mod:`fusedtrain.functional`."""

import torch  # noqa: F401 (the examples)
from torch import Tensor, nn

from .. import functional as F


class GLU(nn.GLU):
    """Fused :class:`torch.nn.GLU`; see :func:`fusedtrain.functional.glu`.

    Example:
        >>> GLU()(torch.tensor([2.0, 3.0, 0.0, 100.0]))
        tensor([1., 3.])
    """

    def forward(self, input: Tensor) -> Tensor:
        return F.glu(input, self.dim)


class _Halves(nn.Module):
    """A gated linear unit of the halves of its input along `dim`; with `gate_last` the second half
    is the gate."""

    def __init__(self, dim: int = -1, gate_last: bool = False) -> None:
        super().__init__()
        self.dim, self.gate_last = dim, gate_last

    def extra_repr(self) -> str:
        return f"dim={self.dim}" + (", gate_last=True" if self.gate_last else "")


class SwiGLU(_Halves):
    """``silu(gate) * value`` of the halves of the input; see
    :func:`fusedtrain.functional.swiglu`.

    Example:
        >>> SwiGLU()(torch.tensor([0.0, 100.0, 2.0, 3.0]))
        tensor([  0., 300.])
    """

    def forward(self, input: Tensor) -> Tensor:
        return F.swiglu(input, None, self.dim, self.gate_last)


class GEGLU(_Halves):
    """``gelu(gate) * value`` of the halves of the input; see :func:`fusedtrain.functional.geglu`.

    Args:
        dim: which dimension of the input is halved.
        gate_last: whether the second half is the gate.
        approximate: "none" or "tanh".

    Example:
        >>> GEGLU()(torch.tensor([0.0, 100.0, 2.0, 3.0]))
        tensor([  0., 300.])
    """

    def __init__(self, dim: int = -1, gate_last: bool = False, approximate: str = "none") -> None:
        super().__init__(dim, gate_last)
        self.approximate = approximate

    def forward(self, input: Tensor) -> Tensor:
        return F.geglu(input, None, self.dim, self.gate_last, self.approximate)


class ReGLU(_Halves):
    """``relu(gate) * value`` of the halves of the input; see :func:`fusedtrain.functional.reglu`.

    Example:
        >>> ReGLU()(torch.tensor([-1.0, 1.0, 2.0, 3.0]))
        tensor([0., 3.])
    """

    def forward(self, input: Tensor) -> Tensor:
        return F.reglu(input, None, self.dim, self.gate_last)


class BilinearGLU(_Halves):
    """``gate * value`` of the halves of the input; see
    :func:`fusedtrain.functional.bilinear_glu`.

    Example:
        >>> BilinearGLU()(torch.tensor([-1.0, 1.0, 2.0, 3.0]))
        tensor([-2.,  3.])
    """

    def forward(self, input: Tensor) -> Tensor:
        return F.bilinear_glu(input, None, self.dim, self.gate_last)
