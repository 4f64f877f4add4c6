"""Names that csrc/bindings takes from the headers of torch's stable interface.

The development torch has macros that the oldest supported one lacks. Functions are no trouble: the
headers hide those that are newer than TORCH_TARGET_VERSION (setup.py). Methods of a tensor are not
searched for; `make oldest-torch` compiles them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

NAME = re.compile(
    r"\btorch(?:::\w+)+|\b(?:STABLE|STD|TORCH|C10|AOTI)_[A-Z0-9_]+|\b(?:aoti_)?torch_\w+"
)
# Before a name is added: is it in the headers of torch 2.10? tests/tools/test_laws.py has a look,
# in the headers at hand, and `make oldest-torch` in those of 2.10.
OLDEST = {
    "STABLE_TORCH_LIBRARY_IMPL", "STD_TORCH_CHECK", "TORCH_BOX", "TORCH_ERROR_CODE_CHECK",
    "aoti_torch_empty_strided", "aoti_torch_get_current_cuda_stream", "aoti_torch_get_device_type",
    "torch::headeronly::IntHeaderOnlyArrayRef", "torch::headeronly::MemoryFormat",
    "torch::headeronly::ScalarType", "torch::headeronly::ScalarType::BFloat16",
    "torch::headeronly::ScalarType::Byte", "torch::headeronly::ScalarType::Double",
    "torch::headeronly::ScalarType::Float", "torch::headeronly::ScalarType::Half",
    "torch::headeronly::ScalarType::Long", "torch::stable::Tensor",
    "torch::stable::accelerator::DeviceGuard", "torch::stable::clone", "torch::stable::contiguous",
    "torch::stable::copy_", "torch::stable::detail::from", "torch::stable::detail::to",
    "torch::stable::empty_like", "torch::stable::parallel_for", "torch::stable::to",
    "torch::stable::transpose", "torch::stable::view", "torch::stable::zero_",
}  # fmt: skip


def newer_names(files: Iterable[Path]) -> list[tuple[Path, int, str]]:
    """File, line and name of those that torch 2.10 may lack and no file defines."""
    lines = [
        (path, number, line.split("//")[0])
        for path in files
        for number, line in enumerate(path.read_text().splitlines(), 1)
    ]
    defined = {name for *_, line in lines for name in re.findall(r"#define (\w+)", line)}
    return [
        (path, number, name)
        for path, number, line in lines
        for name in NAME.findall(line)
        if name not in OLDEST | defined
    ]
