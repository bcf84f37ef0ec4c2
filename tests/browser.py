"""Control headless Chromium for tests of pages, by the DevTools protocol on two pipes.

The browser is the machine's own if it has one, otherwise Debian's, which `debian` unpacks into a cache folder.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import debian

LIMIT = 60.0  # seconds; every response comes sooner


def chromium() -> tuple[str, dict[str, str]]:
    """Return the path of Chromium, and the environment that it needs."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        found = shutil.which(name)
        if found:
            return found, dict(os.environ)
    root = debian.unpacked("chromium")
    libraries = debian.libraries(root)
    folders = [libraries, libraries / "pulseaudio", libraries / "blas", libraries / "lapack"]
    path = os.pathsep.join(map(str, folders))
    return str(root / "usr" / "lib" / "chromium" / "chromium"), {**os.environ, "LD_LIBRARY_PATH": path}


class Tab:
    """Control one page: collect its console errors and its requests, and evaluate JavaScript."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands = commands
        self._answers = answers
        self._rest = b""
        self._count = 0
        self._session = ""
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._loaded = False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Runtime", "Log", "Network", "Page"):
            self.call(f"{domain}.enable")

    def open(self, path: Path) -> None:
        """Open a file, and wait until the page is loaded."""
        self._loaded = False
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not self._loaded:
            self._take()

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression; the value must be serializable as JSON."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def resize(self, width: int, height: int, dark: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a DevTools command, and return its result."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._take()
            if answer.get("id") == self._count:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result

    def _take(self) -> dict[str, Any]:
        """Return the next message, and record it if it is about the page."""
        deadline = time.monotonic() + LIMIT
        while b"\0" not in self._rest:
            assert select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))[0], "no answer in time"
            content = os.read(self._answers, 2**16)
            assert content, "the browser has ended"
            self._rest += content
        first, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(first)
        method = message.get("method")
        params = message.get("params", {})
        if method == "Runtime.exceptionThrown" or (method == "Runtime.consoleAPICalled" and params["type"] != "log"):
            self.errors.append(json.dumps(params))
        elif method == "Log.entryAdded":
            self.errors.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Page.loadEventFired":
            self._loaded = True
        return message


@contextlib.contextmanager
def tab(profile: Path) -> Iterator[Tab]:
    """Start a browser with the new folder ``profile``, yield a tab, and end the browser at the end of the block."""
    program, environ = chromium()
    commands = os.pipe()
    answers = os.pipe()
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"]
    flags += [f"--user-data-dir={profile}", "--no-first-run", "--disable-background-networking", "--hide-scrollbars"]
    # The browser reads commands from descriptor 3 and writes answers to 4.
    script = f'exec "$@" 3<&{commands[0]} 4>&{answers[1]}'
    process = subprocess.Popen(
        ["bash", "-c", script, "bash", program, *flags],
        env={**environ, "HOME": str(profile)},
        pass_fds=(commands[0], answers[1]),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(commands[0])
    os.close(answers[1])
    try:
        yield Tab(commands[1], answers[0])
    finally:
        os.close(commands[1])  # closing the pipe ends the browser and its children
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.wait()
        os.close(answers[0])
