"""How far back each group of layers looks, counted in blocks.

A group is a set of layers with the same window and a block table of their own. A block holds the keys and values of
`block_size` tokens for the layers of one group. Tables are indexed by absolute block number, so that all groups grow
together, and a group with a window gives back the blocks that lie before it. Knows no rows and no blocks.
"""

from __future__ import annotations

from collections.abc import Iterator

Windows = tuple[int | None, ...]  # of each group: positions that a token sees, itself included; None: all of them

NO_WINDOWS: Windows = (None,)  # one group, with all layers


def first_block(position: int, window: int, block_size: int) -> int:
    """The first block that tokens from this position on can see."""
    return max(0, position - window + 1) // block_size


def most_blocks(num_tokens: int, at_once: int, windows: Windows, block_size: int) -> int:
    """Blocks of all groups that a row of so many tokens needs at any time, if no step feeds more than `at_once`."""
    count = -(-num_tokens // block_size)
    return sum(count if window is None else min(count, _span(window, at_once, block_size)) for window in windows)


def most_entries(num_blocks: int, max_entries: int, windows: Windows, block_size: int) -> int:
    """The longest table of one row, in blocks, for which so many blocks suffice; no more than `max_entries`."""
    least, most = 0, max_entries
    while least < most:
        middle = (least + most + 1) // 2
        if most_blocks(middle * block_size, 1, windows, block_size) <= num_blocks:
            least = middle
        else:
            most = middle - 1
    return least


def sliding(windows: Windows) -> Iterator[tuple[int, list[int]]]:
    """Each window, and the groups that have it. Groups of one window always hold the same part of their tables."""
    for window in dict.fromkeys(windows):
        if window is not None:
            yield window, [group for group, other in enumerate(windows) if other == window]


def _span(window: int, at_once: int, block_size: int) -> int:
    """Blocks that the positions seen by so many tokens in a row touch at most, wherever the first of them lies."""
    return -(-(window + at_once - 2) // block_size) + 1
