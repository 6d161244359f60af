"""The English clean-up of spaces (`clean_up_tokenization_spaces`), for a whole text and for a stream of deltas.

Knows the ten replacements and where a text may be cut without changing their result; knows nothing of tokens.
Byte-level and SentencePiece BPE models never use it (transformers ignores the option for them too).
"""

from __future__ import annotations

_REPLACEMENTS = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)
_LONGEST = max(len(pattern) for pattern, _ in _REPLACEMENTS)


def clean_up(text: str) -> str:
    for pattern, replacement in _REPLACEMENTS:
        text = text.replace(pattern, replacement)
    return text


class CleanUpStream:
    """Cleans a text that arrives in pieces; the outputs add up to `clean_up` of the whole."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, delta: str) -> str:
        text = self._held + delta
        cut = _last_safe_cut(text)
        self._held = text[cut:]
        return clean_up(text[:cut])

    def finish(self) -> str:
        text, self._held = clean_up(self._held), ""
        return text


def _last_safe_cut(text: str) -> int:
    return next((cut for cut in range(len(text), 0, -1) if _is_safe_cut(text, cut)), 0)


def _is_safe_cut(text: str, cut: int) -> bool:
    """Whether no replacement reaches across `cut`, for any following text.

    Every pattern starts with a space, and only spaces are ever removed. So nothing reaches across in two cases. Either
    no space is near before the cut. Or the cut is before a space, and the character before it cannot stand before the
    space of " ' " (that is ') nor before the ' that " ' " leaves behind (that is n).
    """
    near = text[max(0, cut - _LONGEST + 1) : cut]
    if len(near) == _LONGEST - 1 and " " not in near:
        return True
    return cut < len(text) and text[cut] == " " and near[-1] not in " 'n"
