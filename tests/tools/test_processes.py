"""Forks of a Python that has imported torch, for tests, are as new processes are."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from helpers.processes import run_python

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")


@pytest.mark.parametrize(
    ("code", "status", "error"),
    [
        ("pass", 0, ""),
        ("raise SystemExit(3)", 3, ""),
        ("raise SystemExit('why')", 1, "why\n"),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
        ("import sys; print('seen', file=sys.stderr); sys.exit()", 0, "seen\n"),
    ],
)
def test_ends(code: str, status: int, error: str) -> None:
    run = run_python("-c", code)
    assert (run.returncode, run.stdout, run.stderr) == (status, "", error)


def test_an_error_shows_its_traceback() -> None:
    run = run_python("-c", "1 / 0")
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1] == "ZeroDivisionError: division by zero"


def test_surroundings(tmp_path: Path) -> None:
    """Nothing of one process is left for the next."""
    (tmp_path / "neighbour.py").write_text("import os\nos.environ['LEFT'] = 'here'\n")
    text = "import os, sys, neighbour\nprint(sys.argv, os.environ.get('ONE'), __name__, *sys.stdin)"
    (tmp_path / "script.py").write_text(text)
    script = str(tmp_path / "script.py")
    for _ in range(2):
        run = run_python(script, "--lr", "1", env={"ONE": "1"}, cwd=Path("/"))
        assert run.stdout.strip() == f"{[script, '--lr', '1']} 1 __main__", run.stderr
    run = run_python("-m", "script", cwd=tmp_path)
    assert run.stdout.strip() == f"{[script]} None __main__", run.stderr
    code = "import os, sys; print(os.getcwd(), 'neighbour' in sys.modules, os.environ.get('LEFT'))"
    assert run_python("-c", code, cwd=tmp_path).stdout.strip() == f"{tmp_path} False None"
    code = "import os, torch; print(torch.get_num_threads(), *sorted(os.environ))"
    assert run_python("-c", code, env={"OMP_NUM_THREADS": "3"}).stdout == "3 OMP_NUM_THREADS\n"
    missing = run_python("-c", "import neighbour")
    assert "No module named 'neighbour'" in missing.stderr


def test_a_process_that_is_late_is_killed() -> None:
    code = "import time; print('begun', flush=True); time.sleep(60)"
    with pytest.raises(subprocess.TimeoutExpired) as raised:
        run_python("-c", code, timeout=0.5)
    assert raised.value.output == "begun\n"
    assert run_python("-c", "print(1)", timeout=60).stdout == "1\n"


def test_it_ends_as_python_does() -> None:
    code = "import atexit, threading, time; atexit.register(print, 'last')\n"
    code += "threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()"
    assert run_python("-c", code).stdout.split() == ["thread", "last"]
