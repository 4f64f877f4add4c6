"""Builds fusedtrain/_C.so (CPU), where nvcc is found fusedtrain/_C_cuda.so, and _C_autograd.so.

The first two use torch's stable ABI and no Python API: one build serves every torch from 2.10 and
every CPython. The third is for the torch and the Python at hand. A build.ninja is written and run
by ninja; torch itself is never imported.

Environment:
    FUSEDTRAIN_CUDA      0: no CUDA file. 1: built, nvcc must be there. Unset: built where the torch
                         at hand is a CUDA build, which alone can load it, and nvcc is found
                         (CUDA_HOME, CUDA_PATH, PATH, /usr/local/cuda, the nvidia-cuda-nvcc wheel).
    FUSEDTRAIN_CUDA_ARCHS  e.g. "90" or "80;90" (default 75;80;90;100;120, of these what nvcc knows;
                         the highest with PTX).
    FUSEDTRAIN_ISAS      all: the CPU kernels for every instruction set, as in wheels. Unset: for
                         the baseline and the best set of this machine, in 70 % of the time.
    FUSEDTRAIN_REQUIRE   of "cpu,cuda,autograd": a file that cannot be built is an error.
    FUSEDTRAIN_PORTABLE  1: for other machines. Linked for glibc 2.28, without symbols of the
                         debugger, and no _C_autograd.so, which is for one torch and one Python.
    MAX_JOBS             compilers at a time (default: ninja's choice).
"""

import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"
TARGET = "-DTORCH_TARGET_VERSION=0x020A000000000000"  # torch 2.10
# The two -fno flags let the compiler turn a branch into a select; results do not change.
CXX_FLAGS = (
    "-O3 -std=c++17 -fPIC -fvisibility=hidden -fno-math-errno -fno-trapping-math "
    "-Wall -Wextra -Wno-unused-function"
)
X86 = platform.machine() in ("x86_64", "AMD64")
# An x86 without AVX2 is rare: its kernels compile in half the time, and still use vectors.
ISA_FLAGS = {
    "default": "-O1 -ftree-vectorize" if X86 else "",
    "avx2": "-mavx2 -mfma -mf16c",
    "avx512": "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c "
    "-mprefer-vector-width=512 -Wno-maybe-uninitialized",
}
# Flags of /proc/cpuinfo.
ISA_NEEDS: dict[str, set[str]] = {
    "default": set(),
    "avx2": {"avx2", "fma", "f16c"},
    "avx512": {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl"},
}
# Division and square root by the hardware's approximation (2 ULP; a fifth of the instructions):
# correctly rounded ones would make the 16-bit kernels wait for arithmetic instead of memory.
NVCC_FLAGS = (
    "-O3 -std=c++17 -Xcompiler -fPIC,-fvisibility=hidden,-Wall,-Wno-unused-function "
    "-prec-div=false -prec-sqrt=false -Xptxas -v"
)
# Machine code is most of the file, and compresses to a tenth. Each driver for CUDA 13 reads the
# dense format; of those for CUDA 12 some cannot.
COMPRESS, DENSE = "-Xfatbin -compress-all", "--compress-mode=size"
DEFAULT_ARCHS = "75;80;90;100;120"
OLDEST_ARCH = 70  # __grid_constant__ parameters


def _load(path: Path) -> ModuleType:
    """A module by its path: the package itself would import torch."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


autograd_build = _load(ROOT / "fusedtrain/_backends/autograd_build.py")
ninja_build = _load(ROOT / "tools/ninja_build.py")
CannotBuild = autograd_build.CannotBuild
PORTABLE = os.environ.get("FUSEDTRAIN_PORTABLE") == "1"


def sources_key() -> str:
    """A key of all that _C.so and _C_cuda.so are made of; tools/gpu.py compares it."""
    kinds = {".h", ".cpp", ".cu", ".cuh"}
    sources = [p for p in CSRC.rglob("*") if p.suffix in kinds and p.parent.name != "autograd"]
    state = hashlib.sha256()
    for path in sorted([*sources, ROOT / "setup.py", ROOT / "tools/ninja_build.py"]):
        state.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return state.hexdigest()[:16]


def torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise CannotBuild("torch is not installed where fusedtrain is built")
    return Path(spec.origin).parent


def cxx() -> str:
    compiler: str = autograd_build.find_compiler(os.environ.get("CXX"))
    return compiler


def ninja() -> str:
    spec = importlib.util.find_spec("ninja")
    if spec is not None and spec.origin is not None:
        import ninja as package

        return str(Path(package.BIN_DIR) / "ninja")
    path = shutil.which("ninja")
    if not path:
        raise CannotBuild("ninja is not installed where fusedtrain is built (pip install ninja)")
    return path


def nvcc_places() -> Iterator[Path]:
    """Where nvcc may be, the most explicit place first."""
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if home := os.environ.get(variable):
            yield Path(home) / "bin" / "nvcc"
    if on_path := shutil.which("nvcc"):
        yield Path(on_path)
    yield Path("/usr/local/cuda/bin/nvcc")
    versions = Path("/usr/local").glob("cuda-*/bin/nvcc")
    yield from sorted(versions, key=lambda p: _numbers(p.parts[-3]), reverse=True)
    yield Path("/opt/cuda/bin/nvcc")
    # The wheel nvidia-cuda-nvcc from CUDA 13 on: nvidia/cu13/bin. That of CUDA 12 has no nvcc.
    for folder in sys.path:
        wheels = Path(folder or ".").glob("nvidia/cu*/bin/nvcc")
        yield from sorted(wheels, key=lambda p: _numbers(p.parts[-3]), reverse=True)


def _numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]


def nvcc() -> str:
    """The compiler; tools/gpu.py asks this function, too."""
    if os.environ.get("FUSEDTRAIN_CUDA") == "0":
        raise CannotBuild("built with FUSEDTRAIN_CUDA=0")
    path = next((p for p in nvcc_places() if p.is_file() and os.access(p, os.X_OK)), None)
    if path is None:
        raise CannotBuild(
            "nvcc was not found (set CUDA_HOME, put nvcc on PATH, or "
            "pip install nvidia-cuda-nvcc nvidia-cuda-cccl)"
        )
    return str(path)


def cuda_archs(compiler: str) -> tuple[list[str], list[str]]:
    """The architectures to build for, from the oldest to the newest, and those left out."""
    setting = os.environ.get("FUSEDTRAIN_CUDA_ARCHS") or os.environ.get("TORCH_CUDA_ARCH_LIST")
    asked = setting or DEFAULT_ARCHS
    archs = [a.removesuffix("+PTX").replace(".", "") for a in re.split(r"[;, ]+", asked) if a]
    for arch in archs:
        if not re.fullmatch(r"\d+[af]?", arch):
            raise CannotBuild(f"{arch!r} in {asked!r} is no architecture (such as 90 or 9.0)")
    archs = sorted(dict.fromkeys(archs), key=_numbers)
    run = subprocess.run([compiler, "--list-gpu-arch"], capture_output=True, text=True, check=False)
    known = (
        {int(n) for n in re.findall(r"compute_(\d+)", run.stdout)} if not run.returncode else None
    )
    built = [a for a in archs if _numbers(a)[0] >= OLDEST_ARCH]
    if known:  # an nvcc older than 11.1 has no such option
        built = [a for a in built if _numbers(a)[0] in known]
    if not built:
        raise CannotBuild(f"{compiler} ({version_of(compiler)}) builds none of {asked}")
    return built, [a for a in archs if a not in built]


# Linkers take the newest version of each symbol that this machine has.
LINK = f"{sys.executable} {ROOT}/tools/old_glibc.py $compiler" if PORTABLE else "$compiler"


Ninja = partial(ninja_build.Ninja, CSRC, LINK)


def run_ninja(n: Any, duration: str) -> None:
    """Compiles the units of a :class:`Ninja` that are not up to date.

    Args:
        n: the units.
        duration: of the whole, as a first line for the user.
    """
    try:
        n.run(ninja(), duration)
    except (subprocess.CalledProcessError, OSError) as error:
        raise CannotBuild(f"the compiler failed ({error}); its messages are above") from error


def torch_flags(torch: Path) -> tuple[str, str]:
    """Flags to compile a binding, and to link a file of kernels."""
    include = f"{TARGET} -isystem {torch}/include -isystem {torch}/include/torch/csrc/api/include"
    # Messages name a source by its place in the package: two builds have the same bytes. GCC names
    # a header of torch by its real path where that is shorter.
    include += f" -fmacro-prefix-map={ROOT}/="
    include += "".join(f" -fmacro-prefix-map={t}=torch" for t in sorted({torch, torch.resolve()}))
    if sys.platform == "darwin":
        return include, f"-L{torch}/lib -ltorch -ltorch_cpu -lc10 -undefined dynamic_lookup"
    # libtorch.so pulls libtorch_cuda.so where torch has it, also when linked where it has not.
    link = f"-L{torch}/lib -Wl,--no-as-needed -ltorch -ltorch_cpu -lc10 -Wl,--exclude-libs,ALL"
    return include, link


class Unit(NamedTuple):
    """A source, its own flags, and the instruction set that it is compiled for."""

    source: Path
    flags: str = ""
    isa: str = ""


def machine_isas() -> list[str]:
    """The instruction sets that this processor has, the best one last."""
    info = Path("/proc/cpuinfo")
    if not (X86 and info.exists()):
        return list(ISA_FLAGS) if X86 else ["default"]
    has = set(info.read_text().split())
    return [isa for isa, needs in ISA_NEEDS.items() if needs <= has]


def built_isas() -> list[str]:
    """The instruction sets that _C.so is built for."""
    machine = machine_isas()
    if X86 and (PORTABLE or os.environ.get("FUSEDTRAIN_ISAS") == "all"):
        return list(ISA_FLAGS)
    return list(dict.fromkeys([machine[0], machine[-1]]))


def cpu_units(isas: list[str]) -> list[Unit]:
    """The units of _C.so: those of csrc/cpu/isa once for each of these instruction sets.

    tools/sanitize.py builds them, too.
    """
    include, _ = torch_flags(torch_folder())
    sets = " ".join(f"-DFT_WITH_{isa.upper()}" for isa in isas) + f" -DFT_LOWEST=isa_{isas[0]}"
    units = [Unit(CSRC / "bindings/cpu.cpp", include)]
    units += [
        Unit(source, sets if source.stem == "dispatch" else "")
        for source in sorted((CSRC / "cpu").glob("*.cpp"))
    ]
    for isa in isas:
        sources = sorted((CSRC / "cpu/isa").glob("*.cpp"))
        names = f"-DFT_ISA=isa_{isa} -DFT_ISA_NAME={isa}"
        units += [Unit(source, f"{ISA_FLAGS[isa]} {names}".strip(), isa) for source in sources]
    return units


def build_cpu(
    out: Path, work: Path, isas: list[str] | None = None, more: str = ""
) -> dict[str, object]:
    """Builds _C.so.

    Args:
        out: the file.
        work: the folder of the objects.
        isas: those of built_isas() where None.
        more: flags of every compilation and of the link, behind all others.
    """
    torch, compiler = torch_folder(), cxx()
    n = Ninja(work / "cpu")
    isas = isas or built_isas()
    objects = [
        n.compile(unit.source, compiler, f"{CXX_FLAGS} {unit.flags} {more}".strip(), isa=unit.isa)
        for unit in cpu_units(isas)
    ]
    n.link(out, objects, compiler, f"{torch_flags(torch)[1]} {more}".strip())
    run_ninja(n, "the CPU kernels, about 1 minute on 2 cores")
    return {
        "compiler": version_of(compiler),
        "torch": torch_version(torch),
        "instruction_sets": "+".join(isas),
    }


def version_of(compiler: str) -> str:
    run = subprocess.run([*compiler.split(), "--version"], capture_output=True, text=True)
    lines = run.stdout.splitlines() or [compiler]
    # nvcc names itself first and says its release further down.
    return next((line for line in lines if ", release " in line), lines[0])


def torch_version(torch: Path) -> str:
    match = re.search(r"__version__ = '([^']+)'", (torch / "version.py").read_text())
    return match.group(1) if match else "unknown"


def torch_is_without_cuda(torch: Path) -> bool:
    return re.search(r"^cuda\b.* = None$", (torch / "version.py").read_text(), re.M) is not None


def build_cuda(out: Path, work: Path, asked: bool = True) -> dict[str, object]:
    """Builds _C_cuda.so.

    Args:
        out: the file.
        work: the folder of the objects.
        asked: also for a torch that cannot load it.
    """
    unwanted = os.environ.get("FUSEDTRAIN_CUDA") == "0"
    if not (asked or unwanted) and torch_is_without_cuda(torch_folder()):
        raise CannotBuild(
            f"torch {torch_version(torch_folder())} at the build could not load it "
            "(FUSEDTRAIN_CUDA=1 builds it all the same)"
        )
    compiler, torch, host = nvcc(), torch_folder(), cxx()
    sources = sorted((CSRC / "cuda").glob("*.cu"))
    if not sources:
        raise CannotBuild("this version has no CUDA kernels")
    archs, left_out = cuda_archs(compiler)
    if left_out:
        names = ", ".join(f"sm_{a}" for a in left_out)
        print(
            f"fusedtrain: _C_cuda.so is built without {names}, which {compiler} "
            f"({version_of(compiler)}) or fusedtrain does not know",
            file=sys.stderr,
        )
    codes = [f"-gencode arch=compute_{a},code=sm_{a}" for a in archs]
    ptx = str(_numbers(archs[-1])[0])
    codes.append(f"-gencode arch=compute_{ptx},code=compute_{ptx}")
    dense = (re.findall(r"release (\d+)", version_of(compiler)) or ["0"])[0]
    flags = f"{NVCC_FLAGS} {DENSE if int(dense) >= 13 else COMPRESS} -ccbin {host.split()[0]}"
    include, link = torch_flags(torch)
    n = Ninja(work / "cuda")
    objects = [n.compile(s, compiler, f"{flags} {' '.join(codes)}", "nvcc") for s in sources]
    objects.append(n.compile(CSRC / "bindings/cuda.cpp", host, f"{CXX_FLAGS} {include}"))
    # nvcc links, since it knows where its runtime lies; static, so that any driver it fits will do.
    link = re.sub(r"-Wl,(\S+)", r"-Xlinker \1", link)
    n.link(out, objects, compiler, f"{link} -cudart static -nodlink -ccbin {host.split()[0]}")
    names = ", ".join(f"sm_{a}" for a in archs)
    run_ninja(n, f"the CUDA kernels ({names}), about {1 + len(archs)} minutes on 2 cores")
    return {
        "cuda_archs": archs,
        "cuda_ptx": ptx,
        **({"cuda_archs_left_out": left_out} if left_out else {}),
        "nvcc": version_of(compiler).strip(),
    }


def build_autograd(out: Path, work: Path) -> dict[str, object]:
    """Builds _C_autograd.so.

    Args:
        out: the file.
        work: the folder of the objects.
    """
    if PORTABLE:
        raise CannotBuild("this is a wheel for every torch, the file is for one")
    torch, compiler = torch_folder(), cxx()
    compile_flags, link_flags = autograd_build.flags(torch)
    n = Ninja(work / "autograd")
    source = autograd_build.source_in(ROOT / "fusedtrain")
    n.link(out, [n.compile(source, compiler, compile_flags)], compiler, link_flags)
    run_ninja(n, "the autograd nodes, about 20 seconds")
    return {"autograd": autograd_build.built_for(torch_version(torch))}


class BuildKernels(build_ext):
    """build_ext that writes a build.ninja; in place for editable installs, else into the wheel."""

    def get_ext_filename(self, fullname: str) -> str:
        # No Python ABI in the name: the file has no Python API.
        return str(Path(*fullname.split("."))) + ".so"

    def run(self) -> None:
        required = set(filter(None, os.environ.get("FUSEDTRAIN_REQUIRE", "").split(",")))
        if os.environ.get("FUSEDTRAIN_CUDA") == "1":
            required.add("cuda")
        package = ROOT / "fusedtrain" if self.inplace else Path(self.build_lib) / "fusedtrain"
        package = package.resolve()
        package.mkdir(parents=True, exist_ok=True)
        # Not setuptools' own temporary folder: pip makes a new one each time, ninja keeps this one.
        work = ROOT / "build" / "ninja"
        asked = "cuda" in required
        record: dict[str, object] = {"sources": sources_key()}
        files = {"cpu": "_C.so", "cuda": "_C_cuda.so", "autograd": autograd_build.NAME}
        builds = {
            "cpu": partial(build_cpu, package / files["cpu"], work),
            "cuda": partial(build_cuda, package / files["cuda"], work, asked),
            "autograd": partial(build_autograd, package / files["autograd"], work),
        }
        # The nodes are one unit of 30 to 45 s of CPU: beside the others, on any number of cores.
        # With many cores each file waits for the longest of its units.
        if not os.environ.get("MAX_JOBS"):
            pool = ThreadPoolExecutor(len(builds))
            beside = builds if (os.cpu_count() or 1) >= 8 else ("autograd",)
            for name in beside:
                builds[name] = partial(pool.submit(builds[name]).result)
        for name, file in files.items():
            try:
                record.update(builds[name]())
            except CannotBuild as reason:
                (package / file).unlink(missing_ok=True)
                if name in required:
                    raise SystemExit(f"fusedtrain: {file} is required: {reason}") from None
                record[f"{name}_not_built"] = str(reason)
                print(f"fusedtrain: {file} is not built: {reason}", file=sys.stderr)
        if "cpu_not_built" in record:
            print(
                "fusedtrain: installed as pure Python; ops run in plain torch "
                "(python -m fusedtrain info)",
                file=sys.stderr,
            )
        (package / "_build_info.json").write_text(json.dumps(record, indent=1) + "\n")
        if not self.inplace:  # An installation can build the file for another torch.
            shutil.copytree(CSRC / "autograd", package / "csrc/autograd", dirs_exist_ok=True)

    def get_outputs(self) -> list[str]:
        package = Path(self.build_lib) / "fusedtrain"
        names = ("_C.so", "_C_cuda.so", autograd_build.NAME, "_build_info.json")
        paths = [package / name for name in names if (package / name).exists()]
        return [str(path) for path in [*paths, *sorted(package.glob("csrc/autograd/*"))]]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class AnyPythonWheel(bdist_wheel):
    """A wheel for every Python 3 on one platform."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


if __name__ == "__main__":
    setup(
        ext_modules=[Extension("fusedtrain._C", sources=[])],
        cmdclass={"build_ext": BuildKernels, "bdist_wheel": AnyPythonWheel},
    )
