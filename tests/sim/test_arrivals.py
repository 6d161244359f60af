"""Traces are read as their authors wrote them, and what is wrong in one is named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gapless.errors import InvalidRequest
from gapless.sim.arrivals import Arrival, copied, prompt_of, read_arrivals, scaled, shrunk

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:50.5000000,396,109\n2023-11-16 18:15:46.0000000,374,0\n"
)
MOONCAKE = '{"timestamp": 3000, "input_length": 600, "output_length": 5, "hash_ids": [0, 7]}\n'
OWN = '{"arrival_s": 2, "prompt_tokens": 40, "output_tokens": 3, "hashes": [1, 2], "hash_tokens": 16}\n'


def write(folder: Path, text: str) -> str:
    (folder / "trace").write_text(text)
    return str(folder / "trace")


def test_azure_is_sorted_and_begins_at_zero(tmp_path: Path) -> None:
    assert read_arrivals(write(tmp_path, AZURE)) == [Arrival(0.0, 374, 1), Arrival(4.5, 396, 109)]


def test_mooncake_and_recorded(tmp_path: Path) -> None:
    assert read_arrivals(write(tmp_path, MOONCAKE)) == [Arrival(0.0, 600, 5, (0, 7))]
    assert read_arrivals(write(tmp_path, OWN)) == [Arrival(0.0, 40, 3, (1, 2), 16)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "neither Azure"),
        ("a,b\n1,2\n", "neither Azure"),
        ("TIMESTAMP,ContextTokens\n", "column GeneratedTokens is missing"),
        (AZURE.replace("396", "x"), "line 2: ContextTokens must be a number of tokens, not 'x'"),
        (AZURE.replace("2023-11-16 18:15:50.5000000", "soon"), "line 2: TIMESTAMP 'soon'"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no requests"),
        ("{\n", "line 1: not JSON"),
        (OWN + "[]\n", "line 2: not an object"),
        (OWN.replace("2,", "-2,", 1), "arrival_s must be a number"),
        (OWN.replace("[1, 2]", '["a"]'), "hashes must be a list of integers"),
    ],
)
def test_wrong_files(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said) as caught:
        read_arrivals(write(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot be read: No such file"):
        read_arrivals(str(tmp_path / "none"))


def test_prompts_share_what_their_hashes_share() -> None:
    a, b, c = (prompt_of(Arrival(0, 40, 1, hashes, 16), n) for n, hashes in enumerate([(1, 2), (1, 3), ()]))
    assert (a[:16] == b[:16]).all()
    assert (a[16:32] != b[16:32]).any()
    assert (a[32:] != b[32:]).any(), "behind the hashes a prompt is its own"
    assert (c[:16] != a[:16]).any()
    small = prompt_of(Arrival(0, 1000, 1), 5, vocab_size=97)
    assert small.min() >= 0
    assert small.max() < 97
    assert len(np.unique(small)) > 50


def test_scaling() -> None:
    given = [Arrival(8.0, 100, 100, (1,))]
    assert scaled(given, 4) == [Arrival(2.0, 100, 100, (1,))]
    assert shrunk(given, 16, 4) == [Arrival(8.0, 6, 4, (1,), 32)]


def test_copies_come_at_the_same_time_and_share_nothing() -> None:
    once = [Arrival(0.0, 40, 3, (1, 2), 16), Arrival(60.0, 40, 3, (1, 2), 16)]
    twice = copied(once, 2)
    assert [arrival.at_s for arrival in twice] == [0.0, 15.0, 60.0, 75.0]
    prompts = [prompt_of(arrival, number)[:32].tolist() for number, arrival in enumerate(twice)]
    assert prompts[0] == prompts[2] != prompts[1] == prompts[3]
    assert copied(once, 1) == once
