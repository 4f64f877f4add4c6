"""Memory of the machine, or of a container."""

from __future__ import annotations

import sys
from pathlib import Path

SHARE = 0.5  # of the memory that is available at the start: the limit for a step on the CPU
_CGROUP = Path("/sys/fs/cgroup")  # of a container: its own


def available_memory() -> int | None:
    """Bytes that Linux can give without swapping; None if the system does not say."""
    free = [_in_kilobytes("MemAvailable:")]
    limit, used = _cgroup("memory.max"), _cgroup("memory.current")
    if limit is not None and used is not None:
        free.append(limit - used + (_cgroup("memory.stat", "inactive_file") or 0))
    return min((size for size in free if size is not None), default=None)


def machine_memory() -> int | None:
    """Bytes of this machine, or of the container; None if the system does not say."""
    sizes = _in_kilobytes("MemTotal:"), _cgroup("memory.max")
    return min((size for size in sizes if size is not None), default=None)


def peak_of_process() -> int | None:
    """The most bytes that were resident at once; None if the system does not say."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _in_kilobytes(name: str) -> int | None:
    size = _number(Path("/proc/meminfo"), name)
    return None if size is None else 1024 * size


def _cgroup(file: str, name: str = "") -> int | None:
    return _number(_CGROUP / file, name)


def _number(path: Path, name: str) -> int | None:
    """The number behind the name in a file of lines; None without one, as "max" is."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return None
    words = next((line for line in lines if line and line[0].startswith(name)), ["max", "max"])
    word = words[1 if name else 0]
    return int(word) if word.isdigit() else None
