"""Plain JSON: the whole reply is `{"name": "f", "arguments": {...}}`, or a list of such objects.

For every model whose template has no tags of its own.
"""

from __future__ import annotations

import json

from gapless.text.tools.base import CallFrame, ToolFormat, new_call_id
from gapless.text.tools.call_parser import CallSyntax
from gapless.text.tools.json_call import JsonCall


class Plain(ToolFormat):
    name = "json"
    syntax = CallSyntax((), (), "{", lambda tools: JsonCall(), new_call_id, is_bare=True)

    def fits(self, template: str) -> bool:
        return True

    def frame(self, tool: str) -> CallFrame:
        return CallFrame((f'{{"name": {json.dumps(tool)}, "arguments": ',), ("}",), ("\n",))
