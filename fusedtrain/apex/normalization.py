"""The names of ``apex.normalization``: norms of rows of this package. Under autocast their dtypes
are those of torch's norms."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .. import functional as F

__all__ = ["FusedLayerNorm", "FusedRMSNorm", "MixedFusedLayerNorm", "MixedFusedRMSNorm"]


class FusedLayerNorm(nn.LayerNorm):
    """:class:`torch.nn.LayerNorm` with the arguments of Apex's class.

    Args:
        normalized_shape, eps, elementwise_affine: of :class:`torch.nn.LayerNorm`.
        memory_efficient: without effect; here backward keeps the input. Apex's keeps the output.

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
        self.memory_efficient = memory_efficient

    def forward(self, input: Tensor) -> Tensor:
        shape: Any = self.normalized_shape
        output: Any = F.layer_norm(input, shape, self.weight, self.bias, self.eps)
        return output


class FusedRMSNorm(nn.RMSNorm):
    """:class:`torch.nn.RMSNorm` with the arguments of Apex's class, whose `eps` is 1e-5.

    Args:
        normalized_shape, eps, elementwise_affine: of :class:`torch.nn.RMSNorm`.
        memory_efficient: without effect; here backward keeps the input. Apex's keeps the output.

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
        self.memory_efficient = memory_efficient

    def forward(self, input: Tensor) -> Tensor:
        shape: Any = self.normalized_shape
        output: Any = F.rms_norm(input, shape, self.weight, self.eps)
        return output


def _to_weight(module: Any, input: Tensor) -> Tensor:
    """The input in the dtype of the weight, which the output of Apex's mixed classes has."""
    return input.to(module.weight.dtype)


class MixedFusedLayerNorm(FusedLayerNorm):
    """:class:`FusedLayerNorm` whose output has the dtype of its parameters. It always has these.

    Example:
        >>> import torch
        >>> MixedFusedLayerNorm(2)(torch.ones(1, 2, dtype=torch.bfloat16)).dtype
        torch.float32
    """

    def __init__(self, normalized_shape: Any, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__(normalized_shape, eps, True, bool(kwargs.get("memory_efficient")))

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(_to_weight(self, input))


class MixedFusedRMSNorm(FusedRMSNorm):
    """:class:`FusedRMSNorm` whose output has the dtype of its weight. It always has one.

    Example:
        >>> import torch
        >>> MixedFusedRMSNorm(2)(torch.ones(1, 2, dtype=torch.bfloat16)).dtype
        torch.float32
    """

    def __init__(self, normalized_shape: Any, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__(normalized_shape, eps, True, bool(kwargs.get("memory_efficient")))

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(_to_weight(self, input))
