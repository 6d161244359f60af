"""Blocks are found by their tokens and by all tokens before them, and by nothing else."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gapless.core.prefix_index import ROOT, PrefixIndex
from gapless.core.request import int_array

SIZE = 2


def insert_chain(index: PrefixIndex, tokens: list[int], blocks: list[int]) -> int:
    entry = ROOT
    for number, block in enumerate(blocks):
        entry = index.insert(entry, int_array(tokens[number * SIZE : (number + 1) * SIZE]), [block])
    return entry


def match(index: PrefixIndex, tokens: list[int], num_tokens: int | None = None) -> list[int]:
    return index.match(int_array(tokens), len(tokens) if num_tokens is None else num_tokens)[0]


def test_the_longest_known_prefix_is_found() -> None:
    index = PrefixIndex(SIZE)
    last = insert_chain(index, [1, 2, 3, 4, 5, 6], [10, 11, 12])
    assert index.match(int_array([1, 2, 3, 4, 5, 6, 7]), 7) == ([10, 11, 12], last)
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
    last = index.insert(ROOT, int_array([1, 2, 3, 4, 5, 6, 7, 8]), [20, 21, 22, 23])
    assert last == insert_chain(apart, [1, 2, 3, 4, 5, 6, 7, 8], [20, 21, 22, 23])
    assert match(index, [1, 2, 3, 4, 5, 6, 7, 8]) == match(apart, [1, 2, 3, 4, 5, 6, 7, 8]) == [10, 11, 22, 23]


def test_the_first_block_of_a_content_stays_the_one() -> None:
    index = PrefixIndex(SIZE)
    entry = index.insert(ROOT, int_array([1, 2]), [10])
    assert index.insert(ROOT, int_array([1, 2]), [11]) == entry
    assert match(index, [1, 2]) == [10]
    assert 11 not in index


def test_forgetting_a_block_hides_what_hangs_below_it() -> None:
    index = PrefixIndex(SIZE)
    insert_chain(index, [1, 2, 3, 4, 5, 6], [10, 11, 12])
    index.forget(11)
    assert match(index, [1, 2, 3, 4, 5, 6]) == [10]


def test_a_forgotten_parent_that_comes_back_does_not_get_its_old_children() -> None:
    index = PrefixIndex(SIZE)
    insert_chain(index, [1, 2, 3, 4], [10, 11])
    index.forget(10)
    index.insert(ROOT, int_array([1, 2]), [20])
    assert match(index, [1, 2, 3, 4]) == [20]


def test_clearing_forgets_all() -> None:
    index = PrefixIndex(SIZE)
    old = insert_chain(index, [1, 2], [10])
    index.clear()
    assert (len(index), 10 in index, match(index, [1, 2])) == (0, False, [])
    assert index.insert(ROOT, int_array([1, 2]), [10]) != old


BLOCK = st.tuples(st.integers(0, 1), st.integers(0, 1))


@given(st.lists(st.lists(BLOCK, min_size=1, max_size=4), min_size=1, max_size=8), st.lists(BLOCK, max_size=5))
def test_a_match_is_what_a_plain_search_finds(chains: list[list[tuple[int, int]]], wanted) -> None:
    index, held = PrefixIndex(SIZE), {}
    for number, chain in enumerate(chains):
        entry = ROOT
        for depth, tokens in enumerate(chain):
            block = number * 10 + depth
            entry = index.insert(entry, int_array(tokens), [block])
            held.setdefault(tuple(chain[: depth + 1]), block)
    expected = []
    while len(expected) < len(wanted) and tuple(wanted[: len(expected) + 1]) in held:
        expected.append(held[tuple(wanted[: len(expected) + 1])])
    assert match(index, [token for block in wanted for token in block]) == expected
