"""A headless Chromium, driven through a pipe by its DevTools protocol: no package is needed."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    "--headless", "--disable-gpu", "--no-first-run", "--hide-scrollbars", "--mute-audio",
    "--disable-background-networking", "--disable-extensions", "--disable-dev-shm-usage",
    "--remote-debugging-pipe", "--allow-file-access-from-files",
)  # fmt: skip


class BrowserError(Exception):
    """The browser refused a command, or went away."""


def find() -> str | None:
    """The browser's program: `$BROWSER_BINARY`, or one of `NAMES`."""
    return os.environ.get("BROWSER_BINARY") or next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page of a browser.

    Args:
        send: the browser's file of commands.
        receive: that of its answers.
    """

    def __init__(self, send: Any, receive: Any) -> None:
        self._send, self._receive, self._number, self._session = send, receive, 0, ""
        self.requests: list[str] = []  # addresses that pages asked for
        self._loaded, self._buffer = False, b""
        target = self.command("Target.createTarget", url="about:blank")["targetId"]
        attached = self.command("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Network", "Runtime"):
            self.command(f"{domain}.enable")

    def command(self, method: str, **parameters: Any) -> Any:
        """The answer to a command of the protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._send.write(json.dumps(message).encode() + b"\0")
        self._send.flush()
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error']['message']}")
                return answer["result"]

    def resize(self, width: int, height: int = 900) -> None:
        self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip

    def open(self, address: str) -> None:
        """Opens a page and waits until all of it is loaded."""
        self._loaded = False
        answer = self.command("Page.navigate", url=address)
        if "errorText" in answer:
            raise BrowserError(f"{address}: {answer['errorText']}")
        while not self._loaded:
            self._next()

    def evaluate(self, script: str) -> Any:
        """The value of a script, which may be a promise."""
        answer = self.command(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise BrowserError(answer["exceptionDetails"]["exception"]["description"])
        return answer["result"].get("value")

    def picture(self, path: Path) -> None:
        """The whole page as a PNG."""
        size = self.command("Page.getLayoutMetrics")["cssContentSize"]
        shot = self.command(
            "Page.captureScreenshot", captureBeyondViewport=True, clip={**size, "scale": 1}
        )
        path.write_bytes(base64.b64decode(shot["data"]))

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            part = self._receive.read1(1 << 16)
            if not part:
                raise BrowserError("the browser ended")
            self._buffer += part
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        self._loaded |= message.get("method") == "Page.loadEventFired"
        if message.get("method") == "Network.requestWillBeSent":
            self.requests.append(message["params"]["request"]["url"])
        return message


@contextmanager
def browser(program: str) -> Iterator[Browser]:
    """A browser that runs until the block ends.

    Raises:
        BrowserError: it does not start.
    """
    flags = [*_FLAGS, *["--no-sandbox"] * (os.getuid() == 0)]
    commands, answers = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # The protocol's pipe has the numbers 3 (commands) and 4 (answers).
        shell = f'exec "$@" 3<&{commands[0]} 4>&{answers[1]}'
        process = subprocess.Popen(
            ["bash", "-c", shell, "bash", program, *flags, f"--user-data-dir={profile}"],
            pass_fds=(commands[0], answers[1]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands[0])
        os.close(answers[1])
        try:
            with open(commands[1], "wb") as send, open(answers[0], "rb") as receive:
                yield Browser(send, receive)
        finally:
            process.terminate()
            process.wait()
