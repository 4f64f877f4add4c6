"""Checks what a release needs, builds it into dist/, and publishes nothing: `make release`.

Faults of the words (version, notes, sentences that a release makes false) and of the tree are
listed first, all together. Then the wheel and the sdist are built, and twine checks both.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
UNTRUE_AFTERWARDS = ("no release yet", "the first release")


def text(path: str) -> str:
    return (ROOT / path).read_text()


def git(*words: str) -> str:
    command = ["git", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def notes(version: str, changelog: str) -> tuple[str, str]:
    """Date and text of a version's section of the changelog; empty where there is none."""
    section = re.search(
        rf"^## {re.escape(version)} - ([^\n]+)\n(.*?)(?=^## |\Z)", changelog, re.M | re.S
    )
    return (section[1], section[2].strip()) if section else ("", "")


def faults(version: str) -> Iterator[str]:
    """One sentence a fault, with the file to mend."""
    changelog = text("CHANGELOG.md")
    date, body = notes(version, changelog)
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        yield f"fusedtrain/_version.py: {version} is no version to publish"
    if f"\nversion: {version}\n" not in text("CITATION.cff"):
        yield f"CITATION.cff: the version is not {version}"
    if not body:
        yield f"CHANGELOG.md: no section '## {version} - YYYY-MM-DD'"
    elif not re.fullmatch(r"\d{4}-\d\d-\d\d", date):
        yield f"CHANGELOG.md: the date of {version} is '{date}'; write YYYY-MM-DD"
    if (re.search(r"^## Unreleased\n(.*?)(?=^## )", changelog, re.M | re.S) or ["", ""])[1].strip():
        yield f"CHANGELOG.md: lines under Unreleased; move them to {version}"
    for page in ("README.md", "docs/install.md"):
        for number, line in enumerate(text(page).splitlines(), 1):
            if any(words in line for words in UNTRUE_AFTERWARDS):
                yield f"{page}:{number}: a release makes this untrue: {line[:60]}..."
    if git("status", "--porcelain"):
        yield "the tree has changes that are not committed"
    tagged = git("rev-list", "-n1", f"v{version}")
    if tagged and tagged != git("rev-parse", "HEAD"):
        yield f"the tag v{version} is of another commit, {tagged[:9]}"


def main() -> int:
    version = re.search(r'"([^"]+)"', text("fusedtrain/_version.py").split("=")[1])[1]  # type: ignore[index]
    print(f"release {version}: words and tree", flush=True)
    if wrong := list(faults(version)):
        print(*wrong, f"{len(wrong)} to mend; nothing was built.", sep="\n")
        return 1
    for option in ([], ["--sdist"]):
        subprocess.run([sys.executable, ROOT / "tools/build_wheel.py", *option], check=True)
    files = sorted((ROOT / "dist").glob(f"fusedtrain-{version}[-.]*"))
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *files], check=True)
    print(notes(version, text("CHANGELOG.md"))[1])
    print(f"Ready. To publish: git tag v{version}, git push origin v{version} (wheels.yml builds,")
    print("checks and uploads). To try first: make abi-matrix.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
