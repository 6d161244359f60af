"""A file that one process at a time appends to.

Owns the lock. The kernel drops it with the process, however that ends, so no stale lock can remain.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import logging
import os
from collections.abc import Callable
from pathlib import Path

from gapless.errors import ConfigError

OpenRaw = Callable[[Path, str], io.FileIO]
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS)

log = logging.getLogger(__name__)


def open_locked(path: Path, open_raw: OpenRaw = io.FileIO) -> io.FileIO:
    """Open a plain file to append to, with a lock that ends with the process. Raises ConfigError."""
    while True:
        try:
            if path.exists() and not path.is_file():
                raise ConfigError(f"{path}: is a {'folder' if path.is_dir() else 'special file'}; move it away")
            file = open_raw(path, "a+")
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None
        try:
            _lock(file, path)
            if _is_at(file, path):
                return file
        except BaseException:
            file.close()
            raise
        file.close()  # its run ended and removed it between open and lock


def _lock(file: io.FileIO, path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"{path}: in use by {_holder(os.fstat(file.fileno()))}; wait for it, stop it, or choose a different -o"
        ) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise ConfigError(f"{path}: cannot be locked: {error.strerror}") from None
        log.warning("%s: this file system has no locks; do not start a second run with the same -o", path)


def _holder(status: os.stat_result) -> str:
    """The process that holds the lock on a file, where the kernel tells."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()
            if words[1] == "FLOCK" and words[5].rpartition(":")[2] == str(status.st_ino):
                return f"process {words[4]}"
    return "a different process"


def _is_at(file: io.FileIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
