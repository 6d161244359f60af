"""A plan packed for a captured step, read by its kernels: the same inputs as those of the plain runner."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plans import LIMITS, plans

pytest.importorskip("triton")

from gapless.core.baggage import MOST
from gapless.core.plan import NO_COPIES, NO_SAMPLE, NOTHING, Plan
from gapless.core.row_fields import ALL_NEEDS
from gapless.device.cpu import CpuDevice, InlineDriver
from gapless.kernels import mixed
from gapless.kernels.baggage import take_in_baggage
from gapless.kernels.mixed import NO_SCORE, MixedInputs, begin_mixed, end_mixed
from gapless.runner.fill import Sections, capacity, fill, target_parts, unpack
from gapless.runner.mixed import in_slices, mixed_capacity, pack_mixed
from gapless.runner.runner import Runner
from toy import toy_runner

SHAPE = (LIMITS.num_rows, 70)  # rows, tokens: two tiles, the last one not whole
STATE = ("last_token", "length", "blocks", "seats", "counts", "biases")


def prepared(plan: Plan, *, targets: bool = False) -> tuple[Plan, Runner, torch.Tensor]:
    """A plan that a graph can hold, a runner with rows in any state, and the packed plan."""
    chunks = plan.chunks if targets else tuple(replace(chunk, targets=NOTHING) for chunk in plan.chunks)
    plan = replace(plan, chunks=chunks, block_copies=NO_COPIES)
    runner = toy_runner(CpuDevice(driver=InlineDriver()), LIMITS)
    draw = torch.Generator().manual_seed(0)
    for row in range(LIMITS.num_rows):
        runner.rows.length[row] = int(torch.randint(0, LIMITS.max_model_len, (), generator=draw))
        runner.rows.last_token[row] = 100 + row
        runner.rows.counts[row] = row  # of earlier owners
        for table in runner.rows.tables:
            table[row] = torch.randint(0, LIMITS.num_blocks, (LIMITS.max_blocks,), generator=draw)
    packed = np.full(mixed_capacity(LIMITS), -7, np.int32)
    pack_mixed(plan, packed, LIMITS.num_rows)
    return plan, runner, torch.from_numpy(packed)


def begun(plan: Plan, runner: Runner, packed: torch.Tensor) -> MixedInputs:
    rows, inputs = runner.rows, MixedInputs(*SHAPE, LIMITS.num_groups, torch.device("cpu"))
    kept = rows.last_token, rows.length, rows.blocks, rows.seats
    begin_mixed(packed, *kept, LIMITS.block_size, LIMITS.max_new_blocks, inputs)
    take_in_baggage(packed, rows.counts, rows.biases)
    return inputs


@settings(max_examples=40, deadline=None)
@given(plans(), st.sampled_from([2, mixed.CHUNKS_AT_A_TIME]))
def test_the_inputs_are_those_of_the_plain_runner(plan: Plan, chunks_at_a_time: int) -> None:
    plan, runner, packed = prepared(plan)
    _, plain, _ = prepared(plan)
    with patch.object(mixed, "CHUNKS_AT_A_TIME", chunks_at_a_time):
        found = begun(plan, runner, packed)

    sections = np.zeros(capacity(LIMITS), np.int32)
    views = unpack(torch.from_numpy(sections[: fill(plan, sections)]), Sections.of(plan))
    plain.rows.apply(views)
    wanted = plain._inputs(plan, views)
    batch, tokens, decodes, chunks = wanted.batch, plan.num_tokens, plan.num_decodes, len(plan.chunks)

    for name in STATE:
        assert torch.equal(getattr(runner.rows, name), getattr(plain.rows, name)), name
    assert torch.equal(found.ids[:tokens], wanted.token_ids)
    assert torch.equal(found.positions[:tokens], wanted.positions)
    assert torch.equal(found.slots[:, :tokens], torch.stack(batch.slots))
    assert torch.equal(found.decode_rows[:decodes], batch.decode_rows)
    assert torch.equal(found.decode_lengths[:decodes], batch.decode_lengths)
    for name in ("chunk_rows", "chunk_offsets", "chunk_starts", "chunk_ends"):
        assert torch.equal(getattr(found, name)[:chunks], getattr(batch, name)), name
    samples = plan.num_samples
    assert wanted.sample_tokens is not None
    assert torch.equal(found.sample_rows[:samples], views.sample_rows.long())
    assert torch.equal(found.sample_places[:samples], wanted.positions[wanted.sample_tokens] + 1)
    assert torch.equal(found.sample_tokens[:samples], wanted.sample_tokens)
    assert found.sample_rows[:samples].tolist() == plan.sample_rows.tolist()
    assert torch.equal(found.sample_places[:samples], wanted.positions[wanted.sample_tokens] + 1)


@settings(max_examples=40, deadline=None)
@given(plans())
def test_the_rest_is_the_padding_row(plan: Plan) -> None:
    plan, runner, packed = prepared(plan)
    found = begun(plan, runner, packed)
    tokens, decodes, chunks, samples = plan.num_tokens, plan.num_decodes, len(plan.chunks), plan.num_samples
    padding, scratch = LIMITS.num_rows, LIMITS.num_blocks * LIMITS.block_size
    assert set(found.ids[tokens:].tolist()) == {0}
    assert set(found.slots[:, tokens:].ravel().tolist()) == {scratch}
    assert set(found.decode_rows[decodes:].tolist()) <= {padding}
    assert set(found.decode_lengths[decodes:].tolist()) <= {0}
    assert set(found.chunk_rows[chunks:].tolist()) <= {padding}
    assert set(found.chunk_offsets[chunks:].tolist()) <= {tokens}
    assert torch.equal(found.chunk_starts[chunks:], found.chunk_ends[chunks:])
    assert set(found.sample_rows[samples:].tolist()) <= {padding}


@settings(max_examples=40, deadline=None)
@given(plans())
def test_scores_have_the_places_of_their_samples(plan: Plan) -> None:
    plan, runner, packed = prepared(plan)
    found = begun(plan, runner, packed)
    places = found.score_places.tolist()
    assert [places.index(place) for place in range(len(plan.score_samples))] == plan.score_samples.tolist()
    assert places.count(NO_SCORE) == len(places) - len(plan.score_samples)
    assert found.num_top.item() == (plan.num_top if len(plan.score_samples) else 0)


@settings(max_examples=40, deadline=None)
@given(plans())
def test_rows_move_on_as_in_the_plain_runner(plan: Plan) -> None:
    plan, runner, packed = prepared(plan)
    _, plain, _ = prepared(plan)
    inputs = begun(plan, runner, packed)
    samples = plan.num_samples
    tokens = torch.arange(50, 50 + LIMITS.num_rows)
    tokens[::3] = NO_SAMPLE
    out = torch.zeros(LIMITS.num_rows, dtype=torch.int32)
    runner.rows.counts[0] = MOST  # stays there
    end_mixed(packed, tokens, inputs, runner.rows.last_token, runner.rows.length, runner.rows.counts, out)

    sections = np.zeros(capacity(LIMITS), np.int32)
    views = unpack(torch.from_numpy(sections[: fill(plan, sections)]), Sections.of(plan))
    plain.rows.apply(views)
    plain.rows.counts[0] = MOST
    plain.rows.advance(views, tokens[:samples], ALL_NEEDS)
    assert out[:samples].tolist() == tokens[:samples].tolist()
    for name in STATE:
        assert torch.equal(getattr(runner.rows, name), getattr(plain.rows, name)), name


@settings(max_examples=40, deadline=None)
@given(plans())
def test_targets_come_last_in_whole_slices(plan: Plan) -> None:
    plan, _, packed = prepared(plan, targets=True)
    size = pack_mixed(plan, np.zeros(mixed_capacity(LIMITS), np.int32), LIMITS.num_rows)
    total = in_slices(plan.num_targets, LIMITS.num_rows)
    assert (total % LIMITS.num_rows, total // LIMITS.num_rows) == (0, -(-plan.num_targets // LIMITS.num_rows))
    places, targets = packed[size - 2 * total : size].view(2, total).tolist()
    wanted = [part.tolist() for part in target_parts(plan)]
    assert [places[: plan.num_targets], targets[: plan.num_targets]] == wanted


@settings(max_examples=40, deadline=None)
@given(plans())
def test_any_plan_fits_into_a_slot(plan: Plan) -> None:
    plan, _, _ = prepared(plan, targets=True)
    room = np.zeros(mixed_capacity(LIMITS), np.int32)
    assert pack_mixed(plan, room, LIMITS.num_rows) <= mixed_capacity(LIMITS) <= capacity(LIMITS)
