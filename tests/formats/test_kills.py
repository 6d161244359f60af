"""A batch whose process is killed again and again: nothing is lost or doubled, and the order is kept."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

NUM_ROWS = 400
KILLS = 4


def write_rows(path: Path) -> None:
    dice = random.Random(5)
    with path.open("w") as file:
        for index in range(NUM_ROWS):
            body = {"prompt": [dice.randrange(1, 97) for _ in range(dice.randrange(1, 20))], "max_tokens": 9}
            body |= {"temperature": 9} if index % 50 == 7 else {"temperature": 0.9}  # 9 is refused
            row = {"custom_id": f"row {index}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(row) + "\n")


def start(prompts: Path, model: Path, out: Path) -> subprocess.Popen[bytes]:
    options = ["--model", str(model), "--device", "cpu", "--dtype", "float32", "--num-blocks", "64"]
    command = [sys.executable, "-m", "gapless", "run", str(prompts), "-o", str(out), *options, "--max-num-rows", "4"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def num_lines(part: Path) -> int:
    return part.read_bytes().count(b"\n") if part.exists() else 0


def kill_while_it_writes(process: subprocess.Popen[bytes], part: Path, most: int) -> None:
    """Killed after some more results; at once if it is faster than we are."""
    wanted = num_lines(part) + most
    while process.poll() is None and num_lines(part) < wanted:
        time.sleep(0.001)
    process.kill()
    process.wait()


def results(out: Path) -> list[Any]:
    """Without what depends on the time: when a row ran, and what the cache had by then."""
    if out.suffix == ".parquet":
        found = pq.read_table(out).to_pylist()
        found = [each | {"response": json.loads(each["response"])} for each in found]
        found = [each | {"error": json.loads(each["error"]) if each["error"] else None} for each in found]
    else:
        found = [json.loads(line) for line in out.read_text().splitlines()]
    for each in found:
        each["response"]["body"].pop("created", None)
        each["response"]["body"].get("usage", {}).pop("prompt_tokens_details", None)
    return found


@pytest.mark.slow
def test_a_run_that_is_killed_gives_the_results_of_one_that_is_not(tmp_path: Path, tiny_dir: Path) -> None:
    prompts, dice = tmp_path / "in.jsonl", random.Random(1)
    write_rows(prompts)
    with start(prompts, tiny_dir, tmp_path / "whole.jsonl") as undisturbed:
        assert undisturbed.wait() == 1, "some rows are refused"
    wanted = results(tmp_path / "whole.jsonl")
    assert [each["custom_id"] for each in wanted] == [f"row {index}" for index in range(NUM_ROWS)]
    assert sum(each["error"] is not None for each in wanted) == NUM_ROWS // 50
    out = tmp_path / "out.parquet"
    part = out.with_name(out.name + ".part")
    for _ in range(KILLS):
        kill_while_it_writes(start(prompts, tiny_dir, out), part, dice.randrange(1, 60))
    assert 0 < num_lines(part) <= NUM_ROWS
    with start(prompts, tiny_dir, out) as last:
        assert last.wait() == 1
    found = results(out)
    assert [each.pop("id") for each in found] == [each.pop("id") for each in wanted]
    assert found == wanted
