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
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from _collected import Collected
from _cuda_equivalents import SAME
from _mutant import Judge, Key, Mutant, mutant
from _test_files import all_located

FOLDER = "csrc/cuda"
KEPT = Path(__file__).resolve().parent.parent / "build/kernel_mutants"
_PASSES = "test_kernel_traffic::test_passes_and_launches["
_NORMS = [
    "test_cuda_batch_norm_walks", f"{_PASSES}batch_norm", "test_cuda_batch_norm",
    "test_batch_norm_kernels", "test_batch_norm_numbers", "test_batch_norm_in_place",
]  # fmt: skip
_GPU_STEPS, _CUDA_STEPS = (
    "test_optimizer_gpu_kernels",
    "test_cuda_optimizers",
)
_LAUNCHES = "test_cuda_optimizer_launches"
_STEPS = [
    _GPU_STEPS, _CUDA_STEPS, _LAUNCHES, f"{_PASSES}optimizer_step", "test_bad_gradients",
    "test_split_master_kernels", "test_state_code_kernels",
]  # fmt: skip
_CHAINS = [
    "test_chain_walks", *(f"{_PASSES}{op}" for op in ("gated", "scale_add", "bias_act")),
    "test_chain_kernels",
]  # fmt: skip
# The tests of the files whose names begin so, the narrowest first: the first that fails ends the
# trial.
_TESTS: dict[str, list[str]] = {
    "batch_norm": _NORMS,
    **dict.fromkeys(("gated", "scale_add", "bias_act", "channels"), _CHAINS),
    "channelwise": ["test_activation_kernels", f"{_PASSES}channelwise"],
    "depthwise": ["test_depthwise_kernels", f"{_PASSES}depthwise_conv"],
    "divisor": ["test_depthwise_kernels", "test_pool_kernels"],
    "few_bit": ["test_few_bit", f"{_PASSES}few_bit"],
    "fold": ["test_fold_kernels", f"{_PASSES}fold"],
    "images": ["test_image_kernels", f"{_PASSES}normalize_images"],
    "optimizer": _STEPS,
    "pointwise": ["test_activation_kernels", f"{_PASSES}pointwise"],
    "pool": ["test_pool_kernels", f"{_PASSES}max_pool2d"],
    "shares": [*_CHAINS, "test_activation_kernels", "test_depthwise_kernels"],
    "scaling": [
        *(f"{_GPU_STEPS}::test_{what}" for what in ("zero", "update_scale")),
        f"{_LAUNCHES}::test_ranges",
    ],
    "launch": [
        "test_cuda_emulator::test_planted",
        "test_activation_kernels",
        *_NORMS,
    ],
    "reduce": [*_NORMS, "test_fold_kernels"],
    "vec": ["test_activation_kernels", f"{_NORMS[0]}::test_planes", *_CHAINS],
}
TESTS = {begin: all_located(tests) for begin, tests in _TESTS.items()}
EQUIVALENT: dict[Key, str] = {
    (f"{FOLDER}/{file}", function, after): why
    for why, functions in SAME.items()
    for (file, function), lines in functions.items()
    for after in lines
}

# The columns: pattern, its replacement in the mutant, insertion behind the match in the build of
# all mutants, name of the sort. Operands of comparisons are integers, mostly; of two floats the
# second becomes one more, or one less.
_SORTS = (
    (r"__syncthreads\(\);", "", "if (!ft_is(#)) ", "barrier deleted"),
    (r"__syncwarp\(\);", "", "if (!ft_is(#)) ", "barrier deleted"),
    (r" < (?=[\w(*&-])", " <= ", "ft_more(#) + ", "<= for <"),
    (r" <= (?=[\w(*&-])", " < ", "-ft_more(#) + ", "< for <="),
    (r" > (?=[\w(*&-])", " >= ", "-ft_more(#) + ", ">= for >"),
    (r" >= (?=[\w(*&-])", " > ", "ft_more(#) + ", "> for >="),
    (r" [=!]= (?=[\w(*&-])(?!nullptr|\w*[dD]type\b)", "{}1 + ", "ft_more(#) + ", "one more"),
    (r" \+= (?=[\w(*-])", " -= ", "ft_signed(#) *= ", "-= for +="),
    (r"(?<=[\w\])]) \+ (?=[\w(*])", " - ", "ft_sign(#) * ", "- for +"),
    (r"(?<=[\w\])]) - (?=[\w(*])", " + ", "ft_sign(#) * ", "+ for -"),
    (r"(?<=[\w\])]) \* (?=[\w(])", " * 2 * ", "ft_two(#) * ", "times two"),
    (r" && ", " && false && ", "!ft_is(#) && ", "never"),
    (r" \|\| ", " || true || ", "ft_is(#) || ", "always"),
    (r"\bthreadIdx\.x\b", "(threadIdx.x + 1)", "", "the next thread"),
    (r"\bblockIdx\.x\b", "(blockIdx.x + 1)", "", "the next block"),
    (r"(?<=, )(?=(offset|0|lane)\))", "1 + ", "ft_more(#) + ", "lane of a shuffle"),
)  # fmt: skip
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
# Lines in which nothing may be inserted that is not known to the compiler.
_CONSTANT = re.compile(
    r"^\s*(#|using |enum |template|namespace|struct |static_assert|return \[|case )|"
    r"constexpr|alignas|__shared__|__launch_bounds__|operator|asm|FT_\w+\(|__global__|\"|\bnew\b|"
    r"\bauto\* kernel|\[\w+ \+ 1\]"
)
# The compiler may have to know what it returns.
_CONSTANT_FUNCTION = re.compile(r"( *)(?!.*\bif constexpr).*\bconstexpr\b.*\).*\{\s*$")


# The smaller or the larger of two: where both are equal, either will do.
_VALUE = r"(?:\w+\()?([\w.>\[\]-]+(?:\(\))?)\)?"
_TIES = (
    re.compile(rf"(?<![\w.]){_VALUE} [<>]=? {_VALUE} \? {_VALUE} : {_VALUE}"),
    re.compile(r"if \(([^;]+?) [<>]=? ([^;]+?)\) ([^;=]+?) = ([^;]+?);"),
)


def _is_tie(code: str, at: int) -> bool:
    """Whether the comparison at that column chooses one of its own sides."""
    for pattern in _TIES:
        for match in pattern.finditer(code):
            a, b, first, second = match.groups()
            if match.start() <= at < match.end() and {a, b} == {first, second}:
                return True
    return False


def _is_pointless(code: str, above: str, match: re.Match[str], what: str) -> bool:
    """Whether no test could notice that mutant of a line. `above`: the line before."""
    if re.fullmatch(r" [<>]=? ", match[0]) and _is_tie(code, match.start()):
        return True
    if what == "times two":
        # How large a grid is; and twice a count is 0 where the count is.
        return "multiprocessors()" in code or re.search(r" [=>]=? 0\)", code) is not None
    # Unrolled loops go over a thread's own arrays: an overrun is AddressSanitizer's to see.
    return what == "<= for <" and above == "#pragma unroll"


@dataclass(frozen=True)
class Site:
    """A place in a file: ``old`` at ``offset``. In the build of all mutants ``text`` goes behind
    ``old``; an empty one stands for brackets around ``old`` and one more."""

    offset: int
    old: str
    text: str
    new: str
    what: str
    pointless: bool = False


def _sites(text: str) -> Iterator[Site]:
    start, constant, above, end = 0, False, "", ""
    for line in text.splitlines(keepends=True):
        code = line.split("//")[0]
        constant = constant or _CONSTANT.search(code) is not None
        if function := _CONSTANT_FUNCTION.match(code):
            end = f"{function[1]}}}"  # the line that ends it
        if not constant:
            for pattern, new, insertion, what in _SORTS:
                for match in re.finditer(pattern, code):
                    before, after = code[: match.start()], code[match.end() :]
                    in_template = re.search(r"\w<[^<>;()]*$", before) and re.match(
                        r"[^<>;()]*>", after
                    )
                    shuffles = what != "lane of a shuffle" or "__shfl" in code
                    if in_template or not shuffles:
                        continue
                    at, pointless = start + match.start(), _is_pointless(code, above, match, what)
                    yield Site(at, match[0], insertion, new.format(match[0]), what, pointless)
        # A definition may go on in the next lines.
        if end and code.rstrip() == end:
            constant, end = False, ""
        elif (
            constant
            and not end
            and re.search(r"[;{}]\s*$|^\s*(#|template.*>\s*$)|\"", code.rstrip())
        ):
            constant = False
        start, above = start + len(line), code.strip() or above


def _functions(text: str) -> list[tuple[int, str]]:
    """Offsets from which functions begin, and their names."""
    text = re.sub(r"__launch_bounds__\([^)]*\)", lambda m: " " * len(m[0]), text)
    pattern = re.compile(r"^(?:[A-Za-z_][^;{}#/()]*?|  +)\b(\w+)\((?!\()[^;]*?\{", re.MULTILINE)
    starts = [(m.start(1), m[1]) for m in pattern.finditer(text)]
    return [(at, name) for at, name in starts if name not in ("if", "for", "while", "switch")]


def _numbered(root: Path) -> Iterator[tuple[int, str, Site, Mutant]]:
    number = 0
    files = sorted(p.relative_to(root).as_posix() for p in (root / FOLDER).glob("*.cu*"))
    for file in files:
        text = (root / file).read_text()
        functions = _functions(text)
        for site in _sites(text):
            name = next((n for at, n in reversed(functions) if at <= site.offset), "")
            made = mutant(file, text, site.offset, site.old, site.new, site.what, name)
            yield number, file, site, made
            number += 1


def mutants(root: Path) -> list[Mutant]:
    # Others are numbered and built: so the library stays the same, whatever is left out here.
    return [made for *_, site, made in _numbered(root) if not site.pointless]


def with_switches(text: str, sites: list[tuple[int, Site]]) -> str:
    """The source with all its mutants, by number."""
    for number, site in sorted(sites, key=lambda item: -item[1].offset):
        end = site.offset + len(site.old)
        insertion = site.text.replace("#", str(number))
        if site.what == "barrier deleted":
            text = text[: site.offset] + insertion + text[site.offset :]
        elif not insertion:
            both = f"({site.old} + ft_more({number}))"
            text = text[: site.offset] + both + text[end:]
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
    chosen = next(tests for begin, tests in TESTS.items() if stem.startswith(begin))
    return tuple(chosen)


def _build(tree: Path, sites: dict[str, list[tuple[int, Site]]]) -> None:
    """Builds the library, or takes the one that was built of the same sources."""
    sources = {file: (tree / file).read_text() for file in sites}
    switched = {file: with_switches(text, sites[file]) for file, text in sources.items()}
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
    sites: dict[str, list[tuple[int, Site]]] = {}
    numbers = {}
    for number, file, site, made in _numbered(tree):
        sites.setdefault(file, []).append((number, site))
        numbers[made] = number
    _build(tree, sites)
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
    limits = {}
    for chosen in sorted({tests_of(file) for file in files}):
        began = time.monotonic()
        if broken := collected.run(chosen, 20 * seconds):
            raise RuntimeError(broken)
        took = time.monotonic() - began
        # A mutant may be slower, and so may be the machine.
        limits[chosen] = max(seconds, 4 * took)
        print(f"  {took:4.0f} s: {' '.join(chosen)}", flush=True)

    def judge(mutant: Mutant) -> str:
        chosen = tests_of(mutant.file)
        choice.write_text(str(numbers[mutant]))
        return collected.judge(mutant.file, chosen, limits[chosen])

    return judge
