"""`gapless bench routing` as a user calls it: prefixes are found where the router knows of them."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from gapless.cli import main
from gapless.distributed.router import POLICIES


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Conversations of a few turns each, each turn with the whole conversation as its prompt."""
    draw, rows = random.Random(3), []
    for turn in range(4):
        for talk in draw.sample(range(16), 16):
            hashes = [100 * talk + part for part in range(2 * turn + 2)]
            rows.append(
                {"timestamp": 30 * len(rows), "input_length": 512 * len(hashes), "output_length": 20}
                | {"hash_ids": hashes}
            )
    (tmp_path / "trace").write_text("\n".join(map(json.dumps, rows)))
    return str(tmp_path / "trace")


def test_prefix_routing_finds_more(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    assert main(["bench", "routing", trace, "--replicas", "5", "--json", str(file)]) == 0
    rows = {row["policy"]: row for row in json.loads(file.read_text())}
    assert tuple(rows) == POLICIES
    others = [rows["load"], rows["random"]]
    assert rows["prefix"]["cached_share"] > 0.55
    assert all(other["cached_share"] < 0.4 for other in others)
    assert all(rows["prefix"]["ttft_p50"] < other["ttft_p50"] for other in others)
    assert len(capsys.readouterr().out.splitlines()) == 5


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--replicas", "0"], "--replicas must be at least 1, not 0"),
        (["--rate", "1"], "--rate needs a number for each of --replicas: 2, not 1"),
        (["--rate", "1", "0"], "--rate must be numbers above 0"),
        (["--requests", "0"], "--requests must be at least 1, not 0"),
        (["--costs", "none"], "--costs none: no such file"),
    ],
)
def test_wrong_flags(trace: str, flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "routing", trace, *flags]) == 2
    assert said in capsys.readouterr().err
