"""How a model learns of tools: by a template that reads them, or by words of our own."""

from __future__ import annotations

from typing import Any

from gapless.text.chat import ChatTemplate
from gapless.text.tools.base import Tool
from gapless.text.tools.find import find_format
from gapless.text.tools.words import told_tools

TOOL = Tool("f", {"type": "object", "properties": {"city": {"type": "string"}}}, "Weather of a city")
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
KNOWS = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}!{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
)
CALLS = [{"id": str(n), "type": "function", "function": {"name": "f", "arguments": {"city": n}}} for n in range(2)]
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": None, "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "0", "name": "f", "content": "rain"},
    {"role": "tool", "tool_call_id": "1", "name": "f", "content": [{"type": "text", "text": "sun"}]},
]


def rendered(template: str, talk: list[dict[str, Any]], tools: list[Tool], name: str = "auto") -> str:
    messages, values = told_tools(talk, tools, find_format(template, name), template)
    return ChatTemplate(template).render(messages, **values)


def test_a_template_that_reads_tools_gets_them_as_they_are() -> None:
    found = rendered(KNOWS, TALK, [TOOL])
    assert found == '[f]<user>Hi<assistant>!f{"city": 0}!f{"city": 1}<tool>rain<tool>sun'
    assert rendered(KNOWS, TALK[:1], []) == "<user>Hi"


def test_a_template_that_knows_no_tools_gets_words() -> None:
    found = rendered(PLAIN, TALK, [TOOL])
    system, _, rest = found.partition("<user>")
    assert system.startswith("<system>You can call these tools.")
    assert '"name": "f", "description": "Weather of a city"' in system
    assert '{"name": "NAME", "arguments": {}}' in system
    call = '{"name": "f", "arguments": {"city": %d}}'
    assert rest == f"Hi<assistant>{call % 0}\n{call % 1}<user>Result of f:\nrain\nResult of f:\nsun"


def test_the_words_join_a_system_message_that_is_there() -> None:
    said = {"role": "system", "content": "Be brief."}
    found = rendered(PLAIN, [said, *TALK[:1]], [TOOL], "hermes")
    assert found.startswith("<system>Be brief.\n\nYou can call")
    assert '<tool_call>\n{"name": "NAME", "arguments": {}}\n</tool_call>' in found
    assert found.count("<system>") == 1
    assert said == {"role": "system", "content": "Be brief."}, "the client's messages are not changed"
