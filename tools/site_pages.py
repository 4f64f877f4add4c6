"""Pages of the documentation site (mkdocs hooks) that are no file of docs/.

A page links files of the repository by relative paths, so the links work on a forge and in a
checkout. The site has a copy of every file that is linked: Markdown as a page, a picture as a
picture, a source as a page with its code. Links are rewritten to these.

docs/api.md lists the public names; each of its sections becomes a page of docstrings. The pages of
docs/benchmarks/ get all rows of the stored results.
"""

from __future__ import annotations

import html
import logging
import os
import posixpath
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.utils import get_relative_url

ROOT = Path(__file__).resolve().parent.parent
LOG = logging.getLogger("mkdocs.hooks.site_pages")  # a warning here fails `mkdocs build --strict`
PICTURES = {".png", ".svg", ".jpg"}
LANGUAGES = {".py": "python", ".h": "cpp", ".cpp": "cpp", ".cu": "cpp", ".cuh": "cpp"}
API = "api.md"
# Where a module and its function share a name, griffe finds the module.
_FUNCTIONS = {"fusedtrain.zero_grad": "fusedtrain.optim.zero_grad.zero_grad"}
_LINK = re.compile(r"(\]\()(?!https?:|mailto:|#)([^)#\s]+)((?:#[^)\s]*)?\))")

_PHONE = 52  # characters in a row of a table on a screen of 500 pixels
_TABLE = re.compile(r"<table>.*?</table>", re.S)
_HEADER = re.compile(r"<th\b[^>]*>(.*?)</th>", re.S)
_ROW = re.compile(r"<tr>(?:(?!<th\b|</tr>).)*</tr>", re.S)
_CELL = re.compile(r"<td\b[^>]*>(.*?)</td>", re.S)
_OPENING = re.compile(r"<td\b([^>]*)>")

# Place in docs/ (as mkdocs names pages) of a page made here: path in the repository.
_origins: dict[str, str] = {}

# The theme's script for the search of a page that is opened from a folder.
_WORKER = "https://unpkg.com/iframe-worker/shim"

# Its methods come from several bases; the optimizers, its subclasses, do not repeat them.
_WITH_INHERITED = "fusedtrain.optim.FusedOptimizer"


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """`text` with the parts between its fenced blocks changed."""
    done, part, fence = [], [], ""
    for line in text.splitlines(keepends=True):
        start = line.strip()
        if fence:
            done.append(line)
            fence = "" if start == fence else fence
        elif start.startswith("```"):
            done += [change("".join(part)), line]
            part, fence = [], "`" * (len(start) - len(start.lstrip("`")))
        else:
            part.append(line)
    return "".join([*done, change("".join(part))])


def links(text: str) -> list[str]:
    """The relative paths that a Markdown text links."""
    targets: list[str] = []
    outside_code(text, lambda part: targets.extend(m[2] for m in _LINK.finditer(part)) or "")
    return targets


def place_of(path: str) -> str:
    """Where the site has a file or folder of the repository, below docs/."""
    if path == "README.md":
        return "index.md"
    if (ROOT / path).is_dir():
        return place_of(
            f"{path}/README.md" if (ROOT / path / "README.md").exists() else f"{path}/index.md"
        )
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    page = Path(path).suffix in {".md", *PICTURES}
    return f"repository/{path}" if page else f"repository/{path}.md"


def code_page(path: str) -> str:
    """A source or a folder as Markdown; the search leaves it out."""
    head = f"---\nsearch:\n  exclude: true\n---\n\n# {path}\n\n"
    place = ROOT / path
    if place.is_dir():
        return head + "\n".join(f"- `{p.name}`" for p in sorted(place.iterdir())) + "\n"
    language = LANGUAGES.get(place.suffix, "text")
    return f"{head}``````{language}\n{place.read_text()}\n``````\n"


def _add_linked(files: Files, config: Any) -> None:
    """Adds what pages link outside of docs/, and what those link in turn."""
    in_docs = {f"docs/{file.src_uri}" for file in files.documentation_pages()}
    pages, seen = [*sorted(in_docs), "CHANGELOG.md", "CONTRIBUTING.md"], set()
    while pages:
        path = pages.pop()
        if path in seen:
            continue
        seen.add(path)
        place, source = place_of(path), ROOT / path
        if not source.exists():
            LOG.warning("a page links %s, which is not there", path)
        elif path not in in_docs and files.get_file_from_path(place) is None:
            _origins[place] = path
            if source.is_file() and source.suffix in {".md", *PICTURES}:
                new = File.generated(config, place, abs_src_path=str(source))
            else:
                new = File.generated(config, place, content=code_page(path))
            files.append(new)
        if path.endswith(".md") and source.is_file():
            folder = posixpath.dirname(path)
            linked = links(source.read_text())
            pages += [posixpath.normpath(posixpath.join(folder, link)) for link in linked]


def api_sections(text: str) -> dict[str, list[str]]:
    """Names by module, as docs/api.md lists them."""
    sections: dict[str, list[str]] = {}
    for line in text.splitlines():
        if heading := re.match(r"## `([\w.]+)`$", line):
            names = sections.setdefault(heading[1], [])
        elif row := re.match(r"\| `(\w+)` \|", line):
            names.append(row[1])
    return sections


def _address(module: str, name: str) -> str:
    return _FUNCTIONS.get(f"{module}.{name}", f"{module}.{name}")


def _api_page(module: str, names: list[str]) -> str:
    head = f"# {module}\n\n::: {module}\n    options:\n      members: false\n"
    head += "      show_root_heading: false\n      show_root_toc_entry: false\n\n"
    inherited = "    options:\n      inherited_members: true\n"
    for name in names:
        address = _address(module, name)
        head += f"::: {address}\n{inherited if address == _WITH_INHERITED else ''}\n"
    return head


def on_files(files: Files, config: Any) -> Files:
    _origins.clear()
    _add_linked(files, config)
    api = files.get_file_from_path(API)
    sections = api_sections(api.content_string) if api else {}
    entries = next(entry["API"] for entry in config.nav if "API" in entry)
    del entries[1:]  # `mkdocs serve` calls this again
    for module, names in sections.items():
        place = f"api/{module}.md"
        files.append(File.generated(config, place, content=_api_page(module, names)))
        entries.append({module: place})
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    place = page.file.src_uri
    origin = _origins.get(place, f"docs/{place}")
    if origin == "CHANGELOG.md":  # which names everything, and explains least
        page.meta["search"] = {"boost": 0.2}
    folder = posixpath.dirname(origin)

    def link(match: re.Match[str]) -> str:
        target = place_of(posixpath.normpath(posixpath.join(folder, match[2])))
        return match[1] + os.path.relpath(target, posixpath.dirname(place) or ".") + match[3]

    markdown = outside_code(markdown, lambda text: _LINK.sub(link, text))
    if place == API:
        markdown = _link_names(markdown)
    if place.startswith("benchmarks/"):
        markdown = _with_rows(markdown)
    return markdown


def _with_rows(markdown: str) -> str:
    """A page of docs/benchmarks/ with all rows of its family. This imports torch."""
    if str(ROOT) not in sys.path:  # mkdocs takes out what a hook adds while it is loaded
        sys.path.insert(0, str(ROOT))
    from benchmarks.report import with_rows

    return with_rows(markdown)


def _link_names(markdown: str) -> str:
    """docs/api.md with every name a link to its docstring."""
    lines, module = [], ""
    for line in markdown.splitlines():
        if heading := re.match(r"## `([\w.]+)`$", line):
            module = heading[1]
            line = f"## [`{module}`](api/{module}.md)"
        elif row := re.match(r"\| `(\w+)` \|", line):
            line = f"| [`{row[1]}`][{_address(module, row[1])}] |" + line[row.end() :]
        lines.append(line)
    return "\n".join(lines)


def on_page_content(output: str, page: Any, config: Any, files: Files) -> str:
    """The page with tables that a phone can show: docs/style.css makes a block of each row."""
    return _TABLE.sub(lambda match: stackable(match[0]), output)


def stackable(table: str) -> str:
    """A table that is wider than a phone with the names of columns in its cells."""
    names = [_words(cell) for cell in _HEADER.findall(table)]
    rows = [_CELL.findall(row) for row in _ROW.findall(table)]
    widths = [
        max(map(len, " ".join([name, *(_words(row[n]) for row in rows if len(row) > n)]).split()))
        for n, name in enumerate(names)
    ]  # of the longest word: a column cannot be narrower
    if sum(widths) + 3 * len(widths) <= _PHONE:
        return table

    def label_row(row: re.Match[str]) -> str:
        labels = iter(names)
        return _OPENING.sub(lambda m: f'<td data-label="{next(labels, "")}"{m[1]}>', row[0])

    return _ROW.sub(label_row, table.replace("<table>", "<table data-stacked>", 1))


def _words(cell: str) -> str:
    return html.escape(html.unescape(re.sub("<[^>]+>", "", cell)).strip()) or "-"


def on_post_page(output: str, page: Any, config: Any) -> str:
    """The page with docs/offline_worker.js in the place of a script from another host."""
    if output.count(_WORKER) != 1:
        LOG.warning("%s: the theme no longer loads %s", page.file.src_uri, _WORKER)
    return output.replace(_WORKER, get_relative_url("offline_worker.js", page.url))


def on_post_template(output_content: str, template_name: str, config: Any) -> str:
    """The same for 404.html, which has no search from a folder."""
    return output_content.replace(_WORKER, "/offline_worker.js")
