"""The standard streams, made safe for a command line that may be started in any way.

Owns three rules. A stream that was closed at the start counts as /dev/null. A character that the terminal's encoding
lacks is printed as an escape. Words on standard error never end a run, whoever does or does not read them.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from types import FrameType
from typing import BinaryIO

from gapless.commands import EXIT_INTERRUPTED


def settle() -> None:
    """Apply the rules to this process. Closed descriptors are filled, so that no result file becomes descriptor 2."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115  # for as long as the process lives
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def stdin() -> BinaryIO:
    """Standard input as bytes, whatever the locale says of text."""
    return sys.stdin.buffer


def say(text: str, end: str = "\n") -> None:
    """Print on standard error, if that is possible."""
    with contextlib.suppress(OSError):
        print(text, end=end, file=sys.stderr, flush=True)


def mute_stdout() -> None:
    """Drop what is still buffered for standard output, which cannot be written."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


def interrupt_on_signals() -> None:
    """The first SIGINT or SIGTERM raises KeyboardInterrupt; the second ends the process at once.

    A signal that is ignored from the start stays ignored, as with `nohup` and in background jobs.
    """
    was_asked = False

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal was_asked
        if was_asked:
            say("gapless: stopped at once")
            os._exit(EXIT_INTERRUPTED)
        was_asked = True
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, on_signal)
