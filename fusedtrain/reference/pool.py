"""Max pooling whose backward needs the place of the maximum in its window, not its index.

Places count row by row in the window, padding included. Of equal maxima the first counts, of NaNs
the last, as in torch. Places are packed (`bits.py`) in the order of the output's memory:
[N, H, W, C] if `channels_last`, else [N, C, H, W].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._torch_private import functorch_is_active
from .bits import pack, unpack


def out_size(size: int, kernel: int, stride: int, padding: int, ceil_mode: bool) -> int:
    """Number of outputs; with ceil_mode windows may end beyond the padding, but not begin there."""
    room = size + 2 * padding - kernel
    count = (room + (stride - 1 if ceil_mode else 0)) // stride + 1
    return count - 1 if ceil_mode and (count - 1) * stride >= size + padding else count


def out_sizes(
    input: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], ceil: bool
) -> tuple[int, int]:
    """Height and width of the output."""
    height, width = (
        out_size(*numbers, ceil)
        for numbers in zip(input.shape[-2:], kernel, stride, padding, strict=True)
    )
    return height, width


def new_image(model: Tensor, height: int, width: int, channels_last: bool) -> Tensor:
    """A tensor with the sizes of `model`, except for the last two."""
    format = torch.channels_last if channels_last else torch.contiguous_format
    shape = (*model.shape[:-2], height, width)
    return torch.empty(shape, dtype=model.dtype, device=model.device, memory_format=format)


def _corners(size: int, stride: int, padding: int, like: Tensor) -> Tensor:
    """The starts of the windows along one dimension."""
    return torch.arange(size, device=like.device) * stride - padding


def _in_memory_order(t: Tensor, channels_last: bool) -> Tensor:
    return t.permute(0, 2, 3, 1) if channels_last else t


def _laid_out(t: Tensor, channels_last: bool) -> Tensor:
    if functorch_is_active():  # vmap does not support channels_last
        return t
    if channels_last:
        return t.contiguous(memory_format=torch.channels_last)
    return t.contiguous()


def max_pool2d(
    input: Tensor, kernel_size: list[int], stride: list[int], padding: list[int], ceil_mode: bool,
    bits: int, channels_last: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The maxima, and their places in `bits` bits each (0: no places)."""
    output, index = torch.nn.functional.max_pool2d_with_indices(
        _laid_out(input, channels_last), kernel_size, stride, padding, [1, 1], ceil_mode
    )
    output = _laid_out(output, channels_last)
    if bits == 0:
        return output, torch.empty(0, dtype=torch.uint8, device=input.device)
    width = input.size(-1)
    rows = index // width - _corners(index.size(-2), stride[0], padding[0], input).unsqueeze(-1)
    columns = index % width - _corners(index.size(-1), stride[1], padding[1], input)
    places = rows * kernel_size[1] + columns
    return output, pack(_in_memory_order(places, channels_last), bits)


def max_pool2d_indices(
    codes: Tensor, shape: list[int], width: int, kernel_size: list[int], stride: list[int],
    padding: list[int], bits: int, channels_last: bool,
) -> Tensor:  # fmt: skip
    """torch's indices of outputs of this shape, for an input of this width."""
    count = 1
    for size in shape:
        count *= size
    places = unpack(codes, bits, count).to(torch.int64)
    if channels_last:
        places = places.view(shape[0], shape[2], shape[3], shape[1]).permute(0, 3, 1, 2)
    else:
        places = places.view(shape)
    rows = places // kernel_size[1]
    rows = rows + _corners(shape[-2], stride[0], padding[0], codes).unsqueeze(-1)
    columns = places % kernel_size[1] + _corners(shape[-1], stride[1], padding[1], codes)
    return rows * width + columns


def max_pool2d_backward(
    grad: Tensor, codes: Tensor, height: int, width: int, kernel_size: list[int], stride: list[int],
    padding: list[int], bits: int, channels_last: bool,
) -> Tensor:  # fmt: skip
    """The gradient of the input: sums in the order of the outputs, rounded once. Differentiable."""
    shape = list(grad.shape)
    index = max_pool2d_indices(
        codes, shape, width, kernel_size, stride, padding, bits, channels_last
    )
    wide = grad if grad.dtype is torch.float64 else grad.float()
    sums = torch.zeros(
        shape[:-2] + [height * width], dtype=wide.dtype, device=grad.device
    ).scatter_add(-1, index.flatten(-2), wide.flatten(-2))
    grad_input = sums.to(grad.dtype).view(shape[:-2] + [height, width])
    return _laid_out(grad_input, channels_last)
