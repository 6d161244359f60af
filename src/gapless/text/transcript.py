"""One completion as its tokens come in: its tokens, its text, and how it ended.

Owns the text state of a request: what was shown, what is held back, where a stop string ended it. A stop string counts
only if it becomes complete with a token past the first `min_tokens`. A stop string, and the text of a stop token, is no
part of the text unless `include_stop` is set. Offline and served requests are told by the same
object. Knows no engine.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from typing import NamedTuple

from gapless.text.detokenizer import Detokenizer
from gapless.text.stop import StopMatcher, StopResult
from gapless.text.tokenizer import Tokenizer


class Addition(NamedTuple):
    """The part that some tokens added to a transcript."""

    text: str
    token_ids: Sequence[int]


NOTHING = Addition("", ())


class Transcript:
    """Tokens in, text out. Without a tokenizer there is no text, and nothing to stop at."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        stop: Sequence[str] = (),
        stop_ids: Collection[int] = (),
        *,
        min_tokens: int = 0,
        include_stop: bool = False,
        tells_starts: bool = False,
        shown: Collection[int] = (),  # special tokens that are part of the text
    ) -> None:
        hidden = () if include_stop else stop_ids  # each can only be the last token
        self._detokenizer = Detokenizer(tokenizer, hidden=hidden, shown=shown) if tokenizer is not None else None
        self._one_by_one = len(stop) > 0 or tells_starts
        self._matcher = StopMatcher(stop, include_stop=include_stop)
        self._min_tokens = min_tokens
        self._parts: list[str] = []
        self._num_certain = 0  # characters, those that are held back included
        self._tells_starts = tells_starts
        self.num_shown = 0  # characters
        self.token_ids: list[int] = []
        self.starts: list[int] = []  # where in the text each token begins, if requested; the text may end before
        self.stop: str | None = None  # the stop string that ended the text
        self.finish_reason: str | None = None  # once nothing more comes

    @property
    def text(self) -> str:
        return "".join(self._parts)

    def take(self, tokens: Sequence[int], reason: str | None = None) -> Addition:
        """Add tokens, with the text that can be shown now; those past a stop string are dropped.

        reason: why they were the last, if they were. A stop string is a reason of its own.
        """
        if self.finish_reason is not None:
            return NOTHING
        num_before = len(self.token_ids)
        text = self._push(tokens)
        if reason is not None and self.stop is None:
            text += self._flush()
        self.finish_reason = "stop" if self.stop is not None else reason
        return Addition(text, self.token_ids[num_before:])

    def _push(self, tokens: Sequence[int]) -> str:
        if not self._one_by_one:
            self.token_ids.extend(tokens)
            return self._match(self._detokenizer.push(list(tokens)) if self._detokenizer else "")
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
        return self._match(self._detokenizer.push([token]) if self._detokenizer else "")

    def num_in_text(self) -> int:
        """How many tokens the shown text has something of; needs their starts. A stop token may show no text."""
        if self._detokenizer is None:
            return len(self.token_ids)
        if self.stop is not None or self.finish_reason is None:
            return bisect_left(self.starts, self.num_shown)
        hidden = self.finish_reason == "stop" and not self._detokenizer.shows(self.token_ids[-1])
        return len(self.token_ids) - hidden

    def _flush(self) -> str:
        """The rest of the text: nothing more comes."""
        rest = self._match(self._detokenizer.finish() if self._detokenizer else "")
        return rest if self.stop is not None else rest + self._show(self._matcher.finish())

    def _match(self, text: str) -> str:
        """Text that became certain with the last token."""
        self._num_certain += len(text)
        return self._show(self._matcher.push(text, may_stop=len(self.token_ids) > self._min_tokens))

    def _show(self, result: StopResult) -> str:
        self.stop = result.stop
        if result.text:
            self._parts.append(result.text)
            self.num_shown += len(result.text)
        return result.text
