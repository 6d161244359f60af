"""Decode attention in Gluon for Hopper: programs that stay on their core and read keys and values without gaps.

The keys of all rows and KV heads are one list of blocks, cut into equal shares, one for each program. A program copies
its blocks into a ring in shared memory several tiles ahead, across the borders of rows and heads, and begins before
the kernel before has ended (kernels/launch): it waits only for the new token's query, key and value.
Each warp takes a block of its own and keeps its own softmax. They are joined when a head's keys end.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_sync = getattr(gl, "barrier", None) or gl.thread_barrier
_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

MAX_GROUP = 8  # query heads of a KV head: the columns of a product of the matrix units
NUM_COLUMNS = gl.constexpr(MAX_GROUP)
BLOCK_SIZE = 16  # slots of a block: the rows of such a product
BLOCK = gl.constexpr(BLOCK_SIZE)
LOWEST = gl.constexpr(-1e30)  # the largest score of no keys; finite, so that differences are numbers
PARTS_AT_ONCE = gl.constexpr(8)


@gluon.jit
def _plus(a, b):
    return a + b


@gluon.jit
def _my_share(lengths, num_rows, LENGTHS: gl.constexpr, MIN_SHARE: gl.constexpr, NUM_KV: gl.constexpr):
    """Blocks of a share, the first one of this program's, how many it has, the row of that, and the row's first one."""
    layout: gl.constexpr = gl.BlockedLayout([LENGTHS // 32], [32], [gl.num_warps()], [0])  # each warp has them all
    index = gl.arange(0, LENGTHS, layout=layout)
    length = gl.load(lengths + index, mask=index < num_rows, other=0).to(gl.int32)
    end = gl.associative_scan((length + BLOCK - 1) // BLOCK * NUM_KV, 0, _plus)
    num_units = gl.max(end, axis=0)
    share = gl.maximum((num_units + gl.num_programs(0) - 1) // gl.num_programs(0), MIN_SHARE)
    unit = gl.program_id(0) * share
    before = end <= unit
    row = gl.sum(before.to(gl.int32), axis=0)
    return share, unit, gl.minimum(num_units - unit, share), row, gl.max(gl.where(before, end, 0), axis=0)


@gluon.jit
def _next(lengths, num_rows, row, head, block, length, next_length, count, NUM_KV: gl.constexpr):
    """The place `count` blocks on, within a head or at the begin of the next one. A length is loaded a row ahead."""
    block += count
    if block * BLOCK >= length:
        block = 0
        head += 1
        if head == NUM_KV:
            head = 0
            row += 1
            length = next_length
            next_length = gl.load(lengths + gl.minimum(row + 1, num_rows - 1)).to(gl.int32)
    return row, head, block, length, next_length


@gluon.jit
def _look_up(blocks, table, block, count, WARPS: gl.constexpr, LAYOUT: gl.constexpr):
    """The numbers of `count` blocks of a row, one for each warp."""
    warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    return gl.load(blocks + table + block + warp, mask=warp < count, other=0)


@gluon.jit
def _request(
    pool, keys, values, stage, number, head, block, length, count,
    NUM_KV: gl.constexpr, HEAD_DIM: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Copy `count` blocks, one for each warp, to a stage of the ring; zeros where there are no known keys."""
    warp = gl.arange(0, keys.shape[1], layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    slot = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    dim = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    first = (number * (BLOCK * 2 * NUM_KV) + head) * HEAD_DIM
    at = pool + first[:, None, None] + (slot * (2 * NUM_KV * HEAD_DIM))[None, :, None] + dim[None, None, :]
    known = gl.minimum(length - 1, (block + count) * BLOCK)  # the new token's key is not there yet
    mask = ((block + warp) * BLOCK)[:, None] + slot[None, :] < known
    mask = mask[:, :, None] & (dim < HEAD_DIM)[None, None, :]
    _copy(keys.index(stage), at, mask=mask)
    _copy(values.index(stage), at + NUM_KV * HEAD_DIM, mask=mask)
    async_copy.commit_group()


@gluon.jit
def _load_head(
    heads, norm, row, head, dim, valid,
    TOTAL: gl.constexpr, HEAD_DIM: gl.constexpr, HAS_NORM: gl.constexpr,
):  # fmt: skip
    """Query or key heads of a row's new token and the weights of their norm, each with that of the other half."""
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
def _turned(x, y, x_weight, y_weight, cos, sin, eps, HEAD_DIM: gl.constexpr, HAS_NORM: gl.constexpr):
    """Such heads normalized and rotated. float32"""
    x = x.to(gl.float32)
    y = y.to(gl.float32)
    if HAS_NORM:
        scale = gl.rsqrt(gl.sum(x * x, axis=1) / HEAD_DIM + eps)[:, None]
        x = x * scale * x_weight.to(gl.float32)
        y = y * scale * y_weight.to(gl.float32)
    return x * cos[None, :] + y * sin[None, :]


@gluon.jit
def _begin(
    heads, cos_sin, norm, pool, slots, queries, row, kv_head, is_end, eps, scale,
    NUM_KV: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, HAS_NORM: gl.constexpr,
    LAYOUT: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """A row's queries of one KV head to shared memory, and the softmax of no keys.

    is_end: the row's new token is among the keys. Its key and value are stored in the pool, and taken in by warp 0.
    All is loaded at once, without a branch: one wait for memory, not three.
    """
    warps: gl.constexpr = queries.shape[0]
    total_heads: gl.constexpr = NUM_KV * (GROUP + 2)
    per_head: gl.constexpr = gl.SliceLayout(1, MMA)
    per_row: gl.constexpr = gl.SliceLayout(2, MMA)
    member = gl.arange(0, NUM_COLUMNS, layout=gl.SliceLayout(1, gl.SliceLayout(0, LAYOUT)))
    dim = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT)))
    acc_dim = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, per_row))
    here = (member < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    new = ((member >= 0)[:, None] & (dim < HEAD_DIM)[None, :]) & is_end
    once = new & (member == 0)[:, None]
    same = member * 0
    x, y, x_weight, y_weight = _load_head(
        heads, norm, row, kv_head * GROUP + member, dim, here, total_heads, HEAD_DIM, HAS_NORM
    )  # fmt: skip
    k_x, k_y, k_x_weight, k_y_weight = _load_head(
        heads, norm, row, NUM_KV * GROUP + kv_head + same, dim, new, total_heads, HEAD_DIM, HAS_NORM
    )  # fmt: skip
    value_at = heads + (row * total_heads + NUM_KV * (GROUP + 1) + kv_head) * HEAD_DIM
    value = gl.load(value_at + same[:, None] + dim[None, :], mask=once, other=0.0)
    acc_value = gl.load(value_at + acc_dim, mask=(acc_dim < HEAD_DIM) & is_end, other=0.0)
    new_slot = gl.load(slots + row)
    angle = cos_sin + row * 2 * HEAD_DIM + dim
    cos = gl.load(angle).to(gl.float32)
    sin = gl.load(angle + HEAD_DIM).to(gl.float32)

    query = _turned(x, y, x_weight, y_weight, cos, sin, eps, HEAD_DIM, HAS_NORM).to(heads.dtype.element_ty)
    copies = gl.arange(0, warps, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None, None]
    queries.store(gl.where(copies >= 0, gl.expand_dims(query, 0), 0.0).to(heads.dtype.element_ty))
    key = _turned(k_x, k_y, k_x_weight, k_y_weight, cos, sin, eps, HEAD_DIM, HAS_NORM).to(pool.dtype.element_ty)
    pool_at = pool + (new_slot * 2 * NUM_KV + kv_head) * HEAD_DIM + same[:, None] + dim[None, :]
    gl.store(pool_at, key, mask=once)
    gl.store(pool_at + NUM_KV * HEAD_DIM, value.to(pool.dtype.element_ty), mask=once)

    score = gl.sum(query.to(gl.float32) * key.to(gl.float32), axis=1) * scale
    score = gl.convert_layout(score, gl.SliceLayout(0, per_head))
    has_new = (gl.arange(0, warps, layout=gl.SliceLayout(1, per_head)) == 0) & is_end
    top = gl.where(has_new[:, None], score[None, :], LOWEST)
    has_new = (gl.arange(0, warps, layout=gl.SliceLayout(1, per_row)) == 0) & is_end
    slot = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, per_row))
    zero = gl.zeros([warps, BLOCK, NUM_COLUMNS], gl.float32, layout=MMA)
    total = gl.where((has_new[:, None] & (slot == 0)[None, :])[:, :, None], 1.0, zero)
    acc = gl.zeros([warps, HEAD_DIM, NUM_COLUMNS], gl.float32, layout=MMA)
    acc = gl.where(has_new[:, None, None], acc_value.to(gl.float32)[None, :, None], acc)
    return top, total, acc


@gluon.jit
def _take_in(
    query, query_2, keys, values, stage, top, total, acc, block, known, scale,
    MMA: gl.constexpr,
):  # fmt: skip
    """Add a stage of the ring to the running softmax of each warp: its block's keys below `known`."""
    warps: gl.constexpr = keys.shape[1]
    warp = gl.arange(0, warps, layout=gl.SliceLayout(1, gl.SliceLayout(2, MMA)))
    slot = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, gl.SliceLayout(2, MMA)))
    seen = ((block + warp) * BLOCK)[:, None] + slot[None, :] < known
    half: gl.constexpr = keys.shape[3] // 2
    zero = gl.zeros([warps, BLOCK, NUM_COLUMNS], gl.float32, layout=MMA)
    k = keys.index(stage).slice(0, half, dim=2).load(gl.DotOperandLayout(0, MMA, 2))
    k_2 = keys.index(stage).slice(half, half, dim=2).load(gl.DotOperandLayout(0, MMA, 2))
    scores = (mma_v2(k, query, zero) + mma_v2(k_2, query_2, zero)) * scale  # two chains take half as long
    scores = gl.where(seen[:, :, None], scores, -float("inf"))
    new_top = gl.maximum(top, gl.max(scores, axis=1))
    fade = gl.exp2(top - new_top)[:, None, :]
    weight = gl.exp2(scores - new_top[:, None, :])
    v = values.index(stage).permute([0, 2, 1]).load(gl.DotOperandLayout(0, MMA, 2))
    part = gl.convert_layout(weight.to(v.dtype), gl.DotOperandLayout(1, MMA, 2))
    return new_top, total * fade + weight, mma_v2(v, part, acc * fade)


@gluon.jit
def _join_parts(
    out, parts, stats, program, split_slot, num_parts,
    GROUP: gl.constexpr, GROUP_2: gl.constexpr, HEAD_DIM: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Add up the parts of one head by several programs."""
    member = gl.arange(0, GROUP_2, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    index = gl.arange(0, PARTS_AT_ONCE, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    dim = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    best = gl.full([GROUP_2], LOWEST, gl.float32, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    whole = gl.zeros([GROUP_2], gl.float32, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    joined = gl.zeros([GROUP_2, HEAD_DIM], gl.float32, layout=gl.SliceLayout(0, LAYOUT))
    for start in range(0, num_parts, PARTS_AT_ONCE):
        part = start + index
        here = (part < num_parts)[:, None] & (member < GROUP)[None, :]
        cell = (program + part) * 2 + gl.where(part == 0, split_slot, 0)
        stat_at = stats + (cell * 2 * GROUP)[:, None] + member[None, :]
        top = gl.load(stat_at, mask=here, other=LOWEST, cache_modifier=".cg")
        total = gl.load(stat_at + GROUP, mask=here, other=0.0, cache_modifier=".cg")
        at = ((cell * GROUP)[:, None] + member[None, :])[:, :, None] * HEAD_DIM + dim[None, None, :]
        value = gl.load(parts + at, mask=here[:, :, None], other=0.0, cache_modifier=".cg")
        new_best = gl.maximum(best, gl.max(top, axis=0))
        weight = gl.exp2(top - new_best[None, :])
        fade = gl.exp2(best - new_best)
        whole = whole * fade + gl.sum(total * weight, axis=0)
        joined = joined * gl.convert_layout(fade, gl.SliceLayout(1, gl.SliceLayout(0, LAYOUT)))[:, None]
        joined += gl.sum(value * weight[:, :, None], axis=0)
        best = new_best
    result = joined / gl.convert_layout(whole, gl.SliceLayout(1, gl.SliceLayout(0, LAYOUT)))[:, None]
    row = gl.arange(0, GROUP_2, layout=gl.SliceLayout(1, gl.SliceLayout(0, LAYOUT)))
    column = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT)))
    mask = (row < GROUP)[:, None] & (column < HEAD_DIM)[None, :]
    gl.store(out + (row * HEAD_DIM)[:, None] + column[None, :], result.to(out.dtype.element_ty), mask=mask)


@gluon.jit
def _finish(
    out, parts, stats, counters, top, total, acc, row, kv_head, first_unit, num_blocks, piece_begin, piece_end, share,
    NUM_KV: gl.constexpr, GROUP: gl.constexpr, GROUP_2: gl.constexpr, HEAD_DIM: gl.constexpr, MMA: gl.constexpr,
    WIDE: gl.constexpr, JOIN: gl.constexpr,
):  # fmt: skip
    """Join the warps. A whole head goes to `out`; a piece is left for the last program to finish one of this head."""
    best = gl.max(top, axis=0)
    fade = gl.exp2(top - best[None, :])
    whole = gl.sum(gl.sum(total, axis=1) * fade, axis=0)
    acc = gl.convert_layout(gl.sum(acc * fade[:, None, :], axis=0), WIDE)
    per_dim: gl.constexpr = gl.SliceLayout(0, WIDE)
    member = gl.arange(0, NUM_COLUMNS, layout=per_dim)
    dim = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(1, WIDE))
    at = (member * HEAD_DIM)[None, :] + dim[:, None]
    mask = (member < GROUP)[None, :] & (dim < HEAD_DIM)[:, None]
    out_at = out + (row * NUM_KV + kv_head) * GROUP * HEAD_DIM
    if (piece_begin == 0) & (piece_end == num_blocks):
        result = acc / gl.convert_layout(whole, per_dim)[None, :]
        gl.store(out_at + at, result.to(out.dtype.element_ty), mask=mask)
    else:
        first_program = first_unit // share
        num_parts = (first_unit + num_blocks - 1) // share - first_program + 1
        split_slot = (first_unit % share != 0).to(gl.int32)  # a program's second place, if it begins within it
        cell = gl.program_id(0) * 2 + gl.where(piece_begin == 0, split_slot, 0)
        gl.store(parts + cell * GROUP * HEAD_DIM + at, acc, mask=mask)
        stat = gl.arange(0, NUM_COLUMNS, layout=gl.SliceLayout(0, gl.SliceLayout(1, MMA)))
        stat_at = stats + cell * 2 * GROUP + stat
        gl.store(stat_at, best, mask=stat < GROUP)
        gl.store(stat_at + GROUP, whole, mask=stat < GROUP)
        _sync()  # every thread's part is written before the count says so
        counter = counters + row * NUM_KV + kv_head
        if gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == num_parts - 1:
            gl.store(counter, 0)  # ready for the next layer
            _join_parts(
                out_at, parts, stats, first_program, split_slot, num_parts, GROUP, GROUP_2, HEAD_DIM, JOIN
            )  # fmt: skip


@gluon.jit(do_not_specialize=["num_rows", "table_stride"])
def stream_decode(
    heads, cos_sin, norm, pool, slots, blocks, rows, lengths, out, parts, stats, counters, eps, scale, table_stride,
    num_rows,
    NUM_KV: gl.constexpr, GROUP: gl.constexpr, GROUP_2: gl.constexpr, HEAD_DIM: gl.constexpr,
    LENGTHS: gl.constexpr, MIN_SHARE: gl.constexpr, NUM_STAGES: gl.constexpr, HAS_NORM: gl.constexpr,
):  # fmt: skip
    """A share of all blocks of all rows' heads. As `decode` of kernels/attention, whose arguments these are.

    LENGTHS: a power of two of at least num_rows and 32. MIN_SHARE: fewest blocks of a program, if there are as many.
    """
    warps: gl.constexpr = gl.num_warps()
    lanes: gl.constexpr = HEAD_DIM // 8  # for a row of 16-byte loads
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [warps, 1, 1], [1, 16, 8])
    copy: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 32 // lanes, lanes], [warps, 1, 1], [2, 1, 0])
    turn: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 32 // lanes, lanes], [1, warps, 1], [2, 1, 0])
    wide: gl.constexpr = gl.BlockedLayout([4, 1], [32, 1], [1, warps], [0, 1])
    group_warps: gl.constexpr = min(GROUP_2, warps)
    join: gl.constexpr = gl.BlockedLayout(
        [PARTS_AT_ONCE, 1, 4], [1, 1, 32], [1, group_warps, warps // group_warps], [2, 1, 0]
    )
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    dtype: gl.constexpr = pool.dtype.element_ty
    keys = gl.allocate_shared_memory(dtype, [NUM_STAGES, warps, BLOCK, HEAD_DIM], swizzled)
    values = gl.allocate_shared_memory(dtype, [NUM_STAGES, warps, BLOCK, HEAD_DIM], swizzled)
    queries = gl.allocate_shared_memory(dtype, [warps, NUM_COLUMNS, HEAD_DIM], swizzled)

    gdc_launch_dependents()
    share, unit, left, row, row_unit = _my_share(lengths, num_rows, LENGTHS, MIN_SHARE, NUM_KV)
    if left > 0:
        length = gl.load(lengths + row).to(gl.int32)
        num_blocks = (length + BLOCK - 1) // BLOCK
        head = (unit - row_unit) // num_blocks
        block = (unit - row_unit) % num_blocks
        next_length = gl.load(lengths + gl.minimum(row + 1, num_rows - 1)).to(gl.int32)
        table = gl.load(rows + row) * table_stride
        # the place of the next request, and the next row's number there
        to_row, to_head, to_block, to_length, to_next_length, to_left = row, head, block, length, next_length, left
        next_number = gl.load(rows + gl.minimum(row + 1, num_rows - 1))
        to_count = gl.minimum(gl.minimum(num_blocks - to_block, to_left), warps)
        number = _look_up(blocks, table, to_block, to_count, warps, copy)
        for stage in gl.static_range(NUM_STAGES - 1):
            _request(
                pool, keys, values, stage, number, to_head, to_block, to_length, to_count, NUM_KV, HEAD_DIM, copy
            )  # fmt: skip
            to_left -= to_count
            was = to_row
            to_row, to_head, to_block, to_length, to_next_length = _next(
                lengths, num_rows, to_row, to_head, to_block, to_length, to_next_length, to_count, NUM_KV
            )  # fmt: skip
            if to_row != was:
                table = next_number * table_stride
                next_number = gl.load(rows + gl.minimum(to_row + 1, num_rows - 1))
            to_count = gl.minimum(gl.minimum((to_length + BLOCK - 1) // BLOCK - to_block, to_left), warps)
            number = _look_up(blocks, table, to_block, to_count, warps, copy)
        gdc_wait()

        stage = 0
        while left > 0:
            num_blocks = (length + BLOCK - 1) // BLOCK
            begin = block
            end = gl.minimum(num_blocks, block + left)
            top, total, acc = _begin(
                heads, cos_sin, norm, pool, slots, queries, row, head, end == num_blocks, eps, scale,
                NUM_KV, GROUP, HEAD_DIM, HAS_NORM, turn, mma,
            )  # fmt: skip
            _sync()
            half: gl.constexpr = HEAD_DIM // 2
            query = queries.slice(0, half, dim=2).permute([0, 2, 1]).load(gl.DotOperandLayout(1, mma, 2))
            query_2 = queries.slice(half, half, dim=2).permute([0, 2, 1]).load(gl.DotOperandLayout(1, mma, 2))
            known = gl.minimum(length - 1, end * BLOCK)
            while block < end:
                async_copy.wait_group(NUM_STAGES - 2)
                _sync()  # all threads' copies are there, and all have read the stage before this one
                _request(
                    pool, keys, values, (stage + NUM_STAGES - 1) % NUM_STAGES, number,
                    to_head, to_block, to_length, to_count, NUM_KV, HEAD_DIM, copy,
                )  # fmt: skip
                to_left -= to_count
                was = to_row
                to_row, to_head, to_block, to_length, to_next_length = _next(
                    lengths, num_rows, to_row, to_head, to_block, to_length, to_next_length, to_count, NUM_KV
                )  # fmt: skip
                if to_row != was:
                    table = next_number * table_stride
                    next_number = gl.load(rows + gl.minimum(to_row + 1, num_rows - 1))
                to_count = gl.minimum(gl.minimum((to_length + BLOCK - 1) // BLOCK - to_block, to_left), warps)
                number = _look_up(blocks, table, to_block, to_count, warps, copy)
                top, total, acc = _take_in(
                    query, query_2, keys, values, stage, top, total, acc, block, known, scale, mma
                )  # fmt: skip
                stage = (stage + 1) % NUM_STAGES
                block += warps
            _finish(
                out, parts, stats, counters, top, total, acc, row, head, unit - begin, num_blocks, begin, end, share,
                NUM_KV, GROUP, GROUP_2, HEAD_DIM, mma, wide, join,
            )  # fmt: skip
            unit += end - begin
            left -= end - begin
            row, head, block, length, next_length = _next(
                lengths, num_rows, row, head, begin, length, next_length, end - begin, NUM_KV
            )  # fmt: skip
