"""Decode attention in Gluon for Hopper: programs that stay on their core and read keys and values without gaps.

The keys of all rows are one list of blocks for each KV head, cut into equal shares, one for each program. A program
copies its blocks into a ring in shared memory several tiles ahead, across the borders of rows, and begins before the
kernel before has ended (kernels/launch): it waits only for the new tokens' queries, keys and values.
A tile has a block for each warp. Each keeps a softmax of its own; they are joined where a row ends.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from gapless.kernels.stream_ends import (
    BLOCK,
    BLOCK_SIZE,
    MAX_GROUP,
    NUM_COLUMNS,
    PARTS_AT_ONCE,
    begin,
    finish,
    first_block,
    load_new,
    operand_type,
    soft_capped,
    sync,
)

__all__ = ["BLOCK_SIZE", "MAX_GROUP", "stream_decode"]

_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

TILES = gl.constexpr(32)  # of a chunk: one for each lane, which holds the numbers of its blocks
SNAP = gl.constexpr(16)  # shares may grow by one in this many for the sake of whole rows


@gluon.jit
def _plus(a, b):
    return a + b


@gluon.jit
def _my_share(
    lengths, num_rows, sharer, num_sharers, LENGTHS: gl.constexpr, MIN_SHARE: gl.constexpr, WINDOW: gl.constexpr
):  # fmt: skip
    """Blocks of a share; this program's first one, and how many it has; the row of that, and the row's first one."""
    layout: gl.constexpr = gl.BlockedLayout([LENGTHS // 32], [32], [gl.num_warps()], [0])  # each warp has them all
    index = gl.arange(0, LENGTHS, layout=layout)
    length = gl.load(lengths + index, mask=index < num_rows, other=0).to(gl.int32)
    num_blocks = (length + BLOCK - 1) // BLOCK - first_block(length, WINDOW)
    end = gl.associative_scan(num_blocks, 0, _plus)
    num_units = gl.max(end, axis=0)
    longest = gl.maximum(gl.max(num_blocks, axis=0), 1)  # beside chunks alone there are no rows
    share = gl.maximum((num_units + num_sharers - 1) // num_sharers, MIN_SHARE)
    whole = (share + longest - 1) // longest * longest
    share = gl.where(whole * SNAP <= share * (SNAP + 1), whole, share)  # rows of one length need no join then
    unit = sharer * share
    before = end <= unit
    row = gl.sum(before.to(gl.int32), axis=0)
    return share, unit, gl.minimum(num_units - unit, share), row, gl.max(gl.where(before, end, 0), axis=0)


@gluon.jit
def _look_up(
    blocks, lengths, rows, num_rows, table_stride, place, WINDOW: gl.constexpr, LAYOUT: gl.constexpr
):  # fmt: skip
    """The chunk after a place: where it lies, and the numbers of its blocks, a tile for each lane of a warp.

    A place is a row, a block of it or its end, blocks left in the share, the row's length and the start of its block
    table, and the next row's length and number, which are loaded a row ahead.
    """
    row, block, left, length, table, next_length, next_number = place
    if block * BLOCK >= length:
        row += 1
        length = next_length
        block = first_block(length, WINDOW)
        table = next_number * table_stride
        next_length = gl.load(lengths + gl.minimum(row + 1, num_rows - 1)).to(gl.int32)
        next_number = gl.load(rows + gl.minimum(row + 1, num_rows - 1))
    warps: gl.constexpr = gl.num_warps()
    end = gl.minimum(gl.minimum((length + BLOCK - 1) // BLOCK, block + left), block + TILES * warps)
    warp = gl.arange(0, warps, layout=gl.SliceLayout(1, LAYOUT))
    tile = gl.arange(0, TILES, layout=gl.SliceLayout(0, LAYOUT))
    index = block + warp[:, None] + (tile * warps)[None, :]
    numbers = gl.load(blocks + table + index, mask=index < end, other=0).to(gl.int32)
    return (block, end, length, numbers), (row, end, left - (end - block), length, table, next_length, next_number)


@gluon.jit
def _request(
    pool, keys, values, stage, chunk, tile, head,
    NUM_KV: gl.constexpr, HEAD_DIM: gl.constexpr, WINDOW: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Copy a tile of a chunk, a block for each warp, to a stage of the ring; zeros where there are no known keys."""
    block, end, length, numbers = chunk
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
    spot = ((block + tile * warps + warp) * BLOCK)[:, None] + slot[None, :]
    mask = spot < known
    if WINDOW > 0:
        mask = mask & (spot >= length - WINDOW)
    mask = mask[:, :, None] & (dim < HEAD_DIM)[None, None, :]
    _copy(keys.index(stage), at, mask=mask)
    _copy(values.index(stage), at + NUM_KV * HEAD_DIM, mask=mask)
    async_copy.commit_group()


@gluon.constexpr_function
def _width(pool_type):
    """Neighbours along the inner dimension that a thread holds: those of a register of the pool's numbers."""
    return 32 // pool_type.primitive_bitwidth


@gluon.constexpr_function
def _ring_layout(row_bytes, pool_type):
    """Rows of keys or values in shared memory, in pieces of 16 bytes that eight rows have in different banks."""
    pieces = row_bytes // 16
    vector = 128 // pool_type.primitive_bitwidth
    return gl.SwizzledSharedLayout(vector, max(8 // pieces, 1), min(8, pieces), [2, 1, 0])


@gluon.jit
def _load_query(queries, WIDTH: gl.constexpr, MMA: gl.constexpr):
    """The two halves of the queries, from shared memory, as the matrix units take them."""
    half: gl.constexpr = queries.shape[2] // 2
    layout: gl.constexpr = gl.DotOperandLayout(1, MMA, WIDTH)
    low = queries.slice(0, half, dim=2).permute([0, 2, 1]).load(layout)
    return low, queries.slice(half, half, dim=2).permute([0, 2, 1]).load(layout)


@gluon.jit
def _take_in(
    query, keys, values, stage, softmax, block, known, floor, scale,
    WINDOW: gl.constexpr, SOFT_CAP: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """Add a stage of the ring to the running softmax of each warp: its block's keys below `known`.

    With a window, those from `floor` on.
    """
    top, total, acc = softmax
    warps: gl.constexpr = keys.shape[1]
    half: gl.constexpr = keys.shape[3] // 2
    warp = gl.arange(0, warps, layout=gl.SliceLayout(1, gl.SliceLayout(2, MMA)))
    slot = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, gl.SliceLayout(2, MMA)))
    spot = ((block + warp) * BLOCK)[:, None] + slot[None, :]
    seen = spot < known
    if WINDOW > 0:
        seen = seen & (spot >= floor)
    zero = gl.zeros([warps, BLOCK, NUM_COLUMNS], gl.float32, layout=MMA)
    width: gl.constexpr = _width(keys.dtype)
    wide: gl.constexpr = operand_type(keys.dtype)
    low = keys.index(stage).slice(0, half, dim=2).load(gl.DotOperandLayout(0, MMA, width)).to(wide)
    high = keys.index(stage).slice(half, half, dim=2).load(gl.DotOperandLayout(0, MMA, width)).to(wide)
    scores = (mma_v2(low, query[0], zero) + mma_v2(high, query[1], zero)) * scale  # two chains take half as long
    scores = soft_capped(scores, SOFT_CAP)
    scores = gl.where(seen[:, :, None], scores, -float("inf"))
    new_top = gl.maximum(top, gl.max(scores, axis=1))
    fade = gl.exp2(top - new_top)[:, None, :]
    weight = gl.exp2(scores - new_top[:, None, :])
    v = values.index(stage).permute([0, 2, 1]).load(gl.DotOperandLayout(0, MMA, 2)).to(wide)
    part = gl.convert_layout(weight.to(v.dtype), gl.DotOperandLayout(1, MMA, 2))
    return new_top, total * fade + weight, mma_v2(v, part, acc * fade)


@gluon.jit(do_not_specialize=["num_rows", "table_stride"])  # else some sizes are compiled for in the middle of work
def stream_decode(
    heads, cos_sin, norm, sinks, pool, slots, blocks, rows, lengths, out, parts, stats, counters, eps, scale,
    k_unit, v_unit, table_stride, num_rows,
    NUM_KV: gl.constexpr, GROUP: gl.constexpr, GROUP_2: gl.constexpr, HEAD_DIM: gl.constexpr,
    LENGTHS: gl.constexpr, MIN_SHARE: gl.constexpr, NUM_STAGES: gl.constexpr, HAS_NORM: gl.constexpr,
    WINDOW: gl.constexpr, SOFT_CAP: gl.constexpr, HAS_SINKS: gl.constexpr,
):  # fmt: skip
    """One KV head and a share of all rows' blocks. As `decode` of kernels/attention, whose arguments these are.

    LENGTHS: a power of two of at least num_rows and 32. MIN_SHARE: fewest blocks of a share, if there are as many.
    """
    warps: gl.constexpr = gl.num_warps()
    dtype: gl.constexpr = pool.dtype.element_ty
    wide_type: gl.constexpr = operand_type(dtype)
    lanes: gl.constexpr = HEAD_DIM // 8  # for a row of 16-byte loads of a new token
    piece: gl.constexpr = 128 // dtype.primitive_bitwidth  # numbers of 16 bytes of the pool
    row_lanes: gl.constexpr = HEAD_DIM // piece
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [warps, 1, 1], [1, 16, 8])
    copy: gl.constexpr = gl.BlockedLayout([1, 1, piece], [1, 32 // row_lanes, row_lanes], [warps, 1, 1], [2, 1, 0])
    turn: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 32 // lanes, lanes], [1, warps, 1], [2, 1, 0])
    numbered: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [warps, 1], [1, 0])
    wide: gl.constexpr = gl.BlockedLayout([warps, 1, 8], [1, 32, 1], [1, warps, 1], [2, 1, 0])
    group_warps: gl.constexpr = min(GROUP_2, warps)
    join_warps: gl.constexpr = [1, group_warps, warps // group_warps]
    join: gl.constexpr = gl.BlockedLayout([PARTS_AT_ONCE, 1, 4], [1, 1, 32], join_warps, [2, 1, 0])
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    plain_2: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    in_ring: gl.constexpr = _ring_layout(HEAD_DIM * 16 // piece, dtype)
    keys = gl.allocate_shared_memory(dtype, [NUM_STAGES, warps, BLOCK, HEAD_DIM], in_ring)
    values = gl.allocate_shared_memory(dtype, [NUM_STAGES, warps, BLOCK, HEAD_DIM], in_ring)
    queries = gl.allocate_shared_memory(wide_type, [warps, NUM_COLUMNS, HEAD_DIM], swizzled)
    joins = gl.allocate_shared_memory(gl.float32, [warps, HEAD_DIM, NUM_COLUMNS], plain)
    sums = gl.allocate_shared_memory(gl.float32, [2, warps, NUM_COLUMNS], plain_2)

    gdc_launch_dependents()
    head = gl.program_id(0) % NUM_KV  # programs side by side read the same tokens at the same time
    share, unit, left, row, row_unit = _my_share(  # lengths, rows and blocks are known since the step began
        lengths, num_rows, gl.program_id(0) // NUM_KV, gl.num_programs(0) // NUM_KV, LENGTHS, MIN_SHARE, WINDOW
    )
    if left > 0:
        length = gl.load(lengths + row).to(gl.int32)
        next_length = gl.load(lengths + gl.minimum(row + 1, num_rows - 1)).to(gl.int32)
        next_number = gl.load(rows + gl.minimum(row + 1, num_rows - 1))
        block = unit - row_unit + first_block(length, WINDOW)
        # requests run ahead by the ring, and their blocks are looked up a chunk ahead of that
        place = (row, block, left, length, gl.load(rows + row) * table_stride, next_length, next_number)
        chunk, place = _look_up(blocks, lengths, rows, num_rows, table_stride, place, WINDOW, numbered)
        next_chunk, place = _look_up(blocks, lengths, rows, num_rows, table_stride, place, WINDOW, numbered)
        tile = 0
        for stage in gl.static_range(NUM_STAGES - 1):
            _request(pool, keys, values, stage, chunk, tile, head, NUM_KV, HEAD_DIM, WINDOW, copy)
            tile += 1
            if chunk[0] + tile * warps >= chunk[1]:
                chunk = next_chunk
                tile = 0
                next_chunk, place = _look_up(blocks, lengths, rows, num_rows, table_stride, place, WINDOW, numbered)
        gdc_wait()

        stage = 0
        has_new = block + left >= (length + BLOCK - 1) // BLOCK
        new = load_new(
            heads, cos_sin, norm, sinks, slots, row, head, has_new,
            NUM_KV, GROUP, HEAD_DIM, HAS_NORM, HAS_SINKS, turn, mma,
        )  # fmt: skip
        while left > 0:
            num_blocks = (length + BLOCK - 1) // BLOCK
            first = block
            last = gl.minimum(num_blocks, block + left)
            softmax = begin(
                new, pool, queries, head, has_new, eps, scale, k_unit, v_unit,
                NUM_KV, HEAD_DIM, HAS_NORM, SOFT_CAP, HAS_SINKS, turn, mma,
            )  # fmt: skip
            sync()
            query = _load_query(queries, _width(dtype), mma)
            known = gl.minimum(length - 1, last * BLOCK)
            while block < last:
                async_copy.wait_group(NUM_STAGES - 2)
                sync()  # all threads' copies are there, and all have read the stage before this one
                free = (stage + NUM_STAGES - 1) % NUM_STAGES
                _request(pool, keys, values, free, chunk, tile, head, NUM_KV, HEAD_DIM, WINDOW, copy)
                tile += 1
                if chunk[0] + tile * warps >= chunk[1]:
                    chunk = next_chunk
                    tile = 0
                    next_chunk, place = _look_up(blocks, lengths, rows, num_rows, table_stride, place, WINDOW, numbered)
                softmax = _take_in(
                    query, keys, values, stage, softmax, block, known, length - WINDOW, scale, WINDOW, SOFT_CAP, mma
                )  # fmt: skip
                stage = (stage + 1) % NUM_STAGES
                block += warps
            left -= last - first
            next_block = first_block(next_length, WINDOW)
            has_new = left >= (next_length + BLOCK - 1) // BLOCK - next_block  # the next row's: loaded meanwhile
            new = load_new(
                heads, cos_sin, norm, sinks, slots, gl.minimum(row + 1, num_rows - 1), head, has_new,
                NUM_KV, GROUP, HEAD_DIM, HAS_NORM, HAS_SINKS, turn, mma,
            )  # fmt: skip
            unseen = first_block(length, WINDOW)
            finish(
                out, parts, stats, counters, joins, sums, softmax, row, head, unit - (first - unseen),
                num_blocks - unseen, first - unseen, last - unseen, share, v_unit,
                NUM_KV, GROUP, GROUP_2, HEAD_DIM, dtype, wide, join,
            )  # fmt: skip
            unit += last - first
            row += 1
            block = next_block
            length = next_length
            next_length = gl.load(lengths + gl.minimum(row + 1, num_rows - 1)).to(gl.int32)
    else:
        gdc_wait()  # that this kernel is over must mean that the one before it is
