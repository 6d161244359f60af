"""Real server processes for tests: started with the command line's own arguments, watched through their log."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai

HERE = Path(__file__).parent
TIMEOUT_S = 60.0
MAX_LEN = 1024  # of the model that the servers here serve
FLAGS = ("--device", "cpu", "--dtype", "float32", "--num-threads", "1", "--depth", "2", "--port", "0")


class Server:
    """One server process."""

    certificate: Path | None = None  # of a server that speaks HTTPS

    def __init__(self, process: subprocess.Popen[bytes], log: Path, certificate: Path | None = None) -> None:
        self.process = process
        self.log = log
        self.certificate = certificate
        self.port = eventually(lambda: next((line["port"] for line in self.lines() if "port" in line), None), self)

    @property
    def url(self) -> str:
        return f"{'http' if self.certificate is None else 'https'}://127.0.0.1:{self.port}"

    @property
    def engine_pid(self) -> int:
        """Of the engine that is, or was last, ready."""
        ready = eventually(lambda: [line for line in self.lines() if line["message"] == "the engine is ready"], self)
        return int(ready[-1]["pid"])

    @property
    def num_engines(self) -> int:
        return sum(line["message"] == "the engine is ready" for line in self.lines())

    def lines(self) -> list[dict[str, Any]]:
        """The log so far, without a line that is still being written."""
        text = self.log.read_text() if self.log.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S, **options)

    def get(self, path: str) -> tuple[int, bytes]:
        return self.send("GET", path)

    def send(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, bytes]:
        """Status and body of a plain request; a body that is not bytes goes as JSON."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json"} | headers)
        request.method = method
        context = ssl.create_default_context(cafile=self.certificate) if self.certificate is not None else None
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=context) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def error(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, Any]]:
        """Status and error object of a request that must fail."""
        status, data = self.send(method, path, body, **headers)
        assert status >= 400, data
        found = json.loads(data)["error"]
        assert set(found) == {"message", "type", "param", "code"}
        assert found["message"]
        return status, found

    def metric(self, name: str) -> float:
        """Sum of a metric over its labels."""
        lines = self.get("/metrics")[1].decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((name + " ", name + "{")))

    def metrics_settle(self, name: str, value: float) -> None:
        """Wait for a metric that the engine tells a fraction of a second late."""
        eventually(lambda: self.metric(name) == value, self)

    def wait_ready(self) -> None:
        eventually(lambda: self.get("/ready")[0] == 200, self)

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(TIMEOUT_S)


def eventually(condition: Callable[[], Any], server: Server | None = None) -> Any:
    """The condition's value once it is true."""
    deadline = time.monotonic() + TIMEOUT_S
    while not (value := condition()):
        log = server.log.read_text()[-3000:] if server is not None and server.log.exists() else ""
        assert time.monotonic() < deadline, f"never happened; {log}"
        assert server is None or server.process.poll() is None, f"the server ended; {log}"
        time.sleep(0.01)
    return value


@contextlib.contextmanager
def running(
    log: Path, model: Path, *flags: str, script: str | None = None, certificate: Path | None = None
) -> Iterator[Server]:
    """A server that is ready; ended at the end. `script` is a file beside this one, instead of the command line."""
    program = ["-m", "gapless.cli"] if script is None else [str(HERE / script)]
    command = [sys.executable, *program, "serve", "--model", str(model), "--log-file", str(log), *FLAGS, *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment) as process:
        try:
            server = Server(process, log, certificate)
            server.wait_ready()
            yield server
        finally:
            if process.poll() is None:
                process.kill()
