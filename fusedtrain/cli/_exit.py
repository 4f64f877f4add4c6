"""Exit codes of the commands; docs/cli.md has the same table."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """The exit status of a command."""

    DONE = 0
    FOUND = 1  # what the command looks for was found, or a target was missed
    USAGE = 2  # the command was called wrongly, or its extra is not installed
    SCRIPT_RAISED = 3  # the user's code raised: its traceback is shown
    STOPPED = 4  # stopped early (Ctrl-C, a budget): partial results are kept, and marked
