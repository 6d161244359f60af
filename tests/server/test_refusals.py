"""What a client can get wrong: each gets its status, the error object, and the name of what is wrong."""

from __future__ import annotations

import contextlib
import json
import re
import socket
from typing import Any

import openai
import pytest
from servers import MAX_LEN, TIMEOUT_S, Server, eventually

TALK = [{"role": "user", "content": "Hello"}]
CHAT = "/v1/chat/completions"
TEXT = {"type": "text", "text": "Hello"}


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"presence_penalty": -3}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"best_of": 5}, "best_of"),
        ({"best_of": 2.0}, "best_of"),
        ({"include_stop_str_in_output": 1}, "include_stop_str_in_output"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"skip_special_tokens": False}, "skip_special_tokens"),
        ({"temprature": 1}, "temprature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": 2.01}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_k": 2.5}, "top_k"),
        ({"seed": 2**63}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"min_tokens": 9, "max_tokens": 5}, "min_tokens"),
        ({"n": 0}, "n"),
        ({"n": 5}, "n"),  # the server's limit is 4
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": ["x" * 257]}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stop_token_ids": [97]}, "stop_token_ids"),
        ({"stop_token_ids": list(range(17))}, "stop_token_ids"),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "no role"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]}, "messages.0.tool_calls.0"),
        ({"messages": [*TALK, {"role": "user", "content": "a", "wieght": 1}]}, "messages.1.wieght"),
        ({"messages": [{"role": "user", "content": [TEXT, TEXT | {"wieght": 1}]}]}, "messages.0.content.1.wieght"),
        ({"messages": "Hello"}, "messages"),
        ({"stream": "yes"}, "stream"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"timeout": 0}, "timeout"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": 1}}, "stream_options.continuous_usage_stats"),
        ({"n": 2, "best_of": 1}, "best_of"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        ({"stream": True, "stream_options": {"include_usge": True}}, "include_usge"),
    ],
    ids=str,
)
def test_a_wrong_parameter_is_refused_by_name(server: Server, values: dict[str, Any], param: str | None) -> None:
    status, error = server.error("POST", CHAT, {"model": "tiny", "messages": TALK, "max_tokens": 20} | values)
    assert status == 400
    assert error["type"] == "invalid_request_error"
    if param is not None:
        assert error["param"].startswith(param)


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 21}, "top_logprobs"),
        ({"include": ["reasoning.encrypted_content"]}, "include"),
        ({"include": "message.output_text.logprobs"}, "include"),
    ],
    ids=str,
)
def test_what_a_response_cannot_include(server: Server, values: dict[str, Any], param: str) -> None:
    status, error = server.error("POST", "/v1/responses", {"input": "Hello", "max_output_tokens": 2} | values)
    assert (status, error["param"]) == (400, param)


@pytest.mark.parametrize(
    "input",
    ["a\ud800", [], "x" * (MAX_LEN + 1), [{"role": "user"}], [{"role": "user", "content": [{"type": "input_image"}]}]],
    ids=["surrogate", "empty", "long", "no content", "image"],
)
def test_a_bad_input_of_a_response(server: Server, input: Any) -> None:
    status, error = server.error("POST", "/v1/responses", {"input": input, "max_output_tokens": 2})
    assert (status, error["param"]) == (400, "input")
    assert "messages" not in error["message"] or "the messages" in error["message"]


@pytest.mark.parametrize(
    ("prompt", "n", "param"),
    [(["a"] * 9, None, "prompt"), ([[1]] * 5, 2, "prompt"), ("a", 5, "n"), (["", *["a"] * 8], None, "prompt")],
    ids=["texts", "ids", "n", "counted first"],
)
def test_too_many_prompts_are_refused_before_any_is_looked_at(
    server: Server, prompt: Any, n: int | None, param: str
) -> None:
    """The limits are 4 and 8. The empty prompt, which is wrong too, would have been found when tokenized."""
    status, error = server.error("POST", "/v1/completions", {"prompt": prompt, "n": n})
    assert (status, error["param"]) == (400, param)
    assert "the server allows" in error["message"]


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"role": "user", "content": "a", "wieght": 1}, "input.0.wieght"),
        ({"role": "user", "content": [{"type": "input_text", "text": "a", "wieght": 1}]}, "input.0.content.0.wieght"),
    ],
    ids=["item", "part"],
)
def test_a_field_of_an_input_that_nobody_reads_is_refused(server: Server, item: Any, param: str) -> None:
    status, error = server.error("POST", "/v1/responses", {"input": [item], "max_output_tokens": 2})
    assert (status, error["param"]) == (400, param)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": [TEXT | {"x": None}], "y": None}], "max_tokens": 1}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
        (
            "/v1/responses",
            {"input": [{"type": None, "role": "user", "content": "a", "y": None}], "max_output_tokens": 1},
        ),
        ("/tokenize", {"prompt": "a", "add_special_tokens": None, "add_generation_prompt": None}),
        ("/detokenize", {"tokens": [1]}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_null_is_absent_whatever_the_name(server: Server, path: str, body: dict[str, Any]) -> None:
    nulls = dict.fromkeys(("enable_thinking", "max_completion_tokens", "stream_options", "no_such_name", "best_of"))
    status, data = server.send("POST", path, body | nulls)
    assert status == 200, data


def test_legal_bounds_are_taken(server: Server) -> None:
    same = {"n": 2, "best_of": 2, "stream": True}
    for values in ({"top_p": 0, "temperature": 2}, same, {"n": 2, "best_of": 4}, {"temperature": 0}):
        status, data = server.send("POST", CHAT, {"messages": TALK, "max_tokens": 2} | values)
        assert status == 200, data


def test_refusals_are_counted_by_outcome(server: Server) -> None:
    """A wrong type, a wrong value, and a model that is not there: one each, on the paths that generate."""
    invalid = 'gapless_requests_total{outcome="invalid"}'
    before = server.metric(invalid)
    for path, body in (
        (CHAT, {"messages": TALK, "n": "1"}),
        ("/v1/completions", {"prompt": "", "max_tokens": 2}),
        ("/v1/responses", {"model": "gpt-9", "input": "a"}),
    ):
        server.error("POST", path, body)
    server.error("POST", "/tokenize", {"prompt": 5})
    assert server.metric(invalid) == before + 3


@pytest.mark.parametrize("stream", [False, True])
def test_neutral_and_harmless_parameters_are_taken(server: Server, stream: bool) -> None:
    neutral = {
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": {},
        "n": 1,
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "best_of": None,
        "top_k": -1,
        "logprobs": False,
        "stop": None,
        "temperature": None,
        "parallel_tool_calls": True,
        "stream_options": {"include_usage": False} if stream else None,
    }
    said = {"role": "assistant", "content": "Hi", "refusal": None, "tool_calls": [], "annotations": [{"a": 1}]}
    said |= {"name": "me", "cache_control": {"type": "ephemeral"}}
    said["content"] = [TEXT | {"cache_control": {"type": "ephemeral"}}]
    talk = [*TALK, said, *TALK]
    status, _ = server.send("POST", CHAT, {"messages": talk, "max_tokens": 2, "stream": stream} | neutral)
    assert status == 200


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses", "/tokenize", "/detokenize"])
def test_an_unknown_model_is_404_before_any_stream_byte(server: Server, path: str) -> None:
    body = {"messages": TALK} if path == CHAT else {"tokens": [1]} if path == "/detokenize" else {"prompt": "a"}
    body = {"input": "a"} if path == "/v1/responses" else body
    status, error = server.error("POST", path, {"model": "gpt-9", "stream": True} | body)
    assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")


@pytest.mark.parametrize("stream", [False, True])
def test_an_over_long_prompt_says_both_numbers(client: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt=[5] * (MAX_LEN + 7), stream=stream)
    assert "context length" in caught.value.message
    assert str(MAX_LEN) in caught.value.message
    assert str(MAX_LEN + 7) in caught.value.message
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match=rf"context length is {MAX_LEN} .* {MAX_LEN + 1} tokens"):
        client.completions.create(model="tiny", prompt=[5, 6], max_tokens=MAX_LEN - 1, stream=stream)


@pytest.mark.parametrize(
    "prompt", ["", [], [[]], ["a", ""], [97], [-1], [1.5], [True], "\ud800", {"a": 1}, [[1], "a"]], ids=str
)
def test_a_bad_prompt(server: Server, prompt: Any) -> None:
    status, error = server.error("POST", "/v1/completions", {"prompt": prompt, "max_tokens": 2})
    assert status == 400
    assert error["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("POST", "/v1/nowhere", 404),
        ("GET", CHAT, 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/health", 405),
        ("GET", "/v1/chat/completions/", 404),
        ("GET", "/state?seconds=x", 400),
        ("GET", "/../../etc/passwd", 404),
    ],
)
def test_paths_and_methods(server: Server, method: str, path: str, status: int) -> None:
    assert server.error(method, path)[0] == status


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/v1/embeddings", "does not offer embeddings; it generates text: use /v1/chat/completions"),
        ("/v1/rerank", "does not offer reranking"),
        ("/rerank", "does not offer reranking"),
        ("/v2/rerank", "does not offer reranking"),
        ("/v1/score", "does not offer scores of pairs"),
        ("/score", "does not offer scores of pairs"),
        ("/v1/audio/transcriptions", "does not offer audio"),
        ("/v1/images/generations", "does not offer images"),
        ("/v1/batches", "`gapless run` completes a file"),
        ("/chat/completions", "did you mean /v1/chat/completions?"),
        ("/v1/v1/models", "did you mean /v1/models?"),
        ("/v1/completions/", "did you mean /v1/completions?"),
        ("/v1/nowhere", "no such path: /v1/nowhere; /docs lists all paths"),
    ],
)
def test_a_path_that_is_not_offered_is_told_so(server: Server, path: str, words: str) -> None:
    status, error = server.error("POST", path, {"model": "tiny", "input": "a"})
    assert (status, error["type"]) == (404, "not_found_error")
    assert words in error["message"]


def test_a_client_asks_for_embeddings(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="does not offer embeddings"):
        client.embeddings.create(model="tiny", input="a")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"{}",
        b"\xff\xfe",
        b"[" * 5000,
        b'{"messages": NaN}',
        b'{"n":' + b"9" * 5000 + b"}",
        b'{"messages":[{"role":"\\ud800","content":"a"}],"model":"\\ud800"}',
        b'{"messages":[{"role":"user","content":"a\\ud800"}],"max_tokens":2}',
    ],
    ids=range(12),
)
def test_a_malformed_body_is_a_400(server: Server, body: bytes) -> None:
    status, error = server.error("POST", CHAT, body)
    assert status in (400, 404)
    assert error["param"] in (None, "messages", "model")


@pytest.mark.parametrize("body", [b"", b"[1]", b"null"], ids=["nothing", "list", "null"])
def test_a_body_that_is_no_object_is_told_so(server: Server, body: bytes) -> None:
    _, error = server.error("POST", CHAT, body)
    assert error["message"] == "the body must be a JSON object"


def test_a_body_must_be_json(server: Server) -> None:
    """A form of another site can send text without asking first; it must not reach the engine."""
    body = json.dumps({"messages": TALK}).encode()
    status, error = server.error("POST", CHAT, body, **{"content-type": "text/plain"})
    assert status == 415
    assert "content-type" in error["message"]


def test_a_body_that_is_too_large(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "x" * 70_000}]}
    status, error = server.error("POST", CHAT, body)
    assert (status, error["code"]) == (413, "body_too_large")
    with socket.create_connection(("127.0.0.1", server.port), TIMEOUT_S) as raw:  # without saying how long it is
        raw.sendall(f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n".encode())
        raw.sendall(b"transfer-encoding: chunked\r\n\r\n")
        for _ in range(5):
            raw.sendall(b"4000\r\n" + b" " * 0x4000 + b"\r\n")
        assert raw.recv(100).startswith(b"HTTP/1.1 413 ")


def test_who_is_still_sending_gets_the_answer(server: Server) -> None:
    """Closing on what was not read would take the answer away from a client that sends all before it reads."""
    with socket.create_connection(("127.0.0.1", server.port), TIMEOUT_S) as raw:
        raw.sendall(f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n".encode())
        raw.sendall(b"content-length: 8000000\r\n\r\n")
        for _ in range(80):
            raw.sendall(b" " * 100_000)
        answer = b"".join(iter(lambda: raw.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert answer.count(b"body_too_large") == 1


def test_a_body_that_never_comes(faulty: Server) -> None:
    with socket.create_connection(("127.0.0.1", faulty.port), TIMEOUT_S) as raw:
        raw.sendall(f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n".encode())
        raw.sendall(b"content-length: 100\r\n\r\n{")
        answer = b""
        while not answer.endswith(b"}}"):
            answer += raw.recv(4096)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"did not arrive within 1 s" in answer


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /health HTTP/1.1\r\nbroken header\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: minus\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"\x00\x01\x02\x03\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"a: " + b"b" * 200_000 + b"\r\n\r\n",
        b"",
    ],
    ids=range(8),
)
def test_malformed_http_hurts_nobody(server: Server, data: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), TIMEOUT_S) as raw:
        answer = b""
        with contextlib.suppress(OSError):  # the server need not wait for the end of nonsense
            raw.sendall(data)
            raw.shutdown(socket.SHUT_WR)
            answer = b"".join(iter(lambda: raw.recv(4096), b""))
    assert not answer or answer.startswith((b"HTTP/1.1 4", b"HTTP/1.1 2"))
    assert b"400 Bad Request" not in answer or b'"invalid_request_error"' in answer
    assert server.get("/health")[0] == 200


@pytest.mark.parametrize(
    ("start", "more"),
    [
        (b"GET /version HTTP/1.1\r\nhost: localhost\r\nx: ", b"a" * 1024),
        (b"GET /version HTTP/1.1\r\nhost: localhost\r\n", b"a: b\r\n" * 200),
        (b"GET /version HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n0\r\n", b"a: b\r\n" * 200),
    ],
    ids=["one", "many", "trailers"],
)
def test_headers_without_end_are_cut_off(server: Server, start: bytes, more: bytes) -> None:
    """They are for anybody to send: no key is looked at before their end."""
    with socket.create_connection(("127.0.0.1", server.port), 3.0) as raw, contextlib.suppress(ConnectionError):
        raw.sendall(start)
        for _ in range(256):
            raw.sendall(more)
        while raw.recv(4096):  # a server that waited for more would run into the timeout here
            pass
    assert server.get("/health")[0] == 200


def test_a_large_body_in_small_pieces_is_no_head(server: Server) -> None:
    body = json.dumps({"prompt": "a" * 60_000}).encode()
    pieces = b"".join(b"2\r\n" + body[i : i + 2] + b"\r\n" for i in range(0, len(body) - 1, 2))
    head = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += b"transfer-encoding: chunked\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), TIMEOUT_S) as raw:
        raw.sendall(head + pieces + (b"1\r\n" + body[-1:] + b"\r\n" if len(body) % 2 else b"") + b"0\r\n\r\n")
        assert raw.recv(4096).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "head",
    [
        b"host: localhost\r\nhost: localhost\r\n",
        b"host: localhost\r\nHost: example.org\r\n",
        b"host: localhost\r\ncontent-length: 2\r\ncontent-length: 3\r\n",
        b"host: localhost\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n",
    ],
    ids=["same hosts", "hosts", "lengths", "length and chunks"],
)
def test_a_head_with_two_meanings_is_refused(server: Server, head: bytes) -> None:
    """A proxy in front might have read the other one."""
    with socket.create_connection(("127.0.0.1", server.port), TIMEOUT_S) as raw:
        raw.sendall(b"POST /tokenize HTTP/1.1\r\nconnection: close\r\n" + head + b"\r\n{}")
        raw.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: raw.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b'"invalid_request_error"' in answer


def test_two_requests_on_one_connection(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), TIMEOUT_S) as raw:
        raw.sendall(b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n" * 2)
        data = b""
        while data.count(b"HTTP/1.1 200") < 2 or data.count(b'{"version"') < 2:
            data += raw.recv(4096)


def test_a_full_queue_is_a_429_that_says_when_to_come_back(server: Server) -> None:
    """128 rows and a queue of 64: the eighth times 24 fits, one more does not, and all ends well.

    All are sent before the first answer is read, so that none of them ends meanwhile. The last one is refused.
    """
    refused = server.metric('gapless_requests_total{outcome="refused"}')
    body = {"prompt": ["a"] * 8, "max_tokens": 900, "ignore_eos": True, "stream": True}
    raws = [socket.create_connection(("127.0.0.1", server.port), TIMEOUT_S) for _ in range(25)]
    for number, raw in enumerate(raws):
        raw.sendall(_post("/v1/completions", body if number < 24 else body | {"prompt": "a"}))
    heads = [raw.recv(4096).decode() for raw in raws]
    ((raw, answer),) = [pair for pair in zip(raws, heads, strict=True) if not pair[1].startswith("HTTP/1.1 200")]
    assert answer.startswith("HTTP/1.1 429")
    while not answer.endswith("}"):
        answer += raw.recv(4096).decode()
    assert int(re.search("(?i)retry-after: ([0-9]+)", answer)[1]) >= 1
    assert "queue_full" in answer
    assert server.metric('gapless_requests_total{outcome="refused"}') == refused + 1
    for raw in raws:
        raw.close()
    eventually(lambda: json.loads(server.get("/state")[1])["running"] == 0, server)
    server.metrics_settle("gapless_kv_use_ratio", 0)
    assert server.client().completions.create(model="tiny", prompt="a", max_tokens=1).usage


def _post(path: str, body: Any) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


def test_a_deadline_of_its_own(faulty: Server) -> None:
    client = faulty.client()
    question: dict[str, Any] = {"model": "tiny", "prompt": "a", "max_tokens": 900}
    extra = {"timeout": 0.05, "ignore_eos": True}
    with pytest.raises(openai.APIStatusError, match="longer than its timeout") as caught:
        client.completions.create(**question, extra_body=extra)
    assert caught.value.status_code == 408
    stream = client.completions.create(**question, extra_body=extra, stream=True)
    with pytest.raises(openai.APIError, match="longer than its timeout"):
        list(stream)  # the stream had begun: the error is an event


def test_an_error_event_is_followed_by_done(faulty: Server) -> None:
    body = {"prompt": "a", "max_tokens": 900, "ignore_eos": True, "timeout": 0.05, "stream": True}
    _, data = faulty.send("POST", "/v1/completions", body)
    *_, error, done, end = data.decode().split("\n\n")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "timeout"
    assert (done, end) == ("data: [DONE]", "")
    body = {"input": "a", "ignore_eos": True, "timeout": 0.05, "stream": True}
    _, data = faulty.send("POST", "/v1/responses", body)
    kinds = [line for line in data.decode().splitlines() if line.startswith("event: ")]
    assert kinds[-2:] == ["event: error", "event: response.failed"]


def test_a_client_that_leaves_ends_its_request(faulty: Server) -> None:
    """Streaming or not, in the middle of the answer or before it."""
    aborted = faulty.metric('gapless_requests_total{outcome="abort"}')
    for stream in (True, False):
        raw = socket.create_connection(("127.0.0.1", faulty.port), TIMEOUT_S)
        body = {"prompt": "abc", "max_tokens": 1000, "ignore_eos": True, "stream": stream}
        raw.sendall(_post("/v1/completions", body))
        if stream:
            while b"data: " not in raw.recv(4096):
                pass
        else:
            eventually(lambda: json.loads(faulty.get("/state")[1])["running"] == 1, faulty)
        raw.close()
        eventually(lambda: json.loads(faulty.get("/state")[1])["running"] == 0, faulty)
    faulty.metrics_settle("gapless_kv_use_ratio", 0)
    assert faulty.metric('gapless_requests_total{outcome="abort"}') == aborted + 2


def test_a_slow_reader_makes_nobody_else_wait(server: Server, client: openai.OpenAI) -> None:
    """It reads nothing of a long answer; others are served, and at the end it gets all of it."""
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    raw.settimeout(TIMEOUT_S)
    raw.connect(("127.0.0.1", server.port))
    body = {"prompt": ["abc"] * 8, "max_tokens": 1000, "temperature": 0, "ignore_eos": True, "stream": True}
    raw.sendall(_post("/v1/completions", body))
    whole = client.completions.create(
        model="tiny", prompt="abc", max_tokens=1000, temperature=0, extra_body={"ignore_eos": True}
    )
    eventually(lambda: json.loads(server.get("/state")[1])["running"] == 0, server)  # the engine did not wait either
    data = b""
    while b"[DONE]" not in data:
        data += raw.recv(2**16)
    raw.close()
    chunks = [json.loads(line[6:]) for line in data.decode().splitlines() if line.startswith("data: {")]
    texts = ["".join(c["choices"][0]["text"] for c in chunks if c["choices"][0]["index"] == i) for i in range(8)]
    assert texts == [whole.choices[0].text] * 8
