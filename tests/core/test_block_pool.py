"""Reference counts, the free list, and what is evicted first."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gapless.core.block_pool import BlockPool
from gapless.core.prefix_index import ROOT, PrefixIndex
from gapless.core.request import int_array

SIZE = 2


def make_pool(num_blocks: int) -> BlockPool:
    return BlockPool(num_blocks, PrefixIndex(SIZE))


def find(pool: BlockPool, tokens: list[int]) -> list[int]:
    return [entry.blocks[0] for entry in pool.index.match(int_array(tokens), len(tokens))]


def cached_chain(pool: BlockPool, *blocks_tokens: tuple[int, int]) -> list[int]:
    """Allocate blocks, register them as one prefix, and release them."""
    entry, blocks = ROOT, []
    for tokens in blocks_tokens:
        block = pool.allocate()
        assert block is not None
        entry = pool.index.insert(entry, int_array(tokens), [[block]])
        blocks.append(block)
    pool.release(blocks)
    return blocks


def test_blocks_are_handed_out_once_each() -> None:
    pool = make_pool(3)
    assert sorted([pool.allocate(), pool.allocate(), pool.allocate()]) == [0, 1, 2]
    assert pool.allocate() is None
    assert (pool.num_used, pool.num_available) == (3, 0)


def test_a_released_block_can_be_had_again() -> None:
    pool = make_pool(1)
    block = pool.allocate()
    pool.release([block])
    assert pool.num_available == 1
    assert pool.allocate() == block


def test_a_shared_block_is_free_only_when_all_gave_it_back() -> None:
    pool = make_pool(1)
    (block,) = cached_chain(pool, (1, 2))
    pool.share([block])
    pool.share([block])
    pool.release([block])
    assert pool.num_available == 0
    assert pool.allocate() is None
    pool.release([block])
    assert pool.num_available == 1


def test_sharing_takes_a_cached_block_out_of_reach_of_eviction() -> None:
    pool = make_pool(2)
    first, second = cached_chain(pool, (1, 2))[0], cached_chain(pool, (3, 4))[0]
    assert pool.num_idle([first, second]) == 2
    pool.share([first])
    assert pool.num_idle([first, second]) == 1
    assert pool.allocate() == second
    assert pool.allocate() is None
    assert first in pool.index


def test_free_blocks_go_before_cached_ones() -> None:
    pool = make_pool(2)
    (cached,) = cached_chain(pool, (1, 2))
    assert pool.allocate() != cached
    assert (pool.num_evictions, cached in pool.index) == (0, True)


def test_the_least_recently_released_is_evicted_first() -> None:
    pool = make_pool(3)
    a, b, c = (cached_chain(pool, (token, token))[0] for token in (1, 2, 3))
    pool.share([a])  # used again: now the most recent
    pool.release([a])
    assert [pool.allocate(), pool.allocate(), pool.allocate()] == [b, c, a]
    assert pool.num_evictions == 3


def test_the_end_of_a_prefix_is_evicted_before_its_beginning() -> None:
    pool = make_pool(3)
    blocks = cached_chain(pool, (1, 2), (3, 4), (5, 6))
    assert pool.allocate() == blocks[2]
    assert find(pool, [1, 2, 3, 4, 5, 6]) == blocks[:2]


def test_an_evicted_block_is_no_longer_found() -> None:
    pool = make_pool(1)
    cached_chain(pool, (1, 2))
    assert find(pool, [1, 2]) == [0]
    pool.allocate()
    assert find(pool, [1, 2]) == []


def test_a_double_release_is_our_bug() -> None:
    pool = make_pool(2)
    block = pool.allocate()
    pool.release([block])
    with pytest.raises(AssertionError, match=f"block {block} released more often than taken"):
        pool.release([block])


def test_clearing_the_cache_keeps_what_is_in_use() -> None:
    pool = make_pool(3)
    idle, used = cached_chain(pool, (1, 2))[0], cached_chain(pool, (3, 4))[0]
    pool.share([used])
    pool.clear_cache()
    pool.check([[used]])
    assert (len(pool.index), pool.num_available) == (0, 2)
    pool.release([used])
    assert used not in pool.index
    assert {pool.allocate() for _ in range(3)} >= {idle, used}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda pool: pool._references.__setitem__(0, 2), "reference counts"),
        (lambda pool: pool._free.append(pool._free[0]), "free twice"),
        (lambda pool: pool._free.pop(), "leaked"),
    ],
)
def test_the_check_sees(damage, message) -> None:
    pool = make_pool(4)
    block = pool.allocate()
    pool.check([[block]])
    damage(pool)
    with pytest.raises(AssertionError, match=message):
        pool.check([[block]])


class PoolMachine(RuleBasedStateMachine):
    """Tables that allocate, share, register and release at random; the pool must always agree with them."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = make_pool(6)
        self.tables: list[tuple[list[int], list[int]]] = []  # blocks, tokens

    @rule(tokens=st.lists(st.integers(0, 1), min_size=SIZE, max_size=4 * SIZE))
    def seat(self, tokens: list[int]) -> None:
        known = tokens[: len(tokens) // SIZE * SIZE]
        entries = self.pool.index.match(int_array(known), len(known))
        found, entry = [entry.blocks[0] for entry in entries], entries[-1] if entries else ROOT
        self.pool.share(found)
        blocks = list(found)
        for start in range(len(found) * SIZE, len(known), SIZE):
            block = self.pool.allocate()
            if block is None:
                break
            entry = self.pool.index.insert(entry, int_array(known[start : start + SIZE]), [[block]])
            blocks.append(block)
        self.tables.append((blocks, known))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        blocks, _ = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(blocks)

    @invariant()
    def every_block_is_in_one_place(self) -> None:
        self.pool.check([blocks for blocks, _ in self.tables])

    @invariant()
    def nobody_shares_what_differs(self) -> None:
        held: dict[int, tuple[int, ...]] = {}
        for blocks, tokens in self.tables:
            for index, block in enumerate(blocks):
                prefix = tuple(tokens[: (index + 1) * SIZE])
                assert held.setdefault(block, prefix) == prefix


test_pool_machine = PoolMachine.TestCase


def test_int_array_is_read_only() -> None:
    with pytest.raises(ValueError, match="read-only"):
        int_array([1, 2])[0] = 3
    assert int_array([1, 2]).dtype == np.int32
