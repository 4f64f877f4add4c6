"""Dropout as a module, alone and behind a bias and an activation."""

from typing import Any

import torch
from torch import Tensor, nn

from .. import functional as F


class Dropout(nn.Dropout):
    """:class:`torch.nn.Dropout` that keeps 16 bytes for backward; see
    :func:`fusedtrain.functional.dropout`. `inplace=True` runs in eager torch.

    Example:
        >>> Dropout(0.25)(torch.ones(1000)).unique()
        tensor([0.0000, 1.3333])
    """

    def forward(self, input: Tensor) -> Tensor:
        return F.dropout(input, self.p, self.training, self.inplace)


class BiasActDropout(nn.Module):
    """A trained bias, an activation and dropout in one pass, to follow a linear layer or
    convolution without a bias. See :func:`fusedtrain.functional.bias_act_dropout`.

    Args:
        num_features: elements of the parameter `bias`, zeros at first.
        activation: the name of a function of :mod:`fusedtrain.functional`, or "identity".
        p: probability that an element becomes 0 in training.
        dim: dimension of the features.
        device: of the bias.
        dtype: of the bias.
        parameters: the activation's, with the function's keywords.

    Raises:
        ValueError: an unknown activation, or `p` not from 0 to 1.
        TypeError: a parameter that the activation does not have.

    Example:
        >>> layer = BiasActDropout(2, "relu")
        >>> list(layer.state_dict())
        ['bias']
        >>> layer(torch.tensor([[1.0, -1.0]]))
        tensor([[1., 0.]], grad_fn=<BiasActBackward>)
    """

    def __init__(
        self,
        num_features: int,
        activation: str = "gelu",
        p: float = 0.0,
        dim: int = -1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **parameters: Any,
    ) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(num_features, device=device, dtype=dtype))
        self.activation, self.p, self.dim, self.parameters_of_act = activation, p, dim, parameters
        # Raises for wrong arguments now rather than in forward.
        F.bias_act_dropout(torch.zeros(1), None, activation, p, False, **parameters)

    def forward(self, input: Tensor) -> Tensor:
        return F.bias_act_dropout(
            input, self.bias, self.activation, self.p, self.training, self.dim,
            **self.parameters_of_act,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return f"{self.bias.numel()}, activation={self.activation!r}, p={self.p}, dim={self.dim}"
