"""Qwen 3 Coder and Qwen 3.5: each parameter between tags of its own, as text.

    <tool_call><function=f><parameter=city>Oslo</parameter></function></tool_call>

A parameter that the schema declares as text is taken as it is. Any other is read as JSON if it is JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from gapless.text.tools.base import CallFrame, TagShape, ToolFormat, new_call_id
from gapless.text.tools.call_parser import CallSyntax, ToolSchemas

BEGIN, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
NOTHING: TagShape = {"type": "const_string", "value": ""}
KEY: TagShape = {"type": "regex", "pattern": "[A-Za-z0-9_.-]+"}
TEXT: TagShape = {"type": "tag", "begin": ">\n", "content": {"type": "any_text"}, "end": f"\n{PARAMETER_END}\n"}
ANY_PARAMETER: TagShape = {"type": "sequence", "elements": [KEY, TEXT]}
FREE: TagShape = {  # any parameters
    "type": "tags_with_separator",
    "tags": [{"type": "tag", "begin": PARAMETER, "content": ANY_PARAMETER, "end": ""}],
    "separator": "",
}


class QwenXml(ToolFormat):
    name = "qwen-xml"
    syntax = CallSyntax((BEGIN,), (END,), "<", lambda tools: QwenXmlCall(tools), new_call_id)

    def fits(self, template: str) -> bool:
        return BEGIN in template and FUNCTION in template

    def frame(self, tool: str) -> CallFrame:
        return CallFrame((BEGIN, f"\n{FUNCTION}{tool}>\n"), (f"{FUNCTION_END}\n", END), ("\n",))

    def arguments_shape(self, schema: Any) -> TagShape:
        """A tag for each property, in the schema's order."""
        properties = schema.get("properties") or {} if isinstance(schema, Mapping) else {}
        required = schema.get("required", ()) if isinstance(schema, Mapping) else ()
        if not properties:
            return FREE if schema.get("additionalProperties") is not False else NOTHING
        parts = [_part(name, each, schema, is_required=name in required) for name, each in properties.items()]
        return {"type": "sequence", "elements": parts}

    def spelled(self, arguments: Any) -> str:
        def text(value: Any) -> str:
            return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

        return "".join(f"{PARAMETER}{name}>\n{text(value)}\n{PARAMETER_END}\n" for name, value in arguments.items())


def _part(name: str, schema: Any, root: Mapping[str, Any], *, is_required: bool) -> TagShape:
    begin, end = f"{PARAMETER}{name}>\n", f"\n{PARAMETER_END}\n"
    content: TagShape
    if is_text(schema) and not any(key in schema for key in ("enum", "const", "pattern", "minLength", "maxLength")):
        content = {"type": "any_text"}
    elif is_text(schema) and "enum" in schema:
        content = {"type": "or", "elements": [{"type": "const_string", "value": text} for text in schema["enum"]]}
    elif is_text(schema):
        content = {"type": "regex", "pattern": _pattern(schema)}
    else:
        definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
        content = {"type": "json_schema", "json_schema": {**schema, **definitions} if schema else {}}
    tag = {"type": "tag", "begin": begin, "content": content, "end": end}
    return tag if is_required else {"type": "or", "elements": [tag, NOTHING]}


def _pattern(schema: Mapping[str, Any]) -> str:
    if "const" in schema:
        return re.escape(str(schema["const"]))
    if "pattern" in schema:
        return str(schema["pattern"]).removeprefix("^").removesuffix("$")
    return rf"(.|\n){{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}"


def is_text(schema: Any) -> bool:
    """Whether values are text and nothing else, so that they need no quotes."""
    return isinstance(schema, Mapping) and schema.get("type") == "string"


class QwenXmlCall:
    """A `CallReader`. The arguments grow by a whole parameter at a time."""

    def __init__(self, tools: ToolSchemas) -> None:
        self.name: str | None = None
        self.is_done = False
        self.has_failed = False
        self._tools = tools
        self._text = ""  # of a tag, or of a value that is not complete
        self._key = ""
        self._json: list[str] = []
        self._num_parameters = 0
        self._in_value = False
        self._state = self._head

    def feed(self, text: str) -> int:
        place = 0
        while place < len(text) and not self.is_done:
            if self._in_value:
                place += self._read_value(text[place:])
                continue
            was_named = self.name is not None
            self._text += text[place]
            self._state()
            if self.has_failed:
                return place
            place += 1
            if self.name is not None and not was_named:
                break
        return place

    def take_arguments(self) -> str:
        taken, self._json = "".join(self._json), []
        return taken

    def _head(self) -> None:
        """`<function=f>`, and nothing else."""
        self._text = self._text.lstrip()
        if self._text.startswith(FUNCTION) and self._text.endswith(">"):
            self.name, self._text, self._state = self._text[len(FUNCTION) : -1].strip(), "", self._between
            self.has_failed = not self.name
        elif not (FUNCTION.startswith(self._text) or self._text.startswith(FUNCTION)) or "\n" in self._text:
            self.has_failed = True

    def _between(self) -> None:
        """The next parameter, or the end."""
        self._text = self._text.lstrip()
        if self._text == FUNCTION_END:
            self._json.append("}" if self._num_parameters else "{}")
            self.is_done = True
        elif self._text.startswith(PARAMETER) and self._text.endswith(">"):
            self._key, self._text, self._in_value = self._text[len(PARAMETER) : -1].strip(), "", True
        elif not self._text.startswith(PARAMETER):
            self.has_failed = not any(tag.startswith(self._text) for tag in (PARAMETER, FUNCTION_END))

    def _read_value(self, text: str) -> int:
        """All of the text, or up to the end of the value."""
        before = len(self._text)
        self._text += text
        end = self._text.find(PARAMETER_END, max(0, before - len(PARAMETER_END)))
        if end < 0:
            return len(text)
        self._add(self._text[:end].removeprefix("\n").removesuffix("\n"))
        return end + len(PARAMETER_END) - before

    def _add(self, text: str) -> None:
        """A parameter is complete."""
        self._json.append("{" if self._num_parameters == 0 else ", ")
        self._json.append(f"{json.dumps(self._key, ensure_ascii=False)}: {self._as_json(text)}")
        self._num_parameters += 1
        self._text, self._in_value = "", False

    def _as_json(self, text: str) -> str:
        schema = self._tools.get(self.name or "")
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        if not is_text((properties or {}).get(self._key)):
            try:
                json.loads(text)
                return text.strip()
            except (ValueError, RecursionError):
                pass
        return json.dumps(text, ensure_ascii=False)
