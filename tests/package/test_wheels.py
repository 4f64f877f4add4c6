"""Distributed files: the sdist, the wheel's linker, the workflows that build and publish."""

from __future__ import annotations

import ctypes
import gzip
import importlib.util
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

import fusedtrain
from helpers import ROOT

PACKAGE = Path(fusedtrain.__file__).parent
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / f"tools/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sys, "path", list(sys.path))
    wheel = load("build_wheel")
old_glibc = load("old_glibc")


def tracked() -> set[str]:
    run = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if run.returncode or not run.stdout:
        pytest.skip("needs a git checkout")
    # New files count as well, deleted ones do not; nor do links to folders.
    more = ["git", "ls-files", "--others", "--exclude-standard"]
    new = subprocess.run(more, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {name for name in (run.stdout + new).splitlines() if (ROOT / name).is_file()}


def test_the_sdist_has_what_git_has(tmp_path: Path) -> None:
    files = tracked()
    subprocess.run(
        [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path),
         "sdist", "--formats=tar", "-d", str(tmp_path)],
        cwd=ROOT, check=True, capture_output=True,
    )  # fmt: skip
    (archive,) = tmp_path.glob("*.tar")
    with tarfile.open(archive) as tar:
        paths = {m.name.split("/", 1)[1] for m in tar.getmembers() if m.isfile()}
    made = {p for p in paths if ".egg-info/" in p} | {"PKG-INFO", "setup.cfg"}
    assert files - paths == set()
    assert paths - files - made == set()


@pytest.mark.long
def test_the_sdist_builds_in_a_clean_environment(tmp_path: Path) -> None:
    """As `pip install` does it: pip fetches torch for the build, and once more for the package."""
    make = [sys.executable, "tools/build_wheel.py", "--sdist", "--out", str(tmp_path)]
    subprocess.run(make, cwd=ROOT, check=True)
    (sdist,) = tmp_path.glob("*.tar.gz")
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "clean"], check=True)
    python = tmp_path / "clean/bin/python"
    # Newer releases of pip read the second name for the build.
    pins = {
        name: str(ROOT / "constraints.txt") for name in ("PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT")
    }
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
    one = wheel.same_bytes(archive(["a/b", "a/c"], 1, 0), 1_000_000)
    assert one == wheel.same_bytes(archive(["a/c", "a/b"], 2, 1000), 1_000_000)
    assert one != wheel.same_bytes(archive(["a/c", "a/d"], 2, 1000), 1_000_000)
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(one))) as tar:
        members = tar.getmembers()
        assert [m.name for m in members] == ["a/b", "a/c"]
        assert {m.mtime for m in members} == {1_000_000}
        file = tar.extractfile("a/c")
        assert file is not None
        assert file.read() == b"a/c"


def test_rights_in_a_wheel_do_not_depend_on_the_umask() -> None:
    wheels = []
    for umask in (0o022, 0o077):
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w") as archive:
            for name, mode in (("p/", 0o40777), ("p/a.py", 0o100666), ("p/_C.so", 0o100777)):
                file = zipfile.ZipInfo(name, (2026, 1, 1, 0, 0, 0))
                file.external_attr = (mode & ~umask) << 16
                archive.writestr(file, name if mode & 0o100000 else "")
        wheels.append(wheel.same_rights(packed.getvalue()))
    assert wheels[0] == wheels[1]
    with zipfile.ZipFile(io.BytesIO(wheels[1])) as archive:
        rights = [file.external_attr >> 16 for file in archive.infolist()]
        assert rights == [0o40755, 0o100644, 0o100755]
        assert archive.read("p/a.py") == b"p/a.py"


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("_C*.so")), ids=lambda path: path.name)
def test_binaries_name_no_folder_of_this_machine(path: Path) -> None:
    if path.name == "_C_autograd.so":
        pytest.skip("not a case: this file is in no wheel")
    content = path.read_bytes()
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


@pytest.fixture
def compiled(tmp_path: Path) -> Path:
    if sys.platform != "linux" or not all(map(shutil.which, ("g++", "objdump", "objcopy"))):
        pytest.skip("needs g++ and binutils")
    (tmp_path / "power.cpp").write_text(SOURCE)
    path = tmp_path / "power.o"
    command = ["g++", "-O1", "-fPIC", "-c", str(tmp_path / "power.cpp"), "-o", str(path)]
    subprocess.run(command, check=True)
    return path


def test_libraries_are_linked_for_an_old_glibc(compiled: Path, tmp_path: Path) -> None:
    plain, portable = tmp_path / "plain.so", tmp_path / "portable.so"
    subprocess.run(["g++", "-shared", str(compiled), "-o", str(plain)], check=True)
    if not old_glibc.too_new(plain):
        pytest.skip("needs a glibc newer than 2.28")
    assert {"pow", "pthread_key_create"} <= set(old_glibc.too_new(plain))
    old_glibc.link(["g++", "-shared", str(compiled), "-o", str(portable)])
    assert old_glibc.too_new(portable) == []
    for library in (plain, portable):
        with zipfile.ZipFile(tmp_path / f"{library.stem}.whl", "w") as archive:
            archive.write(library, f"p/{library.name}")
    wheel.check_symbols(tmp_path / "portable.whl")
    with pytest.raises(SystemExit, match=r"p/plain\.so needs newer versions"):
        wheel.check_symbols(tmp_path / "plain.whl")
    # glibc 2.28 has the function in this library, and searches it there alone.
    dynamic = subprocess.run(["objdump", "-p", portable], capture_output=True, text=True).stdout
    assert re.search(r"required from libpthread\.so\.0:\s*\n.*GLIBC_2\.", dynamic)
    power = ctypes.CDLL(str(portable), mode=os.RTLD_NOW).power
    power.restype, power.argtypes = ctypes.c_double, [ctypes.c_double] * 2
    assert power(2.5, 3.0) == 3 * 2.5**3


def test_symbols_that_an_old_glibc_lacks_are_named(compiled: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"glibc 2\.28 has no closefrom"):
        old_glibc.older(["pow", "closefrom"], "g++")
    out = tmp_path / "out.so"
    with pytest.raises(subprocess.CalledProcessError):
        old_glibc.link(["g++", "-shared", str(compiled), "-lno_such_library", "-o", str(out)])
    assert not out.exists()


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
