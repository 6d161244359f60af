"""A conversation at a real terminal: keys, colours, the history. Nothing here loads torch."""

from __future__ import annotations

import os
import pty
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TIMEOUT_S = 30.0
CHILD = """
import sys
sys.path.insert(0, {here!r})
from argparse import Namespace
from partners import ScriptedPartner, calls, said, DONE
from gapless import console
from gapless.chat.dialogue import Dialogue
from gapless.text.deltas import Content, Reasoning
from gapless.commands.chat import _talk
console.settle()
console.interrupt_on_signals()
slow = [Content("word ") for _ in range(1000)]
partner = ScriptedPartner({answers}, pause_s=0.02)
sys.exit(_talk(partner, Namespace(no_history=False, history={history!r}), Dialogue(), {{}}))
"""


class Terminal:
    """A child process at a terminal of its own."""

    def __init__(self, code: str, **environment: str) -> None:
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.execve(sys.executable, [sys.executable, "-c", code], {**os.environ, "TERM": "xterm", **environment})
        self._held = ""

    def see(self, words: str) -> str:
        """All that is shown up to these words."""
        deadline = time.monotonic() + TIMEOUT_S
        while words not in self._held:
            assert time.monotonic() < deadline, f"{words!r} was never shown; {self._held!r}"
            if select.select([self._fd], [], [], 0.1)[0]:
                self._held += os.read(self._fd, 2**16).decode()
        seen, _, self._held = self._held.partition(words)
        return seen + words

    def type(self, keys: str) -> None:
        time.sleep(0.05)  # readline must wait for keys: a signal just before that is noticed with the next key only
        os.write(self._fd, keys.encode())

    def end(self) -> int:
        """The exit code, once the process has ended."""
        deadline = time.monotonic() + TIMEOUT_S
        while (ended := os.waitpid(self.pid, os.WNOHANG))[0] == 0:
            assert time.monotonic() < deadline, self._held
            if select.select([self._fd], [], [], 0.05)[0]:
                try:
                    self._held += os.read(self._fd, 2**16).decode()
                except OSError:  # its terminal is closed
                    continue
        os.close(self._fd)
        self.pid = 0
        return os.waitstatus_to_exitcode(ended[1])


Start = Callable[..., Terminal]


@pytest.fixture
def history(tmp_path: Path) -> Path:
    return tmp_path / "state" / "history"


@pytest.fixture
def start(history: Path) -> Iterator[Start]:
    made: list[Terminal] = []

    def start(answers: str, **environment: str) -> Terminal:
        code = CHILD.format(here=str(HERE), answers=answers, history=str(history))
        made.append(Terminal(code, **environment))
        made[-1].see("Ctrl-D leaves.")
        made[-1].see("> ")
        return made[-1]

    yield start
    for terminal in made:
        if terminal.pid:
            os.kill(terminal.pid, signal.SIGKILL)
            os.waitpid(terminal.pid, 0)


def test_ctrl_c_stops_the_answer_and_ctrl_d_leaves(start: Start, history: Path) -> None:
    terminal = start('slow, said("ok")')
    terminal.type("talk\r")
    terminal.see("word word ")
    terminal.type("\x03")
    terminal.see("(stopped)")
    terminal.see("> ")
    terminal.type("half a line\x03")
    terminal.see("(Ctrl-D or /exit leaves)")
    terminal.see("> ")
    terminal.type("more\r")
    terminal.see("ok")
    terminal.see("> ")
    terminal.type("/sho\t\r")
    shown = terminal.see("ok\r\n")
    assert "talk" in shown
    assert "word word" in shown
    assert "half a line" not in shown
    terminal.see("> ")
    terminal.type("\x04")
    assert terminal.end() == 0
    assert history.read_text().split() == ["talk", "more", "/show"]
    assert history.stat().st_mode & 0o777 == 0o600


def test_reasoning_is_dim_and_control_characters_are_shown(start: Start) -> None:
    answer = '[Reasoning("hm"), Content("a\\x1b]0;title\\x07b\\tc"), DONE]'
    terminal = start(answer)
    terminal.type("talk\r")
    seen = terminal.see("> ")
    assert "\x1b[2mhm\x1b[0m\r\na\\x1b]0;title\\x07b" in seen
    terminal.type("\x04")
    assert terminal.end() == 0


def test_no_colours_where_they_are_not_wanted(start: Start) -> None:
    terminal = start('[Reasoning("hm"), Content("yes"), DONE]', NO_COLOR="1")
    terminal.type("talk\r")
    assert "hm\r\nyes" in terminal.see("yes")
    terminal.see("> ")
    terminal.type("/exit\r")
    assert terminal.end() == 0


def test_a_terminating_signal_ends_the_program(start: Start, history: Path) -> None:
    terminal = start("slow")
    terminal.type("talk\r")
    terminal.see("word word ")
    os.kill(terminal.pid, signal.SIGTERM)
    assert terminal.end() != 0
    assert history.read_text().split() == ["talk"]


def test_a_result_is_asked_for_by_name_and_ctrl_c_takes_the_question_back(start: Start) -> None:
    call = 'calls(("x", "add", "{}"))'
    terminal = start(f'{call}, {call}, said("done")')
    terminal.type("sum\r")
    assert "\x1b[36m-> add \x1b[0m\x1b[36m{}\x1b[0m" in terminal.see("result of add> ")
    terminal.type("\x03")
    terminal.see("> ")
    terminal.type("/show\r")
    terminal.see("nothing was said yet")
    terminal.see("> ")
    terminal.type("sum\r")
    terminal.see("result of add> ")
    terminal.type("7\r")
    terminal.see("done")
    terminal.see("> ")
    terminal.type("\x04")
    assert terminal.end() == 0
