"""The ledger of KV blocks: what one step wrote and another reads, and the words in which a conflict is told."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fakes import make_limits, make_request
from gapless.core.plan import NOTHING, Plan
from gapless.core.prefix_index import ROOT, Entry
from gapless.core.scheduler import Scheduler
from gapless.errors import RaceError
from gapless.pipeline.block_ledger import BlockLedger, Touched

LIMITS = make_limits(block_size=2, num_blocks=16)


class Bench:
    """A scheduler whose plans go to a ledger and to nowhere else."""

    def __init__(self) -> None:
        self.scheduler = Scheduler(LIMITS)
        self.ledger = BlockLedger(LIMITS)

    def add(self, name: str, prompt: list[int], **params: int) -> None:
        self.scheduler.add(make_request(name, prompt, LIMITS, **params))

    def plan(self) -> Plan:
        plan = self.scheduler.schedule()
        assert plan is not None
        return plan

    def observe(self, plan: Plan) -> Touched:
        return self.ledger.observe(plan, self.scheduler.rows, self.scheduler.pool.free)

    def step(self) -> Plan:
        plan = self.plan()
        self.observe(plan)
        self.scheduler.commit(plan, np.full(plan.num_samples, 9, np.int32))
        return plan


def test_own_blocks_and_those_of_an_equal_prefix_may_be_read() -> None:
    bench = Bench()
    bench.add("a", [1, 2, 3, 4, 5])
    bench.step()
    bench.add("b", [1, 2, 3, 4, 6])
    plan = bench.plan()
    assert plan.chunks[0].start == 4  # found in the prefix cache
    bench.observe(plan)
    assert bench.ledger.num_reads == 5 + 6 + 5


def test_a_block_of_another_request_is_named_with_both_and_the_steps() -> None:
    bench = Bench()
    bench.add("a", [1, 2, 3, 4, 5], max_tokens=8)
    bench.step()
    stolen = int(bench.scheduler.rows.blocks[0, 1, 0])
    bench.scheduler.pool._free.append(stolen)
    bench.add("b", [7, 8], max_tokens=4)
    plan = bench.plan()
    assert stolen in plan.new_blocks[:, 2]
    with pytest.raises(RaceError) as caught:
        bench.observe(plan)
    assert str(caught.value) == (
        f"step 2 reads position 2 of request 'a' from block {stolen}, where step 2 wrote position 0 of 'b'"
    )


def test_a_prefix_with_other_tokens_is_a_conflict() -> None:
    bench = Bench()
    bench.add("a", [1, 2, 3, 4, 5])
    bench.step()
    index = bench.scheduler.pool.index
    index.match = lambda tokens, count: [Entry((ROOT, b""), [int(bench.scheduler.rows.blocks[0, 0, 0])])]  # type: ignore[method-assign]
    bench.add("b", [8, 8, 8])
    plan = bench.plan()
    with pytest.raises(RaceError, match=r"step 2 reads position 0 of request 'b' .* step 1 wrote position 0 of 'a'"):
        bench.observe(plan)


def test_a_block_that_nobody_wrote_is_a_conflict() -> None:
    bench = Bench()
    bench.scheduler.pool.index.match = lambda tokens, count: []  # type: ignore[method-assign]
    bench.add("a", [1, 2, 3])
    plan = bench.plan()
    chunk = replace(plan.chunks[0], start=2, tokens=plan.chunks[0].tokens[2:])
    with pytest.raises(RaceError, match=r"step 1 reads position 0 of request 'a' from block .* nobody has written"):
        bench.observe(replace(plan, chunks=(chunk,)))


def test_a_lost_entry_of_the_table_is_a_conflict() -> None:
    bench = Bench()
    bench.add("a", [1, 2, 3])
    plan = bench.plan()
    with pytest.raises(RaceError, match="entry 1 of the block table is -1 on the device and "):
        bench.observe(replace(plan, new_blocks=plan.new_blocks[:1]))


def test_a_free_block_may_not_be_read() -> None:
    bench = Bench()
    bench.add("a", [1, 2, 3])
    bench.step()
    block = int(bench.scheduler.rows.blocks[0, 0, 0])
    plan = bench.plan()
    with pytest.raises(RaceError, match=f"block {block} is free, and the step reads it"):
        bench.ledger.observe(plan, bench.scheduler.rows, [block])


def test_a_row_whose_new_owner_was_not_announced_is_a_conflict() -> None:
    bench = Bench()
    bench.add("a", [1, 2, 3])
    plan = bench.plan()
    with pytest.raises(RaceError, match="runs row 0 for request 'a'; on the device it belongs to nobody"):
        bench.observe(replace(plan, seat_rows=NOTHING))


def test_freed_blocks_are_told_once_and_new_ones_when_they_are_given() -> None:
    bench = Bench()
    bench.add("a", [1, 2, 3], max_tokens=1)
    plan = bench.plan()
    touched = bench.observe(plan)
    assert (len(touched.freed), sorted(touched.fresh)) == (0, sorted(plan.new_blocks[:, 2]))
    bench.scheduler.abort("a")
    bench.scheduler.pool.clear_cache()
    bench.add("b", [4], max_tokens=2)
    second = bench.observe(bench.plan())
    assert set(second.freed) | set(second.fresh) == set(touched.fresh)
    bench.scheduler.commit(bench.scheduler.schedule() or plan, np.array([5], np.int32))
    assert second.sample_blocks.shape == (1, 1)
