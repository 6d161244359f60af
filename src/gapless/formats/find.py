"""Which format a file has, by what is in it, and which one an output gets, by its name."""

from __future__ import annotations

from collections.abc import Collection
from typing import BinaryIO

from gapless.errors import ConfigError
from gapless.formats.base import Container, Dialect, Row
from gapless.formats.jsonl import JsonLines
from gapless.formats.parquet import MAGIC, ParquetFile, check_installed
from gapless.formats.plain import PlainRows


def find_container(file: BinaryIO) -> Container:
    """By the first bytes, so that a wrong suffix does no harm."""
    first = file.read(len(MAGIC))
    file.seek(0)
    return ParquetFile() if first == MAGIC else JsonLines()


def output_container(name: str) -> Container:
    """Raises ConfigError for one that needs a package that is not installed."""
    if not name.endswith(".parquet"):
        return JsonLines()
    check_installed()
    return ParquetFile()


def find_dialect(first: Row, *, token_ids: bool, names: Collection[str], run: str) -> Dialect:
    """By the first row of all. `names` are the model's, `run` is the run's fingerprint. Raises ConfigError."""
    if not (isinstance(first.value, dict) and "custom_id" in first.value and "body" in first.value):
        return PlainRows(token_ids=token_ids)
    try:
        from gapless.formats.openai_batch import BatchRows
    except ImportError as error:
        raise ConfigError(
            f"OpenAI batch files need the server's types: pip install 'gapless[serve]' ({error})"
        ) from None
    return BatchRows(names, run)
