"""Part files: locked, damaged, torn; and a run that dies at any byte it writes loses nothing."""

from __future__ import annotations

import errno
import io
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from gapless import file_lock, part_file, result_file
from gapless.errors import ConfigError, OutputError
from gapless.part_file import PartFile
from gapless.result_file import ResultFile
from gapless.run_identity import RunIdentity

ME, OTHER = RunIdentity({"model": "me", "input": "1"}), RunIdentity({"model": "somebody else", "input": "1"})
RECORDS = [
    {"index": 2, "id": 2, "text": "é\u0085"},
    {"index": 0, "id": "bad", "error": "no"},
    {"index": 1, "id": "\ud800", "text": "b"},
]
BY_INDEX = sorted(RECORDS, key=lambda record: record["index"])


class Killed(BaseException):
    """The process is dead from here on."""


class Disk:
    """Files of a process that dies after so many writes of a byte, truncations, renames and removals."""

    def __init__(self, num_alive: int) -> None:
        self.num_left, self.files = num_alive, list[io.FileIO]()

    def open_raw(self, path: Path, mode: str) -> io.FileIO:
        disk = self

        class Mortal(io.FileIO):
            def write(self, data: Any) -> int:
                size = min(len(data), disk.num_left)
                super().write(bytes(data[:size]))
                disk.spend(size)
                if size < len(data):
                    disk.spend(1)
                return size

            def truncate(self, size: int | None = None) -> int:
                disk.spend(1)
                return super().truncate(size)

        self.files.append(Mortal(path, mode))
        return self.files[-1]

    def spend(self, count: int) -> None:
        if self.num_left < count:
            for file in self.files:
                io.FileIO.close(file)  # as the kernel does, locks included
            raise Killed
        self.num_left -= count

    @contextmanager
    def patched(self) -> Iterator[None]:
        replace, unlink = os.replace, os.unlink

        def mortal_replace(*paths: Any) -> None:
            self.spend(1)
            replace(*paths)
            self.spend(1)

        def mortal_unlink(path: Any) -> None:
            self.spend(1)
            unlink(path)
            self.spend(1)

        with patch.object(os, "replace", mortal_replace), patch.object(os, "unlink", mortal_unlink):
            yield


@pytest.fixture
def fast_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """What only counts after a power cut."""
    for module in (part_file, result_file):
        monkeypatch.setattr(module, "sync", lambda descriptor: None)


def run(path: Path, num_alive: int = 10**9) -> tuple[list[int], bool]:
    """A run on a mortal disk: the indexes that `add` returned for, and whether it came to its end."""
    disk, added = Disk(num_alive), list[int]()
    try:
        with disk.patched():
            file = ResultFile(path, ME, 3, open_raw=disk.open_raw)
            for record in RECORDS:
                if record["index"] not in file.done:
                    file.add(record)
                    if "error" not in record:
                        added.append(record["index"])
            file.finish()
    except (Killed, ValueError):  # ValueError: somebody touched a file of a dead process
        assert not any(not file.closed for file in disk.files)
        return added, False
    return added, True


def results(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def kept(path: Path) -> set[int]:
    if path.exists():
        return {0, 1, 2}
    file = ResultFile(path, ME, 3)
    file.close()
    return set(file.done)


def count_lives(tmp_path: Path) -> int:
    """Deaths of one whole run that differ."""
    disk = Disk(10**9)
    with disk.patched():
        file = ResultFile(tmp_path / "count.jsonl", ME, 3, open_raw=disk.open_raw)
        for record in RECORDS:
            file.add(record)
        file.finish()
    return 10**9 - disk.num_left


@pytest.mark.usefixtures("fast_sync")
def test_a_kill_at_any_write_loses_nothing(tmp_path: Path) -> None:
    """Killed at every byte, killed again at a random one, then left alone: the same file as without a kill."""
    dice, total = random.Random(0), count_lives(tmp_path)
    assert total > 300
    for num_alive in range(total + 1):
        path = tmp_path / f"{num_alive}.jsonl"
        added, ended = run(path, num_alive)
        assert ended == (num_alive == total)
        assert kept(path) >= set(added)
        again, _ = run(path, dice.randrange(total))
        assert kept(path) >= {*added, *again}
        assert run(path)[1]
        assert results(path) == BY_INDEX
        left = {entry.name.removeprefix(f"{num_alive}.") for entry in tmp_path.glob(f"{num_alive}.*")}
        assert left == {"jsonl", "errors.jsonl", "jsonl.part"}, "the part file is for the error"
        assert results(tmp_path / f"{num_alive}.errors.jsonl") == BY_INDEX[:1]


@pytest.mark.usefixtures("fast_sync")
def test_a_kill_at_any_write_of_a_resumed_run_loses_nothing(tmp_path: Path) -> None:
    for num_alive in range(400):
        path = tmp_path / f"{num_alive}.jsonl"
        first = ResultFile(path, ME, 3)
        first.add(RECORDS[0])
        first.close()
        with first.part.path.open("ab") as torn:
            torn.write(b'{"index": 1, "te')
        added, ended = run(path, num_alive)
        assert kept(path) >= {2, *added}
        assert run(path)[1]
        assert results(path) == BY_INDEX
    assert ended, "400 writes are the whole run"


def test_results_come_out_in_input_order(tmp_path: Path) -> None:
    file = ResultFile(tmp_path / "out.jsonl", ME, 3)
    for record in RECORDS:
        file.add(record)
    assert not file.path.exists()
    file.finish()
    assert results(file.path) == BY_INDEX
    assert b"\xc3\xa9" in file.path.read_bytes(), "UTF-8, not escapes"
    assert results(file.errors_path) == BY_INDEX[:1]


def test_errors_run_again_when_asked_to_and_the_later_result_counts(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    first = ResultFile(path, ME, 3)
    for record in RECORDS:
        first.add(record)
    first.finish()
    assert results(path) == BY_INDEX
    again = ResultFile(path, ME, 3)
    assert again.done == {0, 1, 2}
    assert again.num_failed == 1
    again.close()
    second = ResultFile(path, ME, 3, retry_errors=True)
    assert second.done == {1, 2}
    assert len(second.done) == 2
    second.add({"index": 0, "id": "bad", "text": "now"})
    second.close()
    third = ResultFile(path, ME, 3, retry_errors=True)
    assert third.done == {0, 1, 2}
    third.finish()
    assert results(path)[0] == {"index": 0, "id": "bad", "text": "now"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.jsonl"]


def test_a_part_file_of_a_different_run_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    first = ResultFile(path, ME, 1)
    first.add({"index": 0, "id": 0, "text": "precious"})
    first.close()
    with pytest.raises(
        ConfigError, match=r"^[^:]*part holds .* different run \(model was 'me', now 'somebody else'\);.*--restart"
    ):
        ResultFile(path, OTHER, 1)
    anew = ResultFile(path, OTHER, 1, restart=True)
    assert anew.done == set()
    anew.close()
    assert "precious" in first.part.path.read_text(), "nothing is overwritten before there is a new result"
    anew = ResultFile(path, OTHER, 1, restart=True)
    anew.add({"index": 0, "id": 0, "text": "new"})
    anew.close()
    assert "precious" not in first.part.path.read_text()


def test_a_header_without_results_keeps_nobody_out(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    first = ResultFile(path, OTHER, 1)
    first.add({"index": 0})
    first.close()
    header = first.part.path.read_bytes().split(b"\n")[0]
    first.part.path.write_bytes(header + b'\n{"index": 0, "te')
    file = ResultFile(path, ME, 1)
    file.add({"index": 0, "text": "mine"})
    file.close()
    file = ResultFile(path, ME, 1)
    file.finish()
    assert results(path) == [{"index": 0, "text": "mine"}]


def test_no_part_file_is_left_without_a_result(tmp_path: Path) -> None:
    ResultFile(tmp_path / "out.jsonl", ME, 1).close()
    assert list(tmp_path.iterdir()) == []


def test_fsync_follows_within_a_second_of_results(tmp_path: Path) -> None:
    clock, synced = [0.0], list[float]()
    with (
        patch.object(part_file.time, "monotonic", lambda: clock[0]),
        patch.object(part_file, "sync", lambda descriptor: synced.append(clock[0])),
    ):
        file = ResultFile(tmp_path / "out.jsonl", ME, 100)
        for index in range(40):
            file.add({"index": index})
            clock[0] += 0.125
    assert synced == [0, 0, 1, 2, 3, 4], "the first time the folder too"


# -- damage ------------------------------------------------------------------------------------------------------


@pytest.fixture
def part(tmp_path: Path) -> Path:
    """A part file of ten results."""
    file = ResultFile(tmp_path / "out.jsonl", ME, 10)
    for index in range(10):
        file.add({"index": index, "id": index, "text": f"text {index}"})
    file.close()
    return file.part.path


def resume(part: Path, **options: bool) -> PartFile:
    return PartFile(part, ME, 10, **options)


LINE_5 = b'{"index": 3, "id": 3, "text": "text 3", "crc": '
DAMAGES = {
    "empty object": b"{}",
    "list": b"[]",
    "number": b"7",
    "null": b"null",
    "text as index": b'{"index": "3", "id": 3, "text": "text 3"}',
    "no JSON": b"junk",
    "NULs": b"\0" * 100,
    "no UTF-8": b'{"index": 3, "text": "\xff\xfe"}',
    "nothing": b"",
    "no end of nesting": b"[" * 100_000,
    "edited": b'{"index": 3, "id": 3, "text": "ghost", "crc": "00000000"}',
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_line_is_named_and_skipped_when_asked_to(part: Path, damage: bytes) -> None:
    lines = part.read_bytes().split(b"\n")
    assert lines[4].startswith(LINE_5)
    lines[4] = damage
    part.write_bytes(b"\n".join(lines))
    with pytest.raises(ConfigError, match=r"out.jsonl.part:5: .*\n.*--skip-damaged.*9 results.*--restart"):
        resume(part)
    file = resume(part, skip_damaged=True)
    assert file.done == set(range(10)) - {3}
    file.append({"index": 3, "id": 3, "text": "text 3"})
    out = io.BytesIO()
    out.writelines(record + b"\n" for record in file.sorted_records())
    file.close()
    assert [json.loads(line)["text"] for line in out.getvalue().splitlines()] == [f"text {i}" for i in range(10)]


def sealed(record: dict[str, Any], belongs_to: RunIdentity = ME) -> bytes:
    return part_file._seal(part_file.to_json(record), part_file.zlib.crc32(belongs_to.fingerprint.encode()))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (sealed({"index": 10, "text": ""}), "index 10 is not one of the 10 prompts"),
        (sealed({"index": -1, "text": ""}), "index -1"),
        (sealed({"index": True, "text": ""}), "index True"),
        (sealed({"index": "3", "text": ""}), "index '3'"),
        (sealed({"text": ""}), "index None"),
        (sealed({"index": 3, "text": "ghost"}), "a second result for index 3"),
        (sealed({"index": 3, "text": "text 3"}, OTHER), "checksum"),
    ],
)
def test_a_sound_line_that_cannot_be_is_damage(part: Path, line: bytes, words: str) -> None:
    with part.open("ab") as file:
        file.write(line)
    with pytest.raises(ConfigError, match=f"part:12: .*{words}"):
        resume(part)
    file = resume(part, skip_damaged=True)
    assert file.done == set(range(10))
    file.close()


@pytest.mark.parametrize("head", [b'["part_of"]', b"{}", b'{"part_of": "me"}', b"\0\0\0", b"\xff"])
def test_a_damaged_head_is_line_1(part: Path, head: bytes) -> None:
    lines = part.read_bytes().split(b"\n")
    part.write_bytes(b"\n".join([head, *lines[1:]]))
    with pytest.raises(ConfigError, match=r"part:1: the header"):
        resume(part)
    file = resume(part, skip_damaged=True)
    assert len(file.done) == 10
    file.close()


def test_damage_without_a_result_is_refused_whatever_the_flag(part: Path) -> None:
    part.write_bytes(b"some notes\nof my own\n")
    for skip in (False, True):
        with pytest.raises(ConfigError, match=r"no line holds a result of this run.*--restart"):
            resume(part, skip_damaged=skip)
    part.write_bytes(b"some notes without a line feed")
    with pytest.raises(ConfigError, match="not a part file"):
        resume(part)
    assert part.read_bytes() == b"some notes without a line feed"


@pytest.mark.parametrize("content", [b"", b"{", b'{"part_of": "01', b"\0" * 50])
def test_a_file_without_a_whole_line_is_begun_anew(part: Path, content: bytes) -> None:
    part.write_bytes(content)
    file = resume(part)
    assert file.done == set()
    file.append({"index": 0, "text": ""})
    file.close()
    file = resume(part)
    assert file.done == {0}
    file.close()


def test_many_damaged_lines_are_counted(part: Path) -> None:
    lines = part.read_bytes().split(b"\n")
    part.write_bytes(b"\n".join([lines[0], *[b"x"] * 9, lines[10], b""]))
    with pytest.raises(ConfigError, match=r"part:2.*\n.*part:3.*\n.*part:4.*\nand 6 more\n.*1 results"):
        resume(part)


# -- places that cannot be written -------------------------------------------------------------------------------


def test_a_full_disk_keeps_what_is_there_and_nothing_torn(tmp_path: Path) -> None:
    room = [10**6]

    class Full(io.FileIO):
        def write(self, data: Any) -> int:
            size = min(len(data), room[0])
            if size == 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            room[0] -= size
            return super().write(bytes(data[:size]))

    path = tmp_path / "out.jsonl"
    file = ResultFile(path, ME, 3, open_raw=Full)
    file.add(RECORDS[0])
    before = file.part.path.read_bytes()
    room[0] = 10
    with pytest.raises(OutputError, match=r"out.jsonl.part: cannot be written: No space left"):
        file.add(RECORDS[2])
    assert file.part.path.read_bytes() == before
    file.close()

    room[0] = 10**6
    file = ResultFile(path, ME, 3, open_raw=Full)
    assert file.done == {2}
    file.add(RECORDS[1])
    file.add(RECORDS[2])
    room[0] = 20
    with pytest.raises(OutputError, match=r"out.jsonl: cannot be written: No space left"):
        file.finish()
    file.close()
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.jsonl.part"]
    file = ResultFile(path, ME, 3)
    file.finish()
    assert results(path) == BY_INDEX


def test_a_place_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with pytest.raises(ConfigError, match="no such folder"):
        ResultFile(tmp_path / "none" / "out.jsonl", ME, 1)
    with pytest.raises(ConfigError, match="is a folder"):
        ResultFile(tmp_path, ME, 1)
    with pytest.raises(ConfigError, match="File name too long"):
        ResultFile(tmp_path / ("x" * 250), ME, 1)
    (tmp_path / "out.jsonl.part").mkdir()
    with pytest.raises(ConfigError, match=r"out.jsonl.part: is a folder; move it away"):
        ResultFile(path, ME, 1)
    (tmp_path / "out.jsonl.part").rmdir()
    (tmp_path / "out.jsonl.part.sorted").mkdir()
    with pytest.raises(ConfigError, match=r"out.jsonl.part.sorted: is not a plain file"):
        ResultFile(path, ME, 1)
    (tmp_path / "out.jsonl.part.sorted").rmdir()
    with patch.object(os, "access", lambda *_: False), pytest.raises(ConfigError, match="read-only"):
        ResultFile(path, ME, 1)

    def refuse(path: Path, mode: str) -> io.FileIO:
        raise PermissionError(errno.EACCES, "Permission denied")

    with pytest.raises(ConfigError, match="Permission denied"):
        ResultFile(path, ME, 1, open_raw=refuse)


# -- two runs ----------------------------------------------------------------------------------------------------

HOLD = """
import sys, time
from pathlib import Path
from gapless.file_lock import open_locked
file = open_locked(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def test_a_second_process_is_refused_until_the_first_is_dead(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl.part"
    with subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True) as first:
        try:
            assert first.stdout is not None
            assert first.stdout.readline() == "held\n"
            holder = f"process {first.pid}" if Path("/proc/locks").exists() else "a different process"
            with pytest.raises(ConfigError, match=f"in use by {holder};"):
                PartFile(path, ME, 1)
        finally:
            first.kill()
    assert path.exists(), "the refused one does not remove it"
    PartFile(path, ME, 1).close()


def test_the_lock_is_on_the_file_not_on_its_name(part: Path) -> None:
    other = part.with_name("other.part")
    other.hardlink_to(part)
    file = resume(part)
    with pytest.raises(ConfigError, match="in use"):
        resume(other)
    file.close()
    resume(other).close()


def test_a_file_that_its_run_removed_before_the_lock_is_opened_anew(part: Path) -> None:
    real, calls = file_lock._lock, list[Path]()

    def slow(file: io.FileIO, path: Path) -> None:
        calls.append(path)
        if len(calls) == 1:
            part.unlink()
        real(file, path)

    with patch.object(file_lock, "_lock", slow):
        file = resume(part)
    assert file.done == set()
    assert len(calls) == 2
    file.append({"index": 0})
    file.close()
    assert part.exists()


def test_a_file_system_without_locks_is_a_warning(part: Path, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with patch.object(file_lock.fcntl, "flock", refuse):
        resume(part).close()
    assert "no locks" in caplog.text
