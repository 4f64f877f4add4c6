"""Norms over rows and over channels as modules."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.jit import is_scripting  # type: ignore[attr-defined]

from .. import functional as F
from .._graph.fx import module_call
from ..ops.row_norm import torch_layer_norm
from .act_layer import create_activation


class LayerNorm(nn.LayerNorm):
    """:class:`torch.nn.LayerNorm` by torch's kernel. Its output need not be kept: within
    :class:`fusedtrain.recompute` backward computes it again.

    Example:
        >>> import torch
        >>> LayerNorm(2)(torch.tensor([1.0, 3.0])).detach()
        tensor([-1.0000,  1.0000])
    """

    def forward(self, input: Tensor) -> Tensor:
        if is_scripting():
            return nn.functional.layer_norm(
                input, self.normalized_shape, self.weight, self.bias, self.eps
            )
        if isinstance(input, fx.Proxy):
            call = module_call(input)
            if call is not None:
                return call
        return torch_layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """:class:`torch.nn.RMSNorm` in one pass; see :func:`fusedtrain.functional.rms_norm`.

    Example:
        >>> import torch
        >>> RMSNorm(2)(torch.tensor([1.0, 7.0]))
        tensor([0.2000, 1.4000], grad_fn=<RowNormBackward>)
    """

    def forward(self, x: Tensor) -> Tensor:
        if is_scripting():
            return torch.rms_norm(x, self.normalized_shape, self.weight, self.eps)
        shape: Any = self.normalized_shape
        output: Any = F.rms_norm(x, shape, self.weight, self.eps)
        return output


class LayerNorm2d(nn.LayerNorm):
    """Layer norm over the channels of [N, C, H, W], with timm's name, arguments and state dict.

    The output has the layout of the input; see
    :func:`fusedtrain.functional.layer_norm_channels`.

    Args:
        num_channels: of the input.
        eps: added to the variance.
        affine: False: neither weight nor bias.
        kwargs: `bias`, `device` and `dtype` of :class:`torch.nn.LayerNorm`.

    Example:
        >>> import torch
        >>> LayerNorm2d(8)(torch.ones(2, 8, 3, 3)).sum().item()
        0.0
    """

    def __init__(
        self, num_channels: int, eps: float = 1e-6, affine: bool = True, **kwargs: Any
    ) -> None:
        super().__init__(num_channels, eps=eps, elementwise_affine=affine, **kwargs)

    def forward(self, input: Tensor) -> Tensor:
        return F.layer_norm_channels(input, self.weight, self.bias, self.eps)


class LayerNormAct2d(LayerNorm2d):
    """:class:`LayerNorm2d` and an activation, with timm's name, arguments and state dict.

    Args:
        num_channels, eps, affine, kwargs: as in :class:`LayerNorm2d`.
        apply_act: False is no activation.
        act_layer: class or name of an activation module.
        act_kwargs, inplace: arguments of `act_layer`.
        drop_layer: makes a module that is called between norm and activation.

    Example:
        >>> import torch
        >>> LayerNormAct2d(2)(torch.tensor([[[[1.0]], [[3.0]]]])).flatten().detach()
        tensor([0.0000, 1.0000])
    """

    def __init__(
        self,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        apply_act: bool = True,
        act_layer: Any = nn.ReLU,
        act_kwargs: Mapping[str, Any] | None = None,
        inplace: bool = True,
        drop_layer: Callable[[], nn.Module] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_channels, eps, affine, **kwargs)
        self.drop = nn.Identity() if drop_layer is None else drop_layer()
        self.act = create_activation(act_layer, act_kwargs, inplace) if apply_act else nn.Identity()

    def forward(self, input: Tensor) -> Tensor:
        if not is_scripting():
            call = module_call(input) if isinstance(input, fx.Proxy) else None
            if call is not None:
                return call
        norm = F.layer_norm_channels(input, self.weight, self.bias, self.eps)
        output: Tensor = self.act(self.drop(norm))
        return output


class RmsNorm2d(nn.RMSNorm):
    """RMS norm over the channels of [N, C, H, W], with timm's name, arguments and state dict.

    The output has the layout of the input; see :func:`fusedtrain.functional.rms_norm_channels`.

    Args:
        channels: of the input.
        eps: added to the mean of squares.
        affine: False: no weight.
        device, dtype: of the weight.

    Example:
        >>> import torch
        >>> RmsNorm2d(2)(torch.tensor([[[[1.0]], [[7.0]]]])).flatten().detach()
        tensor([0.2000, 1.4000])
    """

    def __init__(
        self, channels: int, eps: float = 1e-6, affine: bool = True, device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(channels, eps, affine, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm_channels(x, self.weight, self.eps)  # type: ignore[arg-type]
