"""Published data of the GPUs that predictions are made for. Nothing here was measured by us."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Multiprocessor:
    """Resources that threads share (CUDA C++ Programming Guide, table of compute capabilities)."""

    warps: int
    blocks: int
    shared: int  # bytes, of which each block takes `reserved` for the system
    registers: int = 65536
    reserved: int = 1024

    def resident(self, threads: int, registers: int, shared: int) -> int:
        """Blocks that fit at a time, by warps, registers (given out to warps in pieces of 256, a
        quarter of them for each scheduler) and shared memory."""
        warps = -(-threads // 32)
        each = -(-registers * 32 // 256) * 256
        by_registers = self.registers // 4 // each * 4 // warps if each else self.blocks
        taken = -(-shared // 128) * 128 + self.reserved
        by_shared = self.shared // taken if taken else self.blocks
        return min(self.blocks, self.warps // warps, by_registers, by_shared)


@dataclass(frozen=True)
class Gpu:
    """One device: multiprocessors, peak bandwidth in bytes/s, latency of its memory in s, boost
    clock in Hz."""

    name: str
    arch: str
    multiprocessors: int
    bandwidth: float
    latency: float
    clock: float
    source: str


MULTIPROCESSORS = {
    "75": Multiprocessor(warps=32, blocks=16, shared=64 << 10, reserved=0),
    "80": Multiprocessor(warps=64, blocks=32, shared=164 << 10),
    "89": Multiprocessor(warps=48, blocks=24, shared=100 << 10),
    "90": Multiprocessor(warps=64, blocks=32, shared=228 << 10),
    "100": Multiprocessor(warps=64, blocks=32, shared=228 << 10),
    "120": Multiprocessor(warps=48, blocks=24, shared=100 << 10),
}
# A memory that is asked for all it can give answers later. No maker publishes by how much. In
# 740 ns an H200 needs 27 KB on their way to each multiprocessor (4.8 TB/s over 132).
BUSY = 740e-9
# A copy reaches 3.0 of the 3.35 TB/s of an H100; the other devices are assumed to be like it.
COPY = 3.0 / 3.35
# Instructions of threads that a multiprocessor starts in a clock: four schedulers, a warp each.
STARTED = 128
_LUO = "latency: Luo et al., arXiv:2402.13499, table of memory latencies"
_OF_PCIE = f"{_LUO} (of the H100 PCIe)"
# Cycles of an otherwise idle memory over the boost clock. Under load it takes longer.
GPUS = (
    Gpu("A100 SXM 80 GB", "80", 108, 2.039e12, 466.3 / 1.41e9, 1.41e9, _LUO),
    Gpu("H100 SXM", "90", 132, 3.35e12, 478.8 / 1.755e9, 1.755e9, _OF_PCIE),
    Gpu("H200", "90", 132, 4.8e12, 478.8 / 1.755e9, 1.755e9, _OF_PCIE),
    Gpu(
        "B200",
        "100",
        148,
        8.0e12,
        478.8 / 1.755e9,
        1.755e9,
        "latency and clock assumed to be the H100's",
    ),
    Gpu("RTX 4090", "89", 128, 1.008e12, 541.5 / 2.52e9, 2.52e9, _LUO),
)
