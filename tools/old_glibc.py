"""The linker of portable wheels: libraries made with a newer glibc load with 2.28.

    python tools/old_glibc.py COMPILER -shared OBJECTS... FLAGS... -o OUT

A linker takes the default version of each symbol. Here it meets stand-ins in the place of glibc's
libraries. They have the same symbols, each in the newest version that is old enough, if any.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

OLDEST = (2, 28)  # manylinux_2_28: RHEL 8, Debian 10
# libstdc++ 11 and newer ask this variable of glibc 2.32 whether one thread runs. 0 is always right,
# and costs a locked instruction for each copy of a std::shared_ptr.
ABSENT = '__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;\n'
# Since glibc 2.34 these libraries are part of libc.so.6. Before 2.30 a symbol is searched only in
# the library that the linker saw.
HOMES = {
    "pthread_": "libpthread.so.0",
    "sem_": "libpthread.so.0",
    "dl": "libdl.so.2",
    "shm_": "librt.so.1",
}


def _run(*command: str | Path) -> str:
    words = [str(word) for word in command]
    return subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout


def symbols(library: Path, defined: bool) -> dict[str, list[tuple[int, ...]]]:
    """Versions of glibc of the dynamic symbols that a library defines, or that it needs. A needed
    symbol without any version has none."""
    versions: dict[str, list[tuple[int, ...]]] = {}
    for line in _run("objdump", "-T", library).splitlines():
        match = re.search(r"\s[0-9a-f]+\s+(?:(?:Base|\(?GLIBC_([\d.]+)\)?)\s+)?(\S+)$", line)
        if match and ("*UND*" in line) != defined:
            numbers = versions.setdefault(match[2], [])
            numbers += [tuple(int(part) for part in match[1].split("."))] if match[1] else []
    return versions


def glibc(compiler: str, library: str) -> dict[str, list[tuple[int, ...]]]:
    """The symbols of one of this machine's libraries."""
    return symbols(Path(_run(compiler, f"-print-file-name={library}").strip()), True)


def too_new(library: Path, compiler: str = "g++") -> list[str]:
    """The symbols that glibc 2.28 lacks, or that are of no version."""
    known = {**glibc(compiler, "libc.so.6"), **glibc(compiler, "libm.so.6")}
    needed = symbols(library, False).items()
    return sorted(name for name, v in needed if name in known and not (v and max(v) <= OLDEST))


def stand_ins(compiler: str, folder: Path) -> list[str]:
    """Files to link before all others."""
    homes: dict[str, dict[str, str]] = {}
    for library in ("libc.so.6", "libm.so.6"):
        for name, numbers in glibc(compiler, library).items():
            old = [number for number in numbers if number <= OLDEST]
            if old and not name.startswith("GLIBC_"):  # a version is a symbol, too
                moved = HOMES.items() if max(numbers) > OLDEST else ()
                home = next((home for start, home in moved if name.startswith(start)), library)
                version = ".".join(str(part) for part in max(old))
                homes.setdefault(home, {})[name] = f"GLIBC_{version}"
    (folder / "absent.c").write_text(ABSENT)
    _run(compiler, "-x", "c", "-fPIC", "-c", folder / "absent.c", "-o", folder / "absent.o")
    for home, versions in homes.items():
        source, script = folder / f"{home}.c", folder / f"{home}.map"
        lines = [
            f'void f{i}(void) {{}}\n__asm__(".symver f{i},{name}@@{version}");\n'
            for i, (name, version) in enumerate(versions.items())
        ]
        source.write_text("".join(lines))
        script.write_text("".join(f"{version} {{}};\n" for version in sorted({*versions.values()})))
        _run(
            compiler, "-x", "c", "-shared", "-fPIC", "-nostdlib", f"-Wl,-soname,{home}",
            f"-Wl,--version-script={script}", source, "-o", folder / home,
        )  # fmt: skip
    return [str(folder / name) for name in ("absent.o", *homes)]


def link(command: list[str]) -> None:
    """Runs a link whose result loads with glibc 2.28.

    Args:
        command: compiler, flags, objects, `-o` and the library.
    """
    out = Path(command[command.index("-o") + 1])
    host = command[command.index("-ccbin") + 1] if "-ccbin" in command else command[0]
    out.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        # -s: names of local functions are a tenth of the file of CUDA, and no use without sources.
        words = ["-s", "--push-state", "--no-as-needed", *stand_ins(host, Path(folder))]
        options = [part for word in [*words, "--pop-state"] for part in ("-Xlinker", word)]
        _run(command[0], *options, *command[1:])
    if names := too_new(out, host):
        out.unlink()
        raise SystemExit(f"{out.name} needs newer versions than glibc 2.28's of {', '.join(names)}")


if __name__ == "__main__":
    link(sys.argv[1:])
