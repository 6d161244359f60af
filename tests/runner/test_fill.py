"""What the host packs is what the device reads back."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from fakes import FakeExecutor, drive, make_limits, make_request
from gapless.core.plan import Plan
from gapless.core.row_fields import SEAT, SEAT_WORDS
from gapless.device.cpu import CpuDevice, InlineDriver
from gapless.runner.fill import Packed, Sections, capacity, fill, result_capacity, unpack
from gapless.runner.row_store import RowStore, seat_columns
from gapless.runner.runner import spans
from plans import LIMITS, VOCAB, plans

JUNK = -77


def pack(plan: Plan) -> tuple[Packed, np.ndarray, int]:
    array = np.full(capacity(LIMITS) + 100, JUNK, np.int32)
    size = fill(plan, array)
    return unpack(torch.from_numpy(array), Sections.of(plan)), array, size


@given(plans())
def test_every_section_comes_back(plan: Plan) -> None:
    packed, array, size = pack(plan)
    assert (size, bool((array[size:] == JUNK).all())) == (Sections.of(plan).total, True)
    assert packed.decode_rows.tolist() == plan.decode_rows.tolist()
    assert packed.chunk_tokens.tolist() == [token for chunk in plan.chunks for token in chunk.tokens.tolist()]
    places = [(chunk.row, position) for chunk in plan.chunks for position in range(chunk.start, chunk.length)]
    assert list(zip(packed.chunk_token_rows.tolist(), packed.chunk_positions.tolist(), strict=True)) == places
    assert packed.chunk_rows.tolist() == [chunk.row for chunk in plan.chunks]
    assert packed.chunk_starts.tolist() == [chunk.start for chunk in plan.chunks]
    assert packed.chunk_ends.tolist() == [chunk.length for chunk in plan.chunks]
    assert packed.sample_rows.tolist() == plan.sample_rows.tolist()
    assert packed.new_blocks.tolist() == plan.new_blocks.tolist()
    assert packed.seat_rows.tolist() == plan.seat_rows.tolist()
    assert packed.block_copies.tolist() == plan.block_copies.tolist()
    assert packed.seats.shape == (len(plan.seat_rows), SEAT_WORDS)


@given(plans())
def test_samples_follow_the_decodes_and_the_ends_of_sampling_chunks(plan: Plan) -> None:
    packed, _, _ = pack(plan)
    owners = [*plan.decode_rows.tolist(), *(chunk.row for chunk in plan.chunks for _ in chunk.tokens)]
    chosen = packed.sample_tokens.tolist()
    assert [owners[index] for index in chosen] == plan.sample_rows.tolist()
    last = {row: index for index, row in enumerate(owners)}
    assert chosen == [last[row] for row in plan.sample_rows.tolist()]


@given(plans())
def test_scores_follow_the_samples_that_want_them_and_the_targets_of_chunks(plan: Plan) -> None:
    packed, _, _ = pack(plan)
    assert packed.score_samples.tolist() == plan.score_samples.tolist()
    assert packed.score_targets.tolist() == [token for chunk in plan.chunks for token in chunk.targets.tolist()]
    places = zip(packed.chunk_token_rows.tolist(), packed.chunk_positions.tolist(), strict=True)
    owners = [*((row, None) for row in plan.decode_rows.tolist()), *places]
    wanted = [(chunk.row, chunk.scored_from + i) for chunk in plan.chunks for i in range(len(chunk.targets))]
    assert [owners[index] for index in packed.score_tokens.tolist()] == wanted
    assert plan.num_scores == len(packed.score_samples) + len(wanted)
    assert plan.num_samples <= plan.num_results <= result_capacity(LIMITS)


@given(plans())
def test_spans_say_where_the_chunks_lie(plan: Plan) -> None:
    packed, _, _ = pack(plan)
    found = spans(plan)
    assert packed.chunk_offsets.tolist() == [span.offset for span in found]
    assert [(span.start, span.length) for span in found] == [(chunk.start, chunk.length) for chunk in plan.chunks]
    ends = [span.offset + span.count for span in found]
    assert [span.offset for span in found] == [plan.num_decodes, *ends][: len(found)]
    assert (ends or [plan.num_decodes])[-1] == plan.num_tokens


@given(plans())
def test_the_rows_learn_their_new_owners(plan: Plan) -> None:
    store = RowStore(CpuDevice(driver=InlineDriver()), LIMITS, vocab_size=VOCAB)
    store.counts[:] = 7  # of earlier owners
    packed, _, _ = pack(plan)
    store.apply(packed)
    columns = seat_columns(store.seats)
    for row, record in zip(plan.seat_rows.tolist(), plan.seats.reshape(-1).view(SEAT), strict=True):
        for name in SEAT.names:
            assert columns[name][row].tolist() == record[name].tolist(), name
    for row, index, *blocks in plan.new_blocks.tolist():
        assert store.blocks[:, row, index].tolist() == blocks
    for row, token, count in plan.baggage.counts.tolist():
        assert int(store.counts[row, token]) == count
    for row in plan.baggage.count_rows.tolist():
        assert int((store.counts[row] != 0).sum()) == int((plan.baggage.counts[:, 0] == row).sum())
    for row, index, *bias in plan.baggage.biases.tolist():
        assert store.biases[row, index].tolist() == bias
    silent = set(range(LIMITS.num_rows)) - set(plan.seat_rows.tolist())
    assert not store.seats[list(silent)].any()


@given(plans(), st.integers(0, 1000))
def test_the_rows_move_on_by_what_they_were_fed(plan: Plan, first: int) -> None:
    store = RowStore(CpuDevice(driver=InlineDriver()), LIMITS, vocab_size=VOCAB)
    store.length[:] = 100
    store.last_token[:] = JUNK
    packed, _, _ = pack(plan)
    store.advance(packed, torch.arange(first, first + plan.num_samples), needs=0)
    lengths = dict.fromkeys(range(LIMITS.num_rows), 100)
    lengths |= dict.fromkeys(plan.decode_rows.tolist(), 101)
    lengths |= {chunk.row: chunk.length for chunk in plan.chunks}
    tokens = dict.fromkeys(range(LIMITS.num_rows), JUNK)
    tokens |= {row: first + number for number, row in enumerate(plan.sample_rows.tolist())}
    assert dict(enumerate(store.length.tolist()[:-1])) == lengths
    assert dict(enumerate(store.last_token.tolist()[:-1])) == tokens


def test_every_plan_of_a_scheduler_fits_into_a_slot() -> None:
    """Many requests with one long prefix in common, admitted together: the most table entries that a plan can have."""
    limits = make_limits(num_rows=32, num_blocks=400, block_size=1, max_batch_tokens=64, max_model_len=60)
    prefix = list(range(50))
    first = make_request("first", [*prefix, 1], limits, max_tokens=1)
    others = [make_request(str(i), [*prefix, i + 1], limits, max_tokens=2) for i in range(31)]
    run = drive(limits, {0: [first], 3: others})
    assert isinstance(run.executor, FakeExecutor)
    assert max(len(plan.new_blocks) for plan in run.executor.launched) > 3 * limits.max_blocks
    assert max(Sections.of(plan).total for plan in run.executor.launched) <= capacity(limits)
