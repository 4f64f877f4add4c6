"""Mutants of C++ and CUDA by rule: patterns of a line, and what takes their place."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from _mutant import Mutant, marked, mutant

# The columns: pattern, its replacement in the mutant, insertion behind the match in the build of
# all mutants, name of the sort. Operands of comparisons are integers, mostly; of two floats the
# second becomes one more, or one less.
SORTS = (
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
# Further sorts, each in a build of its own.
OTHER_SORTS = (
    *SORTS[2:13],
    (r"(?<=[\w)\]])\[0\]", "[1]", "", "the next index"),
    (r"(?<=[\w)\]])\[(?=[1-9]\])", "[-1 + ", "", "the index before"),
    (r"\bif \((?!constexpr)(?=.*\) )", "if (false && ", "", "branch never"),
    (r"(?<== )\w[^;?]* \? (?=.*;)", "false ? ", "", "the second value"),
    (r"^ +[\w.*\[\]>()-]+( [|*+-]?= [^;?{]+|\([^;{]*\));$", ";", "", "statement dropped"),
)  # fmt: skip
Sorts = Iterable[tuple[str, str, str, str]]
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
    matches = [m for pattern in _TIES for m in pattern.finditer(code)]
    return any(
        m.start() <= at < m.end() and {*m.groups()[:2]} == {*m.groups()[2:]} for m in matches
    )


def _is_pointless(code: str, above: str, match: re.Match[str], what: str) -> bool:
    """Whether no test could notice that mutant of a line. `above`: the line before."""
    if re.fullmatch(r" [<>]=? ", match[0]) and _is_tie(code, match.start()):
        return True
    if what == "times two":
        # How large a grid is; and twice a count is 0 where the count is.
        return "multiprocessors()" in code or re.search(r" [=>]=? 0\)", code) is not None
    # Unrolled loops go over a thread's own arrays: an overrun is AddressSanitizer's to see.
    return what == "<= for <" and above == "#pragma unroll"


def _functions(text: str) -> list[tuple[int, str]]:
    """Offsets from which functions begin, and their names."""
    text = re.sub(r"__launch_bounds__\([^)]*\)", lambda m: " " * len(m[0]), text)
    pattern = re.compile(r"^(?:[A-Za-z_][^;{}#/()]*?|  +)\b(\w+)\((?!\()[^;]*?\{", re.MULTILINE)
    starts = [(m.start(1), m[1]) for m in pattern.finditer(text)]
    return [(at, name) for at, name in starts if name not in ("if", "for", "while", "switch")]


def mutants_of(root: Path, file: str, sorts: Sorts = SORTS) -> list[Mutant]:
    """Mutants of a file by their places, those that are marked as equal among them."""
    text, made = (root / file).read_text(), list[Mutant]()
    functions = _functions(text)
    start, constant, above, end = 0, False, "", ""
    for line in text.splitlines(keepends=True):
        code = line.split("//")[0]
        constant = constant or _CONSTANT.search(code) is not None
        if function := _CONSTANT_FUNCTION.match(code):
            end = f"{function[1]}}}"  # the line that ends it
        for pattern, new, insertion, what in () if constant else sorts:
            for match in re.finditer(pattern, code.rstrip()):
                before, after = code[: match.start()], code[match.end() :]
                in_template = re.search(r"\w<[^<>;()]*$", before) and re.match(r"[^<>;()]*>", after)
                if in_template or (what == "lane of a shuffle" and "__shfl" not in code):
                    continue
                at = start + match.start()
                name = next((n for begin, n in reversed(functions) if begin <= at), "")
                m = mutant(file, text, at, match[0], new.format(match[0]), what, name)
                pointless = _is_pointless(code, above, match, what)
                made.append(replace(m, insertion=insertion, pointless=pointless))
        # A definition may go on in the next lines.
        ends = re.search(r"[;{}]\s*$|^\s*(#|template.*>\s*$)|\"", code.rstrip()) and not end
        if end and code.rstrip() == end:
            constant, end = False, ""
        elif ends:
            constant = False
        start, above = start + len(line), code.strip() or above
    return marked(text, made)
