"""A real headless Chromium for tests, driven over its debugging pipe."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import av
import numpy as np
import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (Debian's package: chromium)")
_QUIET = ("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-quic")
_FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe", *_QUIET)


class Browser:
    """One browser with one page. `errors` are what the page wrote to its console as errors or warnings, or threw."""

    def __init__(self, profile: Path) -> None:
        self.errors: list[str] = []
        self._answers: dict[int, dict[str, Any]] = {}
        self._next, self._buffer = 0, b""
        theirs_in, self._out = _pipe()
        self._in, theirs_out = _pipe()
        self._scratch = tempfile.TemporaryDirectory(prefix="mr-", ignore_cleanup_errors=True)  # it leaves folders there
        command = [str(CHROMIUM), *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
        pipes = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self._process = subprocess.Popen(
            ["bash", "-c", pipes, *command],
            pass_fds=(theirs_in, theirs_out),
            env={**os.environ, "TMPDIR": self._scratch.name},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._session: str | None = None
        try:
            self._open_page()
        except BaseException:
            self.__exit__()
            raise

    def _open_page(self) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._out)
        self._process.terminate()
        try:
            self._process.wait(150)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(150)
        os.close(self._in)
        self._scratch.cleanup()

    def call(self, method: str, **parameters: object) -> dict[str, Any]:
        self._next += 1
        message: dict[str, object] = {"id": self._next, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._out, data) :]
        until = time.monotonic() + 60
        while self._next not in self._answers:
            self._listen(until)
        answer = self._answers.pop(self._next)
        assert "error" not in answer, (method, answer["error"])
        result: dict[str, Any] = answer["result"]
        return result

    def look(self, url: str, width: int, height: int, scheme: str) -> None:
        """Show `url` in a window of this size and colour scheme."""
        mobile = width < 600
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=url)

    def evaluate(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_until(self, expression: str, seconds: float = 40) -> Any:
        until = time.monotonic() + seconds
        while not (found := self.evaluate(expression)):
            assert time.monotonic() < until, (
                f"{expression} stays {found!r}: {self.evaluate('document.body?.innerText')}"
            )
            time.sleep(0.05)
        return found

    def screenshot(self, path: Path) -> np.ndarray:
        """The whole page, as a PNG file and as pixels (height, width, RGB)."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(shot))
        with av.open(str(path)) as image:
            return next(image.decode(video=0)).to_ndarray(format="rgb24")

    def _listen(self, until: float) -> None:
        ready, _, _ = select.select([self._in], [], [], max(until - time.monotonic(), 0))
        assert ready, "the browser does not answer"
        data = os.read(self._in, 1 << 20)
        assert data, "the browser ended"
        *messages, self._buffer = (self._buffer + data).split(b"\0")
        for message in messages:
            self._heard(json.loads(message))

    def _heard(self, message: dict[str, Any]) -> None:
        if "id" in message:
            self._answers[message["id"]] = message
            return
        trouble_of = _TROUBLE.get(message["method"])
        if trouble_of is not None and (seen := trouble_of(message["params"])):
            self.errors.append(seen)


def _pipe() -> tuple[int, int]:
    """A pipe whose ends are not 3 or 4, which the browser's shell gives new meanings."""
    ends = os.pipe()
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in ends]
    for fd in ends:
        os.close(fd)
    return high[0], high[1]


def _of_console(params: dict[str, Any]) -> str | None:
    return str(params["args"]) if params["type"] in ("error", "warning", "assert") else None


def _of_log(params: dict[str, Any]) -> str | None:
    entry = params["entry"]
    return f"{entry['text']} {entry.get('url', '')}" if entry["level"] in ("error", "warning") else None


_TROUBLE: dict[str, Callable[[dict[str, Any]], str | None]] = {
    "Runtime.exceptionThrown": lambda params: str(params["exceptionDetails"]),
    "Runtime.consoleAPICalled": _of_console,
    "Log.entryAdded": _of_log,
}
