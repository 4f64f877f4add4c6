"""Models in half precision whose batch norms stay in float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..amp._casts import convert_module, convert_network, is_affine_norm


class tofp16(nn.Module):
    """A layer that converts its input to float16.

    Args of forward:
        input: a tensor of any shape and dtype.

    Example:
        >>> tofp16()(torch.ones(2))
        tensor([1., 1.], dtype=torch.float16)
    """

    def forward(self, input: Tensor) -> Tensor:
        return input.half()


def BN_convert_float(module: nn.Module) -> nn.Module:
    """Converts the batch norms in `module` that have weights to float32, in place.

    Every torch.nn.modules.batchnorm._BatchNorm with affine=True counts: torch's, SyncBatchNorm,
    `fusedtrain.nn.BatchNormAct2d` and the like. Parameters, running statistics and gradients of the
    norm are converted; its submodules (an activation with a weight) are not.

    Args:
        module: a model, or a batch norm.

    Returns:
        The same module.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).half()
        >>> [p.dtype for p in BN_convert_float(model).parameters()][1:3]
        [torch.float16, torch.float32]
    """
    for norm in module.modules():
        if is_affine_norm(norm):
            convert_module(norm, torch.float32)
    return module


def network_to_half(network: nn.Module) -> nn.Sequential:
    """Converts a network to float16, its batch norms to float32, and its input to float16.

    Unlike Apex, it does not change a float32 batch norm by a bit: Apex converted them to float16
    and back, which made a running variance above 65504 infinite.

    Args:
        network: converted in place, see `convert_network`.

    Returns:
        ``nn.Sequential(tofp16(), network)``, which takes one tensor. The keys of its state_dict
        begin with ``1.``.

    Example:
        >>> model = network_to_half(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
        >>> model(torch.ones(3, 2)).dtype
        torch.float16
        >>> model[1][1].weight.dtype
        torch.float32
    """
    return nn.Sequential(tofp16(), BN_convert_float(convert_network(network, torch.float16)))


class FP16Model(nn.Module):
    """A network in float16, with float32 batch norms, that converts its arguments.

    Floating tensors among the arguments of a call become float16. All other arguments pass
    unchanged: integer and complex tensors, numbers, None, lists and dicts with their tensors (Apex
    took only positional tensors, and converted indices to float16, too).

    Args:
        network: converted in place, see `network_to_half`; it becomes the submodule ``network``.

    Example:
        >>> model = FP16Model(nn.Embedding(3, 2))
        >>> model(torch.tensor([0, 2])).dtype
        torch.float16
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = BN_convert_float(convert_network(network, torch.float16))

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.network(
            *(_half(value) for value in inputs),
            **{name: _half(value) for name, value in kwargs.items()},
        )


def _half(value: Any) -> Any:
    return value.half() if isinstance(value, Tensor) and value.is_floating_point() else value
