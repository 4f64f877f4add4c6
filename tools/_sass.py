"""Kernels as nvcc compiled them: registers, shared memory, threads, and loads of the machine code.

The kernels are read from a built file with cuobjdump, which comes with the CUDA toolkit and with
Triton's wheel. Nothing is run: no GPU is needed.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import re
import shutil
import struct
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_LINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P[T\d]+\s+)?([A-Z][\w.]*)\s*([^;]*);")
_REGISTER = re.compile(r"\bR(\d+)\b")
# Memory of the GPU; generic loads too, which the compiler uses where the kind is not known to it.
_LOAD = re.compile(r"^(?:LDG|LD)(?:\.|$)")
_STORE = re.compile(r"^(?:STG|ST)(?:\.|$)")
_JUMP = re.compile(r"\b0x([0-9a-f]+)\b")


def cuobjdump() -> str | None:
    """The disassembler: of the CUDA toolkit, else of Triton's wheel."""
    spec = importlib.util.find_spec("triton")
    if spec is not None and spec.origin is not None:
        wheel = Path(spec.origin).parent / "backends/nvidia/bin/cuobjdump"
        if wheel.exists():
            return str(wheel)
    return shutil.which("cuobjdump")


def _run(*arguments: str, folder: str | None = None) -> str:
    program = cuobjdump()
    if program is None:
        raise FileNotFoundError("cuobjdump: install the CUDA toolkit or Triton")
    # It looks for nvdisasm on PATH.
    path = f"{Path(program).parent}:{os.environ.get('PATH', '')}"
    return subprocess.run(
        [program, *arguments], capture_output=True, text=True, check=True, cwd=folder,
        env={**os.environ, "PATH": path},
    ).stdout  # fmt: skip


@dataclass(frozen=True)
class Instruction:
    """One line of machine code, with its operands as the disassembler writes them."""

    address: int
    conditional: bool
    name: str
    operands: str

    @property
    def bytes(self) -> int:
        """The bytes that one thread reads or writes by a memory access."""
        match = re.search(r"\.(?:[US](8|16)|(64|128))(?=\.|$)", self.name)
        return int(match[1] or match[2]) // 8 if match else 4

    @property
    def registers(self) -> set[int]:
        """The registers that are read or written."""
        wide = 4 if ".128" in self.name else 2 if ".64" in self.name or self.name[0] == "D" else 1
        numbers = set()
        for operand in self.operands.split(","):
            # An address is a pair.
            each = 2 if "[" in operand else wide
            numbers |= {int(r) + k for r in _REGISTER.findall(operand) for k in range(each)}
        return numbers

    @property
    def loaded(self) -> set[int]:
        """The registers that a load from global memory fills; empty for all else."""
        match = _LOAD.match(self.name) and _REGISTER.match(self.operands)
        return {int(match[1]) + k for k in range(max(1, self.bytes // 4))} if match else set()


def is_load(one: Instruction) -> bool:
    """Whether it reads memory of the GPU."""
    return _LOAD.match(one.name) is not None


def is_store(one: Instruction) -> bool:
    """Whether it writes memory of the GPU."""
    return _STORE.match(one.name) is not None


def jump_target(one: Instruction) -> int | None:
    """The address that a jump or call names."""
    addresses = _JUMP.findall(one.operands)
    return int(addresses[-1], 16) if addresses else None


def instructions(text: str) -> list[Instruction]:
    """Instructions of one kernel, from cuobjdump's text."""
    # The other half of the lines is the encoding alone.
    matches = (_LINE.match(line) for line in text.splitlines() if line.startswith("        /*"))
    # For Blackwell, hints to the scheduler follow: ?WAIT4_END_GROUP, &req={2}.
    return [
        Instruction(int(m[1], 16), m[2] is not None, m[3], re.split("[?&]", m[4])[0].strip())
        for m in matches if m
    ]  # fmt: skip


def pieces(code: list[Instruction]) -> list[tuple[int, int, list[int]]]:
    """The straight pieces of a kernel: begin, end, and the pieces that may follow."""
    place = {one.address: i for i, one in enumerate(code)}
    jumps: dict[int, list[int]] = {}
    for i, one in enumerate(code):
        name = one.name.split(".")[0]
        if one.name == "BRA":
            # A condition may be the first operand, too.
            *condition, to = one.operands.strip().split(", ")
            follows = [i + 1] if one.conditional or condition else []
            jumps[i] = [*follows, *([place[int(to, 16)]] if int(to, 16) in place else [])]
        elif name in ("EXIT", "RET", "BRX"):
            jumps[i] = [i + 1] if one.conditional or one.operands.startswith("P") else []
    begins = sorted({0, *(i + 1 for i in jumps), *(to for all in jumps.values() for to in all)})
    begins = [b for b in begins if b < len(code)]
    number = {begin: k for k, begin in enumerate(begins)}
    parts = []
    for begin, end in zip(begins, [*begins[1:], len(code)], strict=True):
        follows = jumps.get(end - 1, [end])
        parts.append((begin, end, [number[to] for to in follows if to in number]))
    # The code does not show the targets of a jump by a table: any piece that nothing else leads to.
    reached = {0, *(to for _, _, follows in parts for to in follows)}
    orphans = [k for k in range(len(parts)) if k not in reached]
    for _, end, follows in parts:
        if code[end - 1].name.startswith("BRX"):
            follows += orphans
    return parts


def in_loops(graph: list[tuple[int, int, list[int]]]) -> set[int]:
    """The pieces from which a way leads back to themselves."""
    reach = [sum({1 << to for to in follows}) for _, _, follows in graph]
    changed = True
    while changed:
        changed = False
        for k in reversed(range(len(graph))):
            more = reach[k]
            for to in graph[k][2]:
                more |= reach[to]
            changed |= more != reach[k]
            reach[k] = more
    return {k for k in range(len(graph)) if reach[k] >> k & 1}


def bytes_in_flight(code: list[Instruction], loops: bool = True) -> int:
    """The most bytes that one thread waits for at one time, counting its loads in a loop.

    A load is on its way until one of its registers is named. Where two ways through the code meet,
    the loads of both count. In a kernel without a loop all loads count. Loads of a quarter of the
    widest or less do not count: a scale, a code. ``loops``: False where these are for what is left
    over; all loads count then.
    """
    graph = pieces(code)
    looping = in_loops(graph) if loops else set()
    loads: dict[int, tuple[int, set[int]]] = {}
    least = widest(code) // 4
    for counted in (looping, set(range(len(graph)))):
        for k in counted:
            for i in range(*graph[k][:2]):
                if code[i].loaded and code[i].bytes > least:
                    loads[i] = (1 << len(loads), code[i].loaded)
        if loads:
            break
    ended_by: dict[int, int] = {}  # register: the loads that its mention ends
    size = {bit: code[i].bytes for i, (bit, _) in loads.items()}
    for bit, registers in loads.values():
        for r in registers:
            ended_by[r] = ended_by.get(r, 0) | bit

    def through(k: int, waiting: int) -> tuple[int, int]:
        most = total(waiting)
        for i in range(*graph[k][:2]):
            if waiting:
                for r in code[i].registers:
                    waiting &= ~ended_by.get(r, 0)
            if i in loads:
                waiting |= loads[i][0]
                most = max(most, total(waiting))
        return waiting, most

    def total(waiting: int) -> int:
        return sum(bytes for bit, bytes in size.items() if waiting & bit)

    at_begin = [0] * len(graph)
    work, most = set(range(len(graph))), 0
    while work:
        k = work.pop()
        waiting, peak = through(k, at_begin[k])
        most = max(most, peak)
        for to in graph[k][2]:
            if waiting & ~at_begin[to]:
                at_begin[to] |= waiting
                work.add(to)
    return most


def widest(code: list[Instruction], store: bool = False) -> int:
    """Bytes of the widest access to global memory."""
    kind = _STORE if store else _LOAD
    return max((one.bytes for one in code if kind.match(one.name)), default=0)


@dataclass(frozen=True)
class Kernel:
    """One kernel for one architecture. ``source``: the .cu file; ``name``: demangled, shortened."""

    source: str
    name: str
    registers: int
    shared: int  # static, in bytes
    threads: int  # of a block: its __launch_bounds__
    text: str  # of cuobjdump

    @cached_property
    def code(self) -> list[Instruction]:
        return instructions(self.text)

    @property
    def base(self) -> str:
        return self.name.split("<")[0].split("(")[0]


_UNNAMED = re.compile(r"_GLOBAL__N__[0-9a-f]+_\d+_(\w+?)_cu_")
_NAMESPACE = re.compile(r"fusedtrain::|cuda::|formulas::|\(anonymous namespace\)::|^void ")


def _threads(cubin: bytes) -> dict[str, int]:
    """Threads of a block by mangled name: attribute 5 of the ELF sections .nv.info.<kernel>."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + k * size) for k in range(count)]
    threads = {}
    for name, _, _, _, at, length in sections:
        begin = sections[names][4] + name
        title = cubin[begin : cubin.index(b"\0", begin)].decode()
        end = at + length
        while title.startswith(".nv.info.") and at < end:
            form, attribute, value = struct.unpack_from("<BBH", cubin, at)
            at += 4
            if form == 4:  # the value is a length
                if attribute == 5:
                    (number,) = struct.unpack_from("<I", cubin, at)
                    threads[title.removeprefix(".nv.info.")] = number
                at += value
    return threads


def disassembly(library: Path, arch: str) -> str:
    """cuobjdump's text of all kernels; kept in build/sass until the library changes (20 s)."""
    folder = ROOT / "build" / "sass"
    folder.mkdir(parents=True, exist_ok=True)
    state = library.stat()
    path = folder / f"{arch}-{state.st_mtime_ns:x}-{state.st_size:x}.txt"
    # Test processes run side by side: the first one writes.
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            text = _run("-sass", "-arch", f"sm_{arch}", str(library))
            for old in folder.glob(f"{arch}-*"):
                old.unlink()
            part = path.with_suffix(".part")
            part.write_text(text)
            part.rename(path)
    return path.read_text()


def kernels(library: Path, arch: str) -> list[Kernel]:
    """All kernels of a built file for one architecture, such as ``"90"``.

    Raises:
        FileNotFoundError: there is no cuobjdump.
        LookupError: the file has no kernels for that architecture.
    """
    text = disassembly(library, arch)
    code = {body.split("\n", 1)[0].strip(): body for body in text.split("Function : ")[1:]}
    if not code:
        raise LookupError(f"{library} has no machine code for sm_{arch}")
    used = re.findall(
        r" Function (\S+):\n\s+REG:(\d+) STACK:\d+ SHARED:(\d+)",
        _run("-res-usage", "-arch", f"sm_{arch}", str(library)),
    )
    threads: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        _run("-xelf", f"sm_{arch}", str(library.resolve()), folder=folder)
        for cubin in Path(folder).iterdir():
            threads |= _threads(cubin.read_bytes())
    names = subprocess.run(
        ["c++filt"], input="\n".join(name for name, *_ in used), capture_output=True, text=True,
        check=True,
    ).stdout.splitlines()  # fmt: skip
    result = []
    for (mangled, registers, shared), name in zip(used, names, strict=True):
        source = _UNNAMED.search(mangled)
        assert source is not None, mangled
        result.append(Kernel(
            source[1], _NAMESPACE.sub("", _UNNAMED.sub("", name)), int(registers), int(shared),
            threads.get(mangled, 1), code[mangled],
        ))  # fmt: skip
    return result
