"""Finds KV blocks by their content: a trie of full blocks.

An entry's key is its parent entry and its own tokens. A hit is therefore verified by the tokens themselves and, through
the parent, by all tokens before them, so a hash collision cannot cause a false hit. Entry numbers are never used twice,
so entries below a removed one can no longer be reached. Knows blocks only as numbers. The pool tracks their use.
"""

from __future__ import annotations

from gapless.core.request import IntArray

ROOT = 0
Key = tuple[int, bytes]


class PrefixIndex:
    """Maps (parent entry, tokens) to a block."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._entries: dict[Key, tuple[int, int]] = {}  # key -> entry, block
        self._key_of: dict[int, Key] = {}  # block -> key
        self._next_entry = ROOT + 1

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, block: int) -> bool:
        return block in self._key_of

    def match(self, tokens: IntArray, num_tokens: int) -> tuple[list[int], int]:
        """The blocks that hold the longest known prefix of the first `num_tokens` tokens, and the last one's entry."""
        size = self.block_size
        blocks: list[int] = []
        entry = ROOT
        for start in range(0, num_tokens - size + 1, size):
            found = self._entries.get((entry, tokens[start : start + size].tobytes()))
            if found is None:
                break
            entry, block = found
            blocks.append(block)
        return blocks, entry

    def insert(self, parent: int, tokens: IntArray, block: int) -> int:
        """Register a full block below `parent`; return its entry, or that of an earlier block with the same content."""
        key = (parent, tokens.tobytes())
        found = self._entries.get(key)
        if found is not None:
            return found[0]
        entry = self._next_entry
        self._next_entry += 1
        self._entries[key] = (entry, block)
        self._key_of[block] = key
        return entry

    def forget(self, block: int) -> None:
        """Drop the block's entry: its content is about to change."""
        del self._entries[self._key_of.pop(block)]

    def clear(self) -> None:
        self._entries.clear()
        self._key_of.clear()
