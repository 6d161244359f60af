"""Finds KV blocks by their content: a trie of full blocks.

An entry's key is its parent entry and its own tokens. A hit is therefore verified by the tokens themselves and, through
the parent, by all tokens before them, so a hash collision cannot cause a false hit. Entry numbers are never used twice,
so entries below a removed one can no longer be reached. Knows blocks only as numbers. The pool tracks their use.
"""

from __future__ import annotations

from collections.abc import Sequence

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
        content, size = tokens[:num_tokens].tobytes(), self.block_size * tokens.itemsize
        blocks: list[int] = []
        entry = ROOT
        for start in range(0, len(content) - size + 1, size):
            found = self._entries.get((entry, content[start : start + size]))
            if found is None:
                break
            entry, block = found
            blocks.append(block)
        return blocks, entry

    def insert(self, parent: int, tokens: IntArray, blocks: Sequence[int]) -> int:
        """Register full blocks, each below the one before and the first below `parent`; return the last one's entry.

        Where an earlier block has the same content, its entry stands for the new one.
        """
        content, size = tokens.tobytes(), self.block_size * tokens.itemsize
        entry = parent
        for number, block in enumerate(blocks):
            key = (entry, content[number * size : (number + 1) * size])
            found = self._entries.get(key)
            if found is not None:
                entry = found[0]
                continue
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
