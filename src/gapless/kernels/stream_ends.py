"""The two ends of a row in the attention kernel of kernels/stream: its query and new token, and its result.

Layouts are the caller's. Tensors of queries are [query head, number of the head], those of a softmax [warp, ..., query
head]: each warp has its own, and the columns of the matrix units hold the query heads of one KV head.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

sync = getattr(gl, "barrier", None) or gl.thread_barrier

MAX_GROUP = 8  # query heads of a KV head: the columns of a product of the matrix units
NUM_COLUMNS = gl.constexpr(MAX_GROUP)
BLOCK_SIZE = 16  # slots of a block: the rows of such a product
BLOCK = gl.constexpr(BLOCK_SIZE)
LOG2_E = gl.constexpr(1.4426950408889634)
LOWEST = gl.constexpr(-1e30)  # the largest score of no keys; finite, so that differences are numbers
PARTS_AT_ONCE = gl.constexpr(8)


@gluon.jit
def first_block(length, WINDOW: gl.constexpr):
    """The first block of which a row of this length sees anything."""
    if WINDOW > 0:
        first = gl.maximum(length - WINDOW, 0) // BLOCK
    else:
        first = 0
    return first


@gluon.constexpr_function
def operand_type(pool_type):
    """What the matrix units multiply. float16 has all numbers of FP8, and one instruction makes two of them."""
    return gl.float16 if pool_type.is_fp8() else pool_type


@gluon.jit
def _stored(x, unit, TYPE: gl.constexpr):
    """Numbers as the pool has them; the largest of FP8 stands for larger ones."""
    if TYPE.is_fp8():
        x = x.to(gl.float32) / unit
    return x.to(TYPE)


@gluon.jit
def _in_units(x, unit, TYPE: gl.constexpr):
    """A weighted sum of values of the pool as numbers of the model."""
    if TYPE.is_fp8():
        x = x * unit
    return x


@gluon.jit
def soft_capped(scores, CAP: gl.constexpr):
    """As in kernels/soft_cap."""
    if CAP > 0:
        scores = (CAP * LOG2_E) * (1.0 - 2.0 / (gl.exp2(scores * (2.0 / CAP)) + 1.0))
    return scores


@gluon.jit
def _load_heads(
    heads, norm, row, head, dim, valid,
    TOTAL: gl.constexpr, HEAD_DIM: gl.constexpr, HAS_NORM: gl.constexpr,
):  # fmt: skip
    """Query or key heads of a row's new token and the weights of their norm, each with those of the other half."""
    partner = (dim + HEAD_DIM // 2) % HEAD_DIM
    base = heads + (row * TOTAL + head)[:, None] * HEAD_DIM
    x = gl.load(base + dim[None, :], mask=valid, other=0.0)
    y = gl.load(base + partner[None, :], mask=valid, other=0.0)
    x_weight, y_weight = x, y
    if HAS_NORM:
        weights = norm + head[:, None] * HEAD_DIM
        x_weight = gl.load(weights + dim[None, :], mask=valid, other=0.0)
        y_weight = gl.load(weights + partner[None, :], mask=valid, other=0.0)
    return x, y, x_weight, y_weight


@gluon.jit
def _turned(loaded, cos, sin, eps, HEAD_DIM: gl.constexpr, HAS_NORM: gl.constexpr):
    """Such heads normalized and rotated. float32"""
    x, y, x_weight, y_weight = loaded
    x = x.to(gl.float32)
    y = y.to(gl.float32)
    if HAS_NORM:
        scale = gl.rsqrt(gl.sum(x * x, axis=1) / HEAD_DIM + eps)[:, None]
        x = x * scale * x_weight.to(gl.float32)
        y = y * scale * y_weight.to(gl.float32)
    return x * cos[None, :] + y * sin[None, :]


@gluon.jit
def load_new(
    heads, cos_sin, norm, sinks, slots, row, kv_head, has_new,
    NUM_KV: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, HAS_NORM: gl.constexpr, HAS_SINKS: gl.constexpr,
    LAYOUT: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """All that `begin` takes of a row's new token, in one wait for memory. has_new: with its key and value."""
    total: gl.constexpr = NUM_KV * (GROUP + 2)
    member = gl.arange(0, NUM_COLUMNS, layout=gl.SliceLayout(1, gl.SliceLayout(0, LAYOUT)))
    dim = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT)))
    acc_dim = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, gl.SliceLayout(2, MMA)))
    in_group = (member < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    every = ((member >= 0)[:, None] & (dim < HEAD_DIM)[None, :]) & has_new  # each has the one key
    same = member * 0
    queries = _load_heads(
        heads, norm, row, kv_head * GROUP + member, dim, in_group, total, HEAD_DIM, HAS_NORM
    )  # fmt: skip
    key = _load_heads(
        heads, norm, row, NUM_KV * GROUP + kv_head + same, dim, every, total, HEAD_DIM, HAS_NORM
    )  # fmt: skip
    value_at = heads + (row * total + NUM_KV * (GROUP + 1) + kv_head) * HEAD_DIM
    value = gl.load(value_at + same[:, None] + dim[None, :], mask=every & (member == 0)[:, None], other=0.0)
    acc_value = gl.load(value_at + acc_dim, mask=(acc_dim < HEAD_DIM) & has_new, other=0.0)
    angle = cos_sin + row * 2 * HEAD_DIM + dim
    sink = acc_value
    if HAS_SINKS:
        column = gl.arange(0, NUM_COLUMNS, layout=gl.SliceLayout(0, gl.SliceLayout(1, MMA)))
        sink = gl.load(sinks + kv_head * GROUP + column, mask=column < GROUP, other=0.0)
    return queries, key, value, acc_value, gl.load(angle), gl.load(angle + HEAD_DIM), gl.load(slots + row), sink


@gluon.jit
def begin(
    loaded, pool, queries, kv_head, has_new, eps, scale, k_unit, v_unit,
    NUM_KV: gl.constexpr, HEAD_DIM: gl.constexpr, HAS_NORM: gl.constexpr, SOFT_CAP: gl.constexpr,
    HAS_SINKS: gl.constexpr, LAYOUT: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """A row's queries of one KV head to shared memory, once for each warp; the softmax of no keys.

    has_new: the row's new token is among the keys. Its key and value are stored in the pool, and taken in by warp 0,
    and so are the sinks.
    """
    warps: gl.constexpr = queries.shape[0]
    per_head: gl.constexpr = gl.SliceLayout(1, MMA)
    per_row: gl.constexpr = gl.SliceLayout(2, MMA)
    loaded_queries, loaded_key, value, acc_value, cos, sin, new_slot, sink = loaded
    cos = cos.to(gl.float32)
    sin = sin.to(gl.float32)
    dtype: gl.constexpr = pool.dtype.element_ty
    wide: gl.constexpr = operand_type(dtype)
    query = _turned(loaded_queries, cos, sin, eps, HEAD_DIM, HAS_NORM).to(wide)
    copies = gl.arange(0, warps, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None, None]
    queries.store(gl.where(copies >= 0, gl.expand_dims(query, 0), 0.0).to(wide))

    key = _stored(_turned(loaded_key, cos, sin, eps, HEAD_DIM, HAS_NORM), k_unit, dtype)
    member = gl.arange(0, NUM_COLUMNS, layout=gl.SliceLayout(1, gl.SliceLayout(0, LAYOUT)))
    dim = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT)))
    once = ((member == 0)[:, None] & (dim < HEAD_DIM)[None, :]) & has_new
    at = pool + (new_slot * 2 * NUM_KV + kv_head) * HEAD_DIM + (member * 0)[:, None] + dim[None, :]
    gl.store(at, key, mask=once)
    gl.store(at + NUM_KV * HEAD_DIM, _stored(value, v_unit, dtype), mask=once)

    score = soft_capped(gl.sum(query.to(gl.float32) * key.to(gl.float32), axis=1) * scale, SOFT_CAP)
    score = gl.convert_layout(score, gl.SliceLayout(0, per_head))
    whole = 1.0
    if HAS_SINKS:  # a softmax of the two
        sink = sink.to(gl.float32) * LOG2_E
        best = gl.maximum(score, sink)
        share = gl.expand_dims(gl.exp2(score - best)[None, :], 1)
        whole = share + gl.expand_dims(gl.exp2(sink - best)[None, :], 1)
        score = best
    takes = (gl.arange(0, warps, layout=gl.SliceLayout(1, per_head)) == 0) & has_new
    top = gl.where(takes[:, None], score[None, :], LOWEST)
    takes = (gl.arange(0, warps, layout=gl.SliceLayout(1, per_row)) == 0) & has_new
    slot = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, per_row))
    total = gl.zeros([warps, BLOCK, NUM_COLUMNS], gl.float32, layout=MMA)
    total = gl.where((takes[:, None] & (slot == 0)[None, :])[:, :, None], whole, total)
    acc = gl.zeros([warps, HEAD_DIM, NUM_COLUMNS], gl.float32, layout=MMA)
    new_value = _stored(acc_value, v_unit, dtype).to(gl.float32)[None, :, None]
    if HAS_SINKS:
        new_value = new_value * share
    acc = gl.where(takes[:, None, None], new_value, acc)
    return top, total, acc


@gluon.jit
def _join_parts(
    out, parts, stats, first_sharer, kv_head, split_cell, num_parts, v_unit,
    NUM_KV: gl.constexpr, GROUP: gl.constexpr, GROUP_2: gl.constexpr, HEAD_DIM: gl.constexpr, TYPE: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Add up the parts of one row's head that several programs left, always in the same order."""
    per_head: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))
    per_row: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, LAYOUT))
    member = gl.arange(0, GROUP_2, layout=per_head)
    index = gl.arange(0, PARTS_AT_ONCE, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    dim = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    best = gl.full([GROUP_2], LOWEST, gl.float32, layout=per_head)
    whole = gl.zeros([GROUP_2], gl.float32, layout=per_head)
    joined = gl.zeros([GROUP_2, HEAD_DIM], gl.float32, layout=gl.SliceLayout(0, LAYOUT))
    for start in range(0, num_parts, PARTS_AT_ONCE):
        part = start + index
        here = (part < num_parts)[:, None] & (member < GROUP)[None, :]
        cell = ((first_sharer + part) * NUM_KV + kv_head) * 2 + gl.where(part == 0, split_cell, 0)
        stat_at = stats + (cell * 2 * GROUP)[:, None] + member[None, :]
        top = gl.load(stat_at, mask=here, other=LOWEST, cache_modifier=".cg")
        total = gl.load(stat_at + GROUP, mask=here, other=0.0, cache_modifier=".cg")
        at = ((cell * GROUP)[:, None] + member[None, :])[:, :, None] * HEAD_DIM + dim[None, None, :]
        value = gl.load(parts + at, mask=here[:, :, None], other=0.0, cache_modifier=".cg")
        new_best = gl.maximum(best, gl.max(top, axis=0))
        weight = gl.exp2(top - new_best[None, :])
        fade = gl.exp2(best - new_best)
        whole = whole * fade + gl.sum(total * weight, axis=0)
        joined = joined * gl.convert_layout(fade, per_row)[:, None] + gl.sum(value * weight[:, :, None], axis=0)
        best = new_best
    row = gl.arange(0, GROUP_2, layout=per_row)
    column = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT)))
    result = _in_units(joined / gl.convert_layout(whole, per_row)[:, None], v_unit, TYPE).to(out.dtype.element_ty)
    mask = (row < GROUP)[:, None] & (column < HEAD_DIM)[None, :]
    gl.store(out + (row * HEAD_DIM)[:, None] + column[None, :], result, mask=mask)


@gluon.jit
def finish(
    out, parts, stats, counters, values, sums, softmax, row, kv_head, row_unit, num_blocks, first, last, share,
    v_unit,
    NUM_KV: gl.constexpr, GROUP: gl.constexpr, GROUP_2: gl.constexpr, HEAD_DIM: gl.constexpr, TYPE: gl.constexpr,
    WIDE: gl.constexpr, JOIN: gl.constexpr,
):  # fmt: skip
    """Join the warps. A whole row goes to `out`; a piece is left for the last program to finish one of this row.

    first, last: the blocks of the piece, of the row's num_blocks. row_unit: the row's place among all blocks.
    TYPE: of the pool. values [warp, HEAD_DIM, query head] and sums [2, warp, query head] are shared memory for this.
    """
    top, total, acc = softmax
    sums.index(0).store(top)
    sums.index(1).store(gl.sum(total, axis=1))
    values.store(acc)
    sync()
    per_warp: gl.constexpr = gl.SliceLayout(1, WIDE)
    per_dim: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, WIDE))
    top = sums.index(0).load(per_warp)
    best = gl.max(top, axis=0)
    weight = gl.exp2(top - best[None, :])
    whole = gl.sum(sums.index(1).load(per_warp) * weight, axis=0)
    acc = gl.sum(values.load(WIDE) * weight[:, None, :], axis=0)
    member = gl.arange(0, NUM_COLUMNS, layout=per_dim)
    dim = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(1, gl.SliceLayout(0, WIDE)))
    at = (member * HEAD_DIM)[None, :] + dim[:, None]
    mask = (member < GROUP)[None, :] & (dim < HEAD_DIM)[:, None]
    out_at = out + (row * NUM_KV + kv_head) * GROUP * HEAD_DIM
    if (first == 0) & (last == num_blocks):
        result = _in_units(acc / gl.convert_layout(whole, per_dim)[None, :], v_unit, TYPE)
        gl.store(out_at + at, result.to(out.dtype.element_ty), mask=mask)
    else:
        first_sharer = row_unit // share
        num_parts = (row_unit + num_blocks - 1) // share - first_sharer + 1
        split_cell = (row_unit % share != 0).to(gl.int32)  # a program has two cells: for its first piece, and its last
        cell = gl.program_id(0) * 2 + gl.where(first == 0, split_cell, 0)
        gl.store(parts + cell * GROUP * HEAD_DIM + at, acc, mask=mask)
        stat = gl.arange(0, NUM_COLUMNS, layout=gl.SliceLayout(0, per_warp))
        stat_at = stats + cell * 2 * GROUP + stat
        gl.store(stat_at, best, mask=stat < GROUP)
        gl.store(stat_at + GROUP, whole, mask=stat < GROUP)
        sync()  # every thread's part is written before the count says so
        counter = counters + row * NUM_KV + kv_head
        if gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == num_parts - 1:
            gl.store(counter, 0)  # ready for the next layer
            _join_parts(
                out_at, parts, stats, first_sharer, kv_head, split_cell, num_parts, v_unit,
                NUM_KV, GROUP, GROUP_2, HEAD_DIM, TYPE, JOIN,
            )  # fmt: skip
