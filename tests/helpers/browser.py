"""Headless browser driven through a pipe (Chrome's DevTools protocol, standard library only)."""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome-headless-shell")


def find_browser() -> str | None:
    """Return the path of the first Chrome-like browser on PATH, or None."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


def _pipe() -> tuple[int, int]:
    ends = os.pipe()
    duplicates = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return duplicates


class Browser:
    """A browser with one page. `messages` collects the events that the browser sends: errors, requests."""

    def __init__(self, program: str, profile: Path) -> None:
        self.messages: list[dict[str, Any]] = []
        self._numbers = itertools.count(1)
        # The browser reads commands from descriptor 3 and writes replies to 4, so our ends must be above these.
        (their_read, self._write), (self._read, their_write) = _pipe(), _pipe()
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$0" "$@" 3<&{their_read} 4>&{their_write}', program, "--headless",
             "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
             "--no-first-run", "--disable-background-networking", f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(their_read, their_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(their_read)
        os.close(their_write)
        self._buffer = b""
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        number = next(self._numbers)
        command = {"id": number, "method": method, "params": params}
        if self._session:
            command["sessionId"] = self._session
        os.write(self._write, json.dumps(command).encode() + b"\0")
        while True:
            message = self._next()
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]
            self.messages.append(message)

    def open(self, page: Path, width: int, *, dark: bool = False, script: bool = True) -> None:
        """Load a page in a viewport `width` pixels wide."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1,
                  mobile=width < 600)
        self.call("Emulation.setEmulatedMedia",
                  features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])
        self.call("Emulation.setScriptExecutionDisabled", value=not script)
        self.messages.clear()
        self.call("Page.navigate", url=page.as_uri())
        while not any(message.get("method") == "Page.loadEventFired" for message in self.messages):
            self.messages.append(self._next())

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression on the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def press(self, key: str) -> None:
        """Press a key on the focused element."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def picture(self, path: Path) -> None:
        """Save the whole page as PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip={**size, "scale": 1})
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        """End the browser."""
        os.close(self._write)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            chunk = os.read(self._read, 1 << 20)
            assert chunk, "the browser has exited"
            self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)
