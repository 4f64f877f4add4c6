"""The parent's side of a trial: a fresh process that is asked over pipes, with a deadline."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import tempfile
import threading
from typing import Any

from .._child import command
from .._scripts import end_group
from ._job import Job, search_path
from ._switches import Config


class TrialFailed(Exception):
    """A trial raised, died, or took too long.

    Args:
        reason: one line.
        traceback: of the user's code, and what the process printed.
        out_of_memory: the batch does not fit.
        timed_out: the deadline passed.
    """

    def __init__(
        self, reason: str, traceback: str = "", out_of_memory: bool = False, timed_out: bool = False
    ) -> None:
        super().__init__(f"{reason}\n\n{traceback}" if traceback else reason)
        self.reason, self.traceback = reason, traceback
        self.out_of_memory, self.timed_out = out_of_memory, timed_out


class Process:
    """A context manager: the process ends with it."""

    def __init__(self, job: Job, config: Config, facts: dict[str, Any]) -> None:
        known = {"job": job.to_json(), "config": config, "facts": facts}
        task = json.dumps({**known, "path": search_path(job)})
        self._printed = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            command(f"{__package__}", task),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._printed, text=True,
            start_new_session=True,
        )  # fmt: skip
        self._answers: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def ask(self, what: str, timeout: float, **arguments: Any) -> dict[str, Any]:
        """Raises TrialFailed where no answer comes in ``timeout`` seconds."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": what, **arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the queue has its end
        try:
            line = self._answers.get(timeout=max(timeout, 0.001))
        except queue.Empty:
            self.kill()
            raise TrialFailed(f"no answer in {timeout:.0f} s", timed_out=True) from None
        if not line:
            status = self._process.wait()
            raise TrialFailed(f"its process died (status {status})", self._output())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise TrialFailed(
                answer["error"], self._output() + answer["traceback"], answer["out_of_memory"]
            )
        return answer

    def _output(self) -> str:
        self._printed.seek(0)
        return self._printed.read()

    def kill(self) -> None:
        end_group(self._process)

    def close(self) -> None:
        self.kill()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # a request that nobody has read
                pipe.close()
        self._printed.close()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()
