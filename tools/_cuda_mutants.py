"""Mutants of the CUDA kernels: all of them in one build, each switched on by its number.

A mutant is a short insertion into a line (`i < n` becomes `i < ft_more(7) + n`), so that a file
with all its mutants compiles once. The emulator runs the kernels, and notices by itself a mutant
that reaches past a buffer, into another thread's memory or past a barrier.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from _collected import Collected
from _cpp_mutants import mutants_of
from _mutant import Judge, Mutant, named

FOLDER = "csrc/cuda"
KEPT = Path(__file__).resolve().parent.parent / "build/kernel_mutants"
_NORMS = """
cuda_batch_norm_walks
kernel_traffic: passes_and_launches[batch_norm
cuda_batch_norm
batch_norm_kernels
batch_norm_numbers
batch_norm_in_place
"""
_STEPS = """
optimizer_gpu_kernels
cuda_optimizers
cuda_optimizer_launches
kernel_traffic: passes_and_launches[optimizer_step
bad_gradients
split_master_kernels
state_code_kernels
"""
_CHAINS = """
chain_walks
kernel_traffic: passes_and_launches[gated passes_and_launches[scale_add passes_and_launches[bias_act
chain_kernels
"""
_TRAFFIC = "kernel_traffic: passes_and_launches"
# The tests of the files whose names begin so, the narrowest first: the first that fails ends the
# trial.
TESTS = {
    "batch_norm": _NORMS,
    **dict.fromkeys(("gated", "scale_add", "bias_act", "channels"), _CHAINS),
    "row_norm": f"row_norm_kernels\n{_TRAFFIC}[row_norm",
    "channelwise": f"activation_kernels\n{_TRAFFIC}[channelwise",
    "depthwise": f"depthwise_kernels\n{_TRAFFIC}[depthwise_conv",
    "divisor": "depthwise_kernels\npool_kernels",
    "few_bit": f"few_bit\n{_TRAFFIC}[few_bit",
    "fold": f"fold_kernels\n{_TRAFFIC}[fold",
    "group_norm": "group_norm: kernels zero_weights numbers",
    "images": f"image_kernels\n{_TRAFFIC}[normalize_images",
    "optimizer": _STEPS,
    "pointwise": f"activation_kernels\n{_TRAFFIC}[pointwise",
    "pool": f"pool_kernels\n{_TRAFFIC}[max_pool2d",
    "shares": f"{_CHAINS}activation_kernels\ndepthwise_kernels",
    "scaling": "optimizer_gpu_kernels: zero update_scale\ncuda_optimizer_launches: ranges",
    "launch": f"cuda_emulator: planted\nactivation_kernels{_NORMS}",
    "reduce": f"{_NORMS}fold_kernels",
    "vec": f"activation_kernels\ncuda_batch_norm_walks: planes{_CHAINS}",
}
_SWITCHES = """\
#ifndef FT_MUTANTS
#define FT_MUTANTS
extern "C" __attribute__((const)) bool ft_is(int mutant);  // whether it is the one that is tried
static inline int ft_more(int mutant) { return ft_is(mutant) ? 1 : 0; }
static inline int ft_two(int mutant) { return ft_is(mutant) ? 2 : 1; }
static inline int ft_sign(int mutant) { return ft_is(mutant) ? -1 : 1; }
// Takes all that follows: x += ft_signed(7) *= a ? b : c.
struct ft_signed {
  int mutant;
  explicit ft_signed(int mutant) : mutant(mutant) {}
  template <class T>
  auto operator*=(T x) const { return ft_is(mutant) ? -x : +x; }
};
#endif
"""
# Read when a fork that tries a mutant loads the library.
_CHOICE = """
#include <fstream>
static const int ft_chosen = [] {
  int number = -1;
  if (const char* file = getenv("FT_MUTANT_FILE")) std::ifstream(file) >> number;
  return number;
}();
extern "C" bool ft_is(int mutant) { return mutant == ft_chosen; }
"""


def _every(root: Path) -> list[Mutant]:
    """Mutants by their numbers. Pointless ones are built, too: so the library stays the same."""
    files = sorted(p.relative_to(root).as_posix() for p in (root / FOLDER).glob("*.cu*"))
    return [m for file in files for m in mutants_of(root, file)]


def mutants(root: Path) -> list[Mutant]:
    return [m for m in _every(root) if not m.pointless]


def with_switches(text: str, numbered: dict[int, Mutant]) -> str:
    """The source with all its mutants, by number."""
    for number, m in sorted(numbered.items(), key=lambda item: -item[1].offset):
        start, end = m.offset, m.offset + len(m.old)
        insertion = m.insertion.replace("#", str(number))
        if m.what == "barrier deleted":
            text = text[:start] + insertion + text[start:]
        elif not insertion:
            text = f"{text[:start]}({m.old} + ft_more({number})){text[end:]}"
        else:
            text = text[:end] + insertion + text[end:]
    return _SWITCHES + text


_ORDERS = '("forward", "reverse", "shuffled")'
_BUILD = "import sys, cuda_emulator; sys.exit(cuda_emulator.build() or 0)"
# Few ops of each loop: their formulas are those of the CPU.
CHOSEN = [
    "-k", "(emulated or test_cuda or traffic) and not 2_to_31"
    " and (not test_activation_kernels.py or silu or prelu or star_relu or hardtanh)"
    " and (not every_activation or mish or hardtanh)",
]  # fmt: skip


def tests_of(file: str) -> tuple[str, ...]:
    stem = Path(file).name.split(".")[0]
    return tuple(named(next(rows for begin, rows in TESTS.items() if stem.startswith(begin))))


def _build(tree: Path, numbered: dict[str, dict[int, Mutant]]) -> None:
    """Builds the library, or takes the one that was built of the same sources."""
    sources = {file: (tree / file).read_text() for file in numbered}
    switched = {file: with_switches(text, numbered[file]) for file, text in sources.items()}
    others = [*(tree / "csrc").rglob("*.h*"), *(tree / "csrc/bindings").glob("*.cpp")]
    others += (f for f in (tree / "tests/cuda_emulator").rglob("*.*") if f.suffix != ".pyc")
    texts = [*switched.values(), _CHOICE, *(f.read_text() for f in sorted(others))]
    kept = KEPT / hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16] / "_emulated.so"
    built = tree / "build/emulator/_emulated.so"
    built.parent.mkdir(parents=True)
    if kept.exists():
        shutil.copy(kept, built)
        return
    for file, text in switched.items():
        (tree / file).write_text(text)
    with (tree / "tests/cuda_emulator/emulator.cpp").open("a") as emulator:
        emulator.write(_CHOICE)
    print("the emulator is built with all mutants (five minutes of two processors)", flush=True)
    environment = {**os.environ, "PYTHONPATH": f"{tree}:{tree}/tests"}
    done = subprocess.run(
        [sys.executable, "-c", _BUILD], cwd=tree, env=environment, capture_output=True, text=True
    )
    for file, text in sources.items():
        (tree / file).write_text(text)
    if done.returncode != 0:  # beside thousands of lines of warnings
        lines = [line for line in done.stderr.splitlines() if re.search("[Ee]rror|FAILED", line)]
        raise RuntimeError("\n".join(line[:500] for line in lines[:20] or [done.stderr[-6000:]]))
    shutil.rmtree(KEPT, ignore_errors=True)
    kept.parent.mkdir(parents=True)
    shutil.copy(built, kept)


def prepare(tree: Path, mutants: list[Mutant], seconds: float, ends: ExitStack) -> Judge:
    files = {m.file for m in mutants}
    numbered: dict[str, dict[int, Mutant]] = {}
    for number, m in enumerate(_every(tree)):
        numbered.setdefault(m.file, {})[number] = m
    numbers = {m: number for of_file in numbered.values() for number, m in of_file.items()}
    _build(tree, numbered)
    folder = tree / "tests/cuda_emulator"
    # The sources are newer now, and are going to change. One order of threads is enough: where the
    # order matters the emulator notices a race.
    loader = folder / "__init__.py"
    text = loader.read_text()
    for old, new in (
        ("if errors := build():", 'if errors := "":'),
        ("ORDERS.index(order)", f"{_ORDERS}.index(order)"),
        (f"ORDERS = {_ORDERS}", 'ORDERS = ("shuffled",)'),
    ):
        assert old in text
        text = text.replace(old, new)
    loader.write_text(text)
    choice = tree / "mutant"
    choice.write_text("-1")
    tests = sorted({test.split("::")[0] for file in files for test in tests_of(file)})
    collected = Collected(tree, [*tests, *CHOSEN], FT_MUTANT_FILE=str(choice))
    ends.callback(collected.close)
    tried = collected.judge(lambda m: tests_of(m.file), mutants, seconds)

    def judge(mutant: Mutant) -> str:
        choice.write_text(str(numbers[mutant]))
        return str(tried(mutant))

    return judge
