"""Writes docs/api.md, the list of public names: `python tools/api_list.py`."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "api.md"

# In the order of the page. A name that two modules have is listed under the first.
MODULES = (
    "fusedtrain",
    "fusedtrain.nn",
    "fusedtrain.functional",
    "fusedtrain.optim",
    "fusedtrain.amp",
    "fusedtrain.integrations.timm",
    "fusedtrain.memory",
    "fusedtrain.planning",
    "fusedtrain.advisor.diagnosis",
    "fusedtrain.advisor.fitting",
    "fusedtrain.advisor.tuning",
    "fusedtrain.apex.fp16_utils",
    "fusedtrain.apex",
    "fusedtrain.apex.normalization",
    "fusedtrain.apex.optimizers",
    "fusedtrain.apex.parallel",
    "fusedtrain.apex.larc",
)
# Read as text: they import libraries that need not be installed.
READ = ("fusedtrain.integrations.lightning", "fusedtrain.integrations.accelerate")
# Names that commands and tests import and users need not: they may change in any version.
INTERNAL = {
    "fusedtrain.advisor.diagnosis": {"RULES", "RunFacts", "Rule", "decide"},
    "fusedtrain.advisor.fitting": {"HEADINGS"},
    "fusedtrain.advisor.tuning": {"HEADINGS", "NAMES", "parse_budget"},
}

_HEAD = """\
# Public API

These names are public, with their arguments, defaults and state dicts. Everything else may change
in any version, also where its name has no underscore. In the
[documentation site](testing.md#the-documentation-site) each name leads to its docstring.
[cli.md](cli.md) has the commands with their options and exit codes, which are public, too,
[backends.md](backends.md#at-run-time) the environment variables.

Before version 1.0

- a public name or argument that goes away first warns for one minor version, and at least three
  months, by a DeprecationWarning that names the remedy; the [changelog](../CHANGELOG.md) lists the
  warning under "Deprecated" and the removal under "Removed";
- checkpoints (`state_dict` of modules, optimizers and scalers) and pickled models of every released
  version load in later ones;
- a release supports the torch and Python versions that [backends](backends.md) names. A version
  goes away in a minor release, never in a patch.

Numbers may change by rounding in any version. The changelog names a larger change of numbers.

Written by `python tools/api_list.py`.
"""


def public_names() -> dict[str, list[str]]:
    """Names by module, modules left out; each object once."""
    listed: set[int] = set()
    names: dict[str, list[str]] = {}
    for path in MODULES:
        module = importlib.import_module(path)
        values = {name: getattr(module, name) for name in module.__all__}
        names[path] = [
            name
            for name, value in values.items()
            if not isinstance(value, ModuleType)
            and name not in INTERNAL.get(path, ())
            and id(value) not in listed
        ]
        listed.update(id(values[name]) for name in names[path])
    return names


def docstrings(path: str) -> dict[str, str]:
    """Docstrings by name of a module that is not imported; "" is the module itself."""
    tree = ast.parse((ROOT / f"{path.replace('.', '/')}.py").read_text())
    values: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            values[node.name] = ast.get_docstring(node) or ""
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names = ast.literal_eval(node.value)
    return {"": ast.get_docstring(tree) or "", **{name: values[name] for name in names}}


def first_sentence(value: Any) -> str:
    """The first sentence of a docstring, as Markdown for a table."""
    if isinstance(value, str):
        return "The version, a string."
    text = inspect.cleandoc(vars(value).get("__doc__") or "" if isinstance(value, type) else "")
    return _shortened(text or inspect.getdoc(value) or "")


def _shortened(text: str) -> str:
    text = " ".join(text.split("\n\n")[0].split())
    text = re.split(r"(?<=[.;])\s", text)[0].rstrip(";.")
    text = re.sub(r":(?:func|class|mod|meth):`~?([^`]+)`", r"`\1`", text)
    return text.replace("``", "`").replace("|", "\\|") + "."


def page() -> str:
    parts = [_HEAD]
    for path, names in public_names().items():
        module = importlib.import_module(path)
        parts.append(f"\n## `{path}`\n\n{first_sentence(module)}\n\n| name | |\n|---|---|\n")
        parts += [f"| `{name}` | {first_sentence(getattr(module, name))} |\n" for name in names]
    for path in READ:
        module_text, *texts = docstrings(path).items()
        parts.append(f"\n## `{path}`\n\n{_shortened(module_text[1])}\n\n| name | |\n|---|---|\n")
        parts += [f"| `{name}` | {_shortened(text)} |\n" for name, text in texts]
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
    count = sum(map(len, public_names().values())) + sum(len(docstrings(path)) - 1 for path in READ)
    print(f"{PAGE}: {count} names")
