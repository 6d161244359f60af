"""Finds stop strings in a text that arrives in pieces.

Owns the text held back because it may begin a stop string. The outcome is that of cutting the whole text at the
earliest occurrence (of several that start there, the longest), whatever the pieces. Does not know tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gapless.errors import InvalidRequest


@dataclass(frozen=True)
class StopResult:
    text: str  # safe to show
    stop: str | None = None  # the stop string that ended the text

    @property
    def stopped(self) -> bool:
        return self.stop is not None


@dataclass(frozen=True)
class _Match:
    start: int
    stop: str

    @property
    def end(self) -> int:
        return self.start + len(self.stop)


class StopMatcher:
    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        for stop in stops:
            if not isinstance(stop, str) or not stop:
                raise InvalidRequest(f"a stop string must be a non-empty string, not {stop!r}")
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._held = ""
        self._matched: str | None = None

    def push(self, delta: str) -> StopResult:
        """The text that can be shown now. After a stop, everything further is dropped."""
        if not self._stops:
            return StopResult(delta)
        if self._matched is not None:
            return StopResult("", self._matched)
        return self._resolve(self._held + delta, more_may_come=True)

    def finish(self) -> StopResult:
        """Nothing follows: what was held back is text, or a stop that only waited for a longer one."""
        if self._matched is not None:
            return StopResult("", self._matched)
        return self._resolve(self._held, more_may_come=False)

    def _resolve(self, text: str, *, more_may_come: bool) -> StopResult:
        match = self._first_match(text)
        open_start = self._first_open_start(text) if more_may_come else len(text)
        if match is not None and match.start < open_start:
            return self._stop_at(match, text)
        # A stop string that began no later than the match may still be completed; it would win.
        self._held = text[open_start:]
        return StopResult(text[:open_start])

    def _stop_at(self, match: _Match, text: str) -> StopResult:
        self._held, self._matched = "", match.stop
        return StopResult(text[: match.end if self._include_stop else match.start], match.stop)

    def _first_match(self, text: str) -> _Match | None:
        matches = (_Match(text.find(stop), stop) for stop in self._stops)
        found = (match for match in matches if match.start >= 0)
        return min(found, key=lambda match: (match.start, -match.end), default=None)

    def _first_open_start(self, text: str) -> int:
        """Where the longest suffix of `text` that begins, but is not yet, a stop string starts."""
        return min(_open_start(text, stop) for stop in self._stops)


def _open_start(text: str, stop: str) -> int:
    longest = min(len(text), len(stop) - 1)
    length = next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
    return len(text) - length
