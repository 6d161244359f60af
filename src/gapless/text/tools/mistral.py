"""Mistral, old and new: `[TOOL_CALLS] [{"name": "f", "arguments": {...}}]`, or `[TOOL_CALLS]f[ARGS]{...}` a call.

The templates of these models take call ids of nine letters and digits only.
"""

from __future__ import annotations

import json
import secrets
import string

from gapless.text.tools.base import CallFrame, ToolFormat
from gapless.text.tools.call_parser import CallReader, CallSyntax
from gapless.text.tools.json_call import JsonArguments, JsonCall

BEGIN, ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
ID_LENGTH = 9


def new_mistral_id() -> str:
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(ID_LENGTH))


class MistralCall:
    """Either form: the first character tells which."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.has_failed = False
        self._head = ""  # in the new form: all before the arguments
        self._inner: CallReader | None = None

    @property
    def is_done(self) -> bool:
        return self._inner is not None and self._inner.is_done

    def feed(self, text: str) -> int:
        if self._inner is None:
            count = self._read_head(text)
            if self._inner is None or self.name is not None or self.has_failed:
                return count
        count = self._inner.feed(text)
        self.name, self.has_failed = self._inner.name, self._inner.has_failed
        return count

    def _read_head(self, text: str) -> int:
        if not self._head and text[0] == "{":
            self._inner = JsonCall()
            return 0
        head, brace, _ = text.partition("{")
        self._head += head
        if brace:
            name = self._head.removesuffix(ARGUMENTS).partition(ID)[0].strip()
            self.name, self.has_failed = name, not name
            self._inner = JsonArguments(name)
        return len(head)

    def take_arguments(self) -> str:
        return self._inner.take_arguments() if self._inner is not None else ""


class Mistral(ToolFormat):
    """The old form, or the new one if it `has_args`. Both read either; they differ in what the grammar demands."""

    syntax = CallSyntax((BEGIN,), (), "", lambda tools: MistralCall(), new_mistral_id, marks=(ID, ARGUMENTS))

    def __init__(self, *, has_args: bool) -> None:
        self.name = "mistral-args" if has_args else "mistral"
        self._has_args = has_args

    def fits(self, template: str) -> bool:
        return BEGIN in template and (ARGUMENTS in template or not self._has_args)

    def frame(self, tool: str) -> CallFrame:
        if self._has_args:
            return CallFrame((BEGIN, tool, ARGUMENTS), (), ())
        before = f'{{"name": {json.dumps(tool)}, "arguments": '
        return CallFrame((before,), ("}",), (", ",), opens=(BEGIN, " ["), closes=("]",))
