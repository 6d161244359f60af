"""Finds KV blocks by their content: a trie of full blocks.

An entry's key is its parent entry and its own tokens. A hit is therefore verified by the tokens themselves and, through
the parent, by all tokens before them, so a hash collision cannot cause a false hit. An entry has a block of each group
of layers, or lacks some. It stays while it has any or has entries below it: layers with a window need only the last
blocks of a prefix, which must be found although the first ones are gone. Knows blocks only as numbers. The pool tracks
their use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gapless.core.windows import NO_WINDOWS, Windows, first_block

if TYPE_CHECKING:
    from gapless.core.request import IntArray

NO_BLOCK = -1


Key = tuple["Entry | None", bytes]  # the entry before, and the tokens of a block


@dataclass(eq=False, slots=True)
class Entry:
    """A full block's tokens after all tokens before them, and the blocks that hold their keys and values."""

    key: Key
    blocks: list[int]  # of each group; NO_BLOCK where none is known
    num_children: int = 0


ROOT = Entry((None, b""), [])


class PrefixIndex:
    """Maps (parent entry, tokens) to an entry."""

    def __init__(self, block_size: int, windows: Windows = NO_WINDOWS) -> None:
        self.block_size = block_size
        self._windows = windows
        self._whole = [group for group, window in enumerate(windows) if window is None]
        self._sliding = [(group, window) for group, window in enumerate(windows) if window is not None]
        self._entries: dict[Key, Entry] = {}
        self._entry_of: dict[int, Entry] = {}  # by block

    def __len__(self) -> int:
        """Blocks that can be found."""
        return len(self._entry_of)

    def __contains__(self, block: int) -> bool:
        return block in self._entry_of

    def match(self, tokens: IntArray, num_tokens: int) -> list[Entry]:
        """The entries of the longest known prefix of the first `num_tokens` tokens.

        Groups that see everything have all its blocks, and groups with a window those that the next token sees.
        """
        content, size = tokens[:num_tokens].tobytes(), self.block_size * tokens.itemsize
        found: list[Entry] = []
        entry = ROOT
        for start in range(0, len(content) - size + 1, size):
            below = self._entries.get((entry, content[start : start + size]))
            if below is None or (NO_BLOCK in below.blocks and self._lacks_history(below)):
                break
            entry = below
            found.append(entry)
        return found[: self._num_usable(found)] if self._sliding else found

    def _lacks_history(self, entry: Entry) -> bool:
        """Whether a group that sees everything has no block there."""
        return any(entry.blocks[group] == NO_BLOCK for group in self._whole)

    def _num_usable(self, entries: Sequence[Entry]) -> int:
        """How many of the entries are a prefix whose windows are known too, at most."""
        count = len(entries)
        while (missing := self._last_missing(entries, count)) is not None:
            count = missing  # a prefix that ends between the two sees the missing one too
        return count

    def _last_missing(self, entries: Sequence[Entry], count: int) -> int | None:
        """An entry without a block that the token behind the first `count` entries sees; None if there is none."""
        for group, window in self._sliding:
            first = first_block(count * self.block_size, window, self.block_size)
            for index in range(count - 1, first - 1, -1):
                if entries[index].blocks[group] == NO_BLOCK:
                    return index
        return None

    def insert(self, parent: Entry, tokens: IntArray, blocks: Sequence[Sequence[int]]) -> Entry:
        """Register full blocks, each entry below the one before and the first below `parent`; return the last entry.

        blocks: for each entry those of all groups. A block that an entry has already stands for the new one.
        """
        content, size = tokens.tobytes(), self.block_size * tokens.itemsize
        entry = parent
        for number, new in enumerate(blocks):
            key = (entry, content[number * size : (number + 1) * size])
            below = self._entries.get(key)
            if below is None:
                below = self._entries[key] = Entry(key, list(new))
                entry.num_children += 1
                for block in new:
                    self._entry_of[block] = below
            elif NO_BLOCK in below.blocks:
                self._fill_up(below, new)
            entry = below
        return entry

    def _fill_up(self, entry: Entry, blocks: Sequence[int]) -> None:
        """Give the entry the blocks that it lacks."""
        for group, block in enumerate(blocks):
            if entry.blocks[group] == NO_BLOCK:
                entry.blocks[group] = block
                self._entry_of[block] = entry

    def forget(self, block: int) -> None:
        """The block's content is about to change."""
        entry = self._entry_of.pop(block)
        blocks = entry.blocks
        blocks[blocks.index(block)] = NO_BLOCK
        while entry.num_children == 0 and blocks.count(NO_BLOCK) == len(blocks):
            if self._entries.get(entry.key) is not entry:  # it is gone already, and a row's blocks hung below it
                break
            del self._entries[entry.key]
            parent = entry.key[0]
            assert parent is not None
            parent.num_children -= 1
            entry, blocks = parent, parent.blocks

    def clear(self) -> None:
        self._entries.clear()
        self._entry_of.clear()
