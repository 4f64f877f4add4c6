"""`--fix`: a diff that `patch` applies, and after which the findings are gone."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from fusedtrain.advisor._views import Site
from fusedtrain.advisor.diagnosis import Change, Cost, Diagnosis, Finding
from fusedtrain.advisor.diagnosis._edits import diff_of
from fusedtrain.cli import Exit, doctor as doctor_command, main
from helpers.diagnosis import SCRIPTS, examine, lines, rules

pytestmark = pytest.mark.usefixtures("one_thread")

needs_patch = pytest.mark.skipif(shutil.which("patch") is None, reason="needs the command patch")


def patched(folder: Path, diff: str) -> None:
    subprocess.run(["patch", "-p0"], input=diff, text=True, cwd=folder, check=True,
                   stdout=subprocess.DEVNULL)  # fmt: skip


# Script: the findings that the diff removes, and those that are left to the user.
FIXED = {
    "faults": (
        {"bias-before-norm", "in-place-clone", "convert-fuses", "graph-kept", "eval-with-grad",
         "loader-without-workers", "zero-by-memset", "autotuner-off"},
        {"amp-off", "host-waits"},
    ),
    "tiny": (
        {"slow-optimizer", "graph-kept", "scaler-with-bf16", "autotuner-off"},
        {"small-tensors", "not-channels-last"},
    ),
    "single": ({"tf32-off"}, {"amp-off"}),
}  # fmt: skip


@needs_patch
@pytest.mark.parametrize("name", FIXED)
def test_the_diff_removes_findings(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixed, left = FIXED[name]
    script = tmp_path / "train.py"
    shutil.copy(SCRIPTS / f"{name}.py", script)
    before = script.read_text()
    monkeypatch.chdir(tmp_path)
    diagnosis = examine(script, assume_gpu=True)
    assert fixed <= rules(diagnosis), str(diagnosis)
    diff = diagnosis.diff()
    assert script.read_text() == before  # the diff is printed, nothing is written
    patched(tmp_path, diff)
    os.rename(script, tmp_path / "fixed.py")  # Python keeps the lines of a file that it has read
    after = examine(tmp_path / "fixed.py", assume_gpu=True)
    assert not rules(after) & fixed, f"{diff}\n{after}"
    # Two workers sleep 8 ms a batch, longer than a step may take; the others are by the clock, too.
    clock = {"loader-too-slow", "slow-optimizer", "small-tensors"}
    assert rules(after) - clock <= rules(diagnosis)
    assert not diagnosis.partial
    for rule in left & rules(diagnosis):
        assert all(not f.changes for f in diagnosis.findings if f.rule == rule)


# Source, line, change and its arguments, expected source (None: it stays as it is).
EDITS: dict[str, tuple[str, int, tuple[str, ...], str, dict[str, str], str | None]] = {
    "add": ("x = Conv(1, 2)\n", 1, ("Conv",), "keywords", {"bias": "False"},
            "x = Conv(1, 2, bias=False)\n"),
    "no arguments": ("x = f()\n", 1, ("f",), "keywords", {"a": "1"}, "x = f(a=1)\n"),
    "trailing comma": ("x = Conv(\n    1,\n    2,\n)\n", 1, ("Conv",), "keywords",
                       {"bias": "False"}, "x = Conv(\n    1,\n    2, bias=False,\n)\n"),
    "set": ("x = Conv(1, bias=a or b)\n", 1, ("Conv",), "keywords", {"bias": "False"},
            "x = Conv(1, bias=False)\n"),
    "drop the last": ("f(1, inplace=True)\n", 1, ("f",), "keywords", {"inplace": ""}, "f(1)\n"),
    "drop the first": ("f(inplace=True, a=1)\n", 1, ("f",), "keywords", {"inplace": ""},
                       "f(a=1)\n"),
    "drop the only": ("f(inplace=True)\n", 1, ("f",), "keywords", {"inplace": ""}, "f()\n"),
    "drop by place": ("nn.SiLU(True)\n", 1, ("SiLU",), "keywords", {"inplace": ""}, "nn.SiLU()\n"),
    "drop by second place": ("F.silu(x, True)\n", 1, ("silu",), "keywords", {"inplace": ""},
                             "F.silu(x)\n"),
    "set and drop": ("Adam(p, foreach=False)\n", 1, ("Adam",), "keywords",
                     {"fused": "True", "foreach": ""}, "Adam(p, fused=True)\n"),
    "options are not seen": ("Conv(1, **options)\n", 1, ("Conv",), "keywords", {"bias": "False"},
                             None),
    "another call": ("make(1)\n", 1, ("Conv",), "keywords", {"bias": "False"}, None),
    "accents": ("é = 'ü'; x = Conv('ö')\n", 1, ("Conv",), "keywords", {"bias": "False"},
                "é = 'ü'; x = Conv('ö', bias=False)\n"),
    "argument": ("torch.set_num_threads(64)\n", 1, ("set_num_threads",), "argument",
                 {"value": "2"}, "torch.set_num_threads(2)\n"),
    "detach": ("total += loss\n", 1, ("total",), "detach", {}, "total += loss.detach()\n"),
    "detach a sum": ("total = total + loss * n\n", 1, ("total",), "detach", {},
                     "total = (total + loss * n).detach()\n"),
    "detach in a list": ("losses.append(f(x))\n", 1, ("losses",), "detach", {},
                         "losses.append(f(x).detach())\n"),
    "no detach of a tuple": ("losses.append((step, loss))\n", 1, ("losses",), "detach", {}, None),
    "no detach of a list": ("losses += [loss]\n", 1, ("losses",), "detach", {}, None),
    "replace": ("import torch, fusedtrain\no = torch.optim.Adam(p)\n", 2,
                ("Adam", "fusedtrain.optim.Adam"), "replace", {},
                "import torch, fusedtrain\no = fusedtrain.optim.Adam(p)\n"),
    "convert": ("import torch\ndef main():\n    m = Net(\n        1)\n    f(m)\n", 3, (), "convert",
                {"arguments": ""},
                "import torch\nimport fusedtrain\ndef main():\n    m = Net(\n        1)\n"
                "    fusedtrain.convert(m)\n    f(m)\n"),
    "convert before DataParallel": ("m = DataParallel(Net())\n", 1, (), "convert",
                                    {"arguments": ""}, None),
    "no_grad": ("import torch\nclass A:\n    @other\n    def f(self):\n        return m(x)\n", 5,
                (), "no_grad", {},
                "import torch\nclass A:\n    @torch.no_grad()\n    @other\n    def f(self):\n"
                "        return m(x)\n"),
    "no_grad where one trains": ("def f():\n    m(x)\n    loss.backward()\n", 2, (), "no_grad", {},
                                 None),
    "top": ("'''Doc.'''\nimport torch\nfrom a import (\n    b,\n)\n\nx = 1\n", 1,
            ("torch.backends.cudnn.benchmark = True",), "top", {},
            "'''Doc.'''\nimport torch\nfrom a import (\n    b,\n)\n"
            "\ntorch.backends.cudnn.benchmark = True\n\nx = 1\n"),
    "no line feed at the end": ("f(1)", 1, ("f",), "keywords", {"a": "1"}, "f(1, a=1)"),
}  # fmt: skip


@needs_patch
@pytest.mark.parametrize("case", EDITS)
def test_edit(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, line, names, action, options, expected = EDITS[case]
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "train.py"
    file.write_text(source, encoding="utf-8")
    diff = diff_of([Change(action, str(file), line, options, names)] * 2)
    if expected is None:
        assert diff == ""
        return
    patched(tmp_path, diff)
    assert file.read_text(encoding="utf-8") == expected


# PEP 263: a file says its encoding in a comment, or by a byte order mark.
ENCODED = {
    "latin-1": "# -*- coding: latin-1 -*-\nname = 'Müller'\nx = 'é'; y = Conv('ö', 1)\n",
    "cp1252": "# coding: cp1252\nprice = '€'\nx = '€'; y = Conv(1)\n",
    "shift_jis": "# coding: shift_jis\nx = '学習'\n#\ny = Conv('表', 1)  # 表\n",
    "utf-8-sig": "y = Conv('ö', 1)\n",
    "utf-8": "x = 'a\u2028b'\n\f\ny = Conv('\x85', 1)\n",
}


@needs_patch
@pytest.mark.parametrize("encoding", ENCODED)
def test_fix_keeps_the_bytes_of_a_source(
    encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:  # fmt: skip
    """From the command to `patch`."""
    source = ENCODED[encoding]
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "train.py"
    file.write_bytes(source.encode(encoding))
    line = source[: source.index("Conv")].count("\n") + 1
    change = Change("keywords", str(file), line, {"bias": "False"}, ("Conv",))
    finding = Finding(
        "r", "t", Site(str(file), line), "e", 1.0, Cost("measured", ""), "", (change,)
    )
    monkeypatch.setattr(doctor_command, "doctor", lambda *a, **k: Diagnosis([finding]))
    assert main(["doctor", "--fix", "train.py"]) == Exit.FOUND
    diff = capfdbinary.readouterr().out
    subprocess.run(["patch", "-p0"], input=diff, check=True, stdout=subprocess.DEVNULL)
    place = source.index(")", source.index("Conv"))
    expected = source[:place] + ", bias=False" + source[place:]
    assert file.read_bytes() == expected.encode(encoding)


def test_changes_that_overlap_leave_the_first(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("f(g(1))\n")

    def change(value: str) -> Change:
        return Change("argument", str(file), 1, {"value": value}, ("f",))

    diff = diff_of([change("a"), change("b")])
    assert "+f(a)" in diff
    assert "b" not in diff.split("@@")[-1]


def test_a_source_that_is_gone_gives_no_diff(tmp_path: Path) -> None:
    missing: Callable[[str], Change] = lambda name: Change("top", str(tmp_path / name), 1)  # noqa: E731
    (tmp_path / "broken.py").write_text("def f(:\n")
    assert diff_of([missing("none.py"), missing("broken.py")]) == ""


def test_a_line_that_makes_other_layers_too_is_left_alone(tmp_path: Path) -> None:
    """A helper makes every convolution, and one of them needs its bias."""
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\nfrom torch import nn\n"
        "def conv():\n    return nn.Conv2d(3, 3, 1)\n"
        "model = nn.Sequential(conv(), nn.BatchNorm2d(3), conv())\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=True)\n"
        "for _ in range(8):\n"
        "    optimizer.zero_grad()\n"
        "    model(torch.randn(2, 3, 4, 4)).sum().backward()\n"
        "    optimizer.step()\n"
    )
    diagnosis = examine(script)
    assert lines(diagnosis, "bias-before-norm") == ["return nn.Conv2d(3, 3, 1)"]
    assert "bias=False" not in diagnosis.diff()
