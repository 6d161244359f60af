"""Structural tags as a Lark grammar: free text in which a tag opens a constrained part.

Two spellings are read: OpenAI's and vLLM's older {"structures": [...], "triggers": [...]}, and the newer {"format":
{...}}, whose formats may be nested. A special token in a begin, an end or a trigger is matched as that token, because
no text can spell it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from gapless.core.structured import Structured
from gapless.guides.lark import json_options, quoted, regex
from gapless.guides.vocabulary import Vocabulary

ANY_TEXT = r"/(.|\n)*/"


def tags_to_lark(structured: Structured, vocabulary: Vocabulary) -> str:
    """Raises InvalidRequest."""
    writer = _Writer(structured, vocabulary)
    root = writer.format(_format_of(json.loads(structured.text), writer), last=True)
    return writer.finish(root)


def _format_of(spec: Mapping[str, Any], writer: _Writer) -> Any:
    """The root format; the older spelling becomes triggered tags."""
    if "format" in spec:
        return spec["format"]
    if "structures" not in spec:
        return spec if "type" in spec else writer.fail("it has neither 'format' nor 'structures'")
    tags = []
    for number, item in enumerate(writer.items(spec, "structures")):
        schema = item.get("schema") if isinstance(item, Mapping) else writer.fail(f"structures.{number} is no object")
        content = {"type": "json_schema", "json_schema": {} if schema is None else schema}
        tags.append({"begin": item.get("begin"), "content": content, "end": item.get("end", "")})
    return {"type": "triggered_tags", "triggers": spec.get("triggers"), "tags": tags}


class _Writer:
    """Writes rules, and hands out their names."""

    def __init__(self, structured: Structured, vocabulary: Vocabulary) -> None:
        self._structured = structured
        self._vocabulary = vocabulary
        self._rules: list[str] = [f"TEXT: {ANY_TEXT}"]
        self._grammars: list[dict[str, str]] = []
        self._formats: dict[str, Callable[[Mapping[str, Any], bool], str]] = {
            "const_string": lambda value, last: self.literal(self.text(value, "value")),
            "json_schema": lambda value, last: self._json(value),
            "regex": lambda value, last: regex(self.text(value, "pattern")),
            "grammar": lambda value, last: self._grammar(self.text(value, "grammar")),
            "any_text": self._any_text,
            "sequence": self._sequence,
            "or": lambda value, last: self.rule(
                " | ".join(self.format(item, last=last) for item in self.items(value, "elements"))
            ),
            "tag": lambda value, last: self._tag(value, self.text(value, "begin")),
            "triggered_tags": self._triggered,
            "tags_with_separator": lambda value, last: self._separated(value),
        }

    def finish(self, root: str) -> str:
        lark = "\n".join((f"start: {root}", *self._rules))
        if not self._grammars:
            return lark
        return json.dumps({"grammars": [{"name": "tags", "lark_grammar": lark}, *self._grammars]})

    # -- formats -----------------------------------------------------------------------------------------------------

    def format(self, value: Any, *, last: bool) -> str:
        """An expression for a format. last: nothing follows it."""
        if not isinstance(value, Mapping):
            self.fail(f"a format must be an object, got {value!r:.60}")
        kind = value.get("type")
        if kind not in self._formats:
            self.fail(f"unknown format {kind!r:.60}; known: {', '.join(self._formats)}")
        return self._formats[kind](value, last)

    def _json(self, value: Mapping[str, Any]) -> str:
        schema = value.get("json_schema")
        if not isinstance(schema, (Mapping, bool)):
            self.fail("a json_schema format needs 'json_schema', an object")
        if schema is False:
            self.fail("no text has the schema false")
        found = dict(schema) if isinstance(schema, Mapping) else {}
        return "%json " + json.dumps({**found, "x-guidance": json_options(None)})

    def _grammar(self, text: str) -> str:
        name = f"grammar_{len(self._grammars)}"
        self._grammars.append({"name": name, "lark_grammar": text})
        return f"@{name}"

    def _any_text(self, value: Mapping[str, Any], last: bool) -> str:
        if not last:
            self.fail("any_text can stand before the end of a tag, or at the end of the whole")
        return "TEXT"

    def _sequence(self, value: Mapping[str, Any], last: bool) -> str:
        elements = self.items(value, "elements")
        ends = len(elements) - 1
        return "(" + " ".join(self.format(e, last=last and i == ends) for i, e in enumerate(elements)) + ")"

    def _tag(self, value: Mapping[str, Any], begin: str) -> str:
        """`begin` may lack what a trigger has already matched."""
        content = value.get("content")
        end = self.text(value, "end")
        if isinstance(content, Mapping) and content.get("type") == "any_text":
            return f"{self.literal(begin)} {self.text_until(end)}"
        return self.rule(f"{self.literal(begin)} {self.format(content, last=False)} {self.literal(end)}")

    def _triggered(self, value: Mapping[str, Any], last: bool) -> str:
        triggers = [self._trigger(item) for item in self.items(value, "triggers")]
        bodies: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        for tag in self._tags(value):
            begin = self.text(tag, "begin")
            matching = [trigger for trigger in triggers if begin.startswith(trigger)]
            if not matching:
                self.fail(f"the tag {begin!r:.60} begins with none of the triggers")
            trigger = max(matching, key=len)
            bodies[trigger].append(self._tag(tag, begin[len(trigger) :]))
        used = {trigger: self.rule(" | ".join(tags)) for trigger, tags in bodies.items() if tags}
        later = " | ".join(f"{self.text_until(trigger)} {body}" for trigger, body in used.items())
        first = " | ".join(f"{self.literal(trigger)} {body}" for trigger, body in used.items())
        once, at_least_one = self.flag(value, "stop_after_first"), self.flag(value, "at_least_one")
        if once:
            return f"({first})" if at_least_one else f"({later} | {self._rest(last)})"
        return f"({first}) ({later})* {self._rest(last)}" if at_least_one else f"({later})* {self._rest(last)}"

    def _rest(self, last: bool) -> str:
        """Free text after the last tag."""
        if not last:
            self.fail("triggered_tags must come last: free text has no end of its own")
        return "TEXT"

    def _trigger(self, trigger: Any) -> str:
        if not isinstance(trigger, str) or not trigger:
            self.fail(f"a trigger must be text that is not empty, got {trigger!r:.60}")
        pieces = self._vocabulary.pieces(trigger)
        if isinstance(pieces[0], str) and len(pieces) > 1:
            self.fail(f"the trigger {trigger!r:.60} has a special token after other text; begin with the token")
        return str(trigger)

    def _separated(self, value: Mapping[str, Any]) -> str:
        tags = self.rule(" | ".join(self._tag(tag, self.text(tag, "begin")) for tag in self._tags(value)))
        more = (
            "" if self.flag(value, "stop_after_first") else f"({self.literal(self.text(value, 'separator'))} {tags})*"
        )
        return f"({tags} {more})" if self.flag(value, "at_least_one") else f"({tags} {more})?"

    def _tags(self, value: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        tags = self.items(value, "tags")
        return [tag if isinstance(tag, Mapping) else self.fail("a tag must be an object") for tag in tags]

    # -- parts -------------------------------------------------------------------------------------------------------

    def rule(self, body: str) -> str:
        """A new rule."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def literal(self, text: str) -> str:
        """Exactly this text, special tokens in it as tokens."""
        pieces = self._vocabulary.pieces(text)
        return " ".join(f"<[{piece}]>" if isinstance(piece, int) else quoted(piece) for piece in pieces) or '""'

    def text_until(self, end: str) -> str:
        """Free text up to the first place of `end`, which is part of it."""
        pieces = self._vocabulary.pieces(end)
        if not pieces:
            self.fail("any_text needs a tag whose end is not empty")
        if isinstance(pieces[0], int):
            return f"TEXT {self.literal(end)}"
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}[lazy]: TEXT {quoted(pieces[0])}")
        return f"{name} {self.literal(end[len(pieces[0]) :])}" if len(pieces) > 1 else name

    def text(self, value: Mapping[str, Any], name: str) -> str:
        found = value.get(name)
        if isinstance(found, list) and len(found) == 1:
            found = found[0]
        return found if isinstance(found, str) else self.fail(f"{name} must be text, got {found!r:.60}")

    def items(self, value: Mapping[str, Any], name: str) -> list[Any]:
        found = value.get(name)
        if isinstance(found, list) and found:
            return found
        raise self.fail(f"{name} must be a list that is not empty, got {found!r:.60}")

    def flag(self, value: Mapping[str, Any], name: str) -> bool:
        found = value.get(name) or False
        return found if isinstance(found, bool) else self.fail(f"{name} must be true or false")

    def fail(self, reason: str) -> Any:
        raise self._structured.refuse(reason)
