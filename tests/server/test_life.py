"""A server from start to end: drains, keys, wrong usage, logs that cannot be written."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import openai
import pytest
from servers import FLAGS, HERE, TIMEOUT_S, Server, eventually, running

from gapless.cli import main
from gapless.sim.arrivals import read_arrivals

LONG: dict[str, Any] = {"model": "tiny", "prompt": "abc", "max_tokens": 400, "stream": True}
SLOW = "faulty_server.py"  # steps of 5 ms at least: there is something left to drain
NAME = ("--served-model-name", "tiny", "--num-blocks", "256")


def begin(server: Server) -> openai.Stream[openai.types.Completion]:
    """A stream whose first token has come."""
    stream = server.client().completions.create(**LONG, extra_body={"ignore_eos": True})
    next(iter(stream))
    return stream


def test_a_drain_finishes_what_runs_and_takes_no_more(tmp_path: Path, long_dir: Path) -> None:
    """And then writes the timeline that was asked for. The request is recorded."""
    flags = ("--host", "0.0.0.0", "--trace", str(tmp_path / "T.json"), "--record-trace", str(tmp_path / "R.jsonl"))
    with running(tmp_path / "log.jsonl", long_dir, *NAME, *flags, script=SLOW) as server:
        assert any("without an API key" in line["message"] for line in server.lines())
        stream = begin(server)
        server.process.send_signal(signal.SIGTERM)
        eventually(lambda: server.get("/ready")[0] == 503)
        status, error = server.error("POST", "/v1/completions", {"prompt": "a"})
        assert (status, error["code"]) == (503, "shutting_down")
        rest = list(stream)
        assert rest[-1].choices[0].finish_reason == "length"
        assert server.process.wait(TIMEOUT_S) == 0
        assert any("timeline: " in line["message"] for line in server.lines())
    (run,) = json.loads((tmp_path / "T.json").read_text())["otherData"]["runs"]
    assert run["steps"] >= LONG["max_tokens"]
    assert "<html" in (tmp_path / "T.html").read_text()
    (arrival,) = read_arrivals(str(tmp_path / "R.jsonl"))
    assert arrival.num_output == LONG["max_tokens"]


def _check_cors(server: Server) -> None:
    preflight = {"origin": "https://a.example", "access-control-request-method": "POST"}
    assert server.send("OPTIONS", "/v1/completions", None, **preflight)[0] == 200
    preflight["origin"] = "https://b.example"
    status, error = server.error("OPTIONS", "/v1/completions", None, **preflight)
    assert (status, error["code"]) == (400, "cors_refused")


def test_a_drain_has_an_end_and_a_key_guards(tmp_path: Path, long_dir: Path) -> None:
    """What does not finish in time is told so; the log is on a full disk all the while, which stops nothing."""
    keys = tmp_path / "keys"
    keys.write_text("first-key\nsecond-key\n")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    flags = ("--drain-timeout", "0.2", "--api-key-file", str(keys), "--port", str(port), "--write-timeout", "0.3")
    flags += ("--cors-origin", "https://a.example", "--max-per-client", "64")
    command = [sys.executable, str(HERE / SLOW), "serve", "--model", str(long_dir), *FLAGS, *NAME, *flags]
    with subprocess.Popen([*command, "--log-file", "/dev/full"], env={**os.environ, "OMP_NUM_THREADS": "1"}) as process:
        try:
            server = Server.__new__(Server)
            server.process, server.log, server.port = process, Path("/dev/null"), port
            eventually(lambda: _answers(server), server)
            server.wait_ready()
            _check_keys(server)
            _check_cors(server)
            _check_stalled_reader(server)
            stream = (
                server.client()
                .with_options(api_key="second-key")
                .completions.create(**LONG, extra_body={"ignore_eos": True, "min_tokens": 400})
            )
            next(iter(stream))
            _check_share(server)
            assert server.metric("gapless_log_lines_lost_total") > 0
            process.send_signal(signal.SIGTERM)
            with pytest.raises(openai.APIError, match="shutting down"):
                list(stream)
            assert process.wait(TIMEOUT_S) == 0
        finally:
            if process.poll() is None:
                process.kill()


def _check_stalled_reader(server: Server) -> None:
    """It asks for more than the system's buffers hold and takes nothing: it is let go, and its request with it."""
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    raw.connect(("127.0.0.1", server.port))
    wide = {"prompt": ["a"] * 64, "max_tokens": 1000, "stream": True, "ignore_eos": True, "logprobs": 5}
    data = json.dumps(wide).encode()
    raw.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n")
    raw.sendall(f"authorization: Bearer first-key\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
    eventually(lambda: server.metric("gapless_running_requests") > 0, server)
    eventually(lambda: server.metric('gapless_requests_total{outcome="abort"}') == 64, server)
    raw.close()


def _check_share(server: Server) -> None:
    """The second key has one request running: 64 are one too many for it, and none for the first.

    65 are too many at any time: nobody is told to try again.
    """
    status, error = server.error("POST", "/v1/completions", {"prompt": ["a"] * 65}, authorization="Bearer first-key")
    assert (status, error["message"]) == (400, "65 choices; the server has room for 64")
    body = {"prompt": ["a"] * 64, "max_tokens": 1}
    status, error = server.error("POST", "/v1/completions", body, authorization="Bearer second-key")
    assert (status, error["code"], error["type"]) == (429, "client_queue_full", "rate_limit_error")
    for _ in range(2):  # and again: what is over does not count
        assert server.send("POST", "/v1/completions", body, authorization="Bearer first-key")[0] == 200


def _answers(server: Server) -> bool:
    try:
        return server.get("/version")[0] == 200
    except OSError:
        return False


def _check_keys(server: Server) -> None:
    for header in ({}, {"authorization": "Bearer wrong"}, {"authorization": "first-key"}, {"authorization": "Basic x"}):
        status, error = server.error("GET", "/v1/models", None, **header)
        assert (status, error["code"]) == (401, "invalid_api_key")
    for key in ("first-key", "second-key"):
        assert server.send("GET", "/v1/models", None, authorization=f"Bearer {key}")[0] == 200
    for path in ("/health", "/ready", "/version", "/metrics", "/"):
        assert server.get(path)[0] == 200


def test_the_second_signal_means_now(tmp_path: Path, long_dir: Path) -> None:
    with running(tmp_path / "log.jsonl", long_dir, *NAME, script=SLOW) as server:
        begin(server)
        pid = server.engine_pid
        os.kill(pid, signal.SIGSTOP)  # so that the drain cannot end by itself
        server.process.send_signal(signal.SIGTERM)
        eventually(lambda: any("draining" in line["message"] for line in server.lines()))
        started = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(TIMEOUT_S) == 143
        assert time.monotonic() - started < 5
        eventually(lambda: not Path(f"/proc/{pid}").exists())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "no/such/dir/x"], "no such"),
        (["--port", "99999"], "port must be a whole number between 0 and 65535"),
        (["--host", "192.0.2.1"], "cannot listen on 192.0.2.1"),
        (["--max-body", "lots"], "max_body must be a size"),
        (["--step-timeout", "0"], "step_timeout must be a number of seconds above 0"),
        (["--api-key-file", "no/such/file"], "api_key_file"),
        (["--api-key", ""], "an API key was asked for"),
        (["--depth", "0"], "depth must be"),
    ],
    ids=str,
)
def test_wrong_usage_is_one_clear_line(
    arguments: list[str], words: str, long_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--model", str(long_dir), "--port", "0", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("gapless: ")
    assert words in error
    assert "Traceback" not in error


def test_a_model_that_does_not_load_ends_the_server(tmp_path: Path, long_dir: Path) -> None:
    command = [sys.executable, "-m", "gapless.cli", "serve", "--model", str(long_dir), *FLAGS, "--kv-memory", "1KiB"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 2
    assert "one block of 16 tokens takes" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_the_extra_the_error_says_what_to_install(long_dir: Path) -> None:
    code = (
        "import sys; sys.modules['fastapi'] = None; from gapless.cli import main;"
        f"sys.exit(main(['serve', '--model', {str(long_dir)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "pip install 'gapless[serve]'" in done.stderr
