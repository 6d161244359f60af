"""`gapless.ray.Generator`, without Ray. test_run_on_ray.py has it in a pipeline."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from gapless import LLM, SamplingParams
from gapless.errors import InvalidRequest
from gapless.ray import Generator
from tiny import CPU

OPTIONS = {**CPU, "num_blocks": 64, "max_num_rows": 4, "num_threads": 1}


@pytest.fixture(scope="module")
def generator(tiny_dir: Path) -> Generator:
    return Generator(tiny_dir, {"max_tokens": 5, "temperature": 0}, token_ids=True, **OPTIONS)


def complete(generator: Generator, batch: Any) -> Any:
    async def first() -> Any:
        return await anext(generator(batch))

    return asyncio.run(first())


def test_columns_are_kept_and_results_added(generator: Generator, tiny_llm: LLM) -> None:
    rows = [{"n_": 1, "prompt": "Hello", "max_tokens": 3}, {"n_": 2, "prompt": "", "max_tokens": None}]
    found = complete(generator, pa.Table.from_pylist(rows)).to_pylist()
    wanted = tiny_llm.generate("Hello", SamplingParams(max_tokens=3, temperature=0))[0]
    assert [each["n_"] for each in found] == [1, 2]
    assert found[0]["text"] == wanted.text
    assert found[0]["token_ids"] == list(wanted.token_ids)
    assert found[0]["num_tokens"] == 3
    assert found[0]["error"] is None
    assert found[1]["error"]
    assert found[1]["text"] is None


def test_columns_of_numpy_with_messages(generator: Generator) -> None:
    talk = [[{"role": "user", "content": "Hi"}]]
    table = pa.table({"messages": talk})
    columns = {"messages": table.column("messages").to_pandas().to_numpy()}
    assert complete(generator, columns).to_pylist()[0]["text"] == complete(generator, table).to_pylist()[0]["text"]


def test_draws_depend_on_the_row_alone(generator: Generator) -> None:
    rows = [{"prompt": "abc", "temperature": 1.0, "max_tokens": 20, "index": index} for index in range(4)]
    together = complete(generator, pa.Table.from_pylist(rows)).to_pylist()
    alone = [complete(generator, pa.Table.from_pylist([row])).to_pylist()[0] for row in rows]
    assert together == alone
    assert len({each["text"] for each in together}) == 4


@pytest.mark.parametrize(
    ("columns", "said"),
    [({"question": ["a"]}, "needs a column 'prompt'"), ({"prompt": ["a"], "text": ["b"]}, "has a column 'text'")],
)
def test_wrong_columns(generator: Generator, columns: dict[str, list[str]], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        complete(generator, pa.table(columns))
