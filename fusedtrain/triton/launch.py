"""From a kernel and its arguments to a launch, with little Python in between."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

# The dtype of each tensor in Triton, and that of the math.
STORED = {
    torch.float32: tl.float32,
    torch.float64: tl.float64,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}
WIDE = {dtype: tl.float64 if dtype is torch.float64 else tl.float32 for dtype in STORED}

# A compiled kernel may rely on offsets below 2^31 bytes, where the first tensors were that small.
_SMALL = 2**28  # a power of two
# Triton 3.9 warns where the second is left out: 3.10 will stop to contract a * b + c.
_OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}


def check_dtype(name: str, tensor: Tensor, argument: str) -> None:
    if tensor.dtype not in STORED:
        raise RuntimeError(
            f"fusedtrain::{name}: {argument} must be float32, float64, float16 or bfloat16"
        )


class Launcher:
    """Launches one kernel, and remembers what Triton compiled for each variant, dtype and device.

    Triton itself finds a compiled kernel again in 6.2 us of Python, and starts one that it is given
    in 1.8 (3.6.0, Python 3.11, AMD EPYC, without the driver's part). It is remembered for arguments
    that Triton would not tell apart: pointers divisible by 16, tensors below 2 GiB, and numbers on
    which the kernel does not specialize. It must not specialize on any.
    """

    def __init__(self, kernel: Any, num_warps: int = 4) -> None:
        self._kernel = kernel
        self.options = {**_OPTIONS, "num_warps": num_warps}
        # Constants, and what was compiled for them: to compare a tuple of the same objects takes
        # 0.1 us, to hash one 1.3, most of it Triton's functions.
        self._compiled: dict[Any, tuple[tuple[Any, ...], Any]] = {}

    def __call__(
        self,
        variant: Any,
        programs: int,
        tensors: tuple[Tensor, ...],
        numbers: tuple[float, ...],
        constants: tuple[Any, ...],
    ) -> None:
        """``variant`` and the dtype of the first tensor settle the dtypes of the others, and where
        nobody changes a module, ``constants``."""
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
        found = self._compiled.get(key)
        if found is not None and found[0] == constants:
            found[1][(programs, 1, 1)](*tensors, *numbers, *constants)
        else:
            compiled = self._kernel[(programs,)](*tensors, *numbers, *constants, **self.options)
            if compiled is not None:  # it is in the interpreter
                self._compiled[key] = constants, compiled
