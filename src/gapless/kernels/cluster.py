"""Clusters of programs in Gluon, for Hopper: programs on neighbouring cores that write into each other's shared memory.

A product in parts is joined that way without a word through global memory: every part goes to the first program of its
cluster. Gluon launches clusters (`num_ctas`) for tensors that lie across them, and has no word for this. So here every
tensor is, as Gluon sees it, the same in all programs of a cluster, which then store it once, from the first one. What
tells them apart, and the copies between them, are written in the GPU's own instructions.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


def is_known() -> bool:
    """Whether Gluon's clusters are those of Triton 3.6: a barrier in shared memory is each program's own."""
    return not hasattr(gl.shared_memory_descriptor, "reinterpret")


@gluon.constexpr_function
def copies(rank, num_ctas):
    """For a layout of so many dimensions: each program of a cluster has all of it."""
    return [[0] * rank] * (num_ctas.bit_length() - 1)


@gluon.constexpr_function
def _reserve(num_bytes):
    return f"{{ .shared .align 16 .b8 parts_of_others[{num_bytes}]; mov.u32 $0, parts_of_others; }}"


@gluon.jit
def _run(ASM: gl.constexpr):
    """An instruction without operands, by all threads; its result."""
    return gl.inline_asm_elementwise(ASM, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def enter_cluster():
    """The number of this program in its cluster. Says that its shared memory is there; to be called once."""
    _run("barrier.cluster.arrive.release.aligned; mov.u32 $0, 0;")
    return _run("mov.u32 $0, %cluster_ctarank;")


@gluon.jit
def join_in_cluster(
    acc, number, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, PARTS: gl.constexpr, LAYOUT: gl.constexpr
):  # fmt: skip
    """Send this program's part to the first one. Whether this is the first one, and if so the sum, in order.

    acc [BLOCK_M, BLOCK_N] float32, in a layout of the matrix units. number: as `enter_cluster` gave it.
    """
    part_bytes: gl.constexpr = BLOCK_M * BLOCK_N * 4
    row = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    column = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    # a warp holds eight rows of eight columns, two numbers in each thread: stored side by side, they meet no bank twice
    at = ((row // 8 * (BLOCK_N // 8) + column // 8) * 64 + row % 8 * 8 + column % 8) * 4
    base = _run(_reserve((PARTS - 1) * part_bytes))
    _run("barrier.cluster.wait.acquire.aligned; mov.u32 $0, 0;")  # for the first one's memory
    if number != 0:
        there = gl.inline_asm_elementwise(
            "mapa.shared::cluster.u32 $0, $1, 0;", "=r,r", [base], dtype=gl.int32, is_pure=False, pack=1
        )
        gl.inline_asm_elementwise(
            "st.shared::cluster.v2.f32 [$2], {$4, $5}; mov.u32 $0, 0; mov.u32 $1, 0;", "=r,=r,r,r,f,f",
            [there + (number - 1) * part_bytes + at, acc], dtype=gl.int32, is_pure=False, pack=2,
        )  # fmt: skip
    _run("barrier.cluster.arrive.release.aligned; mov.u32 $0, 0;")
    if number == 0:
        _run("barrier.cluster.wait.acquire.aligned; mov.u32 $0, 0;")  # for the others' parts
        for other in gl.static_range(PARTS - 1):
            acc += gl.inline_asm_elementwise(
                "ld.shared.v2.f32 {$0, $1}, [$2];", "=f,=f,r,r", [base + other * part_bytes + at],
                dtype=gl.float32, is_pure=False, pack=2,
            )  # fmt: skip
    return number == 0, acc
