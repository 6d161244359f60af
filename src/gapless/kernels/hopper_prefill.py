"""Attention of chunks in Gluon, for Hopper: the kernel, and the sizes that it is launched with.

Two warps request blocks of keys and of values from the copy engine, into rings in shared memory. Two groups of four
warps each take one half of a work item through the matrix units. The scores of the next keys are under way while the
softmax of the present ones is computed. Programs stay, and take one work item after the other.
Gluon is Triton's language for layouts and copies by hand; it has no interpreter, and some names changed since 3.6.

A ring is a tuple: its tiles, and for each tile two barriers that say when it is full and when it is free.
Options are those of kernels/attention. A window is no shorter than a block.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_wait

from gapless.kernels.chunk_tiles import SIZE
from gapless.kernels.launch import HOPPER, generation
from gapless.kernels.score_options import ScoreOptions
from gapless.kernels.stream_ends import LOG2_E, soft_capped

_sync = getattr(gl, "barrier", None) or gl.thread_barrier
_copy_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared

HALF = gl.constexpr(64)  # rows of a work item that one group of warps takes: tokens of one head
DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
KEYS = {64: 128, 128: 128, 256: 64}  # of a tile, for each size of heads
STAGES = 2  # of each ring
NEVER = gl.constexpr(2**31 - 1)  # a position behind all others


@gluon.jit
def _number(turn):
    """The item that this program takes in a turn. Items become smaller, so every other turn is in reverse order."""
    num_programs = gl.num_programs(0)
    program = gl.program_id(0)
    return turn * num_programs + gl.where(turn % 2 == 0, program, num_programs - 1 - program)


@gluon.jit
def _record(tiles, number, HEADS_A_ITEM: gl.constexpr, NUM_HEADS: gl.constexpr):
    """Of a work item: the record of its tile (see chunk_tiles), and its first head."""
    items_a_tile: gl.constexpr = NUM_HEADS // HEADS_A_ITEM
    return tiles + (1 + number // items_a_tile) * SIZE, number % items_a_tile * HEADS_A_ITEM


@gluon.jit
def _item(tiles, number, is_there, HEADS_A_ITEM: gl.constexpr, NUM_HEADS: gl.constexpr):
    """Of a work item: its first token, in the batch and in the row, the row's length, and the first head."""
    record, head = _record(tiles, number, HEADS_A_ITEM, NUM_HEADS)
    token = gl.load(record + 1, mask=is_there, other=0)
    first = gl.load(record + 2, mask=is_there, other=0)
    end = gl.load(record + 3, mask=is_there, other=0)
    return token, first, end, head


@gluon.jit
def _row(tiles, number, is_there, HEADS_A_ITEM: gl.constexpr, NUM_HEADS: gl.constexpr):
    """The row of a work item."""
    record, _ = _record(tiles, number, HEADS_A_ITEM, NUM_HEADS)
    return gl.load(record, mask=is_there, other=0)


@gluon.jit
def _floor(first, WINDOW: gl.constexpr):
    """Where the window of an item's first token begins."""
    if WINDOW > 0:
        floor = gl.maximum(first + 1 - WINDOW, 0)
    else:
        floor = 0
    return floor


@gluon.jit
def _fetch(
    pool, table, ring, count, begin, end, floor, column,
    BLOCK_N: gl.constexpr, BOX: gl.constexpr, STAGES: gl.constexpr, HEAD_DIM: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Request a tile of keys or values, block by block.

    What lies behind the row's end could be anything, NaN too. The copy engine writes zeros for what is outside of a
    block. So a block that reaches behind the end is moved by that: a gap of zeros, then the row's last tokens. A block
    that ends before the window is all zeros in the same way.
    """
    tiles, full, free = ring
    stage = count % STAGES
    bar = full.index(stage)
    mbarrier.wait(free.index(stage), (count // STAGES & 1) ^ 1)
    mbarrier.expect(bar, BLOCK_N * HEAD_DIM * 2)
    tile = tiles.index(stage)
    for i in gl.static_range(BLOCK_N // BOX):
        place = begin + i * BOX
        is_seen = place < end
        missing = gl.minimum(gl.maximum(place + BOX - end, 0), BOX)
        if WINDOW > 0:
            is_seen = is_seen & (place + BOX > floor)
            missing = gl.where(is_seen, missing, BOX)
        block = gl.load(table + place // BOX, mask=is_seen, other=0).to(gl.int32)
        _copy_tile(pool, [block, -missing, column], bar, tile.slice(i * BOX, BOX))


@gluon.jit
def _produce(
    q, pool, blocks, tiles, table_stride, queries, ring,
    VALUES: gl.constexpr, NUM_HEADS: gl.constexpr, NUM_KV: gl.constexpr, HEAD_DIM: gl.constexpr,
    HEADS_A_ITEM: gl.constexpr, BLOCK_N: gl.constexpr, BOX: gl.constexpr, STAGES: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Request what the work items need, in the order in which they need it: keys, or queries and values."""
    tokens: gl.constexpr = 2 * HALF // HEADS_A_ITEM
    q_tiles, q_full, q_free = queries
    count = 0
    turn = 0
    number = _number(turn)
    token, first, end, head = _item(tiles, number, True, HEADS_A_ITEM, NUM_HEADS)
    row = _row(tiles, number, True, HEADS_A_ITEM, NUM_HEADS)
    num_items = gl.load(tiles) * (NUM_HEADS // HEADS_A_ITEM)
    gdc_wait()  # all that came before is written from here on; the table of tiles has been since the step began
    while number < num_items:
        table = blocks + row.to(gl.int64) * table_stride
        column = head // (NUM_HEADS // NUM_KV) * HEAD_DIM
        if VALUES:
            column += NUM_KV * HEAD_DIM
            for i in gl.static_range(2):
                mbarrier.wait(q_free.index(i), turn & 1 ^ 1)
                mbarrier.expect(q_full.index(i), HALF * HEAD_DIM * 2)
                if HEADS_A_ITEM == 2:
                    _copy_tile(q, [token, (head + i) * HEAD_DIM], q_full.index(i), q_tiles.index(i))
                else:
                    _copy_tile(q, [token + i * HALF, head * HEAD_DIM], q_full.index(i), q_tiles.index(i))
        begin = (gl.minimum(first + tokens, end) - 1) // BLOCK_N * BLOCK_N
        floor = _floor(first, WINDOW)
        while begin >= floor // BLOCK_N * BLOCK_N:
            _fetch(pool, table, ring, count, begin, end, floor, column, BLOCK_N, BOX, STAGES, HEAD_DIM, WINDOW)
            count += 1
            begin -= BLOCK_N
        turn += 1
        number = _number(turn)
        token, first, end, head = _item(tiles, number, number < num_items, HEADS_A_ITEM, NUM_HEADS)
        row = _row(tiles, number, number < num_items, HEADS_A_ITEM, NUM_HEADS)


@gluon.jit
def _softmax(
    s, top, total, scale, begin, gap, gap_end, place, lowest,
    MASKED: gl.constexpr, WINDOW: gl.constexpr, SOFT_CAP: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Weights of a tile's scores, and the running softmax with them: largest score, sum, what earlier sums fade by.

    lowest: the last position before each token's window. No key of the row's last block is so far back.
    """
    if SOFT_CAP > 0:
        s = soft_capped(s * scale, SOFT_CAP)
        scale = 1.0
    if MASKED:
        key = begin + gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, LAYOUT))
        key = gl.where((key >= gap) & (key < gap_end), NEVER, key)
        # `where` makes bits of the comparisons, and comparisons of the bits
        if WINDOW > 0:
            s = gl.inline_asm_elementwise(
                "{.reg .pred p; setp.le.s32 p, $2, $3; setp.gt.and.s32 p, $2, $4, p; selp.f32 $0, $1, 0fFF800000, p;}",
                "=r,r,r,r,r", [s, key[None, :], place[:, None], lowest[:, None]],
                dtype=gl.float32, is_pure=True, pack=1,
            )  # fmt: skip
        else:
            s = gl.inline_asm_elementwise(
                "{.reg .pred p; setp.le.s32 p, $2, $3; selp.f32 $0, $1, 0fFF800000, p;}", "=r,r,r,r",
                [s, key[None, :], place[:, None]], dtype=gl.float32, is_pure=True, pack=1,
            )  # fmt: skip
    new_top = gl.maximum(top, gl.max(s, axis=1))
    level = new_top * scale
    if MASKED:  # a token may see none of the keys so far
        level = gl.where(new_top == -float("inf"), 0.0, level)
    fade = gl.exp2(gl.fma(top, gl.full_like(top, 0.0) + scale, -level))
    weight = gl.exp2(gl.fma(s, gl.full_like(s, 0.0) + scale, gl.expand_dims(-level, 1) + gl.full_like(s, 0.0)))
    return weight, new_top, total * fade + gl.sum(weight, axis=1), fade


@gluon.jit
def _step(
    q_tile, keys, values, count, acc, weight, top, total, scale, begin, bottom, gap, gap_end, place, lowest,
    MASKED: gl.constexpr, WINDOW: gl.constexpr, SOFT_CAP: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Scores and softmax of tile `count` + 1, whose keys are there, while the values of tile `count` are added."""
    k_tiles, k_full, k_free = keys
    v_tiles, v_full, v_free = values
    k_stage = (count + 1) % STAGES
    v_stage = count % STAGES
    # weights pass from step to step in float32: as pairs of 16 bits they would be taken apart and put together again
    p = gl.convert_layout(weight.to(q_tile.dtype), gl.DotOperandLayout(0, O_LAYOUT, 2))
    zero = gl.zeros([HALF, BLOCK_N], gl.float32, layout=S_LAYOUT)
    s = warpgroup_mma(q_tile, k_tiles.index(k_stage).permute([1, 0]), zero, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(v_stage), count // STAGES & 1)
    acc = warpgroup_mma(p, v_tiles.index(v_stage), acc, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s])
    mbarrier.arrive(k_free.index(k_stage), count=1)
    weight, top, total, fade = _softmax(
        s, top, total, scale, begin, gap, gap_end, place, lowest, MASKED, WINDOW, SOFT_CAP, S_LAYOUT
    )
    # for the next step; waited for here, because without it the compiler moves the wait below in front of the softmax
    mbarrier.wait(k_full.index((count + 2) % STAGES), (count + 2) // STAGES & 1, pred=begin > bottom)
    acc, p = warpgroup_mma_wait(0, deps=[acc, p])
    mbarrier.arrive(v_free.index(v_stage), count=1)
    acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, O_LAYOUT))[:, None]
    return acc, weight, top, total


@gluon.jit
def _consume(
    out, sinks, tiles, scale, queries, keys, values,
    WHICH: gl.constexpr, NUM_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, HEADS_A_ITEM: gl.constexpr,
    BLOCK_N: gl.constexpr, BOX: gl.constexpr, STAGES: gl.constexpr,
    WINDOW: gl.constexpr, SOFT_CAP: gl.constexpr, HAS_SINKS: gl.constexpr,
):  # fmt: skip
    """One half of every work item: one of two heads, or half of the tokens. From the last keys to the first."""
    tokens: gl.constexpr = 2 * HALF // HEADS_A_ITEM
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    out_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    q_tiles, q_full, q_free = queries
    k_tiles, k_full, k_free = keys
    v_tiles, v_full, v_free = values
    q_tile = q_tiles.index(WHICH)
    count = 0
    turn = 0
    number = _number(turn)
    token, first, end, head = _item(tiles, number, True, HEADS_A_ITEM, NUM_HEADS)
    num_items = gl.load(tiles) * (NUM_HEADS // HEADS_A_ITEM)
    gdc_wait()
    while number < num_items:
        last = gl.minimum(first + tokens, end)
        bottom = _floor(first, WINDOW) // BLOCK_N * BLOCK_N
        if HEADS_A_ITEM == 2:
            head += WHICH
        else:
            token += WHICH * HALF
            first += WHICH * HALF
        gap = end // BOX * BOX
        gap_end = gap + BOX - end % BOX
        place = first + gl.arange(0, HALF, layout=gl.SliceLayout(1, s_layout))
        lowest = place - WINDOW
        place = gl.where(place < gap, place, place + gap_end - gap)
        begin = (last - 1) // BLOCK_N * BLOCK_N
        k_stage = count % STAGES
        mbarrier.wait(q_full.index(WHICH), turn & 1)
        mbarrier.wait(k_full.index(k_stage), count // STAGES & 1)
        zero = gl.zeros([HALF, BLOCK_N], gl.float32, layout=s_layout)
        s = warpgroup_mma(q_tile, k_tiles.index(k_stage).permute([1, 0]), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(k_free.index(k_stage), count=1)
        top = gl.full([HALF], -float("inf"), gl.float32, layout=gl.SliceLayout(1, s_layout))
        total = gl.zeros([HALF], gl.float32, layout=gl.SliceLayout(1, s_layout))
        acc = gl.zeros([HALF, HEAD_DIM], gl.float32, layout=o_layout)
        if HAS_SINKS:  # the largest score is kept as it is before the scale
            sink = gl.load(sinks + head).to(gl.float32) * LOG2_E
            if SOFT_CAP == 0:
                sink = sink / scale
            top = gl.zeros([HALF], gl.float32, layout=gl.SliceLayout(1, s_layout)) + sink
            total += 1.0
        weight, top, total, _ = _softmax(
            s, top, total, scale, begin, gap, gap_end, place, lowest, True, WINDOW, SOFT_CAP, s_layout
        )
        mbarrier.wait(k_full.index((count + 1) % STAGES), (count + 1) // STAGES & 1, pred=begin > bottom)
        while (begin > bottom) & (begin > first + 1):
            begin -= BLOCK_N
            acc, weight, top, total = _step(
                q_tile, keys, values, count, acc, weight, top, total, scale, begin, bottom, gap, gap_end, place, lowest,
                True, WINDOW, SOFT_CAP, BLOCK_N, STAGES, s_layout, o_layout,
            )  # fmt: skip
            count += 1
        inside = gl.maximum(bottom, first + HALF - 1 - WINDOW + BLOCK_N) if WINDOW > 0 else bottom
        while begin > inside:  # every token sees all of these
            begin -= BLOCK_N
            acc, weight, top, total = _step(
                q_tile, keys, values, count, acc, weight, top, total, scale, begin, bottom, gap, gap_end, place, lowest,
                False, WINDOW, SOFT_CAP, BLOCK_N, STAGES, s_layout, o_layout,
            )  # fmt: skip
            count += 1
        if WINDOW > 0:
            while begin > bottom:
                begin -= BLOCK_N
                acc, weight, top, total = _step(
                    q_tile, keys, values, count, acc, weight, top, total, scale, begin, bottom, gap, gap_end, place,
                    lowest, True, WINDOW, SOFT_CAP, BLOCK_N, STAGES, s_layout, o_layout,
                )  # fmt: skip
                count += 1
        v_stage = count % STAGES
        mbarrier.wait(v_full.index(v_stage), count // STAGES & 1)
        p = gl.convert_layout(weight.to(q_tile.dtype), gl.DotOperandLayout(0, o_layout, 2))
        acc = warpgroup_mma(p, v_tiles.index(v_stage), acc, is_async=True)
        acc, p = warpgroup_mma_wait(0, deps=[acc, p])
        mbarrier.arrive(v_free.index(v_stage), count=1)
        count += 1
        acc = acc * gl.convert_layout(1.0 / total, gl.SliceLayout(1, o_layout))[:, None]
        q_tile.store(acc.to(q_tile.dtype))  # through shared memory, so that whole lines are written
        value = q_tile.load(out_layout)
        fence_async_shared()
        mbarrier.arrive(q_free.index(WHICH), count=1)
        member = gl.arange(0, HALF, layout=gl.SliceLayout(1, out_layout))
        dim = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, out_layout))
        at = ((token + member).to(gl.int64) * NUM_HEADS + head) * HEAD_DIM
        gl.store(out + at[:, None] + dim[None, :], value, mask=(first + member < last)[:, None])
        turn += 1
        number = _number(turn)
        token, first, end, head = _item(tiles, number, number < num_items, HEADS_A_ITEM, NUM_HEADS)


@gluon.jit
def _barriers(NUM: gl.constexpr, ARRIVALS: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM):
        mbarrier.init(bars.index(i), count=ARRIVALS)
    return bars


@gluon.jit(do_not_specialize=["table_stride"])
def prefill(
    q, sinks, pool, blocks, tiles, out, scale, table_stride,
    NUM_HEADS: gl.constexpr, NUM_KV: gl.constexpr, HEAD_DIM: gl.constexpr, HEADS_A_ITEM: gl.constexpr,
    BLOCK_N: gl.constexpr, BOX: gl.constexpr, STAGES: gl.constexpr,
    WINDOW: gl.constexpr, SOFT_CAP: gl.constexpr, HAS_SINKS: gl.constexpr,
):  # fmt: skip
    """Two halves of 64 rows at a time: tokens of a tile, of one head or two heads that share keys, over their keys.

    q, pool: descriptors of [num_tokens, columns] in boxes [64, HEAD_DIM] and of [num_blocks, BOX, columns] in boxes
    [1, BOX, HEAD_DIM]; tiles: see chunk_tiles.
    """
    tile: gl.constexpr = [STAGES, BLOCK_N, HEAD_DIM]
    queries = (gl.allocate_shared_memory(q.dtype, [2, HALF, HEAD_DIM], q.layout), _barriers(2, 1), _barriers(2, 1))
    keys = (gl.allocate_shared_memory(q.dtype, tile, q.layout), _barriers(STAGES, 1), _barriers(STAGES, 2))
    values = (gl.allocate_shared_memory(q.dtype, tile, q.layout), _barriers(STAGES, 1), _barriers(STAGES, 2))
    _sync()
    gl.warp_specialize(
        [
            (_consume, (out, sinks, tiles, scale, queries, keys, values, 0, NUM_HEADS, HEAD_DIM, HEADS_A_ITEM,
                        BLOCK_N, BOX, STAGES, WINDOW, SOFT_CAP, HAS_SINKS)),
            (_consume, (out, sinks, tiles, scale, queries, keys, values, 1, NUM_HEADS, HEAD_DIM, HEADS_A_ITEM,
                        BLOCK_N, BOX, STAGES, WINDOW, SOFT_CAP, HAS_SINKS)),
            (_produce, (q, pool, blocks, tiles, table_stride, queries, keys,
                        False, NUM_HEADS, NUM_KV, HEAD_DIM, HEADS_A_ITEM, BLOCK_N, BOX, STAGES, WINDOW)),
            (_produce, (q, pool, blocks, tiles, table_stride, queries, values,
                        True, NUM_HEADS, NUM_KV, HEAD_DIM, HEADS_A_ITEM, BLOCK_N, BOX, STAGES, WINDOW)),
        ],
        worker_num_warps=[4, 1, 1],
        worker_num_regs=[240, 24, 24],
    )  # fmt: skip


class HopperPrefill:
    """The kernel with its sizes for a model, over pools [num_slots, 2 * num_kv_heads, head_dim]."""

    def __init__(self, pool: torch.Tensor, block_size: int, num_heads: int, num_cores: int) -> None:
        num_kv, self._head_dim = pool.shape[1] // 2, pool.shape[2]
        self._block_size, self._num_cores = block_size, num_cores
        heads_a_item = 2 if num_heads // num_kv % 2 == 0 else 1
        self.tokens_a_tile = 2 * HALF.value // heads_a_item
        self._items_a_tile = num_heads // heads_a_item
        self.sizes = {
            "NUM_HEADS": num_heads, "NUM_KV": num_kv, "HEAD_DIM": self._head_dim, "HEADS_A_ITEM": heads_a_item,
            "BLOCK_N": KEYS[self._head_dim], "BOX": block_size, "STAGES": STAGES,
        }  # fmt: skip

    @staticmethod
    def is_for(pool: torch.Tensor, block_size: int, windows: Collection[int] = ()) -> bool:
        """Whether it runs here, on such a pool. Blocks are boxes of the copy engine: their size is a power of two."""
        head_dim = pool.shape[2]
        fits = head_dim in KEYS and 8 <= block_size <= KEYS[head_dim] and block_size & (block_size - 1) == 0
        return (
            generation() == HOPPER and pool.dtype in DTYPES and fits and min(windows, default=block_size) >= block_size
        )

    def __call__(
        self,
        q: torch.Tensor,
        pool: torch.Tensor,
        blocks: torch.Tensor,
        tiles: torch.Tensor,
        out: torch.Tensor,
        options: ScoreOptions,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Attend for the tiles' tokens. q and out: [num_tokens, num_heads, head_dim]; tiles: see chunk_tiles."""
        num_items = (len(tiles) - 1) * self._items_a_tile
        pages = pool.view(-1, self._block_size, pool.shape[1] * self._head_dim)
        prefill[(min(self._num_cores, num_items),)](
            _in_boxes(q.flatten(1), HALF.value, self._head_dim), out if sinks is None else sinks,
            _in_boxes(pages, self._block_size, self._head_dim), blocks, tiles, out, options.scale, blocks.stride(0),
            **self.sizes, **options.constants(has_sinks=sinks is not None), num_warps=4, launch_pdl=True,
        )  # fmt: skip


def _in_boxes(x: torch.Tensor, num_rows: int, num_columns: int) -> TensorDescriptor:
    """A tensor as the copy engine takes it, `num_rows` and `num_columns` at a time."""
    box = [1] * (x.dim() - 2) + [num_rows, num_columns]
    return TensorDescriptor.from_tensor(x, box, gl.NVMMASharedLayout.get_default_for(box, DTYPES[x.dtype]))
