"""Flags of the command line that say what shape a text must have. Schemas and grammars are read from files."""

from __future__ import annotations

import argparse
from typing import Any

from gapless.errors import InvalidRequest

MAX_FILE_BYTES = 2**20  # more than any schema or grammar may have

FLAGS = ("json_schema", "json_object", "regex", "choice", "grammar", "structural_tag")
FILES = ("json_schema", "grammar", "structural_tag")


def add_shape_flags(parser: argparse.ArgumentParser) -> None:
    """At most one of them may be given."""
    group = parser.add_argument_group("structured output", "at most one of these; see docs/structured.md")
    group.add_argument("--json-schema", metavar="FILE", help="JSON that is valid by the schema in this file")
    group.add_argument("--json-object", action="store_true", default=None, help="any JSON object")
    group.add_argument("--regex", metavar="REGEX", help="text that this regex matches from begin to end")
    group.add_argument("--choice", action="append", metavar="TEXT", help="this text or another --choice; repeatable")
    group.add_argument("--grammar", metavar="FILE", help="text of the Lark or GBNF grammar in this file")
    group.add_argument("--structural-tag", metavar="FILE", help="free text with tags, by the JSON in this file")


def shape_of_flags(args: argparse.Namespace) -> dict[str, Any] | None:
    """The value of SamplingParams.structured, as a mapping; None without a flag. Raises InvalidRequest."""
    given = {name: getattr(args, name, None) for name in FLAGS}
    found = {name: value for name, value in given.items() if value is not None}
    if len(found) > 1:
        flags = " and ".join("--" + name.replace("_", "-") for name in found)
        raise InvalidRequest(f"{flags} exclude each other", "structured")
    return {name: _read(value) if name in FILES else value for name, value in found.items()} or None


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8-sig") as file:
            return file.read(MAX_FILE_BYTES)
    except OSError as error:
        raise InvalidRequest(f"{path}: cannot be read: {error.strerror}", "structured") from None
    except UnicodeDecodeError:
        raise InvalidRequest(f"{path}: is not UTF-8 text", "structured") from None
