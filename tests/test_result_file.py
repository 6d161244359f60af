"""Where results go when -o names a link, a FIFO, a device or standard output."""

from __future__ import annotations

import errno
import io
import json
import os
import pty
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from gapless.errors import ConfigError, OutputError
from gapless.result_file import ResultFile, ResultStream, open_results
from gapless.run_identity import RunIdentity

RECORDS = [{"index": 1, "id": "\ud800", "text": "é"}, {"index": 0, "id": 0, "text": "a"}]


def opened(path: Path | str) -> ResultFile | ResultStream:
    return open_results(str(path), RunIdentity({"model": "me"}), 2)


def write(path: Path | str) -> None:
    results = opened(path)
    for record in RECORDS:
        results.add(record)
    results.finish()


def parsed(data: bytes) -> list[Any]:
    return [json.loads(line) for line in data.decode().splitlines()]


def test_a_link_is_followed(tmp_path: Path) -> None:
    """The target is replaced and the link stays; both names are one lock and one part file."""
    (tmp_path / "far").mkdir()
    target, link = tmp_path / "far" / "out.jsonl", tmp_path / "link.jsonl"
    target.write_text("old")
    link.symlink_to(target)
    results = opened(link)
    results.add(RECORDS[0])
    assert (tmp_path / "far" / "out.jsonl.part").exists()
    with pytest.raises(ConfigError, match="in use"):
        opened(target)
    results.add(RECORDS[1])
    results.finish()
    assert link.is_symlink()
    assert parsed(target.read_bytes()) == RECORDS[::-1]


def test_a_dangling_link_is_filled_and_a_loop_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    write(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert parsed((tmp_path / "target").read_bytes()) == RECORDS[::-1]
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(ConfigError, match="symbolic links"):
        opened(tmp_path / "loop")
    with pytest.raises(ConfigError, match="is a folder"):
        opened(tmp_path)
    with pytest.raises(ConfigError, match="is a folder"):
        opened("")


@pytest.mark.parametrize("through_link", [False, True])
def test_a_fifo_gets_results_as_they_complete(tmp_path: Path, through_link: bool) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    name = tmp_path / "link" if through_link else fifo
    if through_link:
        name.symlink_to(fifo)
    read = list[bytes]()
    reader = threading.Thread(target=lambda: read.append(fifo.read_bytes()))
    reader.start()
    write(name)
    reader.join(10)
    assert parsed(read[0]) == RECORDS
    assert stat.S_ISFIFO(fifo.stat().st_mode)
    assert not list(tmp_path.glob("*.part*"))


def test_a_device_is_written_to_and_stays_one() -> None:
    ours, theirs = pty.openpty()
    try:
        name = os.ttyname(theirs)
        before = os.stat(name)
        results = opened(name)
        assert isinstance(results, ResultStream)
        results.add(RECORDS[1])
        results.close()
        assert json.loads(os.read(ours, 1000)) == RECORDS[1]
        assert os.path.samestat(before, os.stat(name))
        assert stat.S_ISCHR(os.stat(name).st_mode)
    finally:
        os.close(ours)
        os.close(theirs)


STREAM = """
import sys
from gapless.result_file import open_results
from gapless.run_identity import RunIdentity
results = open_results(sys.argv[1], RunIdentity({}), 2)
results.add({"index": 0})
results.finish()
"""


@pytest.mark.parametrize("name", ["-", "/dev/stdout", "/dev/stderr"])
def test_standard_streams_are_streams_even_if_they_are_plain_files(tmp_path: Path, name: str) -> None:
    path, stream = tmp_path / "out", "stderr" if name == "/dev/stderr" else "stdout"
    with path.open("wb") as out:
        out.write(b"before\n")
        out.flush()
        subprocess.run([sys.executable, "-c", STREAM, name], check=True, **{stream: out})
        out.write(b"after\n")
    assert path.read_bytes() == b'before\n{"index": 0}\nafter\n'
    piped = subprocess.run([sys.executable, "-c", STREAM, name], capture_output=True, check=True)
    assert getattr(piped, stream) == b'{"index": 0}\n'


def test_a_stream_whose_reader_has_gone_or_that_is_full_says_so(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    stream = ResultStream("fifo", io.FileIO(writer, "w"))
    with pytest.raises(OutputError, match="fifo: nobody reads it"):
        stream.add(RECORDS[0])
    stream.close()

    class Full(io.FileIO):
        def write(self, data: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OutputError, match="No space left"):
        ResultStream("device", Full(tmp_path / "x", "w")).add(RECORDS[0])


def test_a_pipe_that_does_not_block_gets_every_byte() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    stream, read = ResultStream("pipe", io.FileIO(writer, "w")), list[bytes]()

    def drain() -> None:
        while data := os.read(reader, 1 << 16):
            read.append(data)

    thread = threading.Thread(target=drain)
    thread.start()
    stream.add({"index": 0, "text": "x" * 500_000})
    stream.finish()
    thread.join(10)
    os.close(reader)
    assert parsed(b"".join(read)) == [{"index": 0, "text": "x" * 500_000}]
