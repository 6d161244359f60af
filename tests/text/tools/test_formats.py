"""How each format of tool calls is read: what is a call, what is content, and that cuts of the text do not matter."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.errors import ConfigError
from gapless.text.deltas import WholeReply
from gapless.text.tools.call_parser import CallParser
from gapless.text.tools.find import FORMATS, find_format

NAMES = ("f", "get_weather", "g.h-1")
SCHEMA = {"properties": {"text": {"type": "string"}, "maybe": {"anyOf": [{"type": "null"}, {"type": "string"}]}}}
TOOLS = dict.fromkeys(NAMES, SCHEMA)
Read = tuple[str, list[tuple[str, str]]]

CASES: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("hermes", "just text", "just text", []),
    ("hermes", ' \n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [("f", '{"a": 1}')]),
    (
        "hermes",
        'Let me see.\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "a}\\"\\\\b"}}\n</tool_call>\n',
        "Let me see.",
        [("f", "{}"), ("get_weather", '{"city": "a}\\"\\\\b"}')],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_call> done ', "done ", [("f", "{}")]),
    ("hermes", 'a\n<tool_call>{"name": "f"}</tool_call>\nb', "a\nb", [("f", "{}")]),
    (
        "hermes",
        '<tool_call>{"arguments": {"x": [1, {"y": 2}]}, "name": "f"}</tool_call>',
        "",
        [("f", '{"x": [1, {"y": 2}]}')],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "cut he', "", [("f", '{"a": "cut he')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_c', "", [("f", "{}")]),
    (
        "hermes",
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        [],
    ),
    ("hermes", "<tool_call> is a tag", "<tool_call> is a tag", []),
    ("hermes", "a <tool_call></tool_call> b", "a <tool_call></tool_call> b", []),
    ("hermes", "x <tool_ca", "x <tool_ca", []),
    ("hermes", '<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', []),
    ("llama3", '{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
    ("llama3", '<|python_tag|>{"type": "function", "name": "f", "parameters": {}}', "", [("f", "{}")]),
    (
        "llama3",
        '{"name": "f", "parameters": {}}; {"name": "g.h-1", "parameters": {"b": 2}}',
        "",
        [("f", "{}"), ("g.h-1", '{"b": 2}')],
    ),
    ("llama3", '{"answer": {"name": "f"}}', '{"answer": {"name": "f"}}', []),
    ("llama3", 'Say {"name": "f", "parameters": {}}', 'Say {"name": "f", "parameters": {}}', []),
    ("llama3", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "f", "arguments": {}}]',
        "",
        [("f", '{"a": 1}'), ("f", "{}")],
    ),
    (
        "mistral",
        'ok[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]get_weather[CALL_ID]123456789[ARGS]{}',
        "ok",
        [("f", '{"a": 1}'), ("get_weather", "{}")],
    ),
    ("mistral", "[TOOL_CALLS]f{}", "", [("f", "{}")]),
    ("mistral", "[TOOL_CALLS]nobody[ARGS]{}", "[TOOL_CALLS]nobody[ARGS]{}", []),
    (
        "json",
        '[{"name": "f", "arguments": {"a": 1}}, {"name": "f", "arguments": {}}]',
        "",
        [("f", '{"a": 1}'), ("f", "{}")],
    ),
    ("json", '{"name": "f", "arguments": {}}\n{"name": "f", "arguments": {}}', "", [("f", "{}"), ("f", "{}")]),
    (
        "functiongemma",
        'ok<start_function_call>call:f{a:<escape>x,{"}<escape>,b:-1.5,c:[1,<escape>y<escape>],d:{e:true}}<end_function_call>',
        "ok",
        [("f", '{"a": "x,{\\"}", "b": -1.5, "c": [1, "y"], "d": {"e": true}}')],
    ),
    (
        "functiongemma",
        "<start_function_call>call:f{}<end_function_call><start_function_call>call:g.h-1{a: None}",
        "",
        [("f", "{}"), ("g.h-1", '{"a": null}')],
    ),
    ("functiongemma", "<start_function_call>call:f{a:<escape>cut of<esc", "", [("f", '{"a": "cut of')]),
    ("functiongemma", "<start_function_call>call:no{}", "<start_function_call>call:no{}", []),
    ("functiongemma", "<start_function_call>f{}", "<start_function_call>f{}", []),
    ("gemma", '<|tool_call>call:f{a:<|"|>é<|"|>, b: [ ] }<tool_call|>', "", [("f", '{"a": "é", "b": []}')]),
    (
        "qwen-xml",
        "Hm.\n<tool_call>\n<function=f>\n<parameter=text>\n12 < 13\n\n</parameter>\n<parameter=n>\n12\n</parameter>\n"
        "<parameter=o>\nword\n</parameter>\n</function>\n</tool_call>\n<tool_call><function=f></function></tool_call>",
        "Hm.",
        [("f", '{"text": "12 < 13\\n", "n": 12, "o": "word"}'), ("f", "{}")],
    ),
    ("qwen-xml", "<tool_call>\n<function=f>\n<parameter=n>\n1\n</parameter>\n<para", "", [("f", '{"n": 1')]),
    ("qwen-xml", "<tool_call>\n<function=no>\n</function>", "<tool_call>\n<function=no>\n</function>", []),
    ("json", "[1, 2, 3]", "[1, 2, 3]", []),
    ("json", " {} ", " {} ", []),
]


def read(name: str, pieces: Sequence[str]) -> Read:
    parser, reply = CallParser(find_format(None, name).syntax, TOOLS), WholeReply()
    for piece in pieces:
        reply.add(parser.push(piece))
    reply.add(parser.finish())
    return reply.content, [(call.name, call.arguments) for call in reply.calls]


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_a_text_is_read_the_same_at_every_cut(name: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert read(name, [text]) == (content, calls)
    assert read(name, text) == (content, calls)
    for cut in range(len(text)):
        assert read(name, [text[:cut], text[cut:]]) == (content, calls), cut


@pytest.mark.parametrize(("name", "text"), [case[:2] for case in CASES])
def test_a_text_that_ends_anywhere_is_read_the_same_in_pieces(name: str, text: str) -> None:
    for end in range(len(text)):
        assert read(name, text[:end]) == read(name, [text[:end]])


FRAGMENTS = [
    *(
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "<|python_tag|>",
        "[",
        "]",
        "{",
        "}",
        '"',
        "\\",
        ",",
        ":",
    ),
    *('{"name": "f"', '"arguments": {', '{"name": "f", "arguments": {"a": "b"}}', "f", " ", "\n", "text", ";", "é"),
    *("<start_function_call>", "<end_function_call>", "call:f{", "<escape>", "a:1", "<function=f>", "<parameter=a>"),
]


@given(st.sampled_from([each.name for each in FORMATS]), st.lists(st.sampled_from(FRAGMENTS), max_size=12), st.data())
@settings(max_examples=250, deadline=None)
def test_whatever_a_model_writes_its_cuts_do_not_matter(name: str, parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = read(name, [text])
    assert read(name, pieces) == whole
    if not whole[1]:
        assert whole[0] == text, "content was lost"


def framed(name: str, calls: Sequence[tuple[str, dict[str, object]]]) -> str:
    """Calls as the grammar demands them."""
    format = find_format(None, name)
    frames = [format.frame(tool) for tool, _ in calls]
    pairs = zip(frames, calls, strict=True)
    written = ["".join([*frame.before, format.spelled(arguments), *frame.after]) for frame, (_, arguments) in pairs]
    return "".join([*frames[0].opens, "".join(frames[0].between).join(written), *frames[0].closes])


KEYS = st.text("abc_é", min_size=1, max_size=4)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=3)),
    max_leaves=5,
)
CALLS = st.lists(st.tuples(st.sampled_from(NAMES), st.dictionaries(KEYS, VALUES)), min_size=1, max_size=3)


@pytest.mark.parametrize("name", [each.name for each in FORMATS])
@given(CALLS)
@settings(max_examples=25, deadline=None)
def test_what_the_grammar_demands_is_read_back(name: str, calls: list[tuple[str, dict[str, object]]]) -> None:
    content, found = read(name, framed(name, calls))
    assert (content, [(tool, json.loads(arguments)) for tool, arguments in found]) == ("", calls)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{% if tools %}<tool_call>{{ x }}</tool_call>", "hermes"),
        ("{% if tools %}<tool_call><function={{ x }}></tool_call>", "qwen-xml"),
        ("{{ tools }}[TOOL_CALLS]{{ x }}", "mistral"),
        ("{{ tools }}[TOOL_CALLS]name[ARGS]{{ x }}", "mistral-args"),
        ("<|start_header_id|>ipython<|end_header_id|>{{ tools }}", "llama3"),
        ("<|python_tag|>", "llama3"),
        ("{{ tools }}<start_function_call>call:", "functiongemma"),
        ("{{ tools }}<|tool_call>call:", "gemma"),
        ("{{ tools }}", "json"),
        ("{{ messages }}", "json"),
        (None, "json"),
    ],
)
def test_the_format_is_found_from_the_template(template: str | None, name: str) -> None:
    assert find_format(template).name == name


def test_an_unknown_format_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="hermes"):
        find_format(None, "nonsense")


def test_ids_of_mistral_calls_are_what_its_templates_take() -> None:
    id = find_format(None, "mistral").syntax.new_id()
    assert len(id) == 9
    assert id.isalnum()
