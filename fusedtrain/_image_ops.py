"""The op of reference/images.py: schema, fake kernel, fallback. `_images.py` is in front of it.

``input`` is uint8 [N, C, H, W], ``coefficients`` float32 [3, C], ``dtype`` not float64.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ._definitions import fallback
from .reference import images

SCHEMAS = {
    "normalize_images": (
        "(Tensor input, Tensor coefficients, ScalarType dtype, MemoryFormat memory_format) "
        "-> Tensor"
    ),
}


def _fake(
    input: Tensor, coefficients: Tensor, dtype: torch.dtype, memory_format: torch.memory_format
) -> Tensor:
    return torch.empty_like(input, dtype=dtype, memory_format=memory_format)


def define(library: torch.library.Library, warn: Callable[[torch.device], None]) -> None:
    """Defines the op in the library, with the plain-torch reference behind it."""
    for name, schema in SCHEMAS.items():
        library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(name, _fake, "Meta")
        library.impl(name, fallback(getattr(images, name), warn), "CompositeExplicitAutograd")
