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
TILES = gl.constexpr(32)  # of a chunk
SNAP = gl.constexpr(16)  # shares may grow by one in this many for the sake of whole rows


@gluon.jit
def _plus(a, b):
    return a + b


@gluon.jit
def _my_share(lengths, num_rows, sharer, num_sharers, LENGTHS: gl.constexpr, MIN_SHARE: gl.constexpr):
    """Blocks of a share, the first one of this program's, how many it has, the row of that, and the row's first one."""
    layout: gl.constexpr = gl.BlockedLayout([LENGTHS // 32], [32], [gl.num_warps()], [0])  # each warp has them all
    index = gl.arange(0, LENGTHS, layout=layout)
    length = gl.load(lengths + index, mask=index < num_rows, other=0).to(gl.int32)
    num_blocks = (length + BLOCK - 1) // BLOCK
    end = gl.associative_scan(num_blocks, 0, _plus)
    num_units = gl.max(end, axis=0)
    longest = gl.max(num_blocks, axis=0)
    share = gl.maximum((num_units + num_sharers - 1) // num_sharers, MIN_SHARE)
    whole = (share + longest - 1) // longest * longest
    share = gl.where(whole * SNAP <= share * (SNAP + 1), whole, share)  # rows of one length need no join then
    unit = sharer * share
    before = end <= unit
    row = gl.sum(before.to(gl.int32), axis=0)
    return share, unit, gl.minimum(num_units - unit, share), row, gl.max(gl.where(before, end, 0), axis=0)


@gluon.jit
def _next(lengths, num_rows, row, block, length, next_length, count):
    """The place `count` blocks on, within a row or at the begin of the next one. A length is loaded a row ahead."""
    block += count
    if block * BLOCK >= length:
        block = 0
        row += 1
        length = next_length
        next_length = gl.load(lengths + gl.minimum(row + 1, num_rows - 1)).to(gl.int32)
    return row, block, length, next_length


@gluon.jit
def _look_up(
    blocks, lengths, rows, num_rows, table_stride, row, block, left, length, table, next_length, next_number,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """The next chunk from `block` on, which is a row's end or within it: its place, and the numbers of its blocks.

    A chunk has a tile for each lane of a warp. What it needs of a row is loaded a row ahead.
    """
    if block * BLOCK >= length:
        block = 0
        row += 1
        length = next_length
        table = next_number * table_stride
        next_length = gl.load(lengths + gl.minimum(row + 1, num_rows - 1)).to(gl.int32)
        next_number = gl.load(rows + gl.minimum(row + 1, num_rows - 1))
    warps: gl.constexpr = gl.num_warps()
    end = gl.minimum(gl.minimum((length + BLOCK - 1) // BLOCK, block + left), block + TILES * warps)
    warp = gl.arange(0, warps, layout=gl.SliceLayout(1, LAYOUT))
    tile = gl.arange(0, TILES, layout=gl.SliceLayout(0, LAYOUT))
    place = block + warp[:, None] + (tile * warps)[None, :]
    numbers = gl.load(blocks + table + place, mask=place < end, other=0).to(gl.int32)
    return row, block, end, left - (end - block), length, table, next_length, next_number, numbers


@gluon.jit
def _request(
    pool, keys, values, stage, numbers, tile, head, block, end, length,
    NUM_KV: gl.constexpr, HEAD_DIM: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Copy a tile of a chunk, a block for each warp, to a stage of the ring; zeros where there are no known keys."""
    warps: gl.constexpr = keys.shape[1]
    per_warp: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))
    warp = gl.arange(0, warps, layout=per_warp)
    slot = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    dim = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    which = gl.full([warps, 1], 0, gl.int32, layout=numbers.type.layout) + tile
    number = gl.convert_layout(gl.sum(gl.gather(numbers, which, axis=1), axis=1), per_warp).to(gl.int64)
    first = (number * (BLOCK * 2 * NUM_KV) + head) * HEAD_DIM
    at = pool + first[:, None, None] + (slot * (2 * NUM_KV * HEAD_DIM))[None, :, None] + dim[None, None, :]
    known = gl.minimum(length - 1, end * BLOCK)  # the new token's key is not there yet
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
def _load_new(
    heads, cos_sin, norm, slots, row, kv_head, is_end,
    NUM_KV: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, HAS_NORM: gl.constexpr,
    LAYOUT: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """All that `_begin` takes of a row's new token, in one wait for memory. is_end: with its key and value."""
    total_heads: gl.constexpr = NUM_KV * (GROUP + 2)
    member = gl.arange(0, NUM_COLUMNS, layout=gl.SliceLayout(1, gl.SliceLayout(0, LAYOUT)))
    dim = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT)))
    acc_dim = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, gl.SliceLayout(2, MMA)))
    here = (member < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    new = ((member >= 0)[:, None] & (dim < HEAD_DIM)[None, :]) & is_end
    same = member * 0
    x, y, x_weight, y_weight = _load_head(
        heads, norm, row, kv_head * GROUP + member, dim, here, total_heads, HEAD_DIM, HAS_NORM
    )  # fmt: skip
    k_x, k_y, k_x_weight, k_y_weight = _load_head(
        heads, norm, row, NUM_KV * GROUP + kv_head + same, dim, new, total_heads, HEAD_DIM, HAS_NORM
    )  # fmt: skip
    value_at = heads + (row * total_heads + NUM_KV * (GROUP + 1) + kv_head) * HEAD_DIM
    value = gl.load(value_at + same[:, None] + dim[None, :], mask=new & (member == 0)[:, None], other=0.0)
    acc_value = gl.load(value_at + acc_dim, mask=(acc_dim < HEAD_DIM) & is_end, other=0.0)
    angle = cos_sin + row * 2 * HEAD_DIM + dim
    cos = gl.load(angle)
    sin = gl.load(angle + HEAD_DIM)
    slot = gl.load(slots + row)
    return x, y, x_weight, y_weight, k_x, k_y, k_x_weight, k_y_weight, value, acc_value, cos, sin, slot


@gluon.jit
def _begin(
    x, y, x_weight, y_weight, k_x, k_y, k_x_weight, k_y_weight, value, acc_value, cos, sin, new_slot,
    pool, queries, kv_head, is_end, eps, scale,
    NUM_KV: gl.constexpr, HEAD_DIM: gl.constexpr, HAS_NORM: gl.constexpr, LAYOUT: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """A row's queries of one KV head to shared memory, and the softmax of no keys.

    is_end: the row's new token is among the keys. Its key and value are stored in the pool, and taken in by warp 0.
    """
    warps: gl.constexpr = queries.shape[0]
    per_head: gl.constexpr = gl.SliceLayout(1, MMA)
    per_row: gl.constexpr = gl.SliceLayout(2, MMA)
    member = gl.arange(0, NUM_COLUMNS, layout=gl.SliceLayout(1, gl.SliceLayout(0, LAYOUT)))
    dim = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT)))
    once = ((member == 0)[:, None] & (dim < HEAD_DIM)[None, :]) & is_end
    cos = cos.to(gl.float32)
    sin = sin.to(gl.float32)
    query = _turned(x, y, x_weight, y_weight, cos, sin, eps, HEAD_DIM, HAS_NORM).to(pool.dtype.element_ty)
    copies = gl.arange(0, warps, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None, None]
    queries.store(gl.where(copies >= 0, gl.expand_dims(query, 0), 0.0).to(pool.dtype.element_ty))
    key = _turned(k_x, k_y, k_x_weight, k_y_weight, cos, sin, eps, HEAD_DIM, HAS_NORM).to(pool.dtype.element_ty)
    pool_at = pool + (new_slot * 2 * NUM_KV + kv_head) * HEAD_DIM + (member * 0)[:, None] + dim[None, :]
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
    out, parts, stats, first_sharer, kv_head, split_slot, num_parts,
    NUM_KV: gl.constexpr, GROUP: gl.constexpr, GROUP_2: gl.constexpr, HEAD_DIM: gl.constexpr, LAYOUT: gl.constexpr,
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
        cell = ((first_sharer + part) * NUM_KV + kv_head) * 2 + gl.where(part == 0, split_slot, 0)
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
    out, parts, stats, counters, values, sums, top, total, acc, row, kv_head, first_unit, num_blocks, piece_begin, piece_end, share,
    NUM_KV: gl.constexpr, GROUP: gl.constexpr, GROUP_2: gl.constexpr, HEAD_DIM: gl.constexpr,
    WIDE: gl.constexpr, JOIN: gl.constexpr,
):  # fmt: skip
    """Join the warps. A whole head goes to `out`; a piece is left for the last program to finish one of this head."""
    sums.index(0).store(top)
    sums.index(1).store(gl.sum(total, axis=1))
    values.store(acc)
    _sync()
    per_warp: gl.constexpr = gl.SliceLayout(1, WIDE)
    top = sums.index(0).load(per_warp)
    best = gl.max(top, axis=0)
    weight = gl.exp2(top - best[None, :])
    whole = gl.sum(sums.index(1).load(per_warp) * weight, axis=0)
    acc = gl.sum(values.load(WIDE) * weight[:, None, :], axis=0)
    whole_2 = gl.convert_layout(whole, gl.SliceLayout(0, gl.SliceLayout(0, WIDE)))
    member = gl.arange(0, NUM_COLUMNS, layout=gl.SliceLayout(0, gl.SliceLayout(0, WIDE)))
    dim = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(1, gl.SliceLayout(0, WIDE)))
    at = (member * HEAD_DIM)[None, :] + dim[:, None]
    mask = (member < GROUP)[None, :] & (dim < HEAD_DIM)[:, None]
    out_at = out + (row * NUM_KV + kv_head) * GROUP * HEAD_DIM
    if (piece_begin == 0) & (piece_end == num_blocks):
        result = acc / whole_2[None, :]
        gl.store(out_at + at, result.to(out.dtype.element_ty), mask=mask)
    else:
        first_sharer = first_unit // share
        num_parts = (first_unit + num_blocks - 1) // share - first_sharer + 1
        split_slot = (first_unit % share != 0).to(gl.int32)  # a program's second place, if it begins within it
        cell = gl.program_id(0) * 2 + gl.where(piece_begin == 0, split_slot, 0)
        gl.store(parts + cell * GROUP * HEAD_DIM + at, acc, mask=mask)
        stat = gl.arange(0, NUM_COLUMNS, layout=gl.SliceLayout(0, per_warp))
        stat_at = stats + cell * 2 * GROUP + stat
        gl.store(stat_at, best, mask=stat < GROUP)
        gl.store(stat_at + GROUP, whole, mask=stat < GROUP)
        _sync()  # every thread's part is written before the count says so
        counter = counters + row * NUM_KV + kv_head
        if gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == num_parts - 1:
            gl.store(counter, 0)  # ready for the next layer
            _join_parts(
                out_at, parts, stats, first_sharer, kv_head, split_slot, num_parts,
                NUM_KV, GROUP, GROUP_2, HEAD_DIM, JOIN,
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
    chunk: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [warps, 1], [1, 0])
    wide: gl.constexpr = gl.BlockedLayout([warps, 1, 8], [1, 32, 1], [1, warps, 1], [2, 1, 0])
    group_warps: gl.constexpr = min(GROUP_2, warps)
    join: gl.constexpr = gl.BlockedLayout(
        [PARTS_AT_ONCE, 1, 4], [1, 1, 32], [1, group_warps, warps // group_warps], [2, 1, 0]
    )
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    dtype: gl.constexpr = pool.dtype.element_ty
    keys = gl.allocate_shared_memory(dtype, [NUM_STAGES, warps, BLOCK, HEAD_DIM], swizzled)
    values = gl.allocate_shared_memory(dtype, [NUM_STAGES, warps, BLOCK, HEAD_DIM], swizzled)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    joins = gl.allocate_shared_memory(gl.float32, [warps, HEAD_DIM, NUM_COLUMNS], plain)
    sums = gl.allocate_shared_memory(gl.float32, [2, warps, NUM_COLUMNS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    queries = gl.allocate_shared_memory(dtype, [warps, NUM_COLUMNS, HEAD_DIM], swizzled)

    gdc_launch_dependents()
    head = gl.program_id(0) % NUM_KV  # side by side: they read the same tokens at the same time
    share, unit, left, row, row_unit = _my_share(
        lengths, num_rows, gl.program_id(0) // NUM_KV, gl.num_programs(0) // NUM_KV, LENGTHS, MIN_SHARE
    )  # fmt: skip
    if left > 0:
        length = gl.load(lengths + row).to(gl.int32)
        next_length = gl.load(lengths + gl.minimum(row + 1, num_rows - 1)).to(gl.int32)
        table = gl.load(rows + row) * table_stride
        next_number = gl.load(rows + gl.minimum(row + 1, num_rows - 1))
        block = unit - row_unit
        # requests run ahead by the ring, their blocks are looked up a chunk ahead of them
        far_row, to_block, to_end, far_left, to_length, table, beyond_length, beyond_number, numbers = _look_up(
            blocks, lengths, rows, num_rows, table_stride, row, block, left, length, table,
            next_length, next_number, chunk,
        )  # fmt: skip
        far_row, next_block, next_end, far_left, far_length, table, beyond_length, beyond_number, next_numbers = _look_up(
            blocks, lengths, rows, num_rows, table_stride, far_row, to_end, far_left, to_length, table,
            beyond_length, beyond_number, chunk,
        )  # fmt: skip
        tile = 0
        for stage in gl.static_range(NUM_STAGES - 1):
            _request(
                pool, keys, values, stage, numbers, tile, head, to_block, to_end, to_length, NUM_KV, HEAD_DIM, copy
            )  # fmt: skip
            to_block += warps
            tile += 1
            if to_block >= to_end:
                to_block, to_end, to_length, numbers, tile = next_block, next_end, far_length, next_numbers, 0
                far_row, next_block, next_end, far_left, far_length, table, beyond_length, beyond_number, next_numbers = _look_up(
                    blocks, lengths, rows, num_rows, table_stride, far_row, next_end, far_left, far_length, table,
                    beyond_length, beyond_number, chunk,
                )  # fmt: skip
        gdc_wait()

        stage = 0
        is_end = block + left >= (length + BLOCK - 1) // BLOCK
        x, y, x_weight, y_weight, k_x, k_y, k_x_weight, k_y_weight, value, acc_value, cos, sin, slot = _load_new(
            heads, cos_sin, norm, slots, row, head, is_end, NUM_KV, GROUP, HEAD_DIM, HAS_NORM, turn, mma
        )  # fmt: skip
        while left > 0:
            num_blocks = (length + BLOCK - 1) // BLOCK
            begin = block
            end = gl.minimum(num_blocks, block + left)
            top, total, acc = _begin(
                x, y, x_weight, y_weight, k_x, k_y, k_x_weight, k_y_weight, value, acc_value, cos, sin, slot,
                pool, queries, head, is_end, eps, scale, NUM_KV, HEAD_DIM, HAS_NORM, turn, mma,
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
                    pool, keys, values, (stage + NUM_STAGES - 1) % NUM_STAGES, numbers, tile,
                    head, to_block, to_end, to_length, NUM_KV, HEAD_DIM, copy,
                )  # fmt: skip
                to_block += warps
                tile += 1
                if to_block >= to_end:
                    to_block, to_end, to_length, numbers, tile = next_block, next_end, far_length, next_numbers, 0
                    far_row, next_block, next_end, far_left, far_length, table, beyond_length, beyond_number, next_numbers = _look_up(
                        blocks, lengths, rows, num_rows, table_stride, far_row, next_end, far_left, far_length, table,
                        beyond_length, beyond_number, chunk,
                    )  # fmt: skip
                top, total, acc = _take_in(
                    query, query_2, keys, values, stage, top, total, acc, block, known, scale, mma
                )  # fmt: skip
                stage = (stage + 1) % NUM_STAGES
                block += warps
            is_end = left - (end - begin) >= (next_length + BLOCK - 1) // BLOCK
            x, y, x_weight, y_weight, k_x, k_y, k_x_weight, k_y_weight, value, acc_value, cos, sin, slot = _load_new(
                heads, cos_sin, norm, slots, gl.minimum(row + 1, num_rows - 1), head, is_end,
                NUM_KV, GROUP, HEAD_DIM, HAS_NORM, turn, mma,
            )  # fmt: skip
            _finish(
                out, parts, stats, counters, joins, sums, top, total, acc, row, head, unit - begin, num_blocks, begin, end, share,
                NUM_KV, GROUP, GROUP_2, HEAD_DIM, wide, join,
            )  # fmt: skip
            unit += end - begin
            left -= end - begin
            row, block, length, next_length = _next(
                lengths, num_rows, row, begin, length, next_length, end - begin
            )  # fmt: skip
