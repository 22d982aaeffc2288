"""A headless Chromium, spoken to over a pipe: enough of the DevTools protocol to load a page and press keys."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
from typing import Any

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")

_PATIENCE = 120  # seconds without a word: a browser that hangs


def find() -> str | None:
    return os.environ.get("TILEWISE_CHROMIUM") or next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """A context manager. `errors` collects what the console and the page complain about, `requests` every address."""

    def __init__(self, path: str, width: int = 1000, height: int = 900) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="tilewise-browser-", ignore_cleanup_errors=True)
        to_browser, from_us = os.pipe()
        to_us, from_browser = os.pipe()
        command = [path, "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe",
                   "--no-first-run", "--disable-dev-shm-usage", f"--user-data-dir={self._folder.name}",
                   f"--window-size={width},{height}", "about:blank"]  # fmt: skip

        def hand_over() -> None:  # the protocol wants its two ends as descriptors 3 and 4
            held = os.dup(to_browser), os.dup(from_browser)
            os.dup2(held[0], 3)
            os.dup2(held[1], 4)

        self._process = subprocess.Popen(
            command,
            preexec_fn=hand_over,  # noqa: PLW1509  (nothing but dup2 runs there)
            close_fds=False,
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._out, self._in = os.fdopen(from_us, "wb", buffering=0), os.fdopen(to_us, "rb", buffering=0)
        self._pending = b""
        self._number = 0
        self._session: str | None = None
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._loaded = False
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._out.close()
        self._in.close()
        self._folder.cleanup()

    def ask(self, method: str, **parameters: Any) -> Any:
        """The answer to one command; what happens meanwhile is noted."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._out.write(json.dumps(message).encode() + b"\0")
        while True:
            told = self._next()
            if told.get("id") == self._number:
                assert "error" not in told, told
                return told["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._pending:
            ready, _, _ = select.select([self._in], [], [], _PATIENCE)
            assert ready, f"the browser said nothing for {_PATIENCE} s"
            data = os.read(self._in.fileno(), 1 << 16)
            assert data, "the browser closed the pipe"
            self._pending += data
        line, _, self._pending = self._pending.partition(b"\0")
        told: dict[str, Any] = json.loads(line)
        self._note(told.get("method", ""), told.get("params", {}))
        return told

    def _note(self, event: str, values: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self.requests.append(values["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            self.errors.append(values["exceptionDetails"]["text"])
        elif event == "Log.entryAdded" and values["entry"]["level"] in ("error", "warning"):
            self.errors.append(values["entry"]["text"])
        elif event == "Runtime.consoleAPICalled" and values["type"] in ("error", "warning"):
            self.errors.append(str(values["args"]))
        elif event == "Page.loadEventFired":
            self._loaded = True

    def resize(self, width: int, height: int = 900, scale: float = 1.0) -> None:
        """A window of this size; one as narrow as a phone's is one."""
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 500,
        )

    def media(self, scheme: str = "light", kind: str = "screen") -> None:
        """Light or dark, screen or print."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.ask("Emulation.setEmulatedMedia", media=kind, features=features)

    def screenshot(self, height: int | None = None) -> bytes:
        """A PNG of the page from its top, as tall as it is or as `height`."""
        width = self.js("innerWidth")
        tall = height or self.js("document.documentElement.scrollHeight")
        clip = {"x": 0, "y": 0, "width": width, "height": tall, "scale": 1}
        told = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        return base64.b64decode(told["data"])

    def load(self, url: str) -> None:
        self._loaded = False
        self.ask("Page.navigate", url=url)
        while not self._loaded:
            self._next()

    def forget(self) -> None:
        """Errors and requests from here on."""
        self.errors.clear()
        self.requests.clear()

    def js(self, expression: str) -> Any:
        """The value of an expression; of a promise, what it comes to."""
        told = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    def press(self, key: str, code: int) -> None:
        text = {"text": "\r"} if key == "Enter" else {}
        self.ask("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **text)
        self.ask("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)
