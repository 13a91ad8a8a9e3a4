"""A headless Chromium that a test drives by its DevTools protocol, over two pipes: no server, no package."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")

# No sandbox, since tests run as root in containers; the rest keeps Chromium itself off the network.
_OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-sync",
    "--disable-component-update",
    "--disable-background-networking",
    "--disable-default-apps",
    "--no-first-run",
    "--no-default-browser-check",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
# Chromium reads commands from descriptor 3 and writes answers to 4.
_LAUNCH = """
import os, sys
for argument, descriptor in zip(sys.argv[1:3], (3, 4)):
    os.dup2(int(argument), descriptor)
os.execv(sys.argv[3], sys.argv[3:])
"""
_TIMEOUT_S = 60.0


def find() -> str | None:
    """The path of a Chromium or Chrome; ``CHROMIUM`` names one that is not on the path."""
    named = os.environ.get("CHROMIUM")
    return named or next((path for name in NAMES if (path := shutil.which(name))), None)


class BrowserError(RuntimeError):
    """Chromium did not do what it was asked."""


class Browser:
    """One page in one Chromium. ``events`` holds what the page reported, the oldest first."""

    def __init__(self, path: str) -> None:
        self.events: list[dict[str, Any]] = []
        self._profile = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        # Out of the way of 3 and 4, whatever was free.
        passed = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 20) for descriptor in (commands, answers)]
        launch = [sys.executable, "-c", _LAUNCH, *map(str, passed), path, *_OPTIONS]
        self._process = subprocess.Popen(
            [*launch, f"--user-data-dir={self._profile.name}", "about:blank"],
            pass_fds=passed,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for descriptor in (commands, answers, *passed):
            os.close(descriptor)
        self._buffer, self._count, self._session = b"", 0, ""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._commands)
        os.close(self._answers)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._profile.cleanup()

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol and its answer."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._count:
            self.events.append(answer)
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error']}")
        found: dict[str, Any] = answer["result"]
        return found

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + _TIMEOUT_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], deadline - time.monotonic())
            part = os.read(self._answers, 1 << 20) if ready else b""
            if not part:
                raise BrowserError("Chromium does not answer." if ready == [] else "Chromium has ended.")
            self._buffer += part
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message

    def open(self, path: Path, fragment: str = "") -> None:
        """Load a file and wait until it has loaded."""
        self.events.clear()
        # Elsewhere first: another fragment alone would load nothing.
        self.ask("Page.navigate", url="about:blank")
        self.wait("location.href === 'about:blank'")
        self.ask("Page.navigate", url=path.resolve().as_uri() + fragment)
        self.wait("location.href !== 'about:blank' && document.readyState === 'complete'")

    def wait(self, condition: str) -> None:
        """Until an expression is true."""
        deadline = time.monotonic() + _TIMEOUT_S
        while not self.run(condition):
            if time.monotonic() > deadline:
                raise BrowserError(f"expected {condition}, waited in vain.")
            time.sleep(0.02)

    def run(self, expression: str) -> Any:
        """What an expression of JavaScript gives in the page, as JSON."""
        answer = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise BrowserError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def press(self, key: str, code: int, text: str = "") -> None:
        """A key down and up, as a person presses it; ``code`` is its Windows key code."""
        event: dict[str, Any] = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.ask("Input.dispatchKeyEvent", type="keyDown", **event, **({"text": text} if text else {}))
        self.ask("Input.dispatchKeyEvent", type="keyUp", **event)

    def view(self, width: int, height: int = 900, *, scheme: str = "light") -> None:
        """The size of the window and the reader's mode."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        wanted = {"prefers-color-scheme": scheme, "prefers-reduced-motion": "reduce"}
        features = [{"name": name, "value": value} for name, value in wanted.items()]
        self.ask("Emulation.setEmulatedMedia", features=features)

    def picture(self, *, whole: bool = False) -> bytes:
        """A PNG of the window, or of the whole page."""
        return base64.b64decode(self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"])

    def paper(self) -> bytes:
        """A PDF of the page as it prints."""
        return base64.b64decode(self.ask("Page.printToPDF", printBackground=True, preferCSSPageSize=True)["data"])

    def complaints(self) -> list[str]:
        """Errors and warnings of the page, exceptions of its script, resources refused."""
        return [text for event in self.events if (text := _complaint(event))]

    def requests(self) -> list[str]:
        """What the page asked for, itself and its data: URLs apart."""
        sent = (event["params"] for event in self.events if event["method"] == "Network.requestWillBeSent")
        asked = (parameters["request"]["url"] for parameters in sent)
        return [url for url in asked if not url.startswith(("data:", "about:"))]


def _complaint(event: dict[str, Any]) -> str | None:
    parameters = event.get("params", {})
    if event["method"] == "Runtime.exceptionThrown":
        return str(parameters["exceptionDetails"])
    if event["method"] == "Log.entryAdded" and parameters["entry"]["level"] in ("warning", "error"):
        return str(parameters["entry"]["text"])
    if event["method"] == "Runtime.consoleAPICalled" and parameters["type"] in ("warning", "error", "assert"):
        return str(parameters["args"])
    return None
