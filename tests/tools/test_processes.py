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
        ("raise SystemExit('why')", 1, "why"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero"),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
        ("import os; assert os.environ.pop('ONE') == '1'", 0, ""),
        ("import os; assert 'ONE' not in os.environ", 1, "AssertionError"),
    ],
)
def test_an_end_is_told(code: str, status: int, error: str) -> None:
    run = run_python("-c", code, env={} if "not in" in code and not status else {"ONE": "1"})
    assert run.returncode == status
    assert (run.stderr.splitlines() or [""])[-1] == error


def test_nothing_of_one_process_is_left_for_the_next(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("import os\nos.environ['LEFT'] = '1'\nprint('made')\n")
    for _ in range(2):
        run = run_python("-c", "import neighbour", cwd=tmp_path)
        assert run.stdout == "made\n", run.stderr
    code = "import os, torch; print(torch.get_num_threads(), *sorted(os.environ))"
    assert run_python("-c", code, env={"OMP_NUM_THREADS": "3"}).stdout == "3 OMP_NUM_THREADS\n"


def test_a_process_that_is_late_is_killed() -> None:
    code = "import time; print('begun', flush=True); time.sleep(60)"
    with pytest.raises(subprocess.TimeoutExpired) as raised:
        run_python("-c", code, timeout=0.5)
    assert raised.value.output == "begun\n"
