"""The command line under odd conditions: closed, full or ASCII streams, readers that go, and impatient people.

`info` is replaced by a stub, so that no process here waits for torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gapless import progress

STUB = """
import os, sys, tempfile, time
from gapless import cli, console
from gapless.errors import ConfigError, OutputError

def handler(args):
{body}
    return 0

cli._info = handler
sys.exit(cli.main(["info"]))
"""
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}


def stub(body: str, shell: str = "", before: str = "", **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `gapless info` with a different body, its streams redirected by the shell."""
    lines = "\n".join("    " + line for line in body.splitlines())
    command = ["bash", "-c", f'{before}"$0" -c "$1" {shell}', sys.executable, STUB.replace("{body}", lines)]
    return subprocess.run(command, check=False, timeout=60, text=True, **{"capture_output": True} | options)


def test_closed_streams_are_dev_null() -> None:
    """A file opened later must not become descriptor 2, where C libraries write their warnings."""
    body = """
console.say("a word")
print("a result")
assert sys.stdin.read() == ""
with tempfile.TemporaryFile() as file:
    assert file.fileno() > 2, file.fileno()
"""
    for closed in ("<&-", ">&-", "2>&-", "<&- >&- 2>&-"):
        done = stub(body, closed)
        assert done.returncode == 0, (closed, done)
        assert done.stdout == ("" if ">&-" in closed.split() else "a result\n")
        assert "Traceback" not in done.stderr


def test_an_error_with_standard_error_closed_is_not_printed_as_a_result() -> None:
    done = stub('raise ConfigError("wrong")', "2>&-")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


def test_what_a_terminal_cannot_show_is_escaped() -> None:
    body = r'print("\xe9 \ud800"); raise ConfigError("\u6771 \udcff")'
    done = stub(body, env={**os.environ, **ASCII})
    assert done.returncode == 2
    assert done.stdout == "\\xe9 \\ud800\n"
    assert done.stderr == "gapless: \\u6771 \\udcff\n"


@pytest.mark.parametrize("body", ['print("x" * 1_000_000)', 'print("x")'], ids=["at a print", "at the end"])
def test_a_reader_that_goes_is_no_error_message(body: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = stub(body, capture_output=False, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="needs /dev/full")
@pytest.mark.parametrize("body", ['print("x" * 1_000_000)', 'print("x")'], ids=["at a print", "at the end"])
def test_a_full_disk_behind_standard_output(body: str) -> None:
    done = stub(body, "> /dev/full")
    assert done.returncode == 1
    assert done.stderr == "gapless: [Errno 28] No space left on device\n"


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="needs /dev/full")
def test_words_that_cannot_be_said_do_not_end_the_work() -> None:
    done = stub('console.say("a word"); print("a result")', "2> /dev/full")
    assert (done.returncode, done.stdout) == (0, "a result\n")


def test_results_that_cannot_be_written_are_exit_code_1() -> None:
    done = stub('raise OutputError("full")')
    assert (done.returncode, done.stderr) == (1, "gapless: full\n")


@pytest.mark.parametrize("signal", ["SIGINT", "SIGTERM"])
def test_the_first_signal_interrupts_and_the_second_ends_the_process(signal: str) -> None:
    kill = f"import signal; os.kill(os.getpid(), signal.{signal}); time.sleep(50)"
    done = stub(kill)
    assert (done.returncode, done.stderr) == (130, "gapless: interrupted\n")
    done = stub(f"try:\n    {kill}\nfinally:\n    {kill}")
    assert (done.returncode, done.stderr) == (130, "gapless: stopped at once\n")


def test_a_signal_that_is_ignored_from_the_start_stays_ignored() -> None:
    done = stub("import signal; os.kill(os.getpid(), signal.SIGINT); print('on')", before="trap '' INT; ")
    assert (done.returncode, done.stdout) == (0, "on\n")


def test_a_bar_needs_no_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream in (None, open(os.devnull, "w")):  # noqa: SIM115
        if stream is not None:
            stream.close()
        monkeypatch.setattr(sys, "stderr", stream)
        with progress.progress_bar("working", 3) as bar:
            bar.advance(3)
