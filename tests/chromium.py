"""A headless Chromium for tests of pages, driven by the DevTools protocol over a pipe: no port, no package.

`find()` says where one is, None if there is none. Every message of the page's console, every exception and every
request is kept: a page that is one file must cause none.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
PATIENCE_S = 60.0


def find() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


class Chromium:
    """One tab."""

    def __init__(self, width: int = 1280, height: int = 900) -> None:
        program = find()
        assert program is not None
        self._home = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()

        def hand_over() -> None:  # the pipe is file 3 and 4 of the browser
            first, second = os.dup(to_read), os.dup(to_write)
            os.dup2(first, 3)
            os.dup2(second, 4)

        flags = [*FLAGS, f"--user-data-dir={self._home.name}", f"--window-size={width},{height}"]
        self._process = subprocess.Popen(
            [program, *flags, "about:blank"],
            preexec_fn=hand_over,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._buffer, self._number, self._session = b"", 0, ""
        self.complaints: list[str] = []
        """Of the page's console: warnings, errors, exceptions."""
        self.requests: list[str] = []
        target = next(t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return dict(answer["result"])
            self._note(answer)
        raise TimeoutError(method)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            read = os.read(self._read, 1 << 20)
            assert read, "the browser is gone"
            self._buffer += read
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.complaints.append(str([arg.get("value", arg.get("description")) for arg in params["args"]]))
            case "Runtime.exceptionThrown":
                self.complaints.append(str(params["exceptionDetails"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.complaints.append(str(params["entry"]["text"]))
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])

    def open(self, file: Path) -> float:
        """Open a page and wait until it is drawn; the milliseconds it took by its own clock."""
        self.complaints.clear()
        self.requests.clear()
        self.call("Page.navigate", url=file.absolute().as_uri())
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            ready = self.run("document.documentElement && document.documentElement.dataset.ready")
            if ready:
                # Two frames later everything is on the screen.
                wait = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
                self.run(f"{wait}.then(() => performance.now())")
                return float(ready)
            if self.complaints:
                break
            time.sleep(0.02)
        raise TimeoutError(f"the page was not drawn: {self.complaints}")

    def run(self, script: str) -> Any:
        """The value of an expression on the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, script: str) -> None:
        """Until an expression is true; between two pages there is nothing to ask."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            with suppress(AssertionError):
                if self.run(script):
                    return
            time.sleep(0.05)
        raise TimeoutError(script)

    def resize(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def screenshot(self, file: Path, selector: str | None = None) -> None:
        """A picture of what is in view, or of an element."""
        options: dict[str, Any] = {"format": "png"}
        if selector is not None:
            script = f"(() => {{ const b = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
            box = self.run(script + " return [b.x + scrollX, b.y + scrollY, b.width, b.height]; })()")
            options["clip"] = dict(zip(("x", "y", "width", "height"), box, strict=True)) | {"scale": 1}
            options["captureBeyondViewport"] = True
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", **options)["data"]))

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)
        os.close(self._write)
        self._home.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
