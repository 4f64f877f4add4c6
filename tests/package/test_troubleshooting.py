"""docs/troubleshooting.md has a row for every message that users meet, found by its first words.

The rule. A message needs a row if `fusedtrain/` raises it as an exception of Python's (ValueError,
RuntimeError, ...), or warns with it. No row is needed for

- classes of the package that it catches itself, and those that carry another's message (INSIDE);
- AttributeError and NotImplementedError, which say that a name is missing (`module ... has no
  attribute`): the names in docs/api.md are the remedy;
- the timing of benchmarks (`advisor/bench`), whose messages are verdicts in a table.

Checks of the ops (csrc/ and fusedtrain/triton/) begin with `fusedtrain::OP: ` or `fusedtrain: `,
which is tested for both, and have one row each by pattern.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator

from helpers import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"
HOLE = "\0"  # what a run fills in
INSIDE = {"AttributeError", "NotImplementedError", "StopIteration", "KeyboardInterrupt"}


def text_of(node: ast.expr, constants: dict[str, str]) -> str:
    """A message with holes."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else HOLE
    if isinstance(node, ast.Name):
        return constants.get(node.id, HOLE)
    if isinstance(node, ast.FormattedValue):
        return text_of(node.value, constants)
    parts = node.values if isinstance(node, ast.JoinedStr) else []
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts = [node.left, node.right]
    return "".join(text_of(part, constants) for part in parts) or HOLE


def messages_in(source: str) -> Iterator[str]:
    tree = ast.parse(source)
    constants = {
        n.targets[0].id: n.value.value
        for n in tree.body
        if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Name)
        and isinstance(n.value, ast.Constant) and isinstance(n.value.value, str)
    }  # fmt: skip
    for node in ast.walk(tree):
        call = node.exc if isinstance(node, ast.Raise) else node
        if not isinstance(call, ast.Call) or not call.args:
            continue
        name = getattr(call.func, "id", "")
        kind = getattr(builtins, name, None)
        is_error = isinstance(node, ast.Raise) and isinstance(kind, type) and name not in INSIDE
        if is_error or "warn" in (name, getattr(call.func, "attr", "")):
            text = text_of(call.args[0], constants)
            if text.strip(HOLE + " "):
                yield " ".join(text.split())


MESSAGES = sorted(
    {
        (str(path.relative_to(ROOT)), message)
        for path in (ROOT / "fusedtrain").rglob("*.py")
        if path.parent.name != "bench"
        for message in messages_in(path.read_text())
        if path.parent.name != "triton" or not message.startswith("fusedtrain:")
    }
)


# The messages of the page: the code in the first cells of its tables.
PATTERNS = [
    double or single
    for cell in re.findall(r"^\| (`.*?`) \| ", PAGE.read_text(), re.M)
    for double, single in re.findall(r"`` (.+?) ``|`([^`]+)`", cell)
]


def matches(pattern: str, message: str) -> bool:
    """Whether a message begins with a pattern; `...` is anything, and a hole needs one."""
    parts = [re.escape(part) for part in pattern.removesuffix("...").split("...")]
    return re.match(".*?".join(parts), message, re.S) is not None


def test_messages_have_rows_and_rows_messages() -> None:
    """A message that has been reworded takes its row along."""
    assert len(MESSAGES) > 100
    assert not [p for p in PATTERNS if len(p.replace("...", "").strip()) < 8], "matches everything"
    rowless = [
        f"{path}: {message.replace(HOLE, '...')}"
        for path, message in MESSAGES
        if not any(matches(pattern, message) for pattern in PATTERNS)
    ]
    assert not rowless, f"{PAGE.name} lacks these messages"
    assert not [p for p in PATTERNS if not any(matches(p, message) for _, message in MESSAGES)]


def test_checks_of_the_ops_name_the_package() -> None:
    unnamed = []
    for path in sorted((ROOT / "csrc" / "bindings").glob("*.[hc]*")):
        for check in re.findall(r"STD_TORCH_CHECK\((.*?)\);", path.read_text(), re.S):
            words = re.findall(r'"([^"]*)"', check)
            if words and not words[0].startswith("fusedtrain") and "emulator" not in words[0]:
                unnamed.append(f"{path.name}: {words[0]}")
    assert not unnamed
