"""docs/benchmarks.md, the charts and README's table are those that the stored results give."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import report
from benchmarks.harness.page import (
    BEGIN,
    COMMAND,
    END,
    HEADLINES,
    Part,
    headlines,
    render,
    replace_generated,
)
from benchmarks.harness.rows import load, make_row
from helpers.benchmarks import STEADY, times, write


def test_the_docs_show_the_stored_results() -> None:
    pages = report.docs()
    assert {"benchmarks.md", "README.md", "whole_step.svg"} < {path.name for path in pages}
    docs = report.ROOT / "docs"
    written = {*(docs / "charts").iterdir(), *(docs / "benchmarks").iterdir()}
    written -= {docs / "charts" / "rounding.svg"}  # of examples/rounding.py
    assert written == {path for path in pages if path.parent.name in ("charts", "benchmarks")}
    for path, text in pages.items():
        if path.read_text(encoding="utf-8") != text:
            pytest.fail(f"{path.name} is not what the results give: {COMMAND}", pytrace=False)


def part(tmp_path: Path) -> Part:
    """One row of mish, 3 times as fast as eager, and one of relu, slower."""
    infos = [
        make_row(
            "activations", "cpu", {"fusedtrain": STEADY, "eager": times(ratio), "copy": STEADY},
            op=op, dtype="float32", numel=2**20, moved=2**23, copied=2**23, **{"pass": "forward"},
        )
        for op, ratio in (("mish", 3.0), ("relu", 0.5))
    ]  # fmt: skip
    rows = load([write(tmp_path / "cpu.json", infos)])
    return Part(report.report_of("activations"), rows)


def test_a_section(tmp_path: Path) -> None:
    parts = {"activations": part(tmp_path)}
    templates = {"a": "# Title\n\n{{ activations 1048576 }}\n\nend\n", "b": "no place\n"}
    pages = render(templates, parts)
    assert pages["b"] == templates["b"]
    text = pages["a"]
    assert text.startswith("# Title\n\n<details>")
    assert "\n\nfloat32, 2^20 elements, " in text
    assert parts["activations"].rows[0].machine in text
    assert "| mish | " in text
    assert "All 2 rows in numbers, and the 1 that are slower than a rival" in text
    assert "  relu forward float32 2^20: 0.50x eager" in text
    assert text.endswith("\n\nend\n")
    others = render({"a": "{{ activations bfloat16 1048576 }}\n"}, parts)
    assert "| mish" not in others["a"]


@pytest.mark.parametrize("template", ["no place\n", "{{ activations }}\n{{ pool }}\n"])
def test_no_family_is_left_out(tmp_path: Path, template: str) -> None:
    with pytest.raises(ValueError, match="either the templates or the results lack"):
        render({"a": template}, {"activations": part(tmp_path)})


def test_a_headline_is_one_row(tmp_path: Path) -> None:
    parts = dict.fromkeys({headline.family for headline in HEADLINES}, part(tmp_path))
    with pytest.raises(ValueError, match="0 rows, not 1"):
        headlines(parts)


def test_what_is_generated_is_replaced() -> None:
    text = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    fresh = replace_generated(text, "new")
    assert fresh == f"before\n{BEGIN}\nnew\n{END}\nafter\n"
    assert replace_generated(fresh, "new") == fresh
    with pytest.raises(ValueError, match="there are no lines"):
        replace_generated("before\n", "new")


@pytest.mark.parametrize("arguments", [[], ["--docs", "results.json"]])
def test_results_or_docs(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        report.main(arguments)
    assert "either --docs" in capsys.readouterr().err
