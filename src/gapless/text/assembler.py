"""Builds the text of one completion as its tokens arrive.

Owns the text state of a request: the text shown, the text held back, and the stop string that ended it. A stop string
counts only if a token past the first `min_tokens` completes it. Knows no engine.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from gapless.text.detokenizer import Detokenizer
from gapless.text.stop import StopMatcher, StopResult
from gapless.text.tokenizer import Tokenizer


class Assembler:
    """Tokens in, text out. Without a tokenizer there is no text and no stop string."""

    def __init__(
        self, tokenizer: Tokenizer | None, stop: Sequence[str] = (), *, min_tokens: int = 0, tells_starts: bool = False
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer) if tokenizer is not None else None
        self._one_by_one = len(stop) > 0 or tells_starts
        self._matcher = StopMatcher(stop)
        self._min_tokens = min_tokens
        self._parts: list[str] = []
        self._num_certain = 0  # characters, those that are held back included
        self._tells_starts = tells_starts
        self.num_shown = 0  # characters
        self.token_ids: list[int] = []
        self.starts: list[int] = []  # where in the text each token begins, if requested; the text may end before
        self.stop: str | None = None  # the stop string that ended the text

    @property
    def text(self) -> str:
        return "".join(self._parts)

    def push(self, tokens: Sequence[int]) -> str:
        """Text that can be shown now. Tokens after a stop string was found are dropped."""
        if self.stop is not None:
            return ""
        if not self._one_by_one:
            self.token_ids.extend(tokens)
            return self._take(self._detokenizer.push(list(tokens)) if self._detokenizer else "")
        shown = []
        for token in tokens:
            shown.append(self._push_one(token))
            if self.stop is not None:
                break
        return "".join(shown)

    def _push_one(self, token: int) -> str:
        self.token_ids.append(token)
        if self._tells_starts:
            self.starts.append(self._num_certain)
        return self._take(self._detokenizer.push([token]) if self._detokenizer else "")

    def num_in_text(self, *, finished: bool, stopped: bool = False) -> int:
        """How many tokens contribute to the shown text; needs their starts.

        `finished`: no more tokens follow. `stopped`: a stop token ended the text, and is left out if it shows no text.
        """
        if self._detokenizer is None:
            return len(self.token_ids)
        if self.stop is not None or not finished:
            return bisect_left(self.starts, self.num_shown)
        hidden = stopped and not self._detokenizer.shows(self.token_ids[-1])
        return len(self.token_ids) - hidden

    def finish(self) -> str:
        """The rest of the text, after the last token."""
        if self.stop is not None:
            return ""
        rest = self._take(self._detokenizer.finish() if self._detokenizer else "")
        return rest if self.stop is not None else rest + self._show(self._matcher.finish())

    def _take(self, text: str) -> str:
        """Text that became certain with the last token."""
        self._num_certain += len(text)
        return self._show(self._matcher.push(text, may_stop=len(self.token_ids) > self._min_tokens))

    def _show(self, result: StopResult) -> str:
        self.stop = result.stop
        if result.text:
            self._parts.append(result.text)
            self.num_shown += len(result.text)
        return result.text
