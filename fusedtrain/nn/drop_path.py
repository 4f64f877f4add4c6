"""Stochastic depth as a module."""

import torch
from torch import Tensor, nn
from torch.jit import is_scripting as _scripting  # type: ignore[attr-defined]
from torch.overrides import has_torch_function_unary as _has

from .._graph.fx import handle as _handle


def _drop_path(input: Tensor, p: float, training: bool, scale_by_keep: bool) -> Tensor:
    if not _scripting() and _has(input):
        return _handle(_drop_path, (input,), input, p, training, scale_by_keep)
    if p == 0.0 or not training:
        return input
    keep = 1.0 - p
    scale = torch.empty(
        [input.shape[0]] + [1] * (input.dim() - 1), dtype=input.dtype, device=input.device
    ).bernoulli_(keep)
    if keep > 0.0 and scale_by_keep:
        scale.div_(keep)
    return input * scale


class DropPath(nn.Module):
    """Stochastic depth (arXiv:1603.09382): in training each sample of the input [N, ...] becomes 0
    with probability `drop_prob`, and is else multiplied by ``1 / (1 - drop_prob)``.

    Draws the same numbers as timm's DropPath. As `drop` of our batch norms it is part of their op.

    Example:
        >>> DropPath(0.5).eval()(torch.ones(2)).tolist()
        [1.0, 1.0]
    """

    def __init__(self, drop_prob: float = 0.0, scale_by_keep: bool = True) -> None:
        super().__init__()
        self.drop_prob, self.scale_by_keep = drop_prob, scale_by_keep

    def forward(self, input: Tensor) -> Tensor:
        return _drop_path(input, self.drop_prob, self.training, self.scale_by_keep)

    def extra_repr(self) -> str:
        return f"drop_prob={self.drop_prob}"
