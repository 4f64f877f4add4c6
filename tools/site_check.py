"""Whether the built documentation site can be read: links and anchors in all of its pages, and in a
headless Chromium the pages at two widths.

python tools/site_check.py [FOLDER] [--pictures FOLDER]

In the browser no table and no code block is wider than its column or scrolls in it, no copy button
covers code, and no page asks for a file outside of the site. Without a browser this part is left
out, and a line says so (Debian: apt-get install chromium-headless-shell).
"""

from __future__ import annotations

import argparse
import posixpath
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _browser import Browser, BrowserError, browser, find

ROOT = Path(__file__).resolve().parent.parent
WIDTHS = (1280, 500)  # pixels: a laptop, and a phone or half a window
NOT_FOUND = "404.html"  # whose links start at the server's root

# Returns [fault, text] for everything that is wrong on the page.
SCRIPT = """
(() => {
  const faults = [];
  const column = document.querySelector('.md-content__inner');
  if (!column) return faults;
  const words = node => (node.textContent || node.alt || '').trim().replace(/\\s+/g, ' ');
  const say = (fault, node) => faults.push([fault, words(node).slice(0, 60)]);
  if (document.documentElement.scrollWidth > innerWidth) say('the page scrolls sideways', column);
  for (const box of column.querySelectorAll('.md-typeset__scrollwrap'))
    if (box.scrollWidth > box.clientWidth + 1) say('a table scrolls in its box', box);
  for (const code of column.querySelectorAll('pre > code'))
    if (code.scrollWidth > code.clientWidth + 1) say('a code block is cut', code);
  const right = column.getBoundingClientRect().right + 5;  // a padding
  for (const node of column.querySelectorAll('*')) {
    if (node.closest('.md-typeset__scrollwrap, .headerlink')) continue;
    if (node.getBoundingClientRect().right > right)
      say(`<${node.tagName.toLowerCase()}> leaves its column`, node);
  }
  for (const block of column.querySelectorAll('pre')) {
    const button = block.querySelector('.md-code__nav');
    if (!button) continue;
    const box = button.getBoundingClientRect(), range = document.createRange();
    const texts = document.createTreeWalker(block.querySelector('code'), NodeFilter.SHOW_TEXT);
    search: while (texts.nextNode())
      for (const word of texts.currentNode.data.matchAll(/\\S+/g)) {
        range.setStart(texts.currentNode, word.index);
        range.setEnd(texts.currentNode, word.index + word[0].length);
        const place = range.getBoundingClientRect();
        if (place.top > box.bottom) break search;
        if (place.right > box.left + 1 && place.bottom > box.top + 1) {
          say('a copy button covers code', block);
          break search;
        }
      }
  }
  return faults;
})()
"""


class _Page(HTMLParser):
    """The ids of a page, and what it links."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if value is None:
                continue
            if name == "id" or (tag == "a" and name == "name"):
                self.ids.add(value)
            elif name in ("href", "src"):
                self.links.append(value)


def broken_links(site: Path) -> list[str]:
    """A line for each link of the site's pages that leads nowhere."""
    files = {path.relative_to(site).as_posix() for path in site.rglob("*") if path.is_file()}
    pages = {
        name: _Page((site / name).read_text(encoding="utf-8"))
        for name in sorted(files)
        if name.endswith(".html")
    }
    return [fault for name in pages for fault in _faults(name, pages, files)]


def _faults(name: str, pages: dict[str, _Page], files: set[str]) -> Iterator[str]:
    for link in dict.fromkeys(pages[name].links):
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            continue
        path = unquote(parts.path)
        if name == NOT_FOUND:
            path = path.lstrip("/")
        target = posixpath.normpath(posixpath.join(posixpath.dirname(name), path)) if path else name
        if path.endswith("/") or target == ".":
            target = posixpath.normpath(f"{target}/index.html")
        if target not in files:
            yield f"{name}: {link} is not there"
            continue
        anchor = unquote(parts.fragment)
        known = target not in pages or anchor in pages[target].ids
        if anchor and not known and not anchor.startswith("__"):  # "__": of the theme's script
            yield f"{name}: {link} has no such anchor"


def unreadable(site: Path, page: Browser, pictures: Path | None = None) -> list[str]:
    """A line for everything that the browser shows badly, and for each request that leaves."""
    lines = []
    for path in sorted(site.rglob("*.html")):
        name = path.relative_to(site).as_posix()
        if name == NOT_FOUND:
            continue
        page.resize(WIDTHS[0])
        page.open(path.as_uri())
        for width in WIDTHS:
            page.resize(width)
            faults = page.evaluate(SCRIPT)
            lines += [f"{name}, {width} px: {fault}: {text}" for fault, text in faults]
            if pictures:
                page.picture(pictures / f"{name.replace('/', '-')}-{width}.png")
    outside = {url for url in page.requests if not url.startswith(("file:", "data:", "blob:"))}
    return [*lines, *(f"a page asks for {url}" for url in sorted(outside) if url != "about:blank")]


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("site", nargs="?", type=Path, default=ROOT / "build" / "site")
    parser.add_argument("--pictures", type=Path, help="a folder for a PNG of every page")
    options = parser.parse_args(arguments)
    site = options.site.resolve()
    if not (site / "index.html").exists():
        parser.error(f"there is no site in {site}: make docs")
    pages = len(list(site.rglob("*.html")))
    print(
        f"site_check: links, tables, code and buttons of {pages} pages, half a minute", flush=True
    )
    faults = broken_links(site)
    program = find()
    if program:
        if options.pictures:
            options.pictures.mkdir(parents=True, exist_ok=True)
        try:
            with browser(program) as page:
                faults += unreadable(site, page, options.pictures)
        except BrowserError as error:
            faults.append(f"{program}: {error}")
    else:
        print("site_check: no Chromium is installed; tables, code and buttons are not looked at")
    print(*faults, sep="\n", end="\n" * bool(faults))
    print(f"site_check: {len(faults) or 'no'} faults")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
