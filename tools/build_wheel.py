"""Builds the wheel, or the sdist, that can be given away, into dist/: `make wheel`, `make sdist`.

    python tools/build_wheel.py [--sdist] [--out FOLDER]

The wheel is for every Python 3, every torch from 2.10 and glibc from 2.28; auditwheel checks the
last. FUSEDTRAIN_CUDA=0 leaves CUDA out. The same sources, torch and compilers give the same bytes:
archives have the time of the last commit (or SOURCE_DATE_EPOCH), and no path of this machine.
"""

from __future__ import annotations

import argparse
import gzip
import io
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from old_glibc import too_new

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "wheel"
# Where there is no commit: zip files begin with 1980.
NO_COMMIT = 1_767_225_600
# PyPI has a limit of 100 MB. These are ours, in MB, without and with CUDA.
LIMITS = {False: 4.0, True: 20.0}
# They come with torch. The driver's library is opened by CUDA's runtime, and named by nothing.
TORCH = ("libtorch*.so*", "libc10*.so*")


def epoch() -> str:
    """The time that archives get, in seconds."""
    setting = os.environ.get("SOURCE_DATE_EPOCH")
    if setting:
        return setting
    run = subprocess.run(
        ["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return run.stdout.strip() or str(NO_COMMIT)


def run(*command: str | Path, **variables: str) -> None:
    subprocess.run(
        [str(word) for word in command], cwd=ROOT, check=True,
        env={**os.environ, "SOURCE_DATE_EPOCH": epoch(), **variables},
    )  # fmt: skip


def build_wheel(out: Path) -> Path:
    """Builds the wheel and checks its tag, its symbols and its size.

    Args:
        out: the folder for the wheel.
    """
    # Files of modules that are gone would be packed, too.
    for stale in (*ROOT.glob("build/lib*"), *ROOT.glob("build/bdist*"), WORK):
        shutil.rmtree(stale, ignore_errors=True)
    print("building the wheel, 1 minute of 2 cores for the CPU, 9 for CUDA", flush=True)
    run(
        sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation",
        "-w", WORK, ROOT,
        FUSEDTRAIN_PORTABLE="1", FUSEDTRAIN_CUDA=os.environ.get("FUSEDTRAIN_CUDA", "1"),
        FUSEDTRAIN_REQUIRE="cpu",
    )  # fmt: skip
    (built,) = WORK.glob("*.whl")
    tag = f"manylinux_2_28_{platform.machine()}"
    print("auditwheel: symbols and tag", flush=True)
    # --only-plat: the one tag that is tested, though the symbols may fit an older one.
    run(
        sys.executable, "-m", "auditwheel", "repair", "--plat", tag, "--only-plat",
        "-w", WORK / "repaired",
        *(word for library in TORCH for word in ("--exclude", library)), built,
        PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    )  # fmt: skip
    (repaired,) = (WORK / "repaired").glob("*.whl")
    if not repaired.name.endswith(f"-py3-none-{tag}.whl"):
        raise SystemExit(f"{repaired.name}: the tag is not py3-none-{tag}")
    out.mkdir(parents=True, exist_ok=True)
    path = out / repaired.name
    path.write_bytes(same_rights(repaired.read_bytes()))
    check_symbols(path)
    show(path)
    return path


def check_symbols(wheel: Path) -> None:
    """Refuses a wheel with a library that glibc 2.28 cannot load; auditwheel does not see all."""
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith(".so"):
                names = too_new(Path(archive.extract(name, folder)))
                if names:
                    raise SystemExit(f"{name} needs newer versions than glibc 2.28's of {names}")


def same_rights(wheel: bytes) -> bytes:
    """The wheel with rights that do not depend on the umask of the build."""
    packed = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(wheel)) as old,
        zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as new,
    ):
        for file in old.infolist():
            copy = zipfile.ZipInfo(file.filename, file.date_time)
            copy.compress_type = zipfile.ZIP_DEFLATED
            mode = 0o40755 if file.is_dir() else 0o100644
            copy.external_attr = (mode | (file.external_attr >> 16 & 0o100) // 0o100 * 0o111) << 16
            new.writestr(copy, old.read(file))
    return packed.getvalue()


def show(wheel: Path) -> None:
    """Prints what is large, and refuses a wheel above the limit."""
    with zipfile.ZipFile(wheel) as archive:
        files = sorted(archive.infolist(), key=lambda file: -file.compress_size)
    for file in files[:4]:
        print(
            f"  {file.compress_size / 1e6:6.2f} of {file.file_size / 1e6:6.2f} MB  {file.filename}"
        )
    size = wheel.stat().st_size / 1e6
    limit = LIMITS[any(file.filename.endswith("_C_cuda.so") for file in files)]
    print(f"{wheel.name}: {size:.2f} MB, limit {limit:.0f} MB")
    if size > limit:
        raise SystemExit(f"the wheel is larger than {limit} MB")


def build_sdist(out: Path) -> Path:
    """Builds the sdist.

    Args:
        out: the folder for the archive.
    """
    shutil.rmtree(WORK, ignore_errors=True)
    run(sys.executable, "setup.py", "-q", "sdist", "--formats=tar", "-d", WORK)
    (built,) = WORK.glob("*.tar")
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{built.name}.gz"
    path.write_bytes(same_bytes(built.read_bytes(), int(epoch())))
    print(f"{path.name}: {path.stat().st_size / 1e6:.2f} MB")
    return path


def same_bytes(archive: bytes, time: int) -> bytes:
    """The archive, compressed, with one time, one owner and one order for all files."""
    packed = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(archive)) as old,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new,
    ):
        for member in sorted(old.getmembers(), key=lambda member: member.name):
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            member.mtime = time
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            member.pax_headers = {}
            new.addfile(member, old.extractfile(member) if member.isfile() else None)
    return gzip.compress(packed.getvalue(), mtime=time)


def main() -> int:
    """Builds one of the two."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sdist", action="store_true", help="the sources, not the wheel")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", metavar="FOLDER")
    options = parser.parse_args()
    print((build_sdist if options.sdist else build_wheel)(options.out.resolve()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
