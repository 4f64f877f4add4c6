"""`make sanitize`: the kernels under AddressSanitizer and UndefinedBehaviorSanitizer.

    python tools/sanitize.py [--short] [--only PART ...] [--examples N] [--workers N]

The parts, one after another; a fault stops the test that has it alone, and all are counted:

    faults    planted faults are reported, else nothing below means anything
    build     _C.so and the emulated CUDA kernels, into build/sanitize
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
import os
import re
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import _sanitized as sanitized
from _planted import (
    PLUGINS,
    Result,
    emulator_environment,
    judge,
    reports,
    run_emulated_faults,
    run_faults,
)
from _test_files import located

LOGS = sanitized.BUILD / "logs"
KERNEL_TESTS = [
    located(f"test_{name}")
    for name in (
        "activation_kernels", "batch_norm_kernels", "batch_norm_numbers", "chain_kernels",
        "fold_kernels", "optimizer_kernels", "state_code_kernels",
        "depthwise_kernels", "pool_kernels", "pool", "images", "few_bit", "bits", "vecmath",
    )
]  # fmt: skip
EMULATED_TESTS = KERNEL_TESTS + [located("test_cuda_batch_norm"), located("test_cuda_optimizers")]


def logged(part: str, command: list[str], env: dict[str, str]) -> tuple[int, list[str]]:
    """Runs a command in the tree: its exit code, and its output, which is in a log, too."""
    LOGS.mkdir(parents=True, exist_ok=True)
    log = LOGS / f"{part.replace(' ', '-')}.log"
    print(f"{part}: runs, output in {log}", flush=True)
    with log.open("w") as file:
        done = subprocess.run(command, cwd=sanitized.TREE, env=env, stdout=file, stderr=file)
    return done.returncode, log.read_text(errors="replace").splitlines()


def run_tests(
    part: str, tests: list[str], chosen: str, env: dict[str, str], workers: int, every: int
) -> Result:
    """pytest in the tree. A test whose process a sanitizer ends has failed; the others go on."""
    start = time.monotonic()
    # --capture=sys: what a sanitizer writes to stderr must outlive the process that it ends.
    code, lines = logged(
        part,
        [sys.executable, "-m", "pytest", *tests, "-v", "-k", chosen, "-n", str(workers),
         "--capture=sys", "-p", "no:cacheprovider", "-p", "_every_nth", "--every", str(every)],
        env,
    )  # fmt: skip
    wrong = reports(lines)
    wrong += [line for line in lines if re.match(r"(FAILED|ERROR) tests/", line)]
    counts = next((m for line in reversed(lines)
                   if (m := re.fullmatch(r"=+ (.*?) in [\d.]+s.*=+", line))), None)  # fmt: skip
    if code != 0 and not wrong:
        wrong = [f"pytest ended with {code}", *lines[-5:]]
    if counts is None or " passed" not in counts.group(1):
        wrong.append("no test passed")
    return Result(part, counts.group(1) if counts else "", time.monotonic() - start, wrong)


def loads_the_sanitized_file(isa: str) -> list[str]:
    """Errors in the _C.so that a process in the tree imports."""
    code = (
        "import fusedtrain, pathlib; file = pathlib.Path(fusedtrain.__file__).parent / '_C.so'; "
        f"assert file.is_relative_to({str(sanitized.TREE)!r}), file; content = file.read_bytes(); "
        "assert b'__asan_report_load' in content and b'__ubsan_handle' in content, 'plain'; "
        "names = fusedtrain.backend_info().backends['cpu'].architectures; "
        f"assert names == ({isa!r},), names"
    )
    return judge(f"the file for {isa}", "", code, sanitized.environment(isa), sanitized.TREE)


def run_isa(isa: str, workers: int, every: int) -> Result:
    if wrong := loads_the_sanitized_file(isa):
        return Result(isa, "", 0.0, wrong)
    # Small libraries that tests compile themselves get the sanitizers too.
    env = sanitized.environment(isa, more={"CXX": str(sanitized.compiler_script()), **PLUGINS})
    chosen = "not emulated and not triton and not reference and not cuda and not inductor"
    # Another instruction set in a process of its own: here each one has a part of its own.
    chosen += " and not every_instruction_set and not capabilities_agree"
    chosen += " and not more_than_2_to_31"  # 10 GiB, and more of the sanitizer's own
    chosen += " and not training_reaches"  # no kernel that others do not run, for minutes
    return run_tests(isa, KERNEL_TESTS, chosen, env, workers, every)


def run_emulated(workers: int, every: int) -> Result:
    chosen = "emulated or test_cuda_batch_norm or test_cuda_optimizers"
    return run_tests("emulated", EMULATED_TESTS, chosen, emulator_environment(), workers, every)


def run_fuzz(isa: str, examples: int, workers: int) -> Result:
    start = time.monotonic()
    part = f"fuzz {isa}"
    command = [sys.executable, "-m", "tests.fuzz", "--examples", str(examples), "--only", "ops"]
    command += ["--seed", "0", "--workers", str(workers)]
    code, lines = logged(part, command, sanitized.environment(isa))
    wrong = reports(lines)
    if code != 0 and not wrong:
        said = [line for line in lines if line.startswith("Failed:")] or lines[-5:]
        wrong = [f"no report of a sanitizer, but the fuzz ended with {code}", *said]
    ran = next((line.strip() for line in reversed(lines) if re.match(r" +ops: [1-9]", line)), "")
    if not ran and not wrong:
        wrong = ["the fuzz does not say that it ran a case", *lines[-5:]]
    return Result(part, ran, time.monotonic() - start, wrong)


PARTS = ("faults", *sanitized.ISAS, "emulated", "fuzz")
# With --short: every nth case of each test function, and generated cases. The emulated kernels
# are left out, since they take 305 s of CPU to compile; `make test` has the emulator's own checks.
SHORT_EVERY, SHORT_EXAMPLES = 8, 100


def chosen_parts() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--short", action="store_true", help="what CI runs: 4 minutes")
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART",
                        help=f"of {', '.join(PARTS)}")  # fmt: skip
    parser.add_argument("--examples", type=int, help="generated cases per instruction set "
                        f"(2000; {SHORT_EXAMPLES} with --short)")  # fmt: skip
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1,
                        help="test processes at a time (the processors)")  # fmt: skip
    options = parser.parse_args()
    if options.workers < 1 or (options.examples is not None and options.examples < 1):
        parser.error("--workers and --examples: at least 1")
    if options.only is None:
        options.only = [part for part in PARTS if part != "emulated" or not options.short]
    if options.examples is None:
        options.examples = SHORT_EXAMPLES if options.short else 2000
    return options


def instruction_sets(asked: set[str], short: bool) -> list[str]:
    """The instruction sets to build: those asked for by name that this processor has."""
    isas = sanitized.machine_isas()
    isas = isas[-1:] if short else isas
    if named := asked & set(sanitized.ISAS):
        isas = [isa for isa in isas if isa in named]
    if not isas:
        best = f"--short takes {sanitized.machine_isas()[-1]} alone" if short else "not here"
        raise sanitized.CannotRun(f"{', '.join(sorted(named))}: {best}")
    return isas


def build(asked: set[str], isas: list[str]) -> None:
    """Both at a time: one unit of _C.so takes longer than all of its others."""
    print(f"building what {', '.join(sorted(asked))} need ({', '.join(isas)})", flush=True)
    with ThreadPoolExecutor() as pool:
        builds: list[Future[Any]] = (
            [pool.submit(sanitized.build_cpu, isas)] if asked - {"faults", "emulated"} else []
        )
        builds += [pool.submit(sanitized.build_emulator)] if "emulated" in asked else []
        for future in builds:
            future.result()


def run(options: argparse.Namespace) -> list[Result]:
    asked = set(options.only)
    isas = instruction_sets(asked, options.short)
    every = SHORT_EVERY if options.short else 1
    results = []

    def note(result: Result) -> Result:
        results.append(result)
        verdict = f"{len(result.wrong)} FAULTS" if result.wrong else "clean"
        print(f"{result.part}: {result.ran or 'nothing ran'}, {verdict} ({result.seconds:.0f} s)")
        print("".join(f"    {line}\n" for line in result.wrong), end="", flush=True)
        return result

    if note(run_faults(sanitized.build_faults(sanitized.BUILD / "faults"))).wrong:
        return results
    sanitized.copy_tree(sanitized.TREE)
    build(asked, isas)
    if "emulated" in asked and not note(run_emulated_faults()).wrong:
        note(run_emulated(options.workers, every))
    for isa in isas:
        if isa in asked:
            note(run_isa(isa, options.workers, every))
        if "fuzz" in asked:
            note(run_fuzz(isa, options.examples, options.workers))
    return results


def main() -> int:
    options = chosen_parts()
    start = time.monotonic()
    try:
        results = run(options)
    except (sanitized.CannotRun, sanitized.setup_module().CannotBuild, OSError,
            subprocess.CalledProcessError) as reason:  # fmt: skip
        print(f"sanitize: cannot run: {reason}")
        return 1
    wrong = sum(len(r.wrong) for r in results)
    left = ", ".join(set(PARTS) - {r.part.split()[0] for r in results})
    print(f"sanitize: {time.monotonic() - start:.0f} s; not run: {left or 'none'}")
    print(f"sanitize: {f'{wrong} faults found' if wrong else 'nothing found'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
