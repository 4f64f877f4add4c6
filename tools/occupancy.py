"""Bandwidth that the CUDA kernels can reach, predicted from nvcc's output. Needs no GPU.

    python tools/occupancy.py [--check] [--markdown] [-k NAME] [--library FILE]

A kernel that streams through memory is as fast as memory if enough bytes are on their way at any
time (Little's law): bandwidth <= bytes in flight / latency. The bytes come from the built file:
threads that are resident on a multiprocessor (registers, shared memory, threads of a block), times
the bytes of a thread's loads between the first load and the first use (its machine code).

Nor is it faster than its instructions can be started: 128 of threads a clock and multiprocessor.
tools/_issue.py counts them along the cheapest way through the code; "instr./B" has them for each
byte that memory moves.

The last column has three parts of the peak: at the latency of an idle memory, of a busy one, and by
the instructions.

Nothing here is a measurement. `make gpu` prints measured bandwidth beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
from _devices import BUSY, COPY, GPUS, MULTIPROCESSORS, STARTED, Gpu  # noqa: E402
from _issue import Route, route  # noqa: E402
from _kernel_table import (  # noqa: E402
    EXCEPTIONS,
    FIRST,
    KINDS,
    ROUTES,
    SLOW,
    SMALL,
    STREAMS,
    TIMED,
    Stream,
)  # fmt: skip
from _sass import Kernel, bytes_in_flight, kernels, widest  # noqa: E402
from _traffic import TRAFFIC  # noqa: E402

LIBRARY = ROOT / "fusedtrain/_C_cuda.so"
# 27 KB for an H200 under load (BUSY of _devices.py), and some to spare.
ENOUGH = 32 << 10
CHECKED = "90"
FAST = 0.8  # of a copy
H100 = next(gpu for gpu in GPUS if gpu.name == "H100 SXM")


@dataclass(frozen=True)
class Prediction:
    """One kernel in one dtype: the worst of its formulas."""

    source: str
    kernel: str
    dtype: str
    arch: str
    registers: int
    shared: int
    threads: int
    blocks: int
    load: int  # bytes of the widest one
    store: int
    in_flight: int  # bytes of a thread
    worst: str  # the formula
    route: Route
    slowest: str  # the formula whose instructions are the most beside what SLOW allows
    variant: str = ""  # of Stream.variants

    @property
    def warps(self) -> int:
        return self.blocks * self.threads // 32

    @property
    def bytes(self) -> int:
        """In flight on a multiprocessor."""
        return self.blocks * self.threads * self.in_flight

    def bandwidth(self, gpu: Gpu, latency: float) -> float:
        """The part of a device's peak that Little's law allows at that latency in s."""
        return min(1.0, self.bytes * gpu.multiprocessors / latency / gpu.bandwidth)

    def by_instructions(self, gpu: Gpu) -> float:
        """The part of a device's peak that its instructions allow; above 1: they do not bind."""
        started = STARTED * gpu.multiprocessors * gpu.clock
        return started / max(self.route.each, 1e-9) / gpu.bandwidth

    @property
    def of_copy(self) -> float:
        """The part of a copy's bandwidth on an H100 that the instructions allow, or above 1."""
        return self.by_instructions(H100) / COPY

    @property
    def allowed(self) -> tuple[float, str]:
        """The least part of a copy's bandwidth, and the reason where that is below FAST."""
        for (source, kernel, part), (percent, reason) in SLOW.items():
            fits = self.source == source and self.kernel.startswith(kernel)
            if fits and re.search(part, self.slowest):
                return percent / 100, reason
        return FAST, ""


def dtype_of(kernel: Kernel) -> str:
    """The dtype of loads and stores; the formula's own float comes before it in some names."""
    arguments = kernel.name.split(">(")[0]
    for cuda, name in (("__half", "float16"), ("__nv_bfloat16", "bfloat16")):
        if cuda in arguments:
            return name
    return "float64" if "double" in arguments else "float32"


def predict(kernel: Kernel, arch: str) -> Prediction:
    """Prediction of one kernel's bytes in flight; ``arch`` has the limits, the kernel the code."""
    stream = STREAMS.get((kernel.source, kernel.base), Stream("", 1, 1))
    blocks = MULTIPROCESSORS[arch].resident(kernel.threads, kernel.registers, kernel.shared)
    name = kernel.name.split(">(")[0] + ">"
    way = next(
        (way for (source, base, part), way in ROUTES.items()
         if kernel.source == source and kernel.base.startswith(base) and re.search(part, name)),
        {},
    )  # fmt: skip
    return Prediction(
        kernel.source, kernel.base, dtype_of(kernel), arch, kernel.registers, kernel.shared,
        kernel.threads, blocks, widest(kernel.code), widest(kernel.code, store=True),
        bytes_in_flight(kernel.code, way.get("turns") != 0) * stream.always // stream.most, name,
        route(kernel.code, **way), name,
    )  # fmt: skip


def worst(library: Path, arch: str, name: str = "") -> list[Prediction]:
    """The worst prediction of each streaming kernel and dtype. ``arch``: a key of MULTIPROCESSORS.

    Raises:
        LookupError: the file has a kernel that is in neither table.
    """
    worst_at: dict[tuple[str, ...], Prediction] = {}
    # The 4090 runs the code of sm_80.
    for kernel in kernels(library, "80" if arch == "89" else arch):
        key = (kernel.source, kernel.base)
        if key not in STREAMS and key not in SMALL:
            raise LookupError(
                f"csrc/cuda/{key[0]}.cu: {key[1]} is in neither table of occupancy.py"
            )
        if key in SMALL or not re.search(STREAMS[key].chosen, kernel.name) or name not in str(key):
            continue
        if dtype_of(kernel) == "float64":
            continue  # right rather than fast
        prediction = predict(kernel, arch)
        labels = (label for label, part in STREAMS[key].variants if re.search(part, kernel.name))
        prediction = replace(prediction, variant=next(labels, ""))
        place = (*key, prediction.variant, prediction.dtype)
        before = worst_at.setdefault(place, prediction)
        fewest = min(before, prediction, key=lambda p: p.bytes)
        slowest = min(before, prediction, key=lambda p: p.of_copy / p.allowed[0])
        worst_at[place] = replace(fewest, route=slowest.route, slowest=slowest.slowest)
    return [worst_at[place] for place in sorted(worst_at)]


def predictions(gpu: str, arch: str) -> dict[tuple[str, str, str, str], float]:
    """GB/s at most, by family, op (any: ""), pass and dtype of a benchmark's row.

    Args:
        gpu: the device's name as torch has it, "NVIDIA H200"; an unknown one has no predictions.
        arch: its architecture, "90".
    """
    named = [g for g in GPUS if all(word in gpu.split() for word in g.name.split()[:1])]
    device = next((g for g in named if g.arch == arch), None)
    if device is None or not LIBRARY.exists():
        return {}
    reach: dict[tuple[str, str, str], float] = {
        (p.source, p.kernel, p.dtype): min(p.bandwidth(device, BUSY), p.by_instructions(device))
        for p in sorted(worst(LIBRARY, arch), key=lambda p: p.of_copy, reverse=True)
        if not p.variant or p.variant in FIRST
    }
    speeds = {}
    for (family, pass_name), kernel_names in TIMED.items():
        for dtype in ("float32", "float16", "bfloat16"):
            places = [(source, name, dtype) for source, name in kernel_names]
            known = [reach[place] for place in places if place in reach]
            if known:
                speeds[family, "", pass_name, dtype] = min(known) * device.bandwidth / 1e9
    if step := speeds.get(("amp_step", "", "", "float32")):
        speeds |= {("amp_step", "", "", kind): part * step for kind, part in KINDS.items()}
    return speeds


def _kept() -> Path:
    """The file of the predictions for the library that is built."""
    code = LIBRARY.read_bytes() if LIBRARY.exists() else b""
    return ROOT / f"build/gpu/predictions-{hashlib.sha256(code).hexdigest()[:16]}.json"


def keep_predictions() -> int:
    """`make gpu-predictions`: computes and keeps them for all GPUs whose code the library has."""
    if not LIBRARY.exists():
        print(f"no predictions: {LIBRARY} is not built")
        return 1
    print("reading the machine code, about half a minute", flush=True)
    speeds: dict[str, dict[str, float]] = {}
    for gpu in GPUS:
        with contextlib.suppress(LookupError):  # no code for its architecture
            of_gpu = predictions(gpu.name, gpu.arch)
            speeds[gpu.name.split()[0]] = {" ".join(kind): gb for kind, gb in of_gpu.items()}
    _kept().parent.mkdir(parents=True, exist_ok=True)
    _kept().write_text(json.dumps(speeds))
    print(f"predictions for {', '.join(speeds)} are in {_kept()}")
    return 0


def kept_predictions(gpu: str) -> dict[str, float]:
    """GB/s by family, op, pass and dtype in one string, if they were computed before."""
    kept = json.loads(_kept().read_text()) if _kept().exists() else {}
    return next((kept[word] for word in gpu.split() if word in kept), {})


def too_few(predicted: Iterable[Prediction]) -> list[str]:
    """The output of --check: a line for each kernel with too few bytes in flight."""
    lines = []
    for p in predicted:
        least, why = float(ENOUGH), ""
        for (source, kernel, part), (allowed, reason) in EXCEPTIONS.items():
            if (p.source, p.kernel) == (source, kernel) and part in p.worst:
                least, why = allowed * 1024, reason
        if p.bytes < least:
            lines.append(
                f"{p.source}.cu: {p.worst}: {p.bytes / 1024:.0f} KB in flight on an sm_{p.arch} "
                f"multiprocessor, {least / 1024:.0f} are needed {why}".rstrip()
            )
    return lines


def too_slow(predicted: Iterable[Prediction]) -> list[str]:
    """The output of --check: a line for each kernel whose instructions keep it from a copy."""
    lines = []
    for p in predicted:
        least, why = p.allowed
        if p.of_copy < least:
            lines.append(
                f"{p.source}.cu: {p.slowest}: {p.route.each:.1f} instructions a byte, "
                f"{p.of_copy:.0%} of a copy's bandwidth; {least:.0%} are needed {why}".rstrip()
            )
    return lines


COLUMNS = (
    "", "kernel", "dtype", "arch", "regs", "shared", "warps", "load B", "store B", "KB in flight",
    "instr./B",
)  # fmt: skip


def rows(predicted: Iterable[Prediction]) -> list[tuple[str, ...]]:
    """Cells of the table; the devices of an architecture share its columns."""
    lines: list[tuple[str, ...]] = []
    for p in predicted:
        reach = ", ".join(
            f"{gpu.name} {p.bandwidth(gpu, gpu.latency):.0%} / {p.bandwidth(gpu, BUSY):.0%} / "
            f"{min(1, p.by_instructions(gpu)):.0%}"
            for gpu in GPUS
            if gpu.arch == p.arch
        )
        lines.append((
            "predicted", f"{p.source}: {p.kernel} {p.variant}".rstrip(), p.dtype, f"sm_{p.arch}",
            str(p.registers), str(p.shared), str(p.warps), str(p.load), str(p.store),
            f"{p.bytes / 1024:.0f}", f"{p.route.each:.1f}", reach,
        ))  # fmt: skip
    return lines


def by_kernel(predicted: list[Prediction]) -> str:
    """The table of docs/gpu_kernels.md: a line a kernel and dtype, a column a device."""
    lines: dict[tuple[str, ...], dict[str, Prediction]] = defaultdict(dict)
    for p in predicted:
        lines[p.source, p.kernel, p.variant, p.dtype][p.arch] = p
    gpus = [gpu for gpu in GPUS if gpu.arch in {p.arch for p in predicted}]
    head = (
        "", "kernel", "dtype", "registers", "load, store", "instructions a byte", "of a copy",
        *(gpu.name for gpu in gpus),
    )  # fmt: skip
    cells = []
    for (source, kernel, variant, dtype), of_arch in lines.items():
        code = of_arch.get(CHECKED, next(iter(of_arch.values())))
        reach = [
            f"{p.bytes / 1024:.0f} KB, {p.bandwidth(gpu, BUSY):.0%}" if p else ""
            for gpu in gpus for p in [of_arch.get(gpu.arch)]
        ]  # fmt: skip
        cells.append((
            "predicted", f"{source}: `{kernel}` {variant}".rstrip(), dtype, str(code.registers),
            f"{code.load}, {code.store}", f"{code.route.each:.1f}",
            f"{min(1, code.of_copy):.0%}", *reach,
        ))  # fmt: skip
    return table(head, cells, markdown=True)


def table(head: tuple[str, ...], lines: list[tuple[str, ...]], markdown: bool) -> str:
    if markdown:
        return "\n".join(
            "| " + " | ".join(cells) + " |" for cells in (head, ("---",) * len(head), *lines)
        )
    widths = [max(map(len, column)) for column in zip(head, *lines)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(cells, widths)).rstrip()
        for cells in (head, *lines)
    )


def traffic(markdown: bool) -> str:
    lines: list[tuple[str, ...]] = [
        ("counted", name, f"{t.passes:g}", f"{t.least:g}", f"{t.passes / t.least:.2f}",
         str(t.launches), t.why)
        for name, t in TRAFFIC.items()
    ]  # fmt: skip
    head = ("", "call", "passes", "least", "ratio", "launches", "why")
    return table(head, lines, markdown)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="fail where bytes are too few or instructions too many"
    )
    parser.add_argument("--markdown", action="store_true", help="the tables of docs/gpu_kernels.md")
    parser.add_argument("--arch", action="append", choices=list(MULTIPROCESSORS), help="only these")
    parser.add_argument("-k", default="", metavar="NAME", help="only kernels with this in the name")
    parser.add_argument(
        "--library", type=Path, default=LIBRARY, help="default: the built package's"
    )
    options = parser.parse_args()
    if not options.library.exists():
        print(f"{options.library} is not built: install the CUDA toolkit, then `make build`")
        return 1
    archs = options.arch or ([CHECKED] if options.check else ["80", "89", "90", "100", "120"])
    predicted: list[Prediction] = []
    for arch in archs:
        print(f"reading the machine code for sm_{arch} (half a minute) ...", file=sys.stderr)
        predicted += worst(options.library, arch, options.k)
    if options.markdown:
        print(by_kernel(predicted))
    else:
        print(table((*COLUMNS, "of the peak bandwidth, at most"), rows(predicted), markdown=False))
    print()
    print(traffic(options.markdown))
    if not options.check:
        return 0
    few, slow = too_few(predicted), too_slow(predicted)
    print(*few, *slow, sep="\n")
    print(
        f"of {len(predicted)} kernels {len(few)} have too few bytes in flight, "
        f"{len(slow)} too many instructions"
    )
    return 1 if few or slow else 0


if __name__ == "__main__":
    sys.exit(main())
