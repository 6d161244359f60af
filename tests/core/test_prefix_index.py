"""Blocks are found by their tokens and by all tokens before them, and by nothing else."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gapless.core.prefix_index import ROOT, Entry, PrefixIndex
from gapless.core.request import int_array

SIZE = 2


def insert_chain(index: PrefixIndex, tokens: list[int], blocks: list[int]) -> Entry:
    entry = ROOT
    for number, block in enumerate(blocks):
        entry = index.insert(entry, int_array(tokens[number * SIZE : (number + 1) * SIZE]), [[block]])
    return entry


def match(index: PrefixIndex, tokens: list[int], num_tokens: int | None = None) -> list[int]:
    found = index.match(int_array(tokens), len(tokens) if num_tokens is None else num_tokens)
    return [block for entry in found for block in entry.blocks]


def test_the_longest_known_prefix_is_found() -> None:
    index = PrefixIndex(SIZE)
    last = insert_chain(index, [1, 2, 3, 4, 5, 6], [10, 11, 12])
    assert index.match(int_array([1, 2, 3, 4, 5, 6, 7]), 7)[-1] is last
    assert match(index, [1, 2, 3, 4, 5, 6, 7]) == [10, 11, 12]
    assert match(index, [1, 2, 3, 4, 9, 9]) == [10, 11]
    assert match(index, [9, 2, 3, 4]) == []


def test_only_full_blocks_within_the_asked_length_count() -> None:
    index = PrefixIndex(SIZE)
    insert_chain(index, [1, 2, 3, 4], [10, 11])
    assert match(index, [1, 2, 3]) == [10]
    assert match(index, [1, 2, 3, 4], 3) == [10]
    assert match(index, [1, 2, 3, 4], 1) == []


def test_the_same_tokens_after_other_tokens_are_another_content() -> None:
    index = PrefixIndex(SIZE)
    insert_chain(index, [1, 2, 7, 7], [10, 11])
    insert_chain(index, [3, 4, 7, 7], [20, 21])
    assert match(index, [1, 2, 7, 7]) == [10, 11]
    assert match(index, [3, 4, 7, 7]) == [20, 21]
    assert match(index, [7, 7]) == []


def test_blocks_that_come_together_hang_below_each_other() -> None:
    index, apart = PrefixIndex(SIZE), PrefixIndex(SIZE)
    for one in (index, apart):
        insert_chain(one, [1, 2, 3, 4], [10, 11])
    index.insert(ROOT, int_array([1, 2, 3, 4, 5, 6, 7, 8]), [[20], [21], [22], [23]])
    insert_chain(apart, [1, 2, 3, 4, 5, 6, 7, 8], [20, 21, 22, 23])
    assert match(index, [1, 2, 3, 4, 5, 6, 7, 8]) == match(apart, [1, 2, 3, 4, 5, 6, 7, 8]) == [10, 11, 22, 23]


def test_the_first_block_of_a_content_stays_the_one() -> None:
    index = PrefixIndex(SIZE)
    entry = index.insert(ROOT, int_array([1, 2]), [[10]])
    assert index.insert(ROOT, int_array([1, 2]), [[11]]) is entry
    assert match(index, [1, 2]) == [10]
    assert 11 not in index


def test_forgetting_a_block_hides_what_hangs_below_it() -> None:
    index = PrefixIndex(SIZE)
    insert_chain(index, [1, 2, 3, 4, 5, 6], [10, 11, 12])
    index.forget(11)
    assert match(index, [1, 2, 3, 4, 5, 6]) == [10]


def test_a_forgotten_parent_that_comes_back_has_its_children_again() -> None:
    index = PrefixIndex(SIZE)
    insert_chain(index, [1, 2, 3, 4], [10, 11])
    index.forget(10)
    index.insert(ROOT, int_array([1, 2]), [[20]])
    assert match(index, [1, 2, 3, 4]) == [20, 11]


def test_entries_go_with_their_last_block_and_those_above_with_them() -> None:
    index = PrefixIndex(SIZE)
    before = ROOT.num_children
    last = insert_chain(index, [1, 2, 3, 4, 5, 6], [10, 11, 12])
    index.forget(10)
    index.forget(11)
    assert len(index._entries) == 3  # the third is below them
    index.forget(12)
    assert index._entries == {}
    index.insert(last, int_array([7, 8]), [[13]])  # a row goes on below an entry that is gone
    index.forget(13)
    assert (index._entries, ROOT.num_children) == ({}, before)


WINDOWED = (None, 3)  # groups of layers: one sees everything, the other this token and two before


def in_groups(index: PrefixIndex, count: int) -> list[int]:
    """Entries 0 to count - 1 of a chain; their blocks are 10, 11, ... and 20, 21, ..."""
    tokens = list(range(1, 2 * count + 1))
    index.insert(ROOT, int_array(tokens), [[10 + i, 20 + i] for i in range(count)])
    return tokens


def test_a_group_with_a_window_needs_its_last_blocks_only() -> None:
    index = PrefixIndex(SIZE, WINDOWED)
    tokens = in_groups(index, 4)
    for block in (20, 21):
        index.forget(block)
    assert len(index.match(int_array(tokens), 8)) == 4
    assert len(index.match(int_array(tokens), 6)) == 3
    assert len(index.match(int_array(tokens), 4)) == 0  # its next token would see block 1


def test_a_prefix_ends_where_the_window_before_it_is_known() -> None:
    index = PrefixIndex(SIZE, WINDOWED)
    tokens = in_groups(index, 5)
    index.forget(23)
    assert len(index.match(int_array(tokens), 10)) == 5
    index.forget(24)
    assert len(index.match(int_array(tokens), 10)) == 3
    index.forget(10)
    assert index.match(int_array(tokens), 10) == []


def test_a_block_of_one_group_comes_back_without_the_others() -> None:
    index = PrefixIndex(SIZE, WINDOWED)
    tokens = in_groups(index, 2)
    index.forget(21)
    index.insert(ROOT, int_array(tokens), [[30, 31], [32, 33]])
    assert [entry.blocks for entry in index.match(int_array(tokens), 4)] == [[10, 20], [11, 33]]
    assert 32 not in index


def test_the_windows_of_a_prefix_are_found_when_its_beginning_is_gone() -> None:
    """A model whose layers all have windows."""
    index = PrefixIndex(SIZE, (3,))
    insert_chain(index, [1, 2, 3, 4, 5, 6], [10, 11, 12])
    index.forget(10)
    index.forget(11)
    assert len(index.match(int_array([1, 2, 3, 4, 5, 6]), 6)) == 3
    assert len(index.match(int_array([9, 2, 3, 4, 5, 6]), 6)) == 0


@given(st.sets(st.integers(0, 19)), st.sampled_from([(3, 7), (1, 4), (6, 6)]))
def test_a_prefix_is_the_longest_whose_windows_are_known(forgotten: set[int], windows: tuple[int, int]) -> None:
    index = PrefixIndex(SIZE, (None, *windows))
    tokens = int_array(range(20))
    index.insert(ROOT, tokens, [[100 + i, 2 * i, 2 * i + 1] for i in range(10)])  # blocks 0 to 19 have a window
    for block in forgotten:
        index.forget(block)

    def is_known(count: int) -> bool:
        firsts = (max(0, count * SIZE - window + 1) // SIZE for window in windows)
        seen = (2 * i + group for group, first in enumerate(firsts) for i in range(first, count))
        return forgotten.isdisjoint(seen)

    assert len(index.match(tokens, 20)) == max(count for count in range(11) if is_known(count))


def test_clearing_forgets_all() -> None:
    index = PrefixIndex(SIZE)
    old = insert_chain(index, [1, 2], [10])
    index.clear()
    assert (len(index), 10 in index, match(index, [1, 2])) == (0, False, [])
    assert index.insert(ROOT, int_array([1, 2]), [[10]]) is not old


BLOCK = st.tuples(st.integers(0, 1), st.integers(0, 1))


@given(st.lists(st.lists(BLOCK, min_size=1, max_size=4), min_size=1, max_size=8), st.lists(BLOCK, max_size=5))
def test_a_match_is_what_a_plain_search_finds(chains: list[list[tuple[int, int]]], wanted) -> None:
    index, held = PrefixIndex(SIZE), {}
    for number, chain in enumerate(chains):
        entry = ROOT
        for depth, tokens in enumerate(chain):
            block = number * 10 + depth
            entry = index.insert(entry, int_array(tokens), [[block]])
            held.setdefault(tuple(chain[: depth + 1]), block)
    expected = []
    while len(expected) < len(wanted) and tuple(wanted[: len(expected) + 1]) in held:
        expected.append(held[tuple(wanted[: len(expected) + 1])])
    assert match(index, [token for block in wanted for token in block]) == expected
