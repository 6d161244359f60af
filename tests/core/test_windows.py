"""Groups of layers with a window hold the blocks of their window and no others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import Run, check_empty, drive, make_limits, make_request, truth
from gapless.core.limits import Limits, check_room, most_tokens
from gapless.core.request import Request
from gapless.core.scheduler import Scheduler
from gapless.core.windows import Windows, first_block, most_blocks, most_entries
from gapless.errors import PromptTooLong

WHOLE: Windows = (None, None, None)
WINDOWED: Windows = (None, 8, 8)


def held_by(scheduler: Scheduler, row: int) -> list[int]:
    """How many blocks the row holds of each group."""
    rows, found = scheduler.rows, []
    for group, window in enumerate(scheduler.limits.windows):
        held = set(scheduler.tables.blocks_of(row))
        table = rows.blocks[row, : rows.num_blocks[row], group].tolist()
        first = 0 if window is None else int(rows.first_blocks[row, 0])
        found.append(len(held.intersection(table[first:])))
    return found


def run_all(limits: Limits, requests: Mapping[int, Sequence[Request]], depth: int = 2) -> Run:
    run = drive(limits, requests, depth=depth)
    for batch in requests.values():
        for request in batch:
            assert (run.tokens(request.id), run.finished[request.id].reason) == truth(request)
    check_empty(run.scheduler)
    return run


# -- how many ----------------------------------------------------------------------------------------------------------


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 6), st.integers(1, 9))
def test_no_row_needs_more_than_the_formula_says(length: int, window: int, block_size: int, at_once: int) -> None:
    """A row is fed so many tokens a step; before each step it gives back what it cannot see."""
    most = 0
    for start in range(0, length, at_once):
        end = min(length, start + at_once)
        most = max(most, -(-end // block_size) - first_block(start, window, block_size))
    assert most <= most_blocks(length, at_once, (window,), block_size) <= -(-length // block_size)


def test_the_formula_is_tight() -> None:
    assert most_blocks(100, 1, (9,), 4) == 3  # positions 3 to 11 of blocks 0, 1 and 2
    assert most_blocks(100, 1, (10,), 4) == 4  # positions 3 to 12
    assert most_blocks(100, 1, (None, 9, 9), 4) == 25 + 6


@given(st.integers(0, 60), st.sampled_from([(None,), (5,), (None, 4), (None, 7, 7), (3, 9)]), st.integers(1, 5))
def test_the_longest_table_is_the_last_that_fits(num_blocks: int, windows: Windows, block_size: int) -> None:
    found = most_entries(num_blocks, 50, windows, block_size)
    assert found == max(n for n in range(51) if most_blocks(n * block_size, 1, windows, block_size) <= num_blocks)


def test_a_request_may_be_as_long_as_the_groups_that_see_everything_have_room() -> None:
    sizes = {"num_blocks": 30, "block_size": 4, "max_model_len": 200}
    whole, windowed = (make_limits(**sizes, windows=windows) for windows in (WHOLE, WINDOWED))
    assert most_tokens(whole) == 40
    assert most_tokens(windowed) == 4 * (30 - 6)
    with pytest.raises(PromptTooLong, match=r"96 tokens \(30 blocks of 4 for 3 groups of layers\)"):
        check_room(90, 7, windowed)
    assert most_tokens(make_limits(**sizes, windows=(8,))) == 200  # every layer has a window


# -- rows -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_long_row_holds_its_windows_only(depth: int) -> None:
    limits = make_limits(windows=WINDOWED, max_model_len=120, num_blocks=100)
    request = make_request("a", range(1, 11), limits, max_tokens=90)
    most: list[int] = [0, 0, 0]
    scheduler_check = Scheduler.check

    def check(self: Scheduler) -> None:
        scheduler_check(self)
        if self.num_running:
            most[:] = np.maximum(most, held_by(self, 0)).tolist()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "check", check)
        run_all(limits, {0: [request]}, depth)
    assert most[0] == 25
    assert most[1] == most[2] <= -(-(8 + depth - 1) // 4) + 1


def test_a_chunk_gives_back_what_it_leaves_behind_before_the_next_step() -> None:
    limits = make_limits(windows=WINDOWED, max_batch_tokens=32)
    scheduler = Scheduler(limits)
    scheduler.add(make_request("a", range(32), limits, max_tokens=4))
    assert scheduler.schedule() is not None
    assert held_by(scheduler, 0) == [8, 8, 8]  # the chunk itself sees them all
    scheduler.schedule()
    assert held_by(scheduler, 0) == [9, 3, 3]
    scheduler.check()


def test_more_requests_run_at_once_than_without_windows() -> None:
    """The same memory. A request ends with 45 blocks without windows, and with 15 + 6 with them."""
    counts = {}
    for windows in (WHOLE, WINDOWED):
        limits = make_limits(windows=windows, num_blocks=96, num_rows=8, max_batch_tokens=16)
        requests = [make_request(str(i), range(i, i + 30), limits, max_tokens=30) for i in range(8)]
        run = run_all(limits, {0: requests})
        counts[windows] = max(plan.num_decodes for plan in run.executor.launched)
    assert counts == {WHOLE: 3, WINDOWED: 5}


# -- prefixes ---------------------------------------------------------------------------------------------------------


def test_a_hit_shares_the_whole_history_of_one_group_and_the_window_of_the_other() -> None:
    limits = make_limits(windows=(None, 6), num_blocks=40)
    scheduler = Scheduler(limits)
    prompt = list(range(1, 22))
    scheduler.add(make_request("a", prompt, limits, max_tokens=4))
    assert scheduler.schedule() is not None
    scheduler.add(make_request("b", [*prompt[:20], 50], limits, max_tokens=4))
    plan = scheduler.schedule()
    assert plan is not None
    assert (plan.chunks[0].start, len(plan.chunks[0].tokens)) == (20, 1)
    row = plan.chunks[0].row
    assert held_by(scheduler, row) == [6, 3]
    assert scheduler.rows.blocks[row, :3, 1].tolist() == [limits.num_blocks] * 3  # nobody's
    scheduler.check()


def test_a_prefix_whose_window_was_evicted_is_found_as_far_as_windows_are_known() -> None:
    """While `a` decodes, its early blocks of the window are given back and given to others."""
    limits = make_limits(windows=(None, 6), num_blocks=26, num_rows=2, max_model_len=80)
    prompt = list(range(1, 22))
    requests = {
        0: [make_request("a", prompt, limits, max_tokens=26)],
        8: [make_request("b", range(40, 50), limits, max_tokens=24)],
        45: [make_request("c", [*prompt[:20], 50], limits, max_tokens=4)],
    }
    run = run_all(limits, requests)
    assert run.scheduler.pool.num_evictions > 0
    assert run.finished["c"].request.num_cached == 0


def test_tokens_are_those_of_a_model_without_windows_whatever_happens() -> None:
    """Preemption, prefix hits and windows together."""
    limits = make_limits(windows=(None, 5, 5), num_blocks=30, num_rows=4, max_batch_tokens=7)
    shared = list(range(1, 15))
    requests = {2 * i: [make_request(str(i), [*shared[: 4 * i], 50 + i], limits, max_tokens=24)] for i in range(5)}
    for depth in (1, 3):
        run = run_all(limits, requests if depth == 1 else _again(requests, limits), depth)
        assert run.scheduler.counters.num_preemptions > 0
        assert run.scheduler.counters.num_cached_tokens > 0


def _again(requests: Mapping[int, Sequence[Request]], limits: Limits) -> dict[int, list[Request]]:
    return {
        turn: [make_request(request.id, request.prompt.tolist(), limits, max_tokens=24) for request in batch]
        for turn, batch in requests.items()
    }
