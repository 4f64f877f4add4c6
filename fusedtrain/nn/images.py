"""A data loader's last step as a module."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..ops import images as _images
from ..reference import images as _reference
from ..reference.images import MemoryFormat, Numbers


class NormalizeImages(nn.Module):
    """``(input / 255 - mean) / std`` of bytes in one pass; see
    :func:`fusedtrain.functional.normalize_images`.

    In front of a model it does not change the state_dict: its factors are a buffer that moves with
    the model and is not saved. `half()` and the like do not round the factors.

    Args:
        mean: one number, or one for each channel; by default ImageNet's.
        std: as mean.
        dtype: of the result.
        memory_format: of the result; ``torch.preserve_format`` keeps the input's.

    Raises:
        TypeError: a dtype that is not float32, float16, bfloat16 or float64.
        ValueError: `mean` and `std` of different lengths, a `std` that is not positive and finite,
            another memory format.

    Shape:
        - Input: uint8 [N, C, H, W] or [C, H, W]. Output: the same shape.

    Example:
        >>> model = nn.Sequential(NormalizeImages(dtype=torch.bfloat16), nn.Flatten())
        >>> model(torch.zeros(2, 3, 1, 1, dtype=torch.uint8))
        tensor([[-2.1250, -2.0312, -1.8047],
                [-2.1250, -2.0312, -1.8047]], dtype=torch.bfloat16)
        >>> list(model.state_dict())
        []
    """

    coefficients: Tensor
    memory_format: MemoryFormat

    def __init__(
        self,
        mean: Numbers | None = None,
        std: Numbers | None = None,
        dtype: torch.dtype = torch.float32,
        memory_format: MemoryFormat = torch.preserve_format,
    ) -> None:
        super().__init__()
        self.mean = _images.numbers_of(_reference.IMAGENET_MEAN if mean is None else mean)
        self.std = _images.numbers_of(_reference.IMAGENET_STD if std is None else std)
        self.dtype, self.memory_format = dtype, memory_format
        _reference.check_formats(dtype, memory_format)
        made = self._made(torch.get_default_device())
        self.register_buffer("coefficients", made, persistent=False)

    def _made(self, device: torch.device) -> Tensor:
        channels = max(len(self.mean), len(self.std))
        return _images.coefficients_of(self.mean, self.std, channels, device, self.dtype).clone()

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        # half() has rounded the coefficients, to_empty() lost them.
        self.coefficients = self._made(self.coefficients.device)
        return self

    def forward(self, input: Tensor) -> Tensor:
        return _images.normalize_with(input, self.coefficients, self.dtype, self.memory_format)

    def extra_repr(self) -> str:
        return (
            f"mean={self.mean}, std={self.std}, dtype={self.dtype}, "
            f"memory_format={self.memory_format}"
        )
