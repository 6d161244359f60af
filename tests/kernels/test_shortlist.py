"""The shortlist of a row by itself: which limit it takes, and what it lists."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

import triton
import triton.language as tl

from gapless.kernels.shortlist import limit_for, list_from

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB, TILE, NUM_TILES, ROOM = 150, 4, 38, 64


@triton.jit
def _list(
    logits, maxima, masses, least, wanted, limits, near, values, ids, counts,
    VOCAB: tl.constexpr, TILE: tl.constexpr, NUM_TILES: tl.constexpr, TILES: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    tile = tl.arange(0, TILES)
    largest = tl.load(maxima + tile, mask=tile < NUM_TILES, other=-float("inf"))
    mass = tl.load(masses + tile, mask=tile < NUM_TILES, other=0.0)
    limit = limit_for(largest, tl.max(largest, axis=0), tl.load(least), mass, tl.load(wanted))
    tl.store(limits, limit)
    base = (logits, logits, tl.load(counts))  # 0: there are no adjusted logits
    count = list_from(limit, base, largest, near, values, ids, near, 0, VOCAB, TILE, NUM_TILES, TILES, 8, ROOM)
    tl.store(counts, count)


def run(logits: np.ndarray, least: int, wanted: float) -> tuple[float, int, list[float], list[int]]:
    padded = np.pad(logits, (0, NUM_TILES * TILE - VOCAB), constant_values=-np.inf).reshape(-1, TILE)
    maxima, masses = padded.max(axis=1), np.exp(padded).sum(axis=1)
    given_ = (logits, maxima, masses, np.array([least], np.int32), np.array([wanted], np.float32))
    inputs = [torch.from_numpy(np.ascontiguousarray(array)).to(DEVICE) for array in given_]
    limits, values = torch.zeros(1, device=DEVICE), torch.zeros(ROOM, device=DEVICE)
    near, ids, counts = (torch.zeros(size, dtype=torch.int32, device=DEVICE) for size in (NUM_TILES, ROOM, 1))
    sizes = {"VOCAB": VOCAB, "TILE": TILE, "NUM_TILES": NUM_TILES, "TILES": 64, "ROOM": ROOM}
    _list[(1,)](*inputs, limits, near, values, ids, counts, **sizes)
    count = int(counts)
    return float(limits), count, values[:count].tolist(), ids[:count].tolist()


@given(st.integers(0, 10**6), st.sampled_from([1, 3, 8, 20]), st.sampled_from([0.0, 0.5, 0.99]), st.booleans())
@settings(max_examples=30)
def test_a_shortlist_is_every_logit_from_its_limit_up(seed: int, least: int, share: float, is_tied: bool) -> None:
    logits = np.random.default_rng(seed).normal(0, 2, VOCAB).astype(np.float32)
    logits = logits.round() if is_tied else logits
    wanted = share * float(np.exp(logits).sum())
    limit, count, values, ids = run(logits, least, wanted)
    expected = np.flatnonzero(logits >= limit)
    if len(expected) > ROOM:
        assert count > ROOM
    else:
        assert (ids, values) == (expected.tolist(), logits[expected].tolist())
    padded = np.pad(logits, (0, NUM_TILES * TILE - VOCAB), constant_values=-np.inf).reshape(-1, TILE)
    is_near = padded.max(axis=1) >= limit
    assert is_near.sum() >= least
    assert np.exp(padded[is_near]).sum() >= wanted * (1 - 1e-5)
    if not is_tied and share == 0:
        assert is_near.sum() <= 2 * least


def test_where_there_are_too_few_tiles_all_are_listed() -> None:
    logits = np.full(VOCAB, -np.inf, np.float32)
    logits[[3, 77]] = 1.0, -5.0
    assert run(logits, 8, 0.0) == (-np.inf, 2, [1.0, -5.0], [3, 77])
