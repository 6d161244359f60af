"""Hermes, Qwen 2.5 and Qwen 3, and many more: `<tool_call>{"name": "f", "arguments": {...}}</tool_call>`."""

from __future__ import annotations

import json

from gapless.text.tools.base import CallFrame, ToolFormat, new_call_id
from gapless.text.tools.call_parser import CallSyntax
from gapless.text.tools.json_call import JsonCall

BEGIN, END = "<tool_call>", "</tool_call>"


class Hermes(ToolFormat):
    name = "hermes"
    syntax = CallSyntax((BEGIN,), (END,), "{", lambda tools: JsonCall(), new_call_id)

    def fits(self, template: str) -> bool:
        return BEGIN in template

    def frame(self, tool: str) -> CallFrame:
        return CallFrame((BEGIN, f'\n{{"name": {json.dumps(tool)}, "arguments": '), ("}\n", END), ("\n",))
