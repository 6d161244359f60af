"""Parquet: a row is an object whose fields are the columns that are not null. Needs pyarrow (`gapless[parquet]`).

Results have the same columns whatever the run. What has no simple type, such as log-probabilities, is JSON as text.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

from gapless.errors import ConfigError
from gapless.formats.base import Columns, Kind, Row, Unreadable

MAGIC = b"PAR1"
ROWS_AT_ONCE = 1024  # read
ROWS_IN_GROUP = 8192  # written


class ParquetFile:
    """The container."""

    def rows(self, file: BinaryIO) -> Iterator[Row]:
        number = 0
        opened = _open(file)
        try:
            for batch in opened.iter_batches(batch_size=ROWS_AT_ONCE):
                for value in batch.to_pylist():
                    number += 1
                    yield Row(f"row {number}", _without_nulls(value))
        except _arrow().ArrowException as error:
            raise Unreadable(f"cannot be read as Parquet after row {number}: {error}") from None

    def count(self, file: BinaryIO) -> int:
        return int(_open(file).metadata.num_rows)

    def write(self, records: Iterable[bytes], out: BinaryIO, columns: Columns) -> None:
        arrow = _arrow()
        import pyarrow.parquet as parquet

        kinds: dict[Kind, Any] = {
            "text": arrow.string(),
            "number": arrow.int64(),
            "ids": arrow.list_(arrow.int64()),
            "json": arrow.string(),
        }
        schema = arrow.schema([(name, kinds[kind]) for name, kind in columns.items()])
        source = iter(records)
        with parquet.ParquetWriter(out, schema) as writer:
            while group := [json.loads(record) for record in itertools.islice(source, ROWS_IN_GROUP)]:
                assert all(record.keys() <= columns.keys() for record in group)
                arrays = [
                    arrow.array([_cell(record.get(name), kind) for record in group], kinds[kind])
                    for name, kind in columns.items()
                ]
                writer.write_table(arrow.Table.from_arrays(arrays, schema=schema))


def check_installed() -> None:
    """Raises ConfigError without pyarrow."""
    _arrow()


def _arrow() -> Any:
    try:
        import pyarrow
    except ImportError:
        raise ConfigError("Parquet files need pyarrow: pip install 'gapless[parquet]'") from None
    return pyarrow


def _open(file: BinaryIO) -> Any:
    arrow = _arrow()
    import pyarrow.parquet as parquet

    try:
        return parquet.ParquetFile(file, pre_buffer=False)
    except arrow.ArrowException as error:
        raise Unreadable(f"cannot be read as Parquet: {error}") from None


def _without_nulls(value: Any) -> Any:
    """A struct has all of its fields in every row, so null is the same as absent."""
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return (
        [_without_nulls(item) for item in value] if isinstance(value, list) and value and not _plain(value) else value
    )


def _plain(values: list[Any]) -> bool:
    return not isinstance(values[0], (dict, list))


def _cell(value: Any, kind: Kind) -> Any:
    if value is None or kind in ("number", "ids"):
        return value
    text = value if kind == "text" and isinstance(value, str) else json.dumps(value)
    return text.encode("utf-8", "replace").decode()  # Parquet has no lone surrogates
