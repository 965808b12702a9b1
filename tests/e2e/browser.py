"""Headless Chromium over its debugging pipe: opens a page, and tells what the page did.

Only what tests of a page need, and no package: the protocol is JSON messages that end with a zero byte.
"""

from __future__ import annotations

import base64
import json
import os
import selectors
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TIMEOUT_S = 180.0


def find_chromium() -> str | None:
    """The browser's command; None where there is none."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next((path for name in names if (path := shutil.which(name)) is not None), None)


class Page:
    """One tab. ``complaints`` collects what the page logged or threw, ``requests`` what it asked for."""

    def __init__(self, send: int, receive: int) -> None:
        self._send = send
        self._receive = receive
        self._buffer = b""
        self._calls = 0
        self.complaints: list[str] = []
        self.requests: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session: str | None = None
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def show(self, file: Path, *, width: int, height: int, dark: bool = False, until: str) -> None:
        """Open ``file`` and return once the expression ``until`` is true on the page."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", **metrics)
        self._call("Emulation.setScrollbarsHidden", hidden=True)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._call("Page.navigate", url=file.resolve().as_uri())
        self.evaluate(
            f"new Promise((resolve) => {{ const look = () => ({until}) ? resolve(true) "
            ": requestAnimationFrame(look); look(); })"
        )

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression on the page, awaited; AssertionError where it throws."""
        answer = self._call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def screenshot(self, file: Path) -> None:
        """The whole page, as far as it scrolls, as a PNG."""
        data = self._call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        file.write_bytes(base64.b64decode(data))

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._calls += 1
        message: dict[str, Any] = {"id": self._calls, "method": method, "params": params}
        if getattr(self, "_session", None) is not None:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            answer = self._read(deadline, method)
            if answer.get("id") == self._calls:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])
            self._note(answer)

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled":
            self.complaints.append(json.dumps(params["args"]))
        elif method == "Log.entryAdded":
            self.complaints.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def _read(self, deadline: float, waiting_for: str) -> dict[str, Any]:
        with selectors.DefaultSelector() as selector:
            selector.register(self._receive, selectors.EVENT_READ)
            while b"\0" not in self._buffer:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError(f"chromium did not answer {waiting_for} in {TIMEOUT_S:.0f} s")
                piece = os.read(self._receive, 1 << 20)
                if not piece:
                    raise ConnectionError(f"chromium ended while it was asked for {waiting_for}")
                self._buffer += piece
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))


@contextmanager
def chromium(command: str, profile: Path) -> Iterator[Page]:
    """A browser with one tab, which ends with the block."""
    to_browser, from_browser = os.pipe(), os.pipe()

    def as_three_and_four() -> None:
        # The numbers may be each other's: both go out of the way first.
        reading, writing = os.dup(to_browser[0]), os.dup(from_browser[1])
        os.dup2(reading, 3)
        os.dup2(writing, 4)

    arguments = [
        command,
        "--headless=new",
        "--remote-debugging-pipe",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        f"--user-data-dir={profile}",
    ]
    process = subprocess.Popen(
        arguments,
        preexec_fn=as_three_and_four,
        close_fds=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_browser[0])
    os.close(from_browser[1])
    try:
        yield Page(to_browser[1], from_browser[0])
    finally:
        os.close(to_browser[1])  # it ends with its pipe
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(from_browser[0])
