"""Structured output over HTTP: every spelling, refusals with their status, and crashes."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from typing import Any

import openai
import pytest
from servers import Server, eventually

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}, "b": {"enum": ["x", "yz"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "seed": 3, "max_tokens": 60}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
TAGS = {"structures": [{"begin": "<f>", "schema": {"type": "boolean"}, "end": "</f>"}], "triggers": ["<f"]}


def ask(server: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    status, data = server.send("POST", path, body)
    assert status == 200, data
    found: dict[str, Any] = json.loads(data)
    return found


def is_thing(text: str) -> bool:
    found = json.loads(text)
    return list(found) == ["a", "b"] and found["a"] in range(10) and found["b"] in ("x", "yz")


@pytest.mark.parametrize(
    ("asked", "fits"),
    [
        ({"response_format": JSON_SCHEMA}, is_thing),
        ({"structured_outputs": {"json": SCHEMA}}, is_thing),
        ({"guided_json": SCHEMA}, is_thing),
        ({"guided_json": json.dumps(SCHEMA), "guided_whitespace_pattern": ""}, is_thing),
        ({"guided_json": SCHEMA, "guided_whitespace_pattern": " "}, is_thing),
        ({"structured_outputs": {"regex": "[ab]{5}"}}, re.compile("[ab]{5}").fullmatch),
        ({"guided_regex": "[ab]{5}"}, re.compile("[ab]{5}").fullmatch),
        ({"guided_choice": ["left", "right"]}, ("left", "right").__contains__),
        ({"guided_grammar": 'root ::= "a" [0-9] "b"'}, re.compile("a[0-9]b").fullmatch),
        ({"structured_outputs": {"grammar": 'start: "a" /[0-9]/ "b"'}}, re.compile("a[0-9]b").fullmatch),
        ({"response_format": {"type": "text"}}, lambda text: True),
    ],
)
def test_every_spelling(server: Server, asked: dict[str, Any], fits: Any) -> None:
    (choice,) = ask(server, "/v1/chat/completions", CHAT | asked)["choices"]
    assert fits(choice["message"]["content"]), choice
    if "response_format" not in asked or asked["response_format"]["type"] != "text":
        assert choice["finish_reason"] == "stop"
    if "response_format" not in asked:
        (choice,) = ask(server, "/v1/completions", {"prompt": "Hi", "seed": 4, "max_tokens": 60} | asked)["choices"]
        assert fits(choice["text"])


def test_any_object_and_tags_begin_as_they_must(server: Server) -> None:
    more = {"max_tokens": 12, "temperature": 0}
    (choice,) = ask(server, "/v1/chat/completions", CHAT | more | {"response_format": {"type": "json_object"}})[
        "choices"
    ]
    assert choice["message"]["content"].startswith("{")
    tags: dict[str, Any] = {
        "format": {"type": "triggered_tags", "at_least_one": True, "stop_after_first": True, "triggers": ["<f"]}
    }
    tags["format"]["tags"] = [{"begin": "<f>", "content": {"type": "regex", "pattern": "[xy]"}, "end": "</f>"}]
    for asked in ({"structural_tag": tags}, {"response_format": {"type": "structural_tag", **tags}}):
        (choice,) = ask(server, "/v1/chat/completions", CHAT | asked)["choices"]
        assert re.fullmatch("<f>[xy]</f>", choice["message"]["content"])
    ask(server, "/v1/chat/completions", CHAT | more | {"response_format": {"type": "structural_tag", **TAGS}})


def test_responses(server: Server) -> None:
    form = {"type": "json_schema", "name": "thing", "schema": SCHEMA, "strict": True}
    found = ask(server, "/v1/responses", {"input": "Hi", "text": {"format": form}, "max_output_tokens": 60})
    assert is_thing(found["output"][0]["content"][0]["text"])
    assert found["text"] == {"format": form}


def test_the_real_client(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="tiny", messages=CHAT["messages"], response_format=JSON_SCHEMA, stream=True, max_tokens=60, n=2
    )
    texts = ["", ""]
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert all(map(is_thing, texts))


REFUSED = [
    ({"response_format": {"type": "yaml"}}, "response_format", "must be one of text"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "must be an object with a schema"),
    ({"response_format": {"type": "json_object", "schema": {}}}, "response_format", "'schema'"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "strin"}}}},
        "response_format",
        "strin",
    ),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, "response_format", "not"),
    ({"response_format": {"type": "json_schema", "json_schema": {"strict": 1}}}, "response_format", "strict"),
    ({"guided_regex": "(a"}, "guided_regex", "unclosed group"),
    ({"guided_regex": "a?" * 8000}, "guided_regex", "cannot be used"),
    ({"guided_choice": []}, "guided_choice", "not empty"),
    ({"guided_grammar": "start: (" + "(" * 5000}, "guided_grammar", "brackets"),
    ({"guided_json": {"items": [[[]]] * 3}}, "guided_json", "cannot be used"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"backend": "x"}}, "structured_outputs", "unknown kind 'backend'"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "both ask for a shape"),
    ({"guided_regex": "a", "guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "needs guided_json"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "needs guided_json"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "contradicts guided_regex"),
    ({"guided_regex": "a", "min_tokens": 2}, "min_tokens", "contradicts guided_regex"),
    ({"structural_tag": {"format": {"type": "strange"}}}, "structural_tag", "unknown format"),
]


@pytest.mark.parametrize(
    ("asked", "place"),
    [
        ({"guided_regex": "a" * 20_000}, "guided_regex"),
        ({"guided_json": "[1]"}, "guided_json"),
        ({"guided_json": [1]}, "guided_json:"),
        ({"tool_choice": 5}, "tool_choice:"),
        ({"stop": ["a", 1]}, "stop.1:"),
        ({"functions": [{"name": "f"}]}, "'functions'"),
        ({"structured_outputs": {"json": [1]}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}},
            "response_format.json_schema.schema",
        ),
    ],
)
def test_an_error_names_the_place_as_the_client_wrote_it(server: Server, asked: dict[str, Any], place: str) -> None:
    status, data = server.send("POST", "/v1/chat/completions", CHAT | asked)
    assert (status, json.loads(data)["error"]["message"].split()[0]) == (400, place)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("asked", "param", "reason"), REFUSED, ids=lambda item: str(item)[:30])
def test_a_refusal_has_its_status_and_names_the_parameter(
    server: Server, asked: dict[str, Any], param: str, reason: str, stream: bool
) -> None:
    status, error = server.error("POST", "/v1/chat/completions", CHAT | asked | {"stream": stream})
    assert (status, error["param"]) == (400, param), error
    assert reason in error["message"]
    assert len(error["message"]) < 700


def test_text_of_responses_is_checked(server: Server) -> None:
    for text, param in (
        ({"format": {"type": "x"}}, "text.format"),
        ({"other": 1}, "text"),
        ({"format": 1}, "text.format"),
    ):
        status, error = server.error("POST", "/v1/responses", {"input": "Hi", "text": text})
        assert (status, error["param"]) == (400, param)


def test_others_are_not_delayed_by_hostile_shapes(server: Server) -> None:
    """Each of these takes the compiler a second; the tokens of a stream keep coming meanwhile."""
    hostile = [{"guided_regex": "(.*a)?" * 2500 + f"b{i}"} for i in range(4)]
    done: list[int] = []

    def send(asked: dict[str, Any]) -> None:
        done.append(server.error("POST", "/v1/chat/completions", CHAT | asked)[0])

    threads = [threading.Thread(target=send, args=(asked,)) for asked in hostile]
    longest_s, began_s = 0.0, time.monotonic()
    client = server.client()
    for thread in threads:
        thread.start()
    while len(done) < len(hostile):
        before_s = time.monotonic()
        client.completions.create(model="tiny", prompt="x", max_tokens=5)
        longest_s = max(longest_s, time.monotonic() - before_s)
        assert time.monotonic() - began_s < 30
    assert done == [400] * len(hostile)
    assert longest_s < 1.0


def test_a_crash_in_the_middle_changes_nothing(faulty: Server) -> None:
    """The grammar is compiled again, and goes on after the tokens that are known."""
    body = {"prompt": "x", "max_tokens": 400, "seed": 5, "guided_regex": "[a-m]{150}-[n-z]{150}", "stream": True}
    expected = ask(faulty, "/v1/completions", body | {"stream": False})["choices"][0]["text"]
    before = faulty.num_engines
    stream = faulty.client().completions.create(
        model="tiny", prompt="x", max_tokens=400, seed=5, extra_body={"guided_regex": body["guided_regex"]}, stream=True
    )
    text = ""
    for number, chunk in enumerate(stream):
        text += chunk.choices[0].text
        if number == 20:
            os.kill(faulty.engine_pid, signal.SIGKILL)
    assert text == expected
    assert re.fullmatch("[a-m]{150}-[n-z]{150}", text)
    eventually(lambda: faulty.num_engines > before, faulty)
