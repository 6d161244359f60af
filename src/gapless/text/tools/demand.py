"""What a reply must look like, as structural tags: a value that the engine turns into a grammar.

    [reasoning] call separator call ...                    where calls are required
    [reasoning] free text, in which a tag opens a call     where tools may be called, and what they get is enforced
    [reasoning] calls, or an answer of a certain shape     with a response format

Knows formats and tools. Does not know how a grammar is compiled, or whether it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gapless.text.reasoning import ReasoningFormat
from gapless.text.tools.base import TagShape, Tool, ToolFormat

ANY_OBJECT = {"type": "object"}
SPACE: TagShape = {"type": "regex", "pattern": r"\s{0,4}"}
# Text that cannot be read as a bare call: it does not begin with a bracket.
NO_CALL: TagShape = {"type": "regex", "pattern": r"\s{0,4}([^\s{\[](.|\n)*)?"}


@dataclass(frozen=True, slots=True)
class Demand:
    """What is demanded of the calls in a reply."""

    tools: Sequence[Tool]  # those that may be called
    is_required: bool
    is_parallel: bool
    enforces_all: bool  # schemas of all tools, or of strict ones only

    def schema(self, tool: Tool) -> Any:
        return tool.parameters if tool.strict or self.enforces_all else ANY_OBJECT


def reply_shape(
    format: ToolFormat,
    demand: Demand | None,
    reasoning: ReasoningFormat | None,
    *,
    is_reasoning: bool,
    answer: TagShape | None = None,
) -> TagShape:
    """The shape of a whole reply. demand: None if it must not have calls. answer: the shape of its text, if any."""
    body = _body(format, demand, answer)
    if reasoning is None:
        return body
    end = {"type": "any_text"}
    thought = {"type": "tag", "begin": "" if is_reasoning else reasoning.begin, "content": end, "end": reasoning.end}
    begun = {"type": "sequence", "elements": [thought, SPACE, body]}
    return begun if is_reasoning else {"type": "or", "elements": [begun, body]}


def _body(format: ToolFormat, demand: Demand | None, answer: TagShape | None) -> TagShape:
    if demand is None:
        assert answer is not None
        return answer
    calls = _calls(format, demand)
    if demand.is_required:
        return calls
    if answer is not None:
        return {"type": "or", "elements": [calls, answer]}
    if format.syntax.is_bare:
        return {"type": "or", "elements": [calls, NO_CALL]}
    return _triggered(format, demand)


def _calls(format: ToolFormat, demand: Demand) -> TagShape:
    """One call, or several with what stands around and between them."""
    frame = format.frame(demand.tools[0].name)
    calls = {
        "type": "tags_with_separator",
        "tags": [_tag(format, demand, tool) for tool in demand.tools],
        "separator": "".join(frame.between),
        "at_least_one": True,
        "stop_after_first": not demand.is_parallel,
    }
    if not frame.opens:
        return calls
    return {"type": "tag", "begin": "".join(frame.opens), "content": calls, "end": "".join(frame.closes)}


def _tag(format: ToolFormat, demand: Demand, tool: Tool) -> TagShape:
    frame = format.frame(tool.name)
    content = format.arguments_shape(demand.schema(tool))
    return {"type": "tag", "begin": "".join(frame.before), "content": content, "end": "".join(frame.after)}


def _triggered(format: ToolFormat, demand: Demand) -> TagShape:
    """Free text, in which the tag of a call opens one."""
    group = _calls(format, demand)
    tags = [group] if group["type"] == "tag" else group["tags"]
    shape = {"type": "triggered_tags", "triggers": [format.syntax.begins[0]], "tags": tags}
    return shape | {"stop_after_first": not demand.is_parallel}
