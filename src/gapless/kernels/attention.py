"""The Triton kernels of paged attention for NVIDIA GPUs; they also run under Triton's interpreter.

`decode` takes one token a row: norm, rope, KV write and attention in one, split over the keys, grouped query heads
packed into one tile; the last split to finish adds up the parts. For chunks there are `rotate_and_store`, and
`prefill` in a file of its own. The caller decides how many programs there are, and of which sizes.

What a layer's spec asks for beyond plain attention is decided when a kernel is compiled, so that plain attention pays
nothing. WINDOW: how many positions a token sees, 0: all of them; keys and block numbers before the window are not read.
SOFT_CAP: of scores, 0: none. HAS_SINKS: `sinks` has a score of each query head that takes part in the softmax.

A pool of FP8 holds keys and values divided by k_unit and v_unit; `scale` includes k_unit. The arithmetic is float16
then, which has all numbers of FP8: one instruction makes two of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gapless.kernels.launch import launch_dependents_and_wait
from gapless.kernels.soft_cap import LOG2_E, soft_capped

SHARE = tl.constexpr(16)  # a split's keys are a multiple of this; whole tiles would leave the last split with few


@triton.jit
def as_operand(query, pool, like):
    """Queries as the matrix units take them: of the type that `like` points to, unless the pool is FP8."""
    if pool.dtype.element_ty.is_fp8():
        query = query.to(tl.float16)
    else:
        query = query.to(like.dtype.element_ty)
    return query


@triton.jit
def _stored(x, pool, unit):
    """Numbers in float32 as the pool has them."""
    if pool.dtype.element_ty.is_fp8():
        x = x / unit
        x = tl.clamp(x, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return x.to(pool.dtype.element_ty)


@triton.jit
def in_units(x, pool, unit):
    """A weighted sum of values of the pool as numbers of the model."""
    if pool.dtype.element_ty.is_fp8():
        x = x * unit
    return x


@triton.jit
def _rotated(
    heads, norm, cos_sin, token, head, dim, valid, eps,
    TOTAL: tl.constexpr, HEAD_DIM: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Query or key heads [len(head), len(dim)] of one token, normalized and rotated. float32"""
    partner = (dim + HEAD_DIM // 2) % HEAD_DIM
    base = heads + (token * TOTAL + head[:, None]) * HEAD_DIM
    x = tl.load(base + dim[None, :], mask=valid, other=0.0).to(tl.float32)
    y = tl.load(base + partner[None, :], mask=valid, other=0.0).to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / HEAD_DIM + eps)[:, None]
        row = norm + head[:, None] * HEAD_DIM
        x = x * scale * tl.load(row + dim[None, :], mask=valid, other=0.0).to(tl.float32)
        y = y * scale * tl.load(row + partner[None, :], mask=valid, other=0.0).to(tl.float32)
    angle = cos_sin + token * 2 * HEAD_DIM + dim
    cos = tl.load(angle, mask=dim < HEAD_DIM, other=0.0).to(tl.float32)
    sin = tl.load(angle + HEAD_DIM, mask=dim < HEAD_DIM, other=0.0).to(tl.float32)
    return x * cos[None, :] + y * sin[None, :]


@triton.jit
def _store_new(
    heads, cos_sin, norm, pool, slots, i, kv_head, dim, eps, k_unit, v_unit,
    NUM_KV: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Rotate the key of a row's new token, store key and value of one head in the pool; both, [1, len(dim)]."""
    total: tl.constexpr = NUM_KV * (GROUP + 2)
    in_head = (dim < HEAD_DIM)[None, :]
    one = tl.arange(0, 1)
    new = one[:, None] * HEAD_DIM + dim[None, :]
    key = NUM_KV * GROUP + kv_head + one
    k_new = _rotated(heads, norm, cos_sin, i, key, dim, in_head, eps, total, HEAD_DIM, HAS_NORM)
    k_new = _stored(k_new, pool, k_unit)
    v_new = tl.load(heads + (i * total + NUM_KV * (GROUP + 1) + kv_head) * HEAD_DIM + new, mask=in_head, other=0.0)
    at = pool + (tl.load(slots + i) * 2 * NUM_KV + kv_head) * HEAD_DIM + new
    tl.store(at, k_new, mask=in_head)
    v_new = _stored(v_new.to(tl.float32), pool, v_unit)
    tl.store(at + NUM_KV * HEAD_DIM, v_new, mask=in_head)
    return k_new.to(tl.float32), v_new.to(tl.float32)


@triton.jit
def keys_and_values(
    pool, table, start, end, floor, kv_head, dim,
    NUM_KV: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_FLOOR: tl.constexpr,
):  # fmt: skip
    """A tile of one head's keys and values [BLOCK_N, len(dim)] from a row's place `start` on; zero from `end` on.

    HAS_FLOOR: zero before `floor` as well.
    """
    place = start + tl.arange(0, BLOCK_N)
    seen = place < end
    if HAS_FLOOR:
        seen = seen & (place >= floor)
    slot = tl.load(table + place // BLOCK_SIZE, mask=seen, other=0) * BLOCK_SIZE + place % BLOCK_SIZE
    at = pool + (slot[:, None] * 2 * NUM_KV + kv_head) * HEAD_DIM + dim[None, :]
    mask = seen[:, None] & (dim < HEAD_DIM)[None, :]
    return tl.load(at, mask=mask, other=0.0), tl.load(at + NUM_KV * HEAD_DIM, mask=mask, other=0.0)


@triton.jit
def _take_in(scores, v, top, total, acc, PRECISION: tl.constexpr):
    """Add a tile of keys to a running softmax: the largest score, the sum of weights, the weighted values."""
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    fade = tl.exp2(top - new_top)
    weight = tl.exp2(scores - new_top[:, None])
    total = total * fade + tl.sum(weight, axis=1)
    acc = acc * fade[:, None] + tl.dot(weight.to(v.dtype), v, input_precision=PRECISION)
    return new_top, total, acc


@triton.jit
def _take_in_one(score, v, top, total, acc):
    """The same for a single key."""
    new_top = tl.maximum(top, score)
    fade = tl.exp2(top - new_top)
    weight = tl.exp2(score - new_top)
    return new_top, total * fade + weight, acc * fade[:, None] + weight[:, None] * v


@triton.jit(do_not_specialize_on_alignment=["slots", "first"])  # views of larger tensors
def rotate_and_store(
    heads, cos_sin, norm, pool, slots, q_out, first, eps, k_unit, v_unit,
    NUM_HEADS: tl.constexpr, NUM_KV: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """All heads of one token, a few at a time: queries go to q_out, keys and values to the token's slot in the pool.

    A head is read once, in halves, each of which is the other's partner. BLOCK_D: dimensions of half a head, at least.
    first: points to the first token of the batch that is stored; those before it are not this kernel's.
    """
    token = tl.program_id(0).to(tl.int64)
    if token >= tl.load(first):
        total: tl.constexpr = NUM_HEADS + 2 * NUM_KV
        half: tl.constexpr = HEAD_DIM // 2
        dim = tl.arange(0, BLOCK_D)
        inside = dim < half
        angle = cos_sin + token * 2 * HEAD_DIM + dim
        cos_1 = tl.load(angle, mask=inside, other=0.0).to(tl.float32)[None, :]
        cos_2 = tl.load(angle + half, mask=inside, other=0.0).to(tl.float32)[None, :]
        sin_1 = tl.load(angle + HEAD_DIM, mask=inside, other=0.0).to(tl.float32)[None, :]
        sin_2 = tl.load(angle + HEAD_DIM + half, mask=inside, other=0.0).to(tl.float32)[None, :]
        slot = tl.load(slots + token)
        for start in tl.static_range(0, total, BLOCK_H):
            head = start + tl.arange(0, BLOCK_H)
            valid = (head < total)[:, None] & inside[None, :]
            turns = (head < NUM_HEADS + NUM_KV)[:, None]
            at = heads + (token * total + head[:, None]) * HEAD_DIM + dim[None, :]
            x_1 = tl.load(at, mask=valid, other=0.0).to(tl.float32)
            x_2 = tl.load(at + half, mask=valid, other=0.0).to(tl.float32)
            y_1, y_2 = x_1, x_2
            if HAS_NORM:
                squares = tl.sum(x_1 * x_1, axis=1) + tl.sum(x_2 * x_2, axis=1)
                scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
                weight = norm + head[:, None] * HEAD_DIM + dim[None, :]
                y_1 = x_1 * scale * tl.load(weight, mask=valid & turns, other=0.0).to(tl.float32)
                y_2 = x_2 * scale * tl.load(weight + half, mask=valid & turns, other=0.0).to(tl.float32)
            out_1 = tl.where(turns, y_1 * cos_1 + y_2 * sin_1, x_1)
            out_2 = tl.where(turns, y_2 * cos_2 + y_1 * sin_2, x_2)
            q_at = q_out + (token * NUM_HEADS + head[:, None]) * HEAD_DIM + dim[None, :]
            is_query = valid & (head < NUM_HEADS)[:, None]
            tl.store(q_at, out_1.to(q_out.dtype.element_ty), mask=is_query)
            tl.store(q_at + half, out_2.to(q_out.dtype.element_ty), mask=is_query)
            kv_at = pool + (slot * 2 * NUM_KV + head[:, None] - NUM_HEADS) * HEAD_DIM + dim[None, :]
            is_kept = valid & (head >= NUM_HEADS)[:, None]
            unit = tl.where(turns, k_unit, v_unit)
            tl.store(kv_at, _stored(out_1, pool, unit), mask=is_kept)
            tl.store(kv_at + half, _stored(out_2, pool, unit), mask=is_kept)


@triton.jit
def decode(
    heads, cos_sin, norm, sinks, pool, slots, blocks, rows, lengths, out, parts, stats, counters, eps, scale,
    k_unit, v_unit, table_stride,
    NUM_KV: tl.constexpr, GROUP: tl.constexpr, BLOCK_G: tl.constexpr, GROUP_2: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    NUM_SPLITS: tl.constexpr, AHEAD: tl.constexpr, PRECISION: tl.constexpr, HAS_NORM: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """All query heads of one KV head of one row, over one part of the row's keys.

    Rotates the new token's queries itself; the part that holds the new token's position also rotates and stores its key
    and value, and reads them back with all others. AHEAD: loads its first keys and values before it waits for the
    kernel before, and takes in the new token's last, from registers.
    """
    i = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(lengths + i)  # known since the step began
    table = blocks + tl.load(rows + i) * table_stride
    first = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else 0  # of the keys that it sees
    share = tl.maximum(tl.cdiv(tl.cdiv(length - first, NUM_SPLITS), SHARE) * SHARE, SHARE)
    num_parts = tl.cdiv(length - first, share)  # short rows leave some splits without work, those of no length all
    begin = first + split * share
    end = tl.minimum(begin + share, length)
    dim = tl.arange(0, BLOCK_D)
    if AHEAD:  # all but the new token's were written in earlier steps
        end_of_known = tl.minimum(end, length - 1)
        k_first, v_first = keys_and_values(
            pool, table, begin, end_of_known, 0, kv_head, dim, NUM_KV, HEAD_DIM, BLOCK_SIZE, BLOCK_N, False
        )
    else:
        end_of_known = end
    launch_dependents_and_wait(PDL)
    if split < num_parts:
        total_heads: tl.constexpr = NUM_KV * (GROUP + 2)
        group = tl.arange(0, BLOCK_G)
        step = tl.arange(0, BLOCK_N)
        head = kv_head * GROUP + group
        head_mask = (group < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
        turned = _rotated(heads, norm, cos_sin, i, head, dim, head_mask, eps, total_heads, HEAD_DIM, HAS_NORM)
        query = as_operand(turned, pool, heads)
        if not AHEAD and end == length:
            _store_new(
                heads, cos_sin, norm, pool, slots, i, kv_head, dim, eps, k_unit, v_unit,
                NUM_KV, GROUP, HEAD_DIM, HAS_NORM,
            )  # fmt: skip
            tl.debug_barrier()  # written by some threads, read by others

        top = tl.full([BLOCK_G], -float("inf"), tl.float32)
        total = tl.zeros([BLOCK_G], tl.float32)
        acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
        if HAS_SINKS:  # in one of the parts
            sink = tl.load(sinks + head, mask=group < GROUP, other=0.0).to(tl.float32) * LOG2_E
            top = tl.where(split == 0, sink, top)
            total = tl.where(split == 0, 1.0, total)
        if AHEAD:
            if begin < end_of_known:
                scores = tl.dot(query, tl.trans(k_first.to(query.dtype)), input_precision=PRECISION) * scale
                scores = soft_capped(scores, SOFT_CAP)
                scores = tl.where((begin + step < end_of_known)[None, :], scores, -float("inf"))
                top, total, acc = _take_in(scores, v_first.to(query.dtype), top, total, acc, PRECISION)
            begin += BLOCK_N
        for start in range(begin, end_of_known, BLOCK_N):
            k, v = keys_and_values(
                pool, table, start, end_of_known, 0, kv_head, dim, NUM_KV, HEAD_DIM, BLOCK_SIZE, BLOCK_N, False
            )
            k, v = k.to(query.dtype), v.to(query.dtype)
            scores = soft_capped(tl.dot(query, tl.trans(k), input_precision=PRECISION) * scale, SOFT_CAP)
            scores = tl.where((start + step < end_of_known)[None, :], scores, -float("inf"))
            top, total, acc = _take_in(scores, v, top, total, acc, PRECISION)
        if AHEAD and end == length:
            k_new, v_new = _store_new(
                heads, cos_sin, norm, pool, slots, i, kv_head, dim, eps, k_unit, v_unit,
                NUM_KV, GROUP, HEAD_DIM, HAS_NORM,
            )  # fmt: skip
            score = soft_capped(tl.sum(query.to(tl.float32) * k_new, axis=1) * scale, SOFT_CAP)
            top, total, acc = _take_in_one(score, v_new, top, total, acc)
        out_at = out + (i * NUM_KV * GROUP + head[:, None]) * HEAD_DIM + dim[None, :]
        if num_parts == 1:
            result = in_units(acc / total[:, None], pool, v_unit)
            tl.store(out_at, result.to(out.dtype.element_ty), mask=head_mask)
        else:
            cell = (i * NUM_KV + kv_head) * NUM_SPLITS
            part_at = ((cell + split) * GROUP + group[:, None]) * HEAD_DIM + dim[None, :]
            stat_at = (cell + split) * 2 * GROUP + group
            tl.store(parts + part_at, acc, mask=head_mask)
            tl.store(stats + stat_at, top, mask=group < GROUP)
            tl.store(stats + stat_at + GROUP, total, mask=group < GROUP)
            tl.debug_barrier()  # every thread's part is written before the count says so
            num_done = tl.atomic_add(counters + i * NUM_KV + kv_head, 1, sem="acq_rel", scope="gpu")
            if num_done == num_parts - 1:
                tl.store(counters + i * NUM_KV + kv_head, 0)  # ready for the next layer
                _add_up(
                    out, pool, parts, stats, i, kv_head, cell, num_parts, v_unit,
                    NUM_KV, GROUP, GROUP_2, HEAD_DIM, BLOCK_D, NUM_SPLITS,
                )  # fmt: skip


@triton.jit
def _add_up(
    out, pool, parts, stats, i, kv_head, cell, num_parts, v_unit,
    NUM_KV: tl.constexpr, GROUP: tl.constexpr, GROUP_2: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):  # fmt: skip
    """Combine the parts of one KV head of one row, all at once."""
    part = tl.arange(0, NUM_SPLITS)
    group = tl.arange(0, GROUP_2)
    dim = tl.arange(0, BLOCK_D)
    here = (part < num_parts)[:, None] & (group < GROUP)[None, :]
    stat_at = stats + (cell + part[:, None]) * 2 * GROUP + group[None, :]
    top = tl.load(stat_at, mask=here, other=-float("inf"), cache_modifier=".cg")
    total = tl.load(stat_at + GROUP, mask=here, other=0.0, cache_modifier=".cg")
    best = tl.max(top, axis=0)
    best = tl.where(best == -float("inf"), 0.0, best)
    weight = tl.exp2(top - best[None, :])  # [NUM_SPLITS, GROUP_2]
    whole = tl.sum(total * weight, axis=0)
    at = ((cell + part[:, None, None]) * GROUP + group[None, :, None]) * HEAD_DIM + dim[None, None, :]
    mask = here[:, :, None] & (dim < HEAD_DIM)[None, None, :]
    values = tl.load(parts + at, mask=mask, other=0.0, cache_modifier=".cg")
    joined = in_units(tl.sum(values * weight[:, :, None], axis=0) / whole[:, None], pool, v_unit)
    head = kv_head * GROUP + group
    out_at = out + (i * NUM_KV * GROUP + head[:, None]) * HEAD_DIM + dim[None, :]
    tl.store(out_at, joined.to(out.dtype.element_ty), mask=(group < GROUP)[:, None] & (dim < HEAD_DIM)[None, :])
