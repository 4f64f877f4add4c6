"""The linker of portable wheels: libraries made with a newer glibc load with 2.28.

    python tools/old_glibc.py COMPILER -shared OBJECTS... FLAGS... -o OUT

A linker takes the newest version of each symbol. Here the library is linked once to see which of
its symbols are too new. Copies of the objects then ask for the newest version of these that is old
enough (glibc keeps them all), and the copies are linked. CUDA's static runtime is treated likewise.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

OLDEST = (2, 28)  # manylinux_2_28: RHEL 8, Debian 10
# libstdc++ 11 and newer ask this variable of glibc 2.32 whether one thread runs. 0 is always right,
# and costs a locked instruction for each copy of a std::shared_ptr.
ABSENT = {
    "__libc_single_threaded": 'extern "C" { __attribute__((visibility("hidden"))) '
    "char __libc_single_threaded = 0; }"
}
# Since glibc 2.34 these libraries are part of libc.so.6. Before 2.30 a symbol is searched only in
# the library that the linker found it in.
HOMES = {
    "pthread_": "libpthread.so.0",
    "sem_": "libpthread.so.0",
    "dl": "libdl.so.2",
    "shm_": "librt.so.1",
}
_SYMBOL = re.compile(r"\s\(?(?:(GLIBC)_([\d.]+))\)?\s+(\S+)$")


def _run(*command: str | Path) -> str:
    return subprocess.run(
        [str(word) for word in command], check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def symbols(library: Path, defined: bool) -> list[tuple[str, str]]:
    """Names and glibc versions of the dynamic symbols that a library defines, or that it needs."""
    lines = _run("objdump", "-T", library).splitlines()
    matches = (_SYMBOL.search(line) for line in lines if ("*UND*" in line) != defined)
    return [(match[3], match[2]) for match in matches if match]


def too_new(library: Path) -> list[str]:
    """The symbols that glibc 2.28 lacks."""
    return sorted({n for n, version in symbols(library, False) if _number(version) > OLDEST})


def older(names: Iterable[str], compiler: str) -> dict[str, str]:
    """The newest version of each name that is old enough, as objects name it.

    Args:
        names: symbols of glibc.
        compiler: knows where glibc is.
    """
    versions: dict[str, list[str]] = {}
    for library in ("libc.so.6", "libm.so.6"):
        path = Path(_run(compiler, f"-print-file-name={library}").strip())
        for name, version in symbols(path, True):
            if _number(version) <= OLDEST:
                versions.setdefault(name, []).append(version)
    missing = [name for name in names if name not in versions and name not in ABSENT]
    if missing:
        raise SystemExit(f"glibc 2.28 has no {', '.join(missing)}: write the sources without")
    return {n: f"{n}@GLIBC_{max(versions[n], key=_number)}" for n in names if n not in ABSENT}


def stand_ins(older: dict[str, str], compiler: str, folder: Path) -> list[str]:
    """Libraries to link with in place of those that the symbols have left."""
    homes: dict[str, list[str]] = {}
    for name in older:
        home = next((home for start, home in HOMES.items() if name.startswith(start)), None)
        if home is not None:
            homes.setdefault(home, []).append(name)
    paths = []
    for home, names in homes.items():
        source, versions, path = (folder / f"{home}{end}" for end in (".c", ".map", ""))
        lines = [
            f'void _{n}(void) {{}}\n__asm__(".symver _{n},{older[n].replace("@", "@@")}");'
            for n in names
        ]
        source.write_text("\n".join(lines) + "\n")
        wanted = sorted({older[n].split("@")[1] for n in names})
        versions.write_text("".join(f"{version} {{}};\n" for version in wanted))
        _run(
            compiler, "-x", "c", "-shared", "-fPIC", "-nostdlib", f"-Wl,-soname,{home}",
            f"-Wl,--version-script={versions}", source, "-o", path,
        )  # fmt: skip
        paths.append(str(path))
    return paths


def static_runtime(nvcc: str) -> Path:
    """CUDA's runtime as an archive."""
    run = subprocess.run([nvcc, "--dryrun", "x.cu"], capture_output=True, text=True)
    folders = re.findall(r'"-L([^"]+)"', run.stderr)
    paths = [Path(folder) / "libcudart_static.a" for folder in folders]
    path = next((path for path in paths if path.exists()), None)
    if path is None:
        raise SystemExit(f"{nvcc}: libcudart_static.a is in none of {folders}")
    return path


def link(command: list[str]) -> None:
    """Runs a link whose result loads with glibc 2.28.

    Args:
        command: compiler, flags, objects, `-o` and the library.
    """
    # Without the names of local functions: a tenth of the file of CUDA, and no use without sources.
    words = [*command, "-Xlinker", "-s"]
    out = Path(command[command.index("-o") + 1])
    try:
        _run(*words)
        names = too_new(out)
        if names:
            with tempfile.TemporaryDirectory() as folder:
                _run(*with_older(words, names, Path(folder)))
            names = too_new(out)
        if names:
            raise SystemExit(f"{out.name} still needs newer versions of {', '.join(names)}")
    except BaseException:
        out.unlink(missing_ok=True)
        raise


def with_older(words: list[str], names: list[str], folder: Path) -> list[str]:
    """The command that links copies, which ask for older versions of these symbols."""
    words, archives = list(words), []
    if "-cudart" in words:
        # nvcc takes no shared library as an input; its runtime is all that it adds here.
        archives = [static_runtime(words[0])]
        words[0] = words[words.index("-ccbin") + 1]
        for option, count in (("-cudart", 2), ("-nodlink", 1), ("-ccbin", 2)):
            at = words.index(option)
            del words[at : at + count]
        # nvcc cuts at commas what it hands on.
        words = [part for w in words for part in (w.split(",") if "," in w else [w])]
    host = words[0]
    versions = older(names, host)
    renamed = folder / "symbols"
    renamed.write_text("".join(f"{a} {b}\n" for a, b in versions.items()))

    def copy_of(file: Path) -> str:
        copy = folder / f"{len(list(folder.iterdir())):03d}_{file.name}"
        _run("objcopy", f"--redefine-syms={renamed}", file, copy)
        return str(copy)

    words = [copy_of(Path(w)) if w.endswith(".o") else w for w in words]
    words += [copy_of(archive) for archive in archives]
    absent = [ABSENT[name] for name in names if name in ABSENT]
    if absent:
        source = folder / "absent.cpp"
        source.write_text("\n".join(absent) + "\n")
        words.append(str(source.with_suffix(".o")))
        _run(host, "-O2", "-fPIC", "-c", source, "-o", words[-1])
    return words + stand_ins(versions, host, folder)


if __name__ == "__main__":
    link(sys.argv[1:])
