"""`/openapi.json` says what the server does: statuses and content types of every route."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from servers import Server

BODIES: dict[str, Any] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/responses": {"input": "a", "max_output_tokens": 1},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
}


def ask(server: Server, method: str, path: str, body: Any = None) -> tuple[int, str, bytes]:
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(server.url + path, data, {"content-type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.headers.get_content_type(), answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers.get_content_type(), error.read()


def test_declared_content_types_are_the_real_ones(server: Server) -> None:
    """Every route, plain and where it can as a stream; a wrong body gets a declared status too."""
    paths = json.loads(server.get("/openapi.json")[1])["paths"]
    assert {"/metrics", "/tokenizer_info", "/v1/responses/{response_id}", *BODIES} <= set(paths)
    made = json.loads(ask(server, "POST", "/v1/responses", BODIES["/v1/responses"])[2])["id"]
    for path, operations in paths.items():
        real = path.replace("{response_id}", made).replace("{model}", "tiny")
        for method in sorted(operations, reverse=True):  # get before delete
            declared = operations[method]["responses"]
            assert "422" not in declared
            status, kind, _ = ask(server, method.upper(), real, BODIES.get(path))
            assert (status, kind in declared["200"]["content"]) == (200, True), (path, kind)
            kinds = {kind}
            if "text/event-stream" in declared["200"]["content"]:
                kinds.add(ask(server, "POST", real, BODIES[path] | {"stream": True})[1])
            assert kinds == set(declared["200"]["content"]), path
            if method == "post":
                status, kind, _ = ask(server, "POST", real, [])
                assert kind in declared[str(status)]["content"], path


def test_what_clients_need_of_the_tokenizer(server: Server) -> None:
    found = json.loads(server.get("/tokenizer_info")[1])
    assert (found["vocab_size"], found["eos_token"], found["eos_token_ids"]) == (97, "\n", [0])
    assert found["special_tokens"] == {"0": "\n"}
    assert "assistant" in found["chat_template"]
