"""While a CUDA graph is captured: what replays would reset, and memory that they copy from."""

from __future__ import annotations

import torch
from torch import Tensor

# Buffers that captured graphs copy from at each replay. The end of a graph is not reported, so
# buffers stay: 128 bytes a tensor and 8 a chunk for each captured step.
_OF_GRAPHS: list[Tensor] = []


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured on the current stream."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def refuse_capture(memory: str) -> None:
    """Raises RuntimeError while a CUDA graph is captured.

    Args:
        memory: is about to be made, and must keep its values from step to step.
    """
    if is_capturing():
        raise RuntimeError(
            f"{memory} would be reset by every replay of the CUDA graph that is being captured: "
            "make a step with the same parameters before the capture"
        )


def check_captured(tensor: Tensor, name: str) -> None:
    """Raises RuntimeError for a tensor in host memory that a captured graph cannot read.

    Args:
        tensor: will be copied to a GPU.
        name: of the tensor, for the message.
    """
    if tensor.device.type == "cpu" and is_capturing() and not tensor.is_pinned():
        raise RuntimeError(
            f"{name} is a tensor on the CPU, which the CUDA graph that is being captured cannot "
            "read: move it to the device of the parameters"
        )


def pinned(host: Tensor) -> Tensor:
    """A copy that a GPU can read later; a graph that is being captured keeps it."""
    copy = host.pin_memory()
    if is_capturing():
        _OF_GRAPHS.append(copy)
    return copy
