"""An engine for `Dataset.map_batches` of Ray Data: columns in, the same columns and the results out.

Each actor of the pool has one engine. Batches overlap in it: `__call__` is asynchronous, so Ray Data hands in the next
batches before the last one ends, and they are tokenized on threads of their own while the engine works.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import zlib
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from gapless.core.params import SamplingParams
from gapless.errors import InvalidRequest
from gapless.formats.base import BadLine, Columns, Line, Row
from gapless.formats.plain import COLUMNS, PlainRows
from gapless.garbage import collect_rarely
from gapless.line_work import LineWork
from gapless.llm import LLM
from gapless.part_file import Record
from gapless.pipeline.engine import derive_seed

PROMPTS = ("prompt", "messages")
PARAMETERS = {field.name for field in dataclasses.fields(SamplingParams)}
RESULTS: Columns = {name: kind for name, kind in COLUMNS.items() if name not in ("index", "id")}
MOST_BATCHES = 16  # with the engine at the same time


class Generator:
    """Completes the column `prompt` or `messages`. Columns that are named like sampling parameters override `params`.

    A row that cannot run gets an `error`; the others still run. Draws with a temperature depend on the row alone, so a
    batch that Ray Data repeats after a failure gives the same tokens: the seed comes from the column `seed`, or `index`
    as in `gapless run`, or from the content of the row.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] = "smollm2",
        params: Mapping[str, Any] | SamplingParams | None = None,
        *,
        token_ids: bool = False,
        **options: Any,
    ) -> None:
        if isinstance(params, SamplingParams):
            params = {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
        self._sampling = {name: value for name, value in (params or {}).items() if value is not None}
        SamplingParams.from_dict(self._sampling)
        self._dialect = PlainRows(token_ids=token_ids)
        self._llm = LLM(model, **options)
        self._threads = ThreadPoolExecutor(MOST_BATCHES, "batch")
        collect_rarely()

    async def __call__(self, batch: Any) -> AsyncIterator[Any]:
        """A batch of Ray Data in any of its formats. Yields an Arrow table. Raises InvalidRequest for wrong columns."""
        yield await asyncio.get_running_loop().run_in_executor(self._threads, self._complete, batch)

    def _complete(self, batch: Any) -> Any:
        import pyarrow as arrow

        table = _as_table(batch)
        _check_columns(table.column_names)
        lines = [self._line(number, value) for number, value in enumerate(table.to_pylist())]
        found: dict[int, Record] = {}
        work = LineWork(self._llm, self._dialect, self._sampling, {})
        work.do(lines, lambda line, record, num_tokens: found.__setitem__(line.index, record))
        text, number_type = arrow.string(), arrow.int64()
        kinds = {"text": text, "json": text, "number": number_type, "ids": arrow.list_(number_type)}
        for name, kind in RESULTS.items():
            cells = [_cell(found[number].get(name), kind) for number in range(len(lines))]
            table = table.append_column(name, arrow.array(cells, kinds[kind]))
        return table

    def _line(self, number: int, value: dict[str, Any]) -> Line | BadLine:
        known = {k: v for k, v in value.items() if v is not None and (k in PROMPTS or k in PARAMETERS)}
        if "seed" not in known and "seed" not in self._sampling:
            known["seed"] = derive_seed(self._llm.engine.options.seed, _row_number(value))
        return self._dialect.parse(Row(f"row {number}", known), number)


def _row_number(value: Mapping[str, Any]) -> int:
    """Tells rows apart, wherever and whenever they run."""
    index = value.get("index")
    if isinstance(index, int):
        return index
    return zlib.crc32(json.dumps(value, sort_keys=True, default=str).encode())


def _as_table(batch: Any) -> Any:
    """From an Arrow table, a data frame or columns of NumPy."""
    import pyarrow as arrow

    if isinstance(batch, arrow.Table):
        return batch
    if isinstance(batch, Mapping):
        return arrow.table({name: arrow.array(_plain(column)) for name, column in batch.items()})
    return arrow.Table.from_pandas(batch, preserve_index=False)


def _plain(value: Any) -> Any:
    """Lists and objects without arrays in them."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return value


def _check_columns(names: list[str]) -> None:
    if not set(PROMPTS) & set(names):
        raise InvalidRequest(f"needs a column 'prompt' or 'messages'; the dataset has {', '.join(names)}")
    if taken := [name for name in RESULTS if name in names]:
        raise InvalidRequest(f"the dataset has a column {taken[0]!r} already, as the results do; rename it")


def _cell(value: Any, kind: str) -> Any:
    return json.dumps(value) if kind == "json" and value is not None else value
