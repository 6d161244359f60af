"""Progress bars on standard error that exist only on a terminal.

Owns how long work shows that it moves. Nothing is printed when output goes to a file or a pipe.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from tqdm import tqdm


class Bar:
    """A bar that counts things done and, beside them, tokens."""

    def __init__(self, label: str, total: int | None, unit: str) -> None:
        self._bar = tqdm(
            total=total,
            desc=label,
            unit=unit,
            disable=not _is_terminal(sys.stderr),
            leave=False,
            dynamic_ncols=True,
            file=sys.stderr,
        )
        self._num_tokens = 0

    def advance(self, count: int, num_tokens: int = 0) -> None:
        """Count things done."""
        self._num_tokens += num_tokens
        if num_tokens and not self._bar.disable:
            elapsed = self._bar.format_dict["elapsed"] or 1e-9
            self._bar.set_postfix_str(f"{self._num_tokens / elapsed:.0f} tok/s", refresh=False)
        self._bar.update(count)

    def to(self, done: int, total: int) -> None:
        """Set how much is done, of how much."""
        self._bar.total = total
        self._bar.update(done - self._bar.n)

    def write(self, text: str, file: TextIO) -> None:
        """Print a line without tearing the bar."""
        self._bar.write(text, file=file)

    def close(self) -> None:
        self._bar.close()


def _is_terminal(stream: TextIO | None) -> bool:
    """Whether somebody can watch; a closed stream is nobody."""
    return stream is not None and not stream.closed and stream.isatty()


@contextmanager
def progress_bar(label: str, total: int | None = None, unit: str = "it") -> Iterator[Bar]:
    """A bar that vanishes at the end of the block."""
    bar = Bar(label, total, unit)
    try:
        yield bar
    finally:
        bar.close()
