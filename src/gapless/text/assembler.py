"""Builds the text of one completion as its tokens come in.

Owns the text state of a request: what was shown, what is held back, where a stop string ended it. Knows no engine.
"""

from __future__ import annotations

from collections.abc import Sequence

from gapless.text.detokenizer import Detokenizer
from gapless.text.stop import StopMatcher
from gapless.text.tokenizer import Tokenizer


class Assembler:
    """Tokens in, text out. Without a tokenizer there is no text, and nothing to stop at."""

    def __init__(self, tokenizer: Tokenizer | None, stop: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(tokenizer) if tokenizer is not None else None
        self._stops = len(stop) > 0
        self._matcher = StopMatcher(stop)
        self._parts: list[str] = []
        self.token_ids: list[int] = []
        self.stop: str | None = None  # the stop string that ended the text

    @property
    def text(self) -> str:
        return "".join(self._parts)

    def push(self, tokens: Sequence[int]) -> str:
        """Text that can be shown now. Tokens after a stop string was found are dropped."""
        if self.stop is not None:
            return ""
        if not self._stops:
            self.token_ids.extend(tokens)
            return self._show(self._detokenizer.push(list(tokens)) if self._detokenizer else "")
        shown = []
        for token in tokens:
            self.token_ids.append(token)
            shown.append(self._show(self._detokenizer.push([token]) if self._detokenizer else ""))
            if self.stop is not None:
                break
        return "".join(shown)

    def finish(self) -> str:
        """The rest of the text: nothing more comes."""
        if self.stop is not None:
            return ""
        rest = self._show(self._detokenizer.finish() if self._detokenizer else "")
        if self.stop is None:
            last = self._matcher.finish()
            self.stop = last.stop
            self._parts.append(last.text)
            rest += last.text
        return rest

    def _show(self, text: str) -> str:
        result = self._matcher.push(text)
        self.stop = result.stop
        if result.text:
            self._parts.append(result.text)
        return result.text
