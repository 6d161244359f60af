"""Part files damaged at random: `python -m gapless.proof.fuzz --target part-files`.

A run is stopped at a random result, its part file is mutated, and the run resumes from there, often more than once.
Results are written in one of several formats. Some prompts fail at first and are retried, or not; at last they all are.
Each time the outcome is either the files of an undisturbed run, to the byte, or a refusal with a GaplessError. A result
that no run produced is never accepted.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gapless.errors import GaplessError
from gapless.formats.base import OutputForm
from gapless.formats.jsonl import JsonLines
from gapless.formats.parquet import ParquetFile
from gapless.formats.plain import COLUMNS
from gapless.part_file import Record
from gapless.result_file import PLAIN, ResultFile
from gapless.run_identity import RunIdentity

RUN = RunIdentity({"model": "m", "input": "0"})
FORMS = [PLAIN, OutputForm(JsonLines(), {}, has_index=False)]
if importlib.util.find_spec("pyarrow") is not None:
    FORMS.append(OutputForm(ParquetFile(), COLUMNS))
MOST_LINES = 12
MOST_MUTATIONS = 4
MOST_RESUMES = 3
MOST_S = 5.0  # for one case; a case takes milliseconds
MEMORY = "/dev/shm"  # a folder where fsync costs nothing
JUNK = (
    b"{}",
    b"[]",
    b"7",
    b'"x"',
    b"null",
    b"\0\0\0\0",
    b"\xff\xfe",
    b'{"index": "0"}',
    b'{"part_of": []}',
    b"[" * 5000,
)
WORDS = ("", "a", "é", "東京", "\ud800", "line\u2028end", "crc", "x" * 300)

Mutation = Callable[[random.Random, bytearray], None]


class Wrong(AssertionError):
    """A case whose outcome is neither the right file nor a refusal."""


def _flip(dice: random.Random, data: bytearray) -> None:
    for _ in range(dice.choice((1, 1, 2, 8))):
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)


def _cut(dice: random.Random, data: bytearray) -> None:
    del data[dice.randrange(len(data)) :]


def _drop(dice: random.Random, data: bytearray) -> None:
    begin = dice.randrange(len(data))
    del data[begin : begin + dice.randrange(1, 60)]


def _blank(dice: random.Random, data: bytearray) -> None:
    begin = dice.randrange(len(data))
    count = min(dice.randrange(1, 200), len(data) - begin)
    data[begin : begin + count] = bytes(count)


def _grow(dice: random.Random, data: bytearray) -> None:
    data += bytes(dice.randrange(1, 5000))


def _insert(dice: random.Random, data: bytearray) -> None:
    begin = dice.randrange(len(data) + 1)
    data[begin:begin] = dice.choice(JUNK) + dice.choice((b"", b"\n"))


def _shuffle_lines(dice: random.Random, data: bytearray) -> None:
    """Swap, repeat or remove lines, the head included."""
    lines = bytes(data).splitlines(keepends=True)
    one, other = dice.randrange(len(lines)), dice.randrange(len(lines))
    kind = dice.randrange(3)
    if kind == 0:
        lines[one], lines[other] = lines[other], lines[one]
    elif kind == 1:
        lines.insert(other, lines[one])
    else:
        del lines[one]
    data[:] = b"".join(lines)


def _edit_head(dice: random.Random, data: bytearray) -> None:
    end = data.find(b"\n") + 1
    data[:end] = (
        dice.choice((*JUNK, b'{"part_of": "run"}', b'{"part_of": "run", "run": {}, "crc": "00000000"}')) + b"\n"
    )


MUTATIONS: tuple[Mutation, ...] = (_flip, _cut, _drop, _blank, _grow, _insert, _shuffle_lines, _edit_head)


def fuzz_part_files(seconds: float, seed: int, most_cases: int | None = None) -> Counter[str]:
    """Play cases until time or number is up; how many ended in which way. Raises Wrong, which names the case."""
    counts: Counter[str] = Counter()
    end = time.monotonic() + seconds
    with _quiet(), tempfile.TemporaryDirectory(dir=MEMORY if os.path.isdir(MEMORY) else None) as folder:
        while time.monotonic() < end and counts["cases"] != most_cases:
            name = f"{seed}/{counts['cases']}"
            began = time.monotonic()
            try:
                counts.update(_play(random.Random(name), Path(folder)))
            except Exception as error:
                raise Wrong(f"case {name}: {type(error).__name__}: {error}") from error
            if time.monotonic() - began > MOST_S:
                raise Wrong(f"case {name}: took more than {MOST_S} seconds")
            counts["cases"] += 1
    return counts


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings about skipped lines."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def _play(dice: random.Random, folder: Path) -> list[str]:
    """One case: the outcome of each resume."""
    records, form = _draw_records(dice), dice.choice(FORMS)
    path = folder / "out.jsonl"
    wanted = _whole(folder / "wanted.jsonl", records, form)
    _run(dice, path, records, form, dice.randrange(1, len(records) + 1), skip_damaged=False)
    part = path.with_name("out.jsonl.part")
    outcomes = []
    for number in range(dice.randrange(1, MOST_RESUMES + 1)):
        if number == 0 or dice.random() < 0.5:
            _mutate(dice, part)
        skip = dice.random() < 0.7
        try:
            _run(dice, path, records, form, dice.randrange(len(records) + 1), skip_damaged=skip)
            outcomes.append("skipped" if skip else "resumed")
        except GaplessError:
            outcomes.append("refused")
    try:
        found = _whole(path, records, form, skip_damaged=True)
    except GaplessError:
        outcomes.append("restarted")
        found = _whole(path, records, form, restart=True)
    assert found == wanted, f"{found!r} is not {wanted!r}"
    return outcomes


def _draw_records(dice: random.Random) -> list[Record]:
    """Results in the order in which they complete; some prompts fail whenever they run."""
    indexes = list(range(dice.randrange(1, MOST_LINES + 1)))
    dice.shuffle(indexes)
    return [
        {"index": index, "id": index, "error": dice.choice(WORDS)}
        if dice.random() < 0.2
        else {"index": index, "id": dice.choice(WORDS), "text": dice.choice(WORDS)}
        for index in indexes
    ]


def _mutate(dice: random.Random, part: Path) -> None:
    data = bytearray(part.read_bytes()) if part.exists() else bytearray()
    for _ in range(dice.randrange(1, MOST_MUTATIONS + 1)):
        if data:
            dice.choice(MUTATIONS)(dice, data)
    part.write_bytes(data)


def _run(
    dice: random.Random, path: Path, records: list[Record], form: OutputForm, most: int, *, skip_damaged: bool
) -> None:
    """Resume, complete at most this many results, some of them badly, and stop as if killed; or finish at times."""
    retry = dice.random() < 0.5
    file = ResultFile(path, RUN, len(records), form=form, skip_damaged=skip_damaged, retry_errors=retry)
    todo = [record for record in records if record["index"] not in file.done]
    for record in todo[:most]:
        file.add(record if dice.random() < 0.8 else {"index": record["index"], "id": 0, "error": "not now"})
    if most >= len(todo) and file.num_failed:  # such a run can still be resumed
        file.finish()
    file.close()


def _whole(
    path: Path, records: list[Record], form: OutputForm, *, restart: bool = False, skip_damaged: bool = False
) -> tuple[bytes, bytes]:
    """Resume, complete every result, and take the results and the errors away."""
    file = ResultFile(path, RUN, len(records), form=form, restart=restart, skip_damaged=skip_damaged, retry_errors=True)
    for record in records:
        if record["index"] not in file.done:
            file.add(record)
    file.finish()
    errors = file.errors_path.read_bytes() if file.errors_path.exists() else b""
    found = path.read_bytes(), errors
    assert file.part.path.exists() == bool(errors), "the part file stays for the errors, and for nothing else"
    for each in (path, file.errors_path, file.part.path):
        each.unlink(missing_ok=True)
    return found
