"""Llama 3.1 to 3.3: the whole reply is `{"name": "f", "parameters": {...}}`, sometimes after `<|python_tag|>`.

Several calls are divided by `; `.
"""

from __future__ import annotations

import json

from gapless.text.tools.base import CallFrame, ToolFormat, new_call_id
from gapless.text.tools.call_parser import CallSyntax
from gapless.text.tools.json_call import JsonCall

TAG = "<|python_tag|>"


class Llama3(ToolFormat):
    name = "llama3"
    syntax = CallSyntax((TAG,), (), "{", lambda tools: JsonCall(), new_call_id, is_bare=True)

    def fits(self, template: str) -> bool:
        return TAG in template or ("ipython" in template and "<|start_header_id|>" in template)

    def frame(self, tool: str) -> CallFrame:
        return CallFrame((f'{{"name": {json.dumps(tool)}, "parameters": ',), ("}",), ("; ",))
