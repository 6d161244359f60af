"""The Triton kernels of batch-invariant paged attention; they also run under Triton's interpreter.

A row's keys are cut into segments at fixed positions. Each segment has a softmax of its own, from scratch, in tiles of
64 keys, and segments are folded together from the first to the last. `attend_rows` takes one token a row, segments
spread over several programs; `attend_chunks` takes tiles of a chunk's tokens, each program all segments. Both do
the same operations on a token, in the same order, so its bits are the same in either. Multiplications that feed an
addition are explicit `fma`, for a compiler may fuse the others in one kernel and not in the other.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gapless.kernels.launch import launch_dependents_and_wait
from gapless.kernels.order_free import order_free_sum

BASE = tl.constexpr(128)  # keys of the shortest segments
OCTAVE = tl.constexpr(8)  # segments until their size doubles: of 2048 keys on, a segment is 1/8 to 1/16 of all before
BLOCK_N = tl.constexpr(64)  # keys of a tile
NOTHING = tl.constexpr(-1.0e30)  # the largest score where there is none: finite, so that differences are
SUMS = tl.constexpr(16)  # columns of a sum of weights
JOINED = tl.constexpr(4)  # parts that are loaded at a time


def num_segments(length: int) -> int:
    """Segments of the first `length` keys."""
    last = max(length - 1, 0) // int(BASE.value)
    octave = max(last.bit_length() - 4, 0)
    return int(OCTAVE.value) * octave + (last >> octave) + 1


@triton.jit
def _segment_of(place):
    """The segment in which a position lies."""
    block = place // BASE
    exponent = (block.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127  # of a power of two
    octave = tl.maximum(exponent - 3, 0)
    return octave * OCTAVE + (block >> octave)


@triton.jit
def _begin_of(segment):
    """The first position of a segment."""
    octave = tl.maximum(segment // OCTAVE - 1, 0)
    return ((segment - octave * OCTAVE) << octave) * BASE


@triton.jit
def _turned(
    heads, norm, cos_sin, token, head, dim, valid, eps,
    TOTAL: tl.constexpr, HEAD_DIM: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Query or key heads [len(head), len(dim)] of one token, normalized and rotated. float32"""
    partner = (dim + HEAD_DIM // 2) % HEAD_DIM
    base = heads + (token * TOTAL + head[:, None]) * HEAD_DIM
    x = tl.load(base + dim[None, :], mask=valid, other=0.0).to(tl.float32)
    y = tl.load(base + partner[None, :], mask=valid, other=0.0).to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt(order_free_sum(x * x, axis=1) / HEAD_DIM + eps)[:, None]
        row = norm + head[:, None] * HEAD_DIM
        x = x * scale * tl.load(row + dim[None, :], mask=valid, other=0.0).to(tl.float32)
        y = y * scale * tl.load(row + partner[None, :], mask=valid, other=0.0).to(tl.float32)
    angle = cos_sin + token * 2 * HEAD_DIM + dim
    cos = tl.load(angle, mask=dim < HEAD_DIM, other=0.0).to(tl.float32)
    sin = tl.load(angle + HEAD_DIM, mask=dim < HEAD_DIM, other=0.0).to(tl.float32)
    return tl.fma(x, tl.broadcast_to(cos[None, :], x.shape), y * sin[None, :])


@triton.jit
def turn_and_store(
    heads, cos_sin, norm, pool, slots, q_out, eps,
    NUM_HEADS: tl.constexpr, NUM_KV: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr, HAS_NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A few heads of one token: queries go to q_out, keys and values to the token's slot in the pool."""
    launch_dependents_and_wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    dim = tl.arange(0, BLOCK_D)
    total: tl.constexpr = NUM_HEADS + 2 * NUM_KV
    valid = (head < total)[:, None] & (dim < HEAD_DIM)[None, :]
    turns = valid & (head < NUM_HEADS + NUM_KV)[:, None]
    turned = _turned(heads, norm, cos_sin, token, head, dim, turns, eps, total, HEAD_DIM, HAS_NORM)
    kept = tl.load(heads + (token * total + head[:, None]) * HEAD_DIM + dim[None, :], mask=valid, other=0.0)
    out = tl.where(turns, turned, kept.to(tl.float32))
    q_at = q_out + (token * NUM_HEADS + head[:, None]) * HEAD_DIM + dim[None, :]
    tl.store(q_at, out.to(q_out.dtype.element_ty), mask=valid & (head < NUM_HEADS)[:, None])
    slot = tl.load(slots + token)
    kv_at = pool + (slot * 2 * NUM_KV + head[:, None] - NUM_HEADS) * HEAD_DIM + dim[None, :]
    tl.store(kv_at, out.to(pool.dtype.element_ty), mask=valid & (head >= NUM_HEADS)[:, None])


@triton.jit
def _take_in(
    query, top, total, acc, pool, table, start, end, last_seen, kv_head, dim, scale,
    NUM_KV: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Add a tile of keys to a running softmax. last_seen: of each query, its own position.

    MASKED: some of the keys lie behind `end`, or behind a query.
    """
    place = start + tl.arange(0, BLOCK_N)
    here = place < end
    block = tl.load(table + place // BLOCK_SIZE, mask=here, other=0) if MASKED else tl.load(table + place // BLOCK_SIZE)
    slot = block * BLOCK_SIZE + place % BLOCK_SIZE
    at = pool + (slot[:, None] * 2 * NUM_KV + kv_head) * HEAD_DIM + dim[None, :]
    mask = (dim < HEAD_DIM)[None, :]
    if MASKED:
        mask = mask & here[:, None]
    k = tl.load(at, mask=mask, other=0.0)
    v = tl.load(at + NUM_KV * HEAD_DIM, mask=mask, other=0.0)
    scores = tl.dot(query, tl.trans(k), input_precision=PRECISION)
    if MASKED:
        scores = tl.where(place[None, :] <= last_seen[:, None], scores, -float("inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1) * scale)
    fade = tl.exp2(top - new_top)
    weight = tl.exp2(tl.fma(scores, scale, -new_top[:, None]))
    weight = weight.to(v.dtype)
    ones = tl.full([BLOCK_N, SUMS], 1.0, v.dtype)
    total = tl.dot(weight, ones, total * fade[:, None], input_precision=PRECISION)
    acc = tl.dot(weight, v, acc * fade[:, None], input_precision=PRECISION)
    return new_top, total, acc


@triton.jit
def _fold(top, total, acc, other_top, other_total, other_acc):
    """Two softmax states as one; a state of nothing leaves the other as it is."""
    new_top = tl.maximum(top, other_top)
    fade = tl.exp2(top - new_top)
    share = tl.exp2(other_top - new_top)
    total = tl.fma(total, fade[:, None], other_total * share[:, None])
    acc = tl.fma(acc, fade[:, None], other_acc * share[:, None])
    return new_top, total, acc


@triton.jit
def _nothing(ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """The softmax state of no key: the largest score, the sum of weights, the weighted values.

    The matrix units add up the weights as well, in the order in which they add up values. They take no fewer than
    `SUMS` columns, which are all equal.
    """
    top = tl.full([ROWS], NOTHING, tl.float32)
    return top, tl.zeros([ROWS, SUMS], tl.float32), tl.zeros([ROWS, BLOCK_D], tl.float32)


@triton.jit
def _store_new(
    heads, cos_sin, norm, pool, slots, i, kv_head, dim, eps,
    NUM_KV: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Rotate the key of a row's new token, and store key and value of one head in the pool."""
    total: tl.constexpr = NUM_KV * (GROUP + 2)
    one = tl.arange(0, 1)
    in_head = (one < 1)[:, None] & (dim < HEAD_DIM)[None, :]
    new = one[:, None] * HEAD_DIM + dim[None, :]
    key = _turned(heads, norm, cos_sin, i, NUM_KV * GROUP + kv_head + one, dim, in_head, eps, total, HEAD_DIM, HAS_NORM)
    value = tl.load(heads + (i * total + NUM_KV * (GROUP + 1) + kv_head) * HEAD_DIM + new, mask=in_head, other=0.0)
    at = pool + (tl.load(slots + i) * 2 * NUM_KV + kv_head) * HEAD_DIM + new
    tl.store(at, key.to(pool.dtype.element_ty), mask=in_head)
    tl.store(at + NUM_KV * HEAD_DIM, value.to(pool.dtype.element_ty), mask=in_head)


@triton.jit
def _store_part(parts, stats, cell, top, total, acc, group, dim, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Leave the state of one segment for the program that folds them together."""
    mask = (group < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    tl.store(parts + (cell * GROUP + group[:, None]) * HEAD_DIM + dim[None, :], acc, mask=mask)
    tl.store(stats + cell * 2 * GROUP + group, top, mask=group < GROUP)
    tl.store(stats + (cell * 2 + 1) * GROUP + group, tl.max(total, axis=1), mask=group < GROUP)


@triton.jit
def _fold_parts(
    out, parts, stats, cell, count,
    GROUP: tl.constexpr, GROUP_2: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The states of `count` segments as one, from the first to the last, to `out`. Several are loaded at a time."""
    group = tl.arange(0, GROUP_2)
    dim = tl.arange(0, BLOCK_D)
    top = tl.full([GROUP_2], NOTHING, tl.float32)
    total = tl.zeros([GROUP_2, 1], tl.float32)
    acc = tl.zeros([GROUP_2, BLOCK_D], tl.float32)
    for first in range(0, count, JOINED):
        tops, totals, accs = (), (), ()
        for i in tl.static_range(JOINED):
            at = cell + first + i
            here = group < tl.where(count > first + i, GROUP, 0)
            mask = here[:, None] & (dim < HEAD_DIM)[None, :]
            stat = stats + at * 2 * GROUP + group
            tops += (tl.load(stat, mask=here, other=NOTHING, cache_modifier=".cg"),)
            totals += (tl.load(stat + GROUP, mask=here, other=0.0, cache_modifier=".cg")[:, None],)
            part = parts + (at * GROUP + group[:, None]) * HEAD_DIM + dim[None, :]
            accs += (tl.load(part, mask=mask, other=0.0, cache_modifier=".cg"),)
        for i in tl.static_range(JOINED):
            top, total, acc = _fold(top, total, acc, tops[i], totals[i], accs[i])
    mask = (group < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    out_at = out + group[:, None] * HEAD_DIM + dim[None, :]
    tl.store(out_at, (acc / total).to(out.dtype.element_ty), mask=mask)


@triton.jit
def attend_rows(
    heads, cos_sin, norm, pool, slots, blocks, rows, lengths, out, parts, stats, counters, eps, scale, table_stride,
    NUM_KV: tl.constexpr, GROUP: tl.constexpr, BLOCK_G: tl.constexpr, GROUP_2: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr, NUM_SPLITS: tl.constexpr,
    MAX_SEGMENTS: tl.constexpr, PRECISION: tl.constexpr, HAS_NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """All query heads of one KV head of one row, over some of the row's segments, which lie side by side.

    Rotates the new token's queries itself; the program that has the last segment also rotates and stores its key and
    value, and reads them back with all others.
    """
    i = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(lengths + i).to(tl.int32)  # known since the step began
    table = blocks + tl.load(rows + i).to(tl.int64) * table_stride
    count = tl.where(length > 0, _segment_of(length - 1) + 1, 0)  # padding has no length
    segment = split * count // NUM_SPLITS
    behind = (split + 1) * count // NUM_SPLITS  # short rows leave some programs without work
    launch_dependents_and_wait(PDL)
    if segment < behind:
        total_heads: tl.constexpr = NUM_KV * (GROUP + 2)
        group = tl.arange(0, BLOCK_G)
        dim = tl.arange(0, BLOCK_D)
        head = kv_head * GROUP + group
        head_mask = (group < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
        turned = _turned(heads, norm, cos_sin, i, head, dim, head_mask, eps, total_heads, HEAD_DIM, HAS_NORM)
        query = turned.to(heads.dtype.element_ty)
        if behind == count:
            _store_new(
                heads, cos_sin, norm, pool, slots, i, kv_head, dim, eps, NUM_KV, GROUP, HEAD_DIM, HAS_NORM,
            )  # fmt: skip
            tl.debug_barrier()  # written by some threads, read by others

        cell = (i * NUM_KV + kv_head) * MAX_SEGMENTS
        last_seen = tl.full([BLOCK_G], 0, tl.int32) + (length - 1)
        end = tl.minimum(_begin_of(behind), length)
        boundary = _begin_of(segment + 1)
        top, total, acc = _nothing(BLOCK_G, BLOCK_D)
        if NUM_SPLITS == 1:
            whole_top, whole_total, whole = _nothing(BLOCK_G, BLOCK_D)
        for start in range(_begin_of(segment), end, BLOCK_N):
            if start == boundary:
                if NUM_SPLITS == 1:
                    whole_top, whole_total, whole = _fold(whole_top, whole_total, whole, top, total, acc)
                else:
                    _store_part(parts, stats, cell + segment, top, total, acc, group, dim, GROUP, HEAD_DIM)
                segment += 1
                boundary = _begin_of(segment + 1)
                top, total, acc = _nothing(BLOCK_G, BLOCK_D)
            top, total, acc = _take_in(
                query, top, total, acc, pool, table, start, end, last_seen, kv_head, dim, scale,
                NUM_KV, HEAD_DIM, BLOCK_SIZE, PRECISION, True,
            )  # fmt: skip
        here = out + (i * NUM_KV + kv_head) * GROUP * HEAD_DIM
        out_at = here + group[:, None] * HEAD_DIM + dim[None, :]
        if NUM_SPLITS == 1:
            whole_top, whole_total, whole = _fold(whole_top, whole_total, whole, top, total, acc)
            tl.store(out_at, (whole / tl.max(whole_total, axis=1)[:, None]).to(out.dtype.element_ty), mask=head_mask)
        elif count == 1:
            tl.store(out_at, (acc / tl.max(total, axis=1)[:, None]).to(out.dtype.element_ty), mask=head_mask)
        else:
            _store_part(parts, stats, cell + segment, top, total, acc, group, dim, GROUP, HEAD_DIM)
            tl.debug_barrier()  # every thread's part is written before the count says so
            num_done = tl.atomic_add(counters + i * NUM_KV + kv_head, 1, sem="acq_rel", scope="gpu")
            if num_done == tl.minimum(count, NUM_SPLITS) - 1:
                tl.store(counters + i * NUM_KV + kv_head, 0)  # ready for the next layer
                _fold_parts(here, parts, stats, cell, count, GROUP, GROUP_2, HEAD_DIM, BLOCK_D)


# else rare lengths would be compiled for in the middle of work
@triton.jit(do_not_specialize=["num_chunks", "num_tiles"], do_not_specialize_on_alignment=["starts", "ends"])
def lay_out(starts, ends, tiles, num_chunks, num_tiles, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr):
    """Which tile of which chunk each entry of `tiles` [num_tiles, 2] is: (chunk, tile), or (-1, 0)."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    chunk = tl.zeros([BLOCK], tl.int32)
    before = tl.zeros([BLOCK], tl.int32)  # tiles of the chunks before it
    base = tl.zeros([1], tl.int32)
    for first in range(0, num_chunks, BLOCK):
        member = first + tl.arange(0, BLOCK)
        here = member < num_chunks
        size = tl.load(ends + member, mask=here, other=0) - tl.load(starts + member, mask=here, other=0)
        count = (size + BLOCK_M - 1) // BLOCK_M
        behind = base + tl.cumsum(count, axis=0)
        passed = (entry[:, None] >= behind[None, :]) & here[None, :]
        chunk += tl.sum(passed.to(tl.int32), axis=1)
        before += tl.sum(tl.where(passed, count[None, :], 0), axis=1)
        base += tl.sum(count, axis=0)
    used = chunk < num_chunks
    tl.store(tiles + 2 * entry, tl.where(used, chunk, -1), mask=entry < num_tiles)
    tl.store(tiles + 2 * entry + 1, tl.where(used, entry - before, 0), mask=entry < num_tiles)


@triton.jit(do_not_specialize_on_alignment=["rows", "offsets", "starts", "ends"])
def attend_chunks(
    q, pool, blocks, tiles, rows, offsets, starts, ends, out, scale, table_stride,
    NUM_HEADS: tl.constexpr, NUM_KV: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One query head of a tile of one chunk's tokens, over all segments of its row up to each token."""
    entry = tl.num_programs(1) - 1 - tl.program_id(1)  # the last tiles of a chunk have most keys
    head = tl.program_id(0)
    chunk = tl.load(tiles + 2 * entry)
    if chunk >= 0:
        tile = tl.load(tiles + 2 * entry + 1)
        start = tl.load(starts + chunk)
        count = tl.load(ends + chunk) - start
        offset = tl.load(offsets + chunk).to(tl.int64)
        table = blocks + tl.load(rows + chunk).to(tl.int64) * table_stride
        kv_head = head // (NUM_HEADS // NUM_KV)
        member = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        dim = tl.arange(0, BLOCK_D)
        mask = (member < count)[:, None] & (dim < HEAD_DIM)[None, :]
        at = ((offset + member[:, None]) * NUM_HEADS + head) * HEAD_DIM + dim[None, :]
        query = tl.load(q + at, mask=mask, other=0.0)
        place = start + member
        end = start + tl.minimum(tile * BLOCK_M + BLOCK_M, count)
        seen_by_all = (start + tile * BLOCK_M + 1) // BLOCK_N * BLOCK_N

        segment = tl.full([], 0, tl.int32)
        boundary = _begin_of(segment + 1)
        top, total, acc = _nothing(BLOCK_M, BLOCK_D)
        whole_top, whole_total, whole = _nothing(BLOCK_M, BLOCK_D)
        for begin in range(0, seen_by_all, BLOCK_N):
            if begin == boundary:
                whole_top, whole_total, whole = _fold(whole_top, whole_total, whole, top, total, acc)
                segment += 1
                boundary = _begin_of(segment + 1)
                top, total, acc = _nothing(BLOCK_M, BLOCK_D)
            top, total, acc = _take_in(
                query, top, total, acc, pool, table, begin, end, place, kv_head, dim, scale,
                NUM_KV, HEAD_DIM, BLOCK_SIZE, PRECISION, False,
            )  # fmt: skip
        for begin in range(seen_by_all, end, BLOCK_N):
            if begin == boundary:
                whole_top, whole_total, whole = _fold(whole_top, whole_total, whole, top, total, acc)
                segment += 1
                boundary = _begin_of(segment + 1)
                top, total, acc = _nothing(BLOCK_M, BLOCK_D)
            top, total, acc = _take_in(
                query, top, total, acc, pool, table, begin, end, place, kv_head, dim, scale,
                NUM_KV, HEAD_DIM, BLOCK_SIZE, PRECISION, True,
            )  # fmt: skip
        whole_top, whole_total, whole = _fold(whole_top, whole_total, whole, top, total, acc)
        tl.store(out + at, (whole / tl.max(whole_total, axis=1)[:, None]).to(out.dtype.element_ty), mask=mask)
