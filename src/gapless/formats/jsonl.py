"""JSON Lines: one JSON object a line, in UTF-8. Only a line feed ends a line, and empty lines do not count."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator
from typing import BinaryIO

from gapless.formats.base import Columns, Row


class JsonLines:
    """The container."""

    def rows(self, file: Iterable[bytes]) -> Iterator[Row]:
        """A bad line does not stop the others; only bytes that are not UTF-8 do."""
        for number, text in _texts(file):
            yield _parse(text, f"line {number}")

    def count(self, file: Iterable[bytes]) -> int:
        return sum(1 for _ in _texts(file))

    def write(self, records: Iterable[bytes], out: BinaryIO, columns: Columns) -> None:
        for record in records:
            out.write(record + b"\n")


def _texts(raws: Iterable[bytes]) -> Iterator[tuple[int, str]]:
    for number, raw in enumerate(raws, start=1):
        text = raw.removeprefix(codecs.BOM_UTF8).decode() if number == 1 else raw.decode()
        if text and not text.isspace():
            yield number, text


def _parse(text: str, place: str) -> Row:
    try:
        return Row(place, json.loads(text))
    except json.JSONDecodeError as error:
        return Row(place, error=f"not JSON: {error.msg} at column {error.colno}")
    except (ValueError, RecursionError) as error:  # a number or a nesting without end
        return Row(place, error=f"not JSON that can be read: {error}")
