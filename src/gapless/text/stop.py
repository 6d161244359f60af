"""Finds stop strings in a text that arrives in pieces.

Owns the text held back because it may begin a stop string. The stop string that is complete first ends the text. If
several are complete at the same character, the longest counts. How the text is split into pieces makes no difference.
Does not know tokens.
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
                raise InvalidRequest(f"a stop string must be a non-empty string, not {stop!r}", "stop")
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._held = ""
        self._matched: str | None = None

    def push(self, delta: str, *, may_stop: bool = True) -> StopResult:
        """The text that can be shown now. After a stop, everything further is dropped.

        Without `may_stop`, a stop string that `delta` completes is text. One that it begins can still end the text.
        """
        if not self._stops:
            return StopResult(delta)
        if self._matched is not None:
            return StopResult("", self._matched)
        text = self._held + delta
        match = self._first_match(text, len(self._held)) if may_stop else None
        if match is not None:
            return self._stop_at(match, text)
        cut = min(open_start(text, stop) for stop in self._stops)
        self._held = text[cut:]
        return StopResult(text[:cut])

    def finish(self) -> StopResult:
        """The text ends: return what was held back."""
        text, self._held = self._held, ""
        return StopResult(text, self._matched)

    def _stop_at(self, match: _Match, text: str) -> StopResult:
        self._held, self._matched = "", match.stop
        return StopResult(text[: match.end if self._include_stop else match.start], match.stop)

    def _first_match(self, text: str, num_old: int) -> _Match | None:
        """The match that ends first, past the old characters."""
        starts = ((text.find(stop, max(0, num_old + 1 - len(stop))), stop) for stop in self._stops)
        found = (_Match(start, stop) for start, stop in starts if start >= 0)
        return min(found, key=lambda match: (match.end, match.start), default=None)


def open_start(text: str, stop: str) -> int:
    """Where the longest suffix of `text` that begins, but is not yet, the stop string starts."""
    longest = min(len(text), len(stop) - 1)
    length = next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
    return len(text) - length
