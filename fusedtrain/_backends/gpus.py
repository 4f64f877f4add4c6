"""NVIDIA GPUs that a process will see, and whether a binary has an image for them.

The driver's management library (NVML) answers without starting CUDA: once CUDA has started, a
forked process, such as a DataLoader's worker, cannot use the GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from .._torch_private import visible_devices


@dataclass(frozen=True)
class Gpu:
    """A GPU's name, compute capability and identity."""

    name: str
    capability: tuple[int, int]
    uuid: str = ""

    def __str__(self) -> str:
        return f"{self.name} (sm_{self.capability[0]}{self.capability[1]})"


class _Unknown(Exception):
    """NVML does not answer."""


def _ask(library: ctypes.CDLL, function: str, *arguments: object) -> None:
    if getattr(library, function)(*arguments) != 0:
        raise _Unknown(function)


@contextlib.contextmanager
def _nvml() -> Iterator[ctypes.CDLL]:
    library = ctypes.CDLL("libnvidia-ml.so.1")
    _ask(library, "nvmlInit_v2")
    try:
        yield library
    finally:
        library.nvmlShutdown()


def _installed() -> list[Gpu]:
    """All GPUs of the machine, in the order of the PCI bus."""
    gpus = []
    with _nvml() as library:
        count = ctypes.c_int(0)
        _ask(library, "nvmlDeviceGetCount_v2", ctypes.byref(count))
        for index in range(count.value):
            handle, major, minor = ctypes.c_void_p(), ctypes.c_int(0), ctypes.c_int(0)
            name, uuid = ctypes.create_string_buffer(96), ctypes.create_string_buffer(96)
            _ask(library, "nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(handle))
            _ask(
                library, "nvmlDeviceGetCudaComputeCapability", handle, ctypes.byref(major),
                ctypes.byref(minor),
            )  # fmt: skip
            _ask(library, "nvmlDeviceGetName", handle, name, 96)
            _ask(library, "nvmlDeviceGetUUID", handle, uuid, 96)
            gpus.append(Gpu(name.value.decode(), (major.value, minor.value), uuid.value.decode()))
    return gpus


def visible(by_bus: bool = False) -> list[Gpu] | None:
    """The GPUs that CUDA shows, or may show, to this process; None if they are unknown.

    Args:
        by_bus: whether CUDA counts devices in the order of the PCI bus. In CUDA's default order the
            fastest GPU is first: on a machine with different GPUs a number in CUDA_VISIBLE_DEVICES
            may then mean any of them, so all are returned.
    """
    if torch.cuda.is_initialized():
        indices = range(torch.cuda.device_count())
        return [
            Gpu(torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i)) for i in indices
        ]
    try:
        chosen = visible_devices()
        if not chosen:
            return []
        every = _installed()
    except (OSError, AttributeError, RuntimeError, _Unknown):
        return None
    alike = len({gpu.capability for gpu in every}) <= 1
    if isinstance(chosen[0], str):
        # A prefix of the UUID is enough. A MIG device's UUID does not contain its GPU's.
        named = [gpu for gpu in every if any(gpu.uuid.startswith(str(c)) for c in chosen)]
        return named or every
    if alike or by_bus:
        # An index without a GPU hides the indices after it.
        numbers = [int(c) for c in chosen]
        end = next((i for i, n in enumerate(numbers) if n >= len(every)), len(numbers))
        return [every[n] for n in numbers[:end]]
    return every


def has_image(capability: tuple[int, int], archs: Sequence[str], ptx: str) -> bool:
    """Whether a binary runs on a GPU.

    Args:
        capability: of the GPU.
        archs: architectures of the machine code: "80" runs on every 8.x, "90a" only on 9.0, "100f"
            on every 10.x.
        ptx: virtual architecture of the PTX, which the driver compiles for this and every newer
            GPU; "" for none.
    """
    number = capability[0] * 10 + capability[1]
    for arch in archs:
        of_arch = int(re.sub(r"\D", "", arch))
        if arch.endswith("a"):
            runs = number == of_arch
        else:
            runs = number // 10 == of_arch // 10 and number >= of_arch
        if runs:
            return True
    return bool(ptx) and number >= int(ptx)
