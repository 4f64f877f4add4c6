"""Launches of kernels with little Python before them."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

# Triton's dtype of a tensor of torch's, and the dtype of the math.
STORED = {
    torch.float32: tl.float32,
    torch.float64: tl.float64,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}
WIDE = {dtype: tl.float64 if dtype is torch.float64 else tl.float32 for dtype in STORED}

# A kernel that was compiled for small tensors may rely on offsets below 2^31 bytes.
_SMALL = 2**28  # a power of two
# Triton 3.9 warns without the second option: 3.10 will stop contracting a * b + c.
_OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}


def check_dtype(name: str, tensor: Tensor, argument: str) -> None:
    if tensor.dtype not in STORED:
        raise RuntimeError(
            f"fusedtrain::{name}: {argument} must be float32, float64, float16 or bfloat16"
        )


class Launcher:
    """Launches one kernel, and caches the compiled kernel of each variant, dtype and device.

    Triton looks up a compiled kernel in 6.2 us of Python, and starts a known one in 1.8 us (3.6.0,
    Python 3.11, AMD EPYC, without the driver's part). The cache serves arguments that Triton treats
    alike: pointers divisible by 16, tensors below 2 GiB, and numbers on which the kernel does not
    specialize. A kernel must not specialize on any number.
    """

    def __init__(self, kernel: Any, num_warps: int = 4) -> None:
        self._kernel = kernel
        self.options = {**_OPTIONS, "num_warps": num_warps}
        # Constants, and the kernel compiled for them. Comparing a tuple of the same objects takes
        # 0.1 us; hashing one takes 1.3 us, mostly in Triton's functions.
        self._compiled: dict[Any, tuple[tuple[Any, ...], Any]] = {}

    def __call__(
        self,
        variant: Any,
        programs: int,
        tensors: tuple[Tensor, ...],
        numbers: tuple[float, ...],
        constants: tuple[Any, ...],
    ) -> None:
        """``variant`` and the dtype of the first tensor determine the other dtypes and, unless
        someone patches a module, ``constants``."""
        first = tensors[0]
        device = first.get_device()
        if device >= 0 and device != torch.cuda.current_device():
            with torch.cuda.device(device):
                self(variant, programs, tensors, numbers, constants)
            return
        addresses = elements = 0
        for tensor in tensors:
            addresses |= tensor.data_ptr()
            elements |= tensor.numel()
        if addresses & 15 or elements >= _SMALL:
            self._kernel[(programs,)](*tensors, *numbers, *constants, **self.options)
            return
        key = (variant, first.dtype, device)
        cached = self._compiled.get(key)
        if cached is not None and cached[0] == constants:
            cached[1][(programs, 1, 1)](*tensors, *numbers, *constants)
        else:
            compiled = self._kernel[(programs,)](*tensors, *numbers, *constants, **self.options)
            if compiled is not None:  # None in the interpreter
                self._compiled[key] = constants, compiled
