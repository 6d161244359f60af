"""Attention of chunks in Triton: tiles of a chunk's tokens over the keys of their row. hopper_prefill is for Hopper.

Options are those of kernels/attention. Runs under Triton's interpreter too.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gapless.kernels.attention import as_operand, in_units, keys_and_values
from gapless.kernels.soft_cap import LOG2_E, soft_capped


@triton.jit
def _take_in_tile(
    query, pool, table, begin, last, floor, kv_head, dim, place, scale, top, total, acc,
    NUM_KV: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Add a tile of keys, from place `begin` on, to a running softmax. WHOLE: every token sees all of them.

    floor: where the first token's window begins.

    Both kinds round alike, so that a token's sums do not depend on the tile of tokens that it is in.
    """
    key = begin + tl.arange(0, BLOCK_N)
    if WHOLE and HEAD_DIM == BLOCK_D:
        slot = tl.load(table + key // BLOCK_SIZE) * BLOCK_SIZE + key % BLOCK_SIZE
        at = pool + (slot[:, None] * 2 * NUM_KV + kv_head) * HEAD_DIM + dim[None, :]
        k, v = tl.load(at), tl.load(at + NUM_KV * HEAD_DIM)
    else:
        k, v = keys_and_values(
            pool, table, begin, last, floor, kv_head, dim, NUM_KV, HEAD_DIM, BLOCK_SIZE, BLOCK_N, WINDOW > 0
        )
    k, v = k.to(query.dtype), v.to(query.dtype)
    scores = tl.dot(query, tl.trans(k), input_precision=PRECISION)
    if SOFT_CAP > 0:
        scores = soft_capped(scores * scale, SOFT_CAP)
        scale = 1.0
    if not WHOLE:
        scores = tl.where(key[None, :] <= place[:, None], scores, -float("inf"))
        if WINDOW > 0:
            scores = tl.where(key[None, :] > place[:, None] - WINDOW, scores, -float("inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    level = new_top * scale
    if WINDOW > 0 and not WHOLE:  # a token may see none of the keys so far
        level = tl.where(new_top == -float("inf"), 0.0, level)
    fade = tl.exp2(tl.fma(top, scale, -level))
    weight = tl.exp2(tl.fma(scores, scale, -level[:, None]))
    total = total * fade + tl.sum(weight, axis=1)
    acc = acc * fade[:, None] + tl.dot(weight.to(v.dtype), v, input_precision=PRECISION)
    return new_top, total, acc


@triton.jit
def prefill(
    q, sinks, pool, blocks, tiles, out, scale, v_unit, table_stride,
    NUM_HEADS: tl.constexpr, NUM_KV: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """One query head of a tile of one chunk's tokens (chunk_tiles), over the keys of its row that each token sees.

    Tiles of keys begin at multiples of BLOCK_N, with a window too.
    """
    head = tl.program_id(0)
    tile = tl.program_id(1)
    if tile < tl.load(tiles):
        record = tiles + (1 + tile) * SIZE
        table = blocks + tl.load(record).to(tl.int64) * table_stride
        token = tl.load(record + 1).to(tl.int64)
        start = tl.load(record + 2)
        last = tl.minimum(start + BLOCK_M, tl.load(record + 3))
        kv_head = head // (NUM_HEADS // NUM_KV)
        member = tl.arange(0, BLOCK_M)
        dim = tl.arange(0, BLOCK_D)
        place = start + member
        mask = (place < last)[:, None] & (dim < HEAD_DIM)[None, :]
        at = ((token + member[:, None]) * NUM_HEADS + head) * HEAD_DIM + dim[None, :]
        query = as_operand(tl.load(q + at, mask=mask, other=0.0), pool, q)

        top = tl.full([BLOCK_M], -float("inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        if HAS_SINKS:  # the largest score is kept as it is before the scale
            unit = scale if SOFT_CAP == 0 else 1.0
            top = tl.zeros([BLOCK_M], tl.float32) + tl.load(sinks + head).to(tl.float32) * LOG2_E / unit
            total += 1.0
        floor = 0
        masked = 0
        if WINDOW > 0:
            floor = tl.maximum(start + 1 - WINDOW, 0)
            masked = floor // BLOCK_N * BLOCK_N
        if PRECISION != "ieee":  # float32 without matrix units becomes so much code that it is not worth it twice
            if WINDOW > 0:
                inside = tl.cdiv(tl.maximum(last - WINDOW, 0), BLOCK_N) * BLOCK_N  # in all tokens' windows
                for begin in range(masked, inside, BLOCK_N):
                    top, total, acc = _take_in_tile(
                        query, pool, table, begin, last, floor, kv_head, dim, place, scale, top, total, acc,
                        NUM_KV, HEAD_DIM, BLOCK_D, BLOCK_SIZE, BLOCK_N, PRECISION, WINDOW, SOFT_CAP, False,
                    )  # fmt: skip
                masked = inside
            whole = (start + 1) // BLOCK_N * BLOCK_N
            for begin in range(masked, whole, BLOCK_N):
                top, total, acc = _take_in_tile(
                    query, pool, table, begin, last, floor, kv_head, dim, place, scale, top, total, acc,
                    NUM_KV, HEAD_DIM, BLOCK_D, BLOCK_SIZE, BLOCK_N, PRECISION, WINDOW, SOFT_CAP, True,
                )  # fmt: skip
            masked = tl.maximum(whole, masked) if WINDOW > 0 else whole
        for begin in range(masked, last, BLOCK_N):
            top, total, acc = _take_in_tile(
                query, pool, table, begin, last, floor, kv_head, dim, place, scale, top, total, acc,
                NUM_KV, HEAD_DIM, BLOCK_D, BLOCK_SIZE, BLOCK_N, PRECISION, WINDOW, SOFT_CAP, False,
            )  # fmt: skip
        result = in_units(acc / total[:, None], pool, v_unit)
        tl.store(out + at, result.to(out.dtype.element_ty), mask=mask)
