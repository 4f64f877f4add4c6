"""``apex.multi_tensor_apply``: scripts import it to see whether Apex's kernels are available."""

from __future__ import annotations

from typing import Any, NoReturn


class MultiTensorApply:
    """Says that Apex's kernels are not available, as an Apex built without them does.

    Example:
        >>> multi_tensor_applier.available
        False
    """

    available = False

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def check_avail(self) -> NoReturn:
        """Raises RuntimeError."""
        raise RuntimeError(
            "multi_tensor_applier: Apex's amp_C kernels are not part of fusedtrain. Functions "
            "torch._foreach_* do such things to lists of tensors; fusedtrain.optim and "
            "fusedtrain.amp have the fused optimizer step"
        )

    def __call__(self, op: Any, noop_flag_buffer: Any, tensor_lists: Any, *args: Any) -> NoReturn:
        self.check_avail()


multi_tensor_applier = MultiTensorApply(2048 * 32)
