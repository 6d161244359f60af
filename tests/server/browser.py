"""A headless Chromium, driven over a pipe by its own protocol: no driver and no further package."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
TIMEOUT_S = 60.0
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--hide-scrollbars")


class Page:
    """One tab."""

    def __init__(self, write_fd: int, read_fd: int) -> None:
        self._write_fd = write_fd
        self._file = os.fdopen(read_fd, "rb", buffering=0)
        self._held = b""
        self._count = 0
        self._session: str | None = None
        self.problems: list[str] = []  # what the page's console said of errors
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._count += 1
        number = self._count
        message = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write_fd, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return dict(answer["result"])

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._held:
            data = self._file.read(2**16)
            assert data, "the browser ended"
            self._held += data
        message, _, self._held = self._held.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        is_error = found.get("params", {}).get("entry", {}).get("level") == "error"
        if found.get("method") == "Runtime.exceptionThrown" or is_error:
            self.problems.append(json.dumps(found["params"])[:500])
        return found

    def open(self, url: str, width: int = 1280, height: int = 800, *, dark: bool = False) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, script: str) -> Any:
        """The value of an expression once it is true."""
        deadline = time.monotonic() + TIMEOUT_S
        while not (value := self.run(script)):
            assert time.monotonic() < deadline, f"never true: {script}; {self.problems}"
            time.sleep(0.02)
        return value

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def press(self, key: str, code: int) -> None:
        for kind in ("rawKeyDown", "char", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, text="\r")

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """A browser with one tab, ended at the end."""
    assert CHROMIUM is not None
    their_in, our_out = os.pipe()
    our_in, their_out = os.pipe()
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}"]
    shell = f'exec "$@" 3<&{their_in} 4>&{their_out}'
    with subprocess.Popen(
        ["bash", "-c", shell, "chromium", *command], pass_fds=(their_in, their_out), stderr=subprocess.DEVNULL
    ) as process:
        os.close(their_in)
        os.close(their_out)
        try:
            yield Page(our_out, our_in)
        finally:
            os.close(our_out)
            process.terminate()
            process.wait(TIMEOUT_S)
