"""An OpenAI endpoint that says what a test tells it to: a list of models, and prepared answers to chats."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class StubApi:
    """Answers chats one after the other, and keeps what it was asked. The last answer is given again and again."""

    def __init__(self) -> None:
        self.models: Any = {"object": "list", "data": [{"id": "one", "max_model_len": 64}, {"id": "two"}]}
        self.answers: list[tuple[int, bytes]] = [(200, b"")]
        self.asked: list[dict[str, Any]] = []
        self.headers: dict[str, str] = {}
        self.url = ""

    def stream(self, *events: Any, done: bool = True) -> None:
        """Answer with these events."""
        lines = [b": a comment\n\n", *(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)]
        self.answers = [(200, b"".join([*lines, b"data: [DONE]\n\n" if done else b""]))]

    def tell(self, *messages: dict[str, Any]) -> None:
        """Answer with these messages, in one piece each."""
        wholes = [{"id": "x", "object": "chat.completion", "created": 0, "model": "one"} for _ in messages]
        for whole, message in zip(wholes, messages, strict=True):
            choice = {"index": 0, "message": {"role": "assistant"} | message, "finish_reason": "stop"}
            whole["choices"] = [choice]  # type: ignore[assignment]
        self.answers = [(200, json.dumps(whole).encode()) for whole in wholes]

    def next(self) -> tuple[int, bytes]:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@contextlib.contextmanager
def stub_api(prefix: str = "") -> Iterator[StubApi]:
    """A stub that listens; its paths begin with the prefix."""
    stub = StubApi()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == f"{prefix}/v1/models"
            self.answer(200, json.dumps(stub.models).encode())

        def do_POST(self) -> None:
            assert self.path == f"{prefix}/v1/chat/completions"
            stub.headers = {name.lower(): value for name, value in self.headers.items()}
            stub.asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.answer(*stub.next())

        def answer(self, status: int, data: bytes) -> None:
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    stub.url = f"http://127.0.0.1:{server.server_port}{prefix}"
    try:
        yield stub
    finally:
        server.shutdown()
        server.server_close()
