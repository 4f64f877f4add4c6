"""Memory of the machine and of a container, as Linux tells it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fusedtrain.advisor import _memory

GB = 2**30


def test_a_container_has_less_than_the_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(_memory, "_CGROUP", tmp_path)
    machine, available = _memory.machine_memory(), _memory.available_memory()
    if machine is None or available is None:
        pytest.skip("needs a system that tells its memory (Linux)")
    (tmp_path / "memory.max").write_text("max\n")
    assert _memory.machine_memory() == machine
    (tmp_path / "memory.max").write_text(f"{GB // 2}\n")
    (tmp_path / "memory.current").write_text(f"{GB // 4}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {GB // 8}\n")
    assert _memory.machine_memory() == GB // 2
    assert _memory.available_memory() == GB // 4 + GB // 8


def test_the_peak_of_the_process_grows() -> None:
    before = _memory.peak_of_process()
    if before is None:
        pytest.skip("needs a system that tells the peak of a process (Linux, macOS)")
    torch.ones(before // 4 + 2**24)  # as many bytes as the peak, and 64 MB
    after = _memory.peak_of_process()
    assert after is not None
    assert after > before
