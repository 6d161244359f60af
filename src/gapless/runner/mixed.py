"""Packs a plan with chunks for a captured step, in the form that `kernels.mixed` reads.

Behind it come the prompt tokens whose log-probabilities are wanted, which are scored after the captured step.
"""

from __future__ import annotations

import numpy as np

from gapless.core.limits import Limits
from gapless.core.plan import Plan
from gapless.core.request import IntArray
from gapless.core.row_fields import SEAT_WORDS
from gapless.kernels.mixed import CHUNK_WORDS, HEADER, NO_SCORE
from gapless.runner.fill import baggage_parts, target_parts


def mixed_capacity(limits: Limits) -> int:
    """Numbers that any plan within the limits packs into."""
    rows, tokens = limits.num_rows, limits.max_batch_tokens
    plan = HEADER + rows * (CHUNK_WORDS + SEAT_WORDS + 2) + tokens + (2 + limits.num_groups) * limits.max_new_blocks
    return plan + limits.max_baggage + 2 * in_slices(tokens, rows)


def in_slices(num_targets: int, slice_size: int) -> int:
    """Targets with what is added to them: whole slices, so that all are scored by products of one size."""
    return -(-num_targets // slice_size) * slice_size


def pack_mixed(plan: Plan, out: IntArray, slice_size: int) -> int:
    """Write the plan into `out`; return how many numbers it took.

    Targets come last: the tokens of the step that they follow, then themselves, each in whole slices.
    """
    parts: list[IntArray] = [
        _header(plan),
        plan.decode_rows,
        _chunk_words(plan).reshape(-1),
        *(chunk.tokens for chunk in plan.chunks),
        plan.new_blocks.reshape(-1),
        plan.seat_rows,
        plan.seats.reshape(-1),
        *baggage_parts(plan.baggage),
        *([score_places(plan, plan.num_samples)] if len(plan.score_samples) else []),
        *([_filled_up(part, slice_size) for part in target_parts(plan)] if plan.num_targets else []),
    ]
    end = 0
    for part in parts:
        start, end = end, end + len(part)
        out[start:end] = part
    return end


def _filled_up(part: IntArray, slice_size: int) -> IntArray:
    found = np.zeros(in_slices(len(part), slice_size), np.int32)
    found[: len(part)] = part
    return found


def _header(plan: Plan) -> IntArray:
    num_top = plan.num_top if len(plan.score_samples) else NO_SCORE
    counts = (len(plan.new_blocks), len(plan.seat_rows), plan.num_samples, num_top)
    baggage = plan.baggage
    sizes = len(baggage.count_rows), len(baggage.counts), len(baggage.biases)
    words = plan.new_blocks.shape[1]  # of each new block
    return np.array([plan.num_decodes, len(plan.chunks), plan.num_tokens, *counts, *sizes, words, 0], np.int32)


def _chunk_words(plan: Plan) -> IntArray:
    """Of each chunk its row, offset, start and end, and which sample it gives: [CHUNK_WORDS, num_chunks]."""
    found = np.empty((CHUNK_WORDS, len(plan.chunks)), np.int32)
    offset, sample = plan.num_decodes, plan.num_decodes
    for index, chunk in enumerate(plan.chunks):
        found[:, index] = chunk.row, offset, chunk.start, chunk.length, sample if chunk.samples else -1
        offset += len(chunk.tokens)
        sample += chunk.samples
    return found


def score_places(plan: Plan, count: int) -> IntArray:
    """For each of `count` samples the place of its score among the scores, or NO_SCORE."""
    places = np.full(count, NO_SCORE, np.int32)
    places[plan.score_samples] = np.arange(len(plan.score_samples), dtype=np.int32)
    return places
