"""Pieces of Lark, the language of llguidance's grammars: texts, regexes, and how JSON may be spaced."""

from __future__ import annotations

import json
from typing import Any

from llguidance import regex_to_lark

# A space, or a line break with an indentation. Without a bound, a model may write white space for ever.
WHITESPACE = r" ?|\n[ \t]{0,32}"


def quoted(text: str) -> str:
    """A text as a literal."""
    return json.dumps(text, ensure_ascii=False)


def regex(pattern: str) -> str:
    """A regex as a terminal. Its digits are ASCII's, as in JSON schemas."""
    return f"/{regex_to_lark(pattern, 'd')}/"


def json_options(whitespace: str | None) -> Any:
    """Options of llguidance's schemas: which white space is allowed. Keywords that it lacks are errors."""
    pattern = WHITESPACE if whitespace is None else whitespace
    spaces = {"whitespace_flexible": True, "whitespace_pattern": pattern} if pattern else {"whitespace_flexible": False}
    return {"lenient": False, **spaces}
