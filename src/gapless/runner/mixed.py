"""Packs a plan with chunks for a captured step, in the form that `kernels.mixed` reads."""

from __future__ import annotations

import numpy as np

from gapless.core.limits import Limits
from gapless.core.plan import Plan
from gapless.core.request import IntArray
from gapless.core.row_fields import SEAT_WORDS
from gapless.kernels.mixed import CHUNK_WORDS, HEADER, NO_SCORE


def mixed_capacity(limits: Limits) -> int:
    """Numbers that any plan within the limits packs into."""
    rows = limits.num_rows
    return HEADER + rows * (CHUNK_WORDS + SEAT_WORDS + 2) + limits.max_batch_tokens + 3 * limits.max_new_blocks


def pack_mixed(plan: Plan, out: IntArray) -> int:
    """Write the plan into `out`; return how many numbers it took."""
    parts: list[IntArray] = [
        _header(plan),
        plan.decode_rows,
        _chunk_words(plan).reshape(-1),
        *(chunk.tokens for chunk in plan.chunks),
        plan.new_blocks.reshape(-1),
        plan.seat_rows,
        plan.seats.reshape(-1),
        *([score_places(plan, plan.num_samples)] if len(plan.score_samples) else []),
    ]
    end = 0
    for part in parts:
        start, end = end, end + len(part)
        out[start:end] = part
    return end


def _header(plan: Plan) -> IntArray:
    num_top = plan.num_top if len(plan.score_samples) else NO_SCORE
    counts = (len(plan.new_blocks), len(plan.seat_rows), plan.num_samples, num_top, 0)
    return np.array([plan.num_decodes, len(plan.chunks), plan.num_tokens, *counts], np.int32)


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
