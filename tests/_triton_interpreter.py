"""Triton's interpreter, with the one thing put right that would show: its bfloat16."""

from __future__ import annotations

from typing import Any

import torch


def round_to_nearest() -> None:
    """Makes float32 to bfloat16 round, as on a GPU: the interpreter cuts off, denormals wrongly.

    Checked in triton 3.6 and 3.9; once or many times, and of no consequence to compiled kernels.
    """
    import numpy as np
    import triton.language as tl
    import triton.runtime.interpreter as interpreter

    convert = interpreter._convert_float
    if convert.__module__ == __name__:
        return

    def converted(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if source == tl.float32 and target == tl.bfloat16:
            rounded = torch.from_numpy(np.ascontiguousarray(data)).bfloat16()
            return rounded.view(torch.uint16).numpy()
        if source == tl.bfloat16 and target == tl.float32:
            return data.astype(np.uint32) << 16
        return convert(data, source, target, mode)

    interpreter._convert_float = converted
