"""A convolution with a forward of its own, on the instance: class, parameters and names stay."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from .._graph.forward import Replacement
from ._kinds import is_transposed, spatial


class Convolving(Replacement):
    """Replacement of the forward of `conv`, which `norm` follows."""

    def __init__(self, conv: nn.Module, norm: nn.Module) -> None:
        self.conv: Any = conv
        self.norm: Any = norm
        self.rank = spatial(conv) + 2
        self.transposed = is_transposed(conv)

    def _module(self) -> nn.Module | None:
        return vars(self).get("conv")

    def convolve(
        self, weight: Tensor, bias: Tensor | None, input: Tensor, output_size: Any = None
    ) -> Tensor:
        """The computation of the convolution's class, with another weight and bias."""
        conv, dims = self.conv, self.rank - 2
        if not self.transposed:
            output: Tensor = (
                conv._conv_forward(input, weight, bias) if dims else F.linear(input, weight, bias)
            )
            return output
        padding = conv._output_padding(
            input, output_size, conv.stride, conv.padding, conv.kernel_size, dims, conv.dilation
        )
        output = getattr(F, f"conv_transpose{dims}d")(
            input, weight, bias, conv.stride, conv.padding, padding, conv.groups, conv.dilation
        )
        return output
