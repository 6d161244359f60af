"""Decode attention that streams keys is for Hopper alone; anywhere, it is compiled for it by the Triton there is."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from types import ModuleType

import pytest
import torch

pytest.importorskip("triton")

from other_gluon import OTHERS, put_in_place

from gapless.attention import triton as attention
from gapless.attention.triton import FEW_ROWS, LARGE_HEADS, MANY_ROWS, NARROW, StreamSizes, TritonAttention
from gapless.models.spec import AttentionSpec

SHARED_BYTES = 227 * 1024  # of a core
HEADS = {  # KV heads, query heads of each, head size, normalized
    "0.6B": (8, 2, 128, True),
    "8B": (8, 4, 128, False),
    "SmolLM2": (3, 3, 64, False),
}
GEMMA = {"Gemma 3 1B": (1, 4, 256, True), "Gemma 3 4B": (4, 2, 256, True)}
OPTIONS = {
    "plain": {"WINDOW": 0, "SOFT_CAP": 0.0, "HAS_SINKS": False},
    "all options": {"WINDOW": 128, "SOFT_CAP": 50.0, "HAS_SINKS": True},
}
COMPILE = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from gapless.kernels.stream import stream_decode
values = json.loads(sys.argv[1])
types = dict.fromkeys(["heads", "cos_sin", "norm", "sinks", "pool", "out"], "*bf16")
types |= {"pool": sys.argv[3]} | dict.fromkeys(["parts", "stats"], "*fp32")
types |= dict.fromkeys(["slots", "blocks", "rows", "lengths"], "*i64") | {"counters": "*i32"}
types |= dict.fromkeys(["eps", "scale", "k_unit", "v_unit"], "fp32") | {"table_stride": "i32", "num_rows": "i32"}
types |= dict.fromkeys(values, "constexpr")
names = stream_decode.arg_names
aligned = {(names.index(name),): [["tt.divisibility", 16]] for name, kind in types.items() if kind[0] == "*"}
source = GluonASTSource(stream_decode, types, values, aligned)
options = {"num_warps": int(sys.argv[2]), "launch_pdl": True}
made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
print(json.dumps({"shared": made.metadata.shared, "ptx": made.asm["ptx"]}))
"""


def specs(num_heads: int, num_kv_heads: int, head_dim: int) -> list[AttentionSpec]:
    return [AttentionSpec(num_heads, num_kv_heads, head_dim, 1.0, rope=None)]


@pytest.mark.parametrize(
    ("name", "sizes", "options", "pool"),
    [
        ("0.6B", FEW_ROWS, "plain", "bf16"),
        *((name, MANY_ROWS, "plain", "bf16") for name in HEADS),
        ("8B", FEW_ROWS, "all options", "bf16"),
        ("8B", NARROW, "plain", "fp8e4nv"),
        ("SmolLM2", NARROW, "all options", "fp8e4nv"),
        ("Gemma 3 1B", LARGE_HEADS, "plain", "bf16"),
        ("Gemma 3 4B", LARGE_HEADS, "all options", "bf16"),
        ("Gemma 3 4B", LARGE_HEADS, "all options", "fp8e4nv"),
    ],
)
def test_keys_are_under_way_before_the_wait_and_nothing_is_written(
    name: str, sizes: StreamSizes, options: str, pool: str
) -> None:
    num_kv_heads, group, head_dim, norm = (HEADS | GEMMA)[name]
    values = {
        "NUM_KV": num_kv_heads, "GROUP": group, "GROUP_2": 1 << (group - 1).bit_length(), "HEAD_DIM": head_dim,
        "LENGTHS": 32, "MIN_SHARE": sizes.min_share, "NUM_STAGES": sizes.num_stages, "HAS_NORM": norm,
        **OPTIONS[options],
    }  # fmt: skip
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, "-c", COMPILE, json.dumps(values), str(sizes.num_warps), f"*{pool}"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    made = json.loads(ran.stdout)
    before, after, _ = made["ptx"].split("griddepcontrol.wait")  # the last is of programs without a share
    number_bytes = 1 if pool == "fp8e4nv" else 2
    copies_of_a_tile = 2 * 16 * head_dim * number_bytes // 16 // 32  # keys and values of a block, 16 bytes a lane
    assert len(re.findall(r"cp\.async\.c[ag]", before)) == (sizes.num_stages - 1) * copies_of_a_tile
    assert not re.search(r"st\.global|atom\.|\bred\.(global|relaxed)", before)
    assert before.count("griddepcontrol.launch_dependents") == 1
    assert "mma.sync" in after
    assert "st.local" not in made["ptx"]
    assert sizes.programs_a_core * (made["shared"] + 1024) <= SHARED_BYTES


@pytest.mark.parametrize(
    ("generation", "dtype", "head_dim", "num_heads", "block_size", "expected"),
    [
        (9, torch.bfloat16, 128, 16, 16, True),
        (9, torch.float16, 64, 4, 16, True),
        (9, torch.float8_e4m3fn, 128, 16, 16, True),
        (9, torch.bfloat16, 128, 32, 16, True),
        (9, torch.bfloat16, 256, 16, 16, True),
        (0, torch.bfloat16, 128, 16, 16, False),
        (8, torch.bfloat16, 128, 16, 16, False),
        (10, torch.bfloat16, 128, 16, 16, False),
        (9, torch.float32, 128, 16, 16, False),
        (9, torch.bfloat16, 80, 16, 16, False),
        (9, torch.bfloat16, 128, 36, 16, False),
        (9, torch.bfloat16, 128, 16, 32, False),
    ],
)
def test_what_it_is_for(
    monkeypatch: pytest.MonkeyPatch,
    generation: int,
    dtype: torch.dtype,
    head_dim: int,
    num_heads: int,
    block_size: int,
    expected: bool,
) -> None:
    monkeypatch.setattr(attention, "generation", lambda: generation)
    pools = [torch.zeros(4, 8, head_dim, dtype=dtype)]
    found = TritonAttention(pools, block_size, specs(num_heads, 4, head_dim), 8, 132)
    sizes = [NARROW, NARROW] if dtype == torch.float8_e4m3fn else [FEW_ROWS, MANY_ROWS]
    sizes = [LARGE_HEADS, LARGE_HEADS] if head_dim == 256 else sizes
    assert [found.stream_sizes(count) for count in (8, 9)] == (sizes if expected else [None, None])


def test_each_kv_head_has_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of a GPU may have so few cores that heads would be left over."""
    monkeypatch.setattr(attention, "generation", lambda: 9)
    pools = [torch.zeros(4, 2 * 40, 128, dtype=torch.bfloat16)]
    made = [TritonAttention(pools, 16, specs(40, 40, 128), 8, cores) for cores in (19, 20)]
    assert [attention.stream_sizes(1) for attention in made] == [None, MANY_ROWS]


def test_up_to_how_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "generation", lambda: 9)
    pools = [torch.zeros(4, 2 * 8, 128, dtype=torch.bfloat16)]
    found = TritonAttention(pools, 16, specs(16, 8, 128), 8, 132)
    assert [found.stream_sizes(count) for count in (132, 133, 256, 264, 265)] == [MANY_ROWS] * 4 + [None]


@pytest.mark.parametrize("language", OTHERS)
def test_a_triton_that_names_things_otherwise_has_none(
    monkeypatch: pytest.MonkeyPatch, language: ModuleType | None
) -> None:
    monkeypatch.setattr(attention, "generation", lambda: 9)
    put_in_place(monkeypatch, language, "language.nvidia.ampere", "stream")
    pools = [torch.zeros(4, 8, 128, dtype=torch.bfloat16)]
    assert TritonAttention(pools, 16, specs(16, 4, 128), 8, 132).stream_sizes(1) is None


@pytest.mark.parametrize("sizes", [FEW_ROWS, MANY_ROWS, NARROW])
def test_there_is_room_for_the_parts_of_all_programs(sizes: StreamSizes) -> None:
    """A program has two cells, each of the query heads of a KV head."""
    pools = [torch.zeros(4, 8, 128, dtype=torch.bfloat16)]
    parts, stats, _ = TritonAttention(pools, 16, specs(16, 4, 128), 8, 132)._scratch
    cells = 2 * sizes.programs_a_core * 132
    assert parts.numel() >= cells * 4 * 128
    assert stats.numel() >= cells * 4 * 2
