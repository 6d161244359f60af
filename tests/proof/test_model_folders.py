"""A short share of the fuzz of damaged models, always the same, and proof that it sees what it is for."""

from __future__ import annotations

import os
import random
import shutil
import time
from pathlib import Path

import pytest

from gapless.proof import model_folders
from gapless.proof.damage import damage
from gapless.proof.model_folders import FAILED, fuzz_model_folders, play_case
from gapless.proof.tiny_files import KINDS, write_model

NUM_CASES = 150


def test_a_share_of_the_fuzz() -> None:
    said: list[str] = []
    counts = fuzz_model_folders(60.0, 7, most_cases=NUM_CASES, say=said.append)
    assert said == []
    assert counts.total() == NUM_CASES
    assert counts[FAILED] == 0
    assert counts["CorruptModel"] > 50
    assert counts["ran"] > 10


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("native", [True, False])
def test_what_is_not_damaged_runs(tmp_path: Path, kind: str, native: bool) -> None:
    for seed in range(3):
        folder = tmp_path / str(seed)
        folder.mkdir()
        write_model(folder, kind, random.Random(seed))
        assert model_folders._try(folder, native=native, say=print) == "ran"


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.stat().st_size < 2**20}


def test_a_case_is_its_seed(tmp_path: Path) -> None:
    said: list[list[str]] = [[], [], []]
    outcomes = [play_case(3, number, said[i].append) for i, number in enumerate((5, 5, 6))]
    assert (outcomes[0], said[0][0]) == (outcomes[1], said[1][0])
    assert said[0][0] != said[2][0]


def test_every_case_damages_something(tmp_path: Path) -> None:
    num_changed = 0
    for number in range(40):
        folder = tmp_path / "model"
        folder.mkdir()
        write_model(folder, KINDS[number % len(KINDS)], random.Random(number))
        before = files(folder)
        damage(random.Random(number), folder)
        num_changed += files(folder) != before
        shutil.rmtree(folder)
    assert num_changed > 35  # a byte may be flipped to what it was


def bad_play(seed: int, number: int) -> str:
    """Cases that a fuzz must see: 1 raises, 2 crashes, 3 hangs, 4 takes all memory, 5 panics as Rust does."""
    if number == 1:
        raise KeyError("surprise")
    if number == 2:
        os.abort()
    if number == 3:
        time.sleep(1000)
    if number == 4:
        bytearray(2**40)
    if number == 5:
        raise BaseException("panic")
    return "ran"


def test_crashes_hangs_and_surprises_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_folders, "CASE_SECONDS", 3.0)
    said: list[str] = []
    counts = fuzz_model_folders(60.0, 0, most_cases=7, say=said.append, play=bad_play)
    assert counts == {"ran": 2, FAILED: 5}
    found = "\n".join(said)
    for part in ("KeyError", "exit code -6", "no outcome within 3 s", "MemoryError", "panic", "--seed 0 --case 3"):
        assert part in found


def test_a_case_can_be_played_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert model_folders.main(["--seed", "3", "--case", "5"]) == 0
    assert capsys.readouterr().out
