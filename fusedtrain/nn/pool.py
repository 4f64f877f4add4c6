"""Max pooling as a module."""

# No return type: with return_indices forward returns a pair, which TorchScript infers.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from torch import Tensor, nn
from torch.jit import is_scripting  # type: ignore[attr-defined]

from .. import functional as F


class MaxPool2d(nn.MaxPool2d):
    """:class:`torch.nn.MaxPool2d` that keeps 2 to 8 bits per output for backward, not the input and
    64 bits per output; see :func:`fusedtrain.functional.max_pool2d`.

    Example:
        >>> import torch
        >>> MaxPool2d(3, stride=2, padding=1)(torch.ones(1, 8, 7, 7)).shape
        torch.Size([1, 8, 4, 4])
    """

    def forward(self, input: Tensor):
        if is_scripting():
            return nn.functional.max_pool2d(  # type: ignore[call-overload]
                input, self.kernel_size, self.stride, self.padding, self.dilation,
                ceil_mode=self.ceil_mode, return_indices=self.return_indices,
            )  # fmt: skip
        return F.max_pool2d(
            input, self.kernel_size, self.stride, self.padding, self.dilation, self.ceil_mode,
            self.return_indices,
        )  # fmt: skip
