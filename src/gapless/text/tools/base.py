"""What a format of tool calls is: how to recognize it, how to read it, and how to demand it of the model.

Knows tools as values. Does not know the wire (`server.tools`) or how a grammar is enforced.
"""

from __future__ import annotations

import json
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gapless.text.tools.call_parser import CallSyntax

TagShape = dict[str, Any]  # a format of structural tags: what a text must look like


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    parameters: Mapping[str, Any]  # a JSON schema of an object
    description: str | None = None
    strict: bool = False  # the grammar enforces the schema, whenever the tool is called

    def described(self) -> dict[str, Any]:
        """The tool as chat templates expect it."""
        about = {} if self.description is None else {"description": self.description}
        function = {"name": self.name, **about, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class CallFrame:
    """What stands around the arguments of a call, and around and between the calls of a reply, for the grammar.

    Each is a sequence of texts. A text that is a special token of the model is written as that token.
    """

    before: Sequence[str]  # of the arguments
    after: Sequence[str]
    between: Sequence[str]  # two calls
    opens: Sequence[str] = ()  # the first call
    closes: Sequence[str] = ()  # the last call


class ToolFormat(ABC):
    """One per file in this folder; `find` lists them. Arguments are JSON, unless a format says otherwise."""

    name: str
    syntax: CallSyntax

    @abstractmethod
    def fits(self, template: str) -> bool:
        """Whether a chat template is of a model that writes this format."""

    @abstractmethod
    def frame(self, tool: str) -> CallFrame:
        """A call of the tool with this name."""

    def arguments_shape(self, schema: Any) -> TagShape:
        """What the arguments must look like. Raises InvalidRequest for a schema that cannot be enforced."""
        return {"type": "json_schema", "json_schema": schema}

    def spelled(self, arguments: Any) -> str:
        """The arguments as the model writes them."""
        return json.dumps(arguments, ensure_ascii=False)


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def reads(template: str, name: str) -> bool:
    """Whether a chat template reads a value of this name."""
    return re.search(rf"\b{re.escape(name)}\b", template) is not None
