"""How a child process is started, and how it ends with its parent.

Knows signals and descriptors. Does not know what the processes say to each other.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def spawn(command: Sequence[str], fds: Sequence[int]) -> subprocess.Popen[bytes]:
    """Start a child that inherits these descriptors and nothing else, out of reach of the terminal's Ctrl-C."""
    return subprocess.Popen(
        [*command, *map(str, fds)],
        pass_fds=fds,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )


def become_child() -> None:
    """In the child: die with the parent, and leave SIGINT and SIGTERM to it, who drains before it ends us."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)  # it died before the line above
