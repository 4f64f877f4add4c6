"""Distributed files: the sdist, the wheel's linker, the workflows that build and publish."""

from __future__ import annotations

import ctypes
import gzip
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import fusedtrain
from helpers import ROOT

sys.path.append(str(ROOT / "tools"))
import build_wheel
import old_glibc

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def test_the_sdist_has_what_git_has(tmp_path: Path) -> None:
    git = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    if not listed:
        pytest.skip("needs a git checkout")
    subprocess.run(
        [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path),
         "sdist", "--formats=tar", "-d", str(tmp_path)],
        cwd=ROOT, check=True, capture_output=True,
    )  # fmt: skip
    (archive,) = tmp_path.glob("*.tar")
    with tarfile.open(archive) as tar:
        paths = {m.name.split("/", 1)[1] for m in tar.getmembers() if m.isfile()}
    made = {p for p in paths if ".egg-info/" in p} | {"PKG-INFO", "setup.cfg"}
    assert paths - made == {name for name in listed if (ROOT / name).is_file()} - made


@pytest.mark.long
def test_the_sdist_builds_in_a_clean_environment(tmp_path: Path) -> None:
    """As `pip install` does it: pip fetches torch for the build, and once more for the package."""
    make = [sys.executable, "tools/build_wheel.py", "--sdist", "--out", str(tmp_path)]
    subprocess.run(make, cwd=ROOT, check=True)
    (sdist,) = tmp_path.glob("*.tar.gz")
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "clean"], check=True)
    python = tmp_path / "clean/bin/python"
    # Newer releases of pip read the second name for the build.
    pins = dict.fromkeys(("PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT"), str(ROOT / "constraints.txt"))
    variables = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    variables |= {**pins, "FUSEDTRAIN_CUDA": "0", "FUSEDTRAIN_REQUIRE": "cpu"}
    for command in (
        ["-m", "pip", "install", "-q", sdist, "numpy"],
        [ROOT / "tools/wheel_check.py"],
    ):
        subprocess.run([python, *command], cwd=tmp_path, env=variables, check=True)


def archive(names: list[str], time: int, user: int) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size, member.mtime, member.uid, member.mode = len(name), time, user, 0o664
            tar.addfile(member, io.BytesIO(name.encode()))
    return packed.getvalue()


def test_archives_of_the_same_files_have_the_same_bytes() -> None:
    one = build_wheel.same_bytes(archive(["a/b", "a/c"], 1, 0), 1_000_000)
    assert one == build_wheel.same_bytes(archive(["a/c", "a/b"], 2, 1000), 1_000_000)
    assert one != build_wheel.same_bytes(archive(["a/c", "a/d"], 2, 1000), 1_000_000)
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(one))) as tar:
        assert {m.mtime for m in tar.getmembers()} == {1_000_000}
        file = tar.extractfile("a/c")
        assert file is not None
        assert file.read() == b"a/c"


@pytest.mark.parametrize("name", ["_C.so", "_C_cuda.so"])
def test_binaries_name_no_folder_of_this_machine(name: str) -> None:
    path = Path(fusedtrain.__file__).parent / name
    content = path.read_bytes() if path.exists() else b""
    assert str(ROOT).encode() + b"/csrc" not in content
    assert b"site-packages/torch/include" not in content


SOURCE = """
#include <cmath>
#include <memory>
#include <pthread.h>
std::shared_ptr<int> kept = std::make_shared<int>(3), copied = kept;
pthread_key_t key;
extern "C" double power(double x, double y) {
  return pthread_key_create(&key, nullptr) == 0 ? std::pow(x, y) * *copied : 0;
}
"""


def test_libraries_are_linked_for_an_old_glibc(tmp_path: Path) -> None:
    if sys.platform != "linux" or not all(map(shutil.which, ("g++", "objdump"))):
        pytest.skip("needs g++ and binutils")
    source, compiled = tmp_path / "power.cpp", str(tmp_path / "power.o")
    plain, portable = tmp_path / "plain.so", tmp_path / "portable.so"

    def link(text: str) -> None:
        source.write_text(text)
        subprocess.run(["g++", "-O1", "-fPIC", "-c", source, "-o", compiled], check=True)
        subprocess.run(["g++", "-shared", compiled, "-o", plain], check=True)
        if not old_glibc.too_new(plain):
            pytest.skip("needs a glibc newer than 2.28")
        old_glibc.link(["g++", "-shared", compiled, "-o", str(portable)])

    link(SOURCE)
    assert {"pow", "pthread_key_create"} <= set(old_glibc.too_new(plain))
    assert old_glibc.too_new(portable) == []
    # glibc 2.28 has the function in this library, and searches it there alone.
    dynamic = subprocess.run(["objdump", "-p", portable], capture_output=True, text=True).stdout
    assert re.search(r"required from libpthread\.so\.0:\s*\n.*GLIBC_2\.", dynamic)
    power = ctypes.CDLL(str(portable), mode=os.RTLD_NOW).power
    power.restype, power.argtypes = ctypes.c_double, [ctypes.c_double] * 2
    assert power(2.5, 3.0) == 3 * 2.5**3
    with pytest.raises(SystemExit, match=r"newer versions than glibc 2\.28's of closefrom"):
        link("#include <unistd.h>\nvoid close_all() { closefrom(3); }")
    assert not portable.exists()


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_name_what_is_there(workflow: Path) -> None:
    """Names that no linter of workflows knows: files of the repository, and targets of make."""
    yaml = pytest.importorskip("yaml")
    text = workflow.read_text()
    jobs = yaml.safe_load(text)["jobs"]
    for job in jobs.values():
        needs = job.get("needs", [])
        assert set([needs] if isinstance(needs, str) else needs) <= set(jobs)
        assert "timeout-minutes" in job
        assert all(("uses" in step) != ("run" in step) for step in job["steps"])
    for path in re.findall(r"(?:tools|\.ci)/[\w.]+", text):
        assert (ROOT / path).exists(), path
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make ([a-z-]+)", text):
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_every_torch_of_the_matrix_is_allowed() -> None:
    """The oldest torch and Python of the package are those that the workflow tries."""
    text = (ROOT / ".github/workflows/wheels.yml").read_text()
    project = (ROOT / "pyproject.toml").read_text()
    oldest = re.search(r'dependencies = \["torch>=([\d.]+)"\]', project)
    python = re.search(r'requires-python = ">=([\d.]+)"', project)
    assert oldest is not None
    assert python is not None
    assert f'torch: ["{oldest[1]}.0"' in text
    assert f'python: ["{python[1]}"' in text
    tool = (ROOT / "tools/other_torch.py").read_text()
    assert f'"torch=={oldest[1]}.0 ' in tool
    pin = re.search(r"^torch==(.+)$", (ROOT / "constraints.txt").read_text(), re.M)
    assert pin is not None
    assert f'"{pin[1]}"' in text
