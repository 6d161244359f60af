"""Who comes to the door: slow clients, pages that pretend to be of this server, and clients that speak TLS."""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import socket
import ssl
import subprocess
from pathlib import Path

import httpx
import openai
import pytest
from servers import TIMEOUT_S, Server, running

from gapless.cli import main
from gapless.server.options import ServerOptions

# -- slow clients ------------------------------------------------------------------------------------------------------


def drip(raw: socket.socket, data: bytes) -> bytes:
    """Send data over and over, a piece at a time, until the server has closed; what it said meanwhile."""
    answer = b""
    raw.settimeout(0.05)
    for _ in range(int(TIMEOUT_S / 0.05)):
        try:
            if not (piece := raw.recv(4096)):
                return answer
            answer += piece
        except TimeoutError:
            pass
        except ConnectionError:  # what was sent last came to a closed door
            return answer
        with contextlib.suppress(OSError):
            raw.sendall(data)
    raise AssertionError("the connection is still open")


@pytest.mark.parametrize("start", [b"GET /version HTTP/1.1\r\nx: ", b"G", b""], ids=["header", "method", "nothing"])
def test_headers_that_do_not_end_in_time(faulty: Server, start: bytes) -> None:
    """However often a byte comes. A connection on which nothing came is closed without a word."""
    with socket.create_connection(("127.0.0.1", faulty.port), TIMEOUT_S) as raw:
        raw.sendall(start)
        answer = drip(raw, b"a" if start.endswith(b" ") else b"")
    if not start:
        assert answer == b""
        return
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert json.loads(body)["error"]["message"] == "the headers did not arrive within 1 s"


def test_the_second_request_of_a_connection_has_a_clock_too(faulty: Server) -> None:
    with socket.create_connection(("127.0.0.1", faulty.port), TIMEOUT_S) as raw:
        raw.sendall(b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n")
        answer = b""
        while not answer.endswith(b"}"):
            answer += raw.recv(4096)
        assert answer.startswith(b"HTTP/1.1 200 ")
        raw.sendall(b"GET /version HTTP/1.1\r\nx: ")
        assert drip(raw, b"a").startswith(b"HTTP/1.1 408 ")


def test_a_body_that_nobody_wants_has_a_clock_too(faulty: Server) -> None:
    """The answer came before it was read, so nobody waits for the rest."""
    with socket.create_connection(("127.0.0.1", faulty.port), TIMEOUT_S) as raw:
        raw.sendall(b"POST /nowhere HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100000\r\n\r\n")
        assert drip(raw, b"a").startswith(b"HTTP/1.1 404 ")


def test_a_long_answer_is_not_cut_by_the_clock_of_the_next_headers(faulty: Server) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 300, "stream": True, "ignore_eos": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", faulty.port), TIMEOUT_S) as raw:
        raw.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body + b"GET /version HT")
        answer = drip(raw, b"")
    assert b"[DONE]" in answer
    assert answer.index(b"HTTP/1.1 408 ") > answer.index(b"[DONE]")


# -- names -------------------------------------------------------------------------------------------------------------


def ask(server: Server, path: str, host: str | None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=TIMEOUT_S)
    connection.putrequest("GET", path, skip_host=True)
    if host is not None:
        connection.putheader("Host", host)
    connection.endheaders()
    with contextlib.closing(connection):
        answer = connection.getresponse()
        return answer.status, answer.read()


@pytest.mark.parametrize("host", ["localhost", "LocalHost:80", "127.0.0.1:9999", "[::1]:8000", "[::1]", "localhost.:1"])
def test_the_server_answers_to_its_names(server: Server, host: str) -> None:
    assert ask(server, "/health", host)[0] == 200


@pytest.mark.parametrize("path", ["/v1/models", "/", "/state"])
@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.org"])
def test_the_server_does_not_answer_to_other_names(server: Server, path: str, host: str) -> None:
    status, data = ask(server, path, host)
    error = json.loads(data)["error"]
    assert (status, error["code"], error["type"]) == (403, "host_not_allowed", "permission_error")
    assert "--allowed-host" in error["message"]


def test_old_probes_without_a_name_are_answered(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), TIMEOUT_S) as raw:
        raw.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert raw.recv(4096).startswith(b"HTTP/1.1 200 ")


def test_which_names_are_checked() -> None:
    own = {"localhost", "127.0.0.1", "::1"}
    assert ServerOptions().allowed_hosts(has_keys=False) == own
    assert ServerOptions(host="127.0.0.2").allowed_hosts(has_keys=False) == {*own, "127.0.0.2"}
    assert ServerOptions(allowed_host=("Box.lan",)).allowed_hosts(has_keys=True) == {*own, "box.lan"}
    for options, has_keys in (
        (ServerOptions(), True),
        (ServerOptions(host="0.0.0.0"), False),
        (ServerOptions(allowed_host=("*",)), False),
    ):
        assert options.allowed_hosts(has_keys=has_keys) == frozenset()


# -- TLS ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate that signs itself, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl program")
    folder = tmp_path_factory.mktemp("tls")
    files = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "1", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    subprocess.run([*command, "-out", str(files[0]), "-keyout", str(files[1])], check=True, capture_output=True)
    return files


def test_https(tmp_path: Path, long_dir: Path, certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    flags = ("--ssl-certfile", str(cert), "--ssl-keyfile", str(key), "--num-blocks", "64")
    with running(tmp_path / "log.jsonl", long_dir, *flags, certificate=cert) as server:
        trusting = httpx.Client(verify=ssl.create_default_context(cafile=cert))
        client = server.client(http_client=trusting)
        model = client.models.list().data[0].id
        stream = client.completions.create(model=model, prompt="abc", max_tokens=5, stream=True)
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] in ("length", "stop")
        with pytest.raises(openai.APIConnectionError):
            server.client().models.list()  # the certificate is not one that everybody trusts
        with socket.create_connection(("127.0.0.1", server.port), TIMEOUT_S) as raw:
            raw.sendall(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                assert b"200 OK" not in raw.recv(4096)
        assert any(line["message"].startswith("listening on https://") for line in server.lines())
        assert server.stop() == 0


def test_certificates_that_cannot_be_used(
    tmp_path: Path, long_dir: Path, certificate: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    cert, key = (str(path) for path in certificate)
    locked = str(tmp_path / "locked.pem")
    command = ["openssl", "pkey", "-in", key, "-aes256", "-passout", "pass:secret", "-out", locked]
    subprocess.run(command, check=True, capture_output=True)
    for flags, words in (
        (("--ssl-certfile", "no/such/file"), "No such file"),
        (("--ssl-certfile", cert), "ssl_certfile"),  # no key in it
        (("--ssl-certfile", cert, "--ssl-keyfile", locked), "ssl_certfile"),
        (("--ssl-keyfile", key), "ssl_keyfile needs ssl_certfile"),
    ):
        assert main(["serve", "--model", str(long_dir), "--port", "0", *flags]) == 2
        error = capsys.readouterr().err
        assert error.startswith("gapless: ")
        assert words in error
