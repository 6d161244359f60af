"""`gapless chat --url` and a real server."""

from __future__ import annotations

import io
import sys

import pytest
from servers import Server

from gapless.cli import main


def test_a_conversation_with_the_server(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    messages = [{"role": "user", "content": "a"}]
    options = {"model": "tiny", "temperature": 0.0, "max_tokens": 6}
    found = server.client().chat.completions.create(messages=messages, **options)  # type: ignore[call-overload]
    text = found.choices[0].message.content
    shapes = '/params structured={"choice": ["x"]}\na\n/params structured={"json_schema": {"const": 7}}\na\n'
    wrong = "/params structured= temperature=9\nb\n/undo\n/params temperature=0 max_tokens=999999\nc\n/stats\n"
    typed = "a\n" + shapes + wrong
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed.encode())))
    assert main(["chat", "--url", server.url, "--temperature", "0", "--max-tokens", "6"]) == 1
    captured = capsys.readouterr()
    assert captured.out == text.rstrip("\n") + "\nx\n7\n"
    assert "error: temperature" in captured.err  # what only the server can refuse
    assert "context length" in captured.err
    assert "tiny at http://127.0.0.1" in captured.err
    assert "tokens of answer" in captured.err
