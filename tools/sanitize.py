"""`make sanitize`: the kernels under AddressSanitizer and UndefinedBehaviorSanitizer.

    python tools/sanitize.py [--short] [--only PART ...] [--examples N] [--workers N]

Planted faults come first (tests/tools/test_sanitize.py): unless they are reported, nothing below
means anything. The parts, one after another, in a copy of the checkout (build/sanitize/tree):

    default, avx2, avx512
              the tests of the CPU kernels with this instruction set, where the processor has it
    emulated  the tests of the CUDA kernels on the emulator
    fuzz      generated cases of every op (python -m tests.fuzz --only ops)

--short is what CI runs: the best instruction set alone, a sample of the tests, few generated cases,
no emulated kernels.
Logs lie in build/sanitize/logs. The exit code is 0 where everything ran and nothing was found.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from _checkout import ROOT, copy_tree, setup_module
from _test_files import all_located, located

BUILD = ROOT / "build" / "sanitize"
TREE, LOGS = BUILD / "tree", BUILD / "logs"
ISAS = ("default", "avx2", "avx512")
PARTS = (*ISAS, "emulated", "fuzz")
PYTEST = (sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider")

# Three parts of `undefined` are off. vptr: no class here has virtual functions. null and
# object-size: AddressSanitizer reports what they report, and the unit of one instruction set takes
# 60 s of CPU without them (GCC 12, AVX2), and more than 100 s with both.
SANITIZERS = (
    "-fsanitize=address,undefined,float-cast-overflow -fno-sanitize=vptr,null,object-size "
    "-fno-sanitize-recover=undefined,float-cast-overflow -fno-omit-frame-pointer -g1"
)
FLAGS = f"{SANITIZERS} -O1 -w"  # -w: `make build` shows the warnings
# Python and torch keep memory until the process ends: no leak of ours could be told apart.
# allocator_may_return_null: tests ask for more memory than there is, and expect an error.
ASAN = "detect_leaks=0:allocator_may_return_null=1:quarantine_size_mb=64"
# Both sanitizers' headlines.
REPORT = re.compile(r"ERROR: (?:Address|Leak)Sanitizer: .*|\S+:\d+:\d+: runtime error: .*")

KERNEL_TESTS = all_located(
    f"test_{name}"
    for name in (
        "activation_kernels", "batch_norm_kernels", "batch_norm_numbers", "chain_kernels",
        "fold_kernels", "optimizer_kernels", "state_code_kernels",
        "depthwise_kernels", "pool_kernels", "pool", "images", "few_bit", "bits", "vecmath",
    )
)  # fmt: skip
EMULATED_TESTS = [*KERNEL_TESTS, located("test_cuda_batch_norm"), located("test_cuda_optimizers")]
# Another instruction set in a process of its own: here each one has a part of its own. 2_to_31
# takes 10 GiB, and more of the sanitizer's own; training_reaches runs no kernel that others do not.
CHOSEN = " and not ".join((
    "not emulated", "triton", "reference", "cuda", "inductor", "every_instruction_set",
    "capabilities_agree", "more_than_2_to_31", "training_reaches",
))  # fmt: skip
CHOSEN_EMULATED = "emulated or test_cuda_batch_norm or test_cuda_optimizers"


class CannotRun(Exception):
    """Why nothing can be sanitized here."""


@functools.cache
def runtime() -> str:
    """The libraries to load before all others: Python is not linked with them.

    libstdc++ too: AddressSanitizer looks for `__cxa_throw` when it starts, and Python has none.
    """
    compiler, paths = setup_module().cxx().split()[0], []
    for name in ("libasan.so", "libubsan.so", "libstdc++.so"):
        command = [compiler, f"-print-file-name={name}"]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        path = Path(run.stdout.strip())
        if not path.is_absolute():
            raise CannotRun(f"{compiler} has no {name} (make sanitize needs GCC's sanitizers)")
        paths.append(str(path.resolve()))
    return " ".join(paths)


def environment(isa: str = "") -> dict[str, str]:
    """Environment of a process that loads sanitized code; without `isa` that of the emulator,
    whose threads have stacks of their own."""
    more = {"FUSEDTRAIN_TEST_EMULATOR_SANITIZERS": SANITIZERS}
    if isa:
        # A compiler that adds the sanitizers: for the small libraries that tests build.
        script = BUILD / "c++"
        text = f'#!/bin/sh\nunset LD_PRELOAD\nexec {setup_module().cxx()} {FLAGS} "$@"\n'
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(text)
        script.chmod(0o755)
        more = {"FUSEDTRAIN_CPU_CAPABILITY": isa, "CXX": str(script)}
    return {
        **os.environ, "LD_PRELOAD": runtime(), "PYTHONUNBUFFERED": "1",
        "ASAN_OPTIONS": f"{ASAN}:detect_stack_use_after_return={int(bool(isa))}",
        "UBSAN_OPTIONS": "print_stacktrace=1", "PYTHONPATH": str(ROOT / "tools"), **more,
    }  # fmt: skip


def reports(text: str) -> list[str]:
    """The headlines of the sanitizers' reports, each once."""
    headlines = (re.sub(r"==\d+==|0x[0-9a-f]+", "", line).strip() for line in REPORT.findall(text))
    return list(dict.fromkeys(headlines))


def faults(
    part: str, command: list[str], env: dict[str, str], ran: str, folder: Path | None = None
) -> list[str]:
    """Runs a command in the copy: its faults, which are printed. `ran`: the output must match."""
    LOGS.mkdir(parents=True, exist_ok=True)
    log, start = LOGS / f"{part.replace(' ', '-')}.log", time.monotonic()
    print(f"{part}: runs, output in {log}", flush=True)
    with log.open("w") as file:
        done = subprocess.run(command, cwd=folder or TREE, env=env, stdout=file, stderr=file)
    text = log.read_text(errors="replace")
    wrong = reports(text) + re.findall(r"^(?:FAILED|ERROR) .*", text, re.M)
    if done.returncode != 0 and not wrong:
        wrong = [f"no report, but exit code {done.returncode}", *text.splitlines()[-5:]]
    matches = re.findall(ran, text, re.M)
    wrong += [] if matches else ["nothing ran"]
    print(f"{part}: {matches[-1:]}, {len(wrong)} faults, {time.monotonic() - start:.0f} s")
    print("".join(f"    {line}\n" for line in wrong), end="", flush=True)
    return wrong


def pytest_faults(
    part: str, tests: list[str], chosen: str, env: dict[str, str], workers: int, every: int
) -> list[str]:
    """pytest in the copy. A test whose process a sanitizer ends has failed; the others go on."""
    # --capture=sys: what a sanitizer writes to stderr must outlive the process that it ends.
    options = ["-n", str(workers), "--capture=sys", "-p", "_every_nth", "--every", str(every)]
    return faults(part, [*PYTEST, *tests, "-k", chosen, *options], env, r"=.* (\d+ passed.*) in ")


def loaded_faults(isa: str) -> list[str]:
    """Whether the _C.so that a process in the copy imports is the sanitized one."""
    code = (
        "import fusedtrain, pathlib; file = pathlib.Path(fusedtrain.__file__).parent / '_C.so'; "
        f"assert file.is_relative_to({str(TREE)!r}), file; content = file.read_bytes(); "
        "assert b'__asan_report_load' in content and b'__ubsan_handle' in content, 'plain'; "
        "print(*fusedtrain.backend_info().backends['cpu'].architectures)"
    )
    return faults(f"file {isa}", [sys.executable, "-c", code], environment(isa), f"^{isa}$")


def build_cpu(isas: list[str]) -> None:
    """_C.so with these instruction sets alone, for the copy."""
    folder = BUILD / "-".join(isas)
    folder.mkdir(parents=True, exist_ok=True)
    setup_module().build_cpu(folder / "_C.so", BUILD, isas, FLAGS)
    shutil.copy2(folder / "_C.so", TREE / "fusedtrain/_C.so")
    (TREE / "fusedtrain/_build_info.json").write_text('{"cuda_not_built": "sanitized"}\n')


def build_emulator() -> None:
    """The emulated CUDA kernels, in TREE/build/emulator."""
    # Without the kernels of the CPU, for they need the runtime, and the compiler is slow under it.
    more = {"FUSEDTRAIN_BACKEND": "reference", "FUSEDTRAIN_TEST_EMULATOR_SANITIZERS": SANITIZERS}
    code = "import sys; sys.path.insert(0, 'tests'); import cuda_emulator; cuda_emulator.build()"
    command = [sys.executable, "-c", code]
    subprocess.run(command, cwd=TREE, check=True, env={**os.environ, **more})


def run(asked: list[str], short: bool, examples: int, workers: int) -> list[str]:
    """All parts that are asked for; their faults."""
    machine: list[str] = setup_module().machine_isas()
    named = [isa for isa in ISAS if isa in asked]
    isas = [isa for isa in (machine[-1:] if short else machine) if isa in (named or ISAS)]
    if not isas:
        raise CannotRun(f"{', '.join(named)}: not here, or not with --short: {machine[-1]}")
    print("sanitize: not run:", *({*PARTS} - {*asked} | {*named} - {*isas} or ["nothing"]))
    every = 8 if short else 1  # nth case of each test
    copy_tree(TREE)
    planted, plain = [*PYTEST, located("test_sanitize"), "-k"], dict(os.environ)
    if wrong := faults("faults", [*planted, "not emulated"], plain, "=.* passed", ROOT):
        return wrong
    if "emulated" in asked:
        build_emulator()
        wrong = faults("emulated faults", [*planted, "emulated"], plain, "=.* passed", ROOT)
        if not wrong:
            env = environment()
            wrong = pytest_faults("emulated", EMULATED_TESTS, CHOSEN_EMULATED, env, workers, every)
    if {*asked} - {"emulated"}:
        build_cpu(isas)
    for isa in isas if {*asked} - {"emulated"} else ():
        wrong += loaded_faults(isa)
        env = environment(isa)
        if isa in asked:
            wrong += pytest_faults(isa, KERNEL_TESTS, CHOSEN, env, workers, every)
        if "fuzz" in asked:
            fuzz = [sys.executable, "-m", "tests.fuzz", "--only", "ops", "--seed", "0",
                    "--examples", str(examples), "--workers", str(workers)]  # fmt: skip
            wrong += faults(f"fuzz {isa}", fuzz, env, r"^ +ops: [1-9].*")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--short", action="store_true", help="what CI runs: 4 minutes")
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--examples", type=int, help="generated cases of an instruction set")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    # The emulated kernels take 305 s of CPU to compile; `make test` has the emulator's own checks.
    usual = [part for part in PARTS if part != "emulated" or not options.short]
    examples = options.examples or (100 if options.short else 2000)
    try:
        wrong = run(options.only or usual, options.short, examples, options.workers)
    except (CannotRun, setup_module().CannotBuild, OSError, subprocess.CalledProcessError) as why:
        print(f"sanitize: cannot run: {why}")
        return 1
    print(f"sanitize: {f'{len(wrong)} faults found' if wrong else 'nothing found'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
