"""From a structured value to the source that llguidance compiles: Lark, or its JSON form of a schema."""

from __future__ import annotations

import json

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

from gapless.core.structured import Structured
from gapless.guides.lark import json_options, quoted, regex
from gapless.guides.tags import tags_to_lark
from gapless.guides.vocabulary import Vocabulary

MAX_GBNF_BYTES = 16 * 2**10  # the converter is Python and holds the interpreter lock
MAX_INTERSECTIONS = 8  # the time to compile `a & b & c` doubles with each


def source_of(structured: Structured, vocabulary: Vocabulary) -> str:
    """Raises InvalidRequest."""
    text, schema = structured.text, LLMatcher.grammar_from_json_schema
    match structured.kind:
        case "json_schema":
            return schema(text, overrides=json_options(structured.whitespace))
        case "json_object":
            return schema('{"type":"object"}', overrides=json_options(structured.whitespace))
        case "regex":
            return f"start: {regex(text)}"
        case "choice":
            return "start: CHOICE\nCHOICE: " + " | ".join(map(quoted, json.loads(text)))
        case "grammar":
            return _grammar_source(structured)
        case _:
            return tags_to_lark(structured, vocabulary)


def _grammar_source(structured: Structured) -> str:
    """Lark as it is; GBNF, llama.cpp's EBNF, converted."""
    text = structured.text
    if "::=" not in text:
        if text.count("&") > MAX_INTERSECTIONS:
            raise structured.refuse(f"more than {MAX_INTERSECTIONS} intersections (&)")
        return text
    if len(text) > MAX_GBNF_BYTES:
        raise structured.refuse(f"a GBNF grammar has at most {MAX_GBNF_BYTES} bytes; write longer ones in Lark")
    try:
        return gbnf_to_lark(text)
    except (GbnfToLarkError, ValueError, KeyError, IndexError, RecursionError) as error:
        raise structured.refuse(f"it is not GBNF: {error or type(error).__name__}") from None
