"""The names of ``apex.normalization``: norms of rows of this package. Under autocast their dtypes
are those of torch's norms.

``memory_efficient`` is accepted, and without effect: backward keeps the input, Apex's the output.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .. import functional as F
from ..nn.layer_norm import RMSNorm

__all__ = ["FusedLayerNorm", "FusedRMSNorm", "MixedFusedLayerNorm", "MixedFusedRMSNorm"]


class FusedLayerNorm(nn.LayerNorm):
    """:class:`torch.nn.LayerNorm` with the arguments of Apex's class.

    Example:
        >>> import torch
        >>> FusedLayerNorm(2, memory_efficient=True)(torch.tensor([1.0, 3.0])).detach()
        tensor([-1.0000,  1.0000])
    """

    def __init__(
        self, normalized_shape: Any, eps: float = 1e-5, elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(normalized_shape, eps=eps, elementwise_affine=elementwise_affine)

    def forward(self, input: Tensor) -> Tensor:
        shape: Any = self.normalized_shape
        output: Any = F.layer_norm(input, shape, self.weight, self.bias, self.eps)
        return output


class FusedRMSNorm(RMSNorm):
    """:class:`torch.nn.RMSNorm` with the arguments of Apex's class, whose `eps` is 1e-5.

    Example:
        >>> import torch
        >>> FusedRMSNorm(2)(torch.tensor([1.0, 7.0])).detach()
        tensor([0.2000, 1.4000])
    """

    def __init__(
        self, normalized_shape: Any, eps: float = 1e-5, elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(normalized_shape, eps=eps, elementwise_affine=elementwise_affine)


class _Mixed(nn.Module):
    """Casts the input to the dtype of the weight, which is always there."""

    weight: nn.Parameter

    def __init__(self, normalized_shape: Any, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__(normalized_shape, eps, **{**kwargs, "elementwise_affine": True})

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.to(self.weight.dtype))


class MixedFusedLayerNorm(_Mixed, FusedLayerNorm):
    """:class:`FusedLayerNorm` with parameters, whose dtype the output has.

    Example:
        >>> import torch
        >>> MixedFusedLayerNorm(2)(torch.ones(1, 2, dtype=torch.bfloat16)).dtype
        torch.float32
    """


class MixedFusedRMSNorm(_Mixed, FusedRMSNorm):
    """:class:`FusedRMSNorm` with a weight, whose dtype the output has.

    Example:
        >>> import torch
        >>> MixedFusedRMSNorm(2)(torch.ones(1, 2, dtype=torch.bfloat16)).dtype
        torch.float32
    """
