"""Parquet in and out; and a clear word where pyarrow is missing."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gapless.cli import main
from gapless.errors import ConfigError, InvalidRequest
from gapless.formats import parquet
from gapless.formats.base import Line
from gapless.formats.parquet import ParquetFile
from gapless.formats.plain import COLUMNS
from gapless.prompt_file import read_prompts

ROWS = [
    {"id": "a", "prompt": "Hello", "messages": None, "temperature": 0.0, "max_tokens": 3},
    {"id": None, "prompt": None, "messages": [{"role": "user", "content": "Hi", "name": None}], "temperature": None},
    {"id": "empty", "prompt": "", "messages": None},
]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "in.data"  # the content says what it is
    pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=2)
    return path


def run(prompts: Path, model: Path, out: Path, *more: str) -> int:
    options = ["--model", str(model), "--device", "cpu", "--dtype", "float32", "--num-blocks", "64"]
    return main(["run", str(prompts), "-o", str(out), *options, "--max-tokens", "4", *more])


def test_rows_are_objects_without_nulls(prompts: Path) -> None:
    found = read_prompts([str(prompts)], io.BytesIO())
    assert found.num_lines == 3
    first, second, third = found.lines()
    assert isinstance(first, Line)
    assert isinstance(second, Line)
    assert isinstance(third, Line)
    assert (first.id, first.prompt, first.params) == ("a", "Hello", {"temperature": 0.0, "max_tokens": 3})
    assert (second.id, second.messages, second.params) == (1, [{"role": "user", "content": "Hi"}], {})


def test_results_are_the_same_as_in_json_lines(prompts: Path, tiny_dir: Path) -> None:
    assert run(prompts, tiny_dir, prompts.with_name("out.jsonl"), "--token-ids") == 1
    assert run(prompts, tiny_dir, prompts.with_name("out.parquet"), "--token-ids") == 1
    lines = [json.loads(line) for line in prompts.with_name("out.jsonl").read_text("utf-8").splitlines()]
    table = pq.read_table(prompts.with_name("out.parquet"))
    assert table.column_names == list(COLUMNS)
    found = [{name: value for name, value in row.items() if value is not None} for row in table.to_pylist()]
    assert found == [line | {"id": str(line["id"])} for line in lines]
    assert prompts.with_name("out.errors.jsonl").exists()


def test_many_rows_keep_their_order_and_odd_values_have_a_place() -> None:
    records = [{"index": i, "id": i, "text": "\ud800é", "logprobs": [{"top": [[1, -0.5]]}]} for i in range(20_000)]
    out = io.BytesIO()
    ParquetFile().write((json.dumps(record).encode() for record in records), out, COLUMNS)
    table = pq.read_table(io.BytesIO(out.getvalue()))
    assert table.column("index").to_pylist() == list(range(20_000))
    assert table.column("text")[0].as_py() == "?é"
    assert json.loads(table.column("logprobs")[0].as_py()) == [{"top": [[1, -0.5]]}]
    assert [row.value["index"] for row in ParquetFile().rows(io.BytesIO(out.getvalue()))] == list(range(20_000))  # type: ignore[index]


def test_a_damaged_file_is_refused_by_its_name(prompts: Path) -> None:
    prompts.write_bytes(prompts.read_bytes()[:-30])
    with pytest.raises(InvalidRequest, match=r"in.data: cannot be read as Parquet"):
        read_prompts([str(prompts)], io.BytesIO())


def test_without_pyarrow_the_run_says_what_to_install(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"pip install 'gapless\[parquet\]'"):
        parquet.check_installed()
    assert main(["run", str(prompts), "-o", str(tmp_path / "out.jsonl")]) == 2
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    assert main(["run", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.parquet")]) == 2
    assert capsys.readouterr().err.count("gapless[parquet]") == 2
