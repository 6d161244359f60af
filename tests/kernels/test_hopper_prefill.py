"""The attention of chunks in Gluon is for Hopper alone; anywhere, it is compiled for it by the Triton there is."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytest.importorskip("triton")

import triton
from other_gluon import OTHERS, put_in_place

from gapless.attention import triton as own
from gapless.kernels import hopper_prefill

PLAIN = {"WINDOW": 0, "SOFT_CAP": 0.0, "HAS_SINKS": False}
SHAPES = {  # heads, KV heads, head size, block size, options
    "0.6B": (16, 8, 128, 16, PLAIN),
    "8B": (32, 8, 128, 16, PLAIN),
    "one head a KV head": (8, 8, 64, 8, PLAIN),
    "large heads": (16, 8, 256, 64, PLAIN),
    "a window and sinks": (32, 8, 128, 16, {"WINDOW": 4096, "SOFT_CAP": 0.0, "HAS_SINKS": True}),
}
COMPILE = """
import json, sys
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from gapless.kernels.hopper_prefill import HALF, HopperPrefill, prefill
heads, kv_heads, head_dim, block_size, options = json.loads(sys.argv[1])
pool = torch.empty(block_size, 2 * kv_heads, head_dim, dtype=torch.bfloat16)
values = HopperPrefill(pool, block_size, heads, 132).sizes | options
types = {"blocks": "*i64", "tiles": "*i32", "out": "*bf16", "sinks": "*bf16", "scale": "fp32", "table_stride": "i32"}
for name, box in {"q": [HALF.value, head_dim], "pool": [1, block_size, head_dim]}.items():
    layout = gl.NVMMASharedLayout.get_default_for(box, gl.bfloat16)
    types[name] = f"tensordesc<bf16{box},{layout!r}>"
types |= dict.fromkeys(values, "constexpr")
names = prefill.arg_names
types = {name: types[name] for name in names}
aligned = {(names.index(name),): [["tt.divisibility", 16]] for name, kind in types.items() if kind[0] == "*"}
source = GluonASTSource(prefill, types, values, aligned)
made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "launch_pdl": True})
print(json.dumps({"shared": made.metadata.shared, "cubin": made.asm["cubin"].hex()}))
"""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if "window" in name else []) for name in SHAPES]
)
def test_softmax_is_computed_while_values_are_added(name: str, tmp_path: Path) -> None:
    """Between the two waits of a step, the second of which is for the values. The compiler may see it otherwise."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, "-c", COMPILE, json.dumps(SHAPES[name])],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    made = json.loads(ran.stdout)
    assert made["shared"] <= 227 * 1024
    ops = re.findall(r"MUFU\.EX2|DEPBAR\.LE gsb0, 0x[01]", disassembled(bytes.fromhex(made["cubin"]), tmp_path))
    in_flight = re.findall(r"1(e*)0", "".join("e" if op.startswith("MUFU") else op[-1] for op in ops))
    rows_and_keys = 2 + hopper_prefill.KEYS[SHAPES[name][2]] // 2  # of a thread: 64 rows for 128 threads
    steps = 3 if SHAPES[name][4]["WINDOW"] else 2  # with and without a mask, and at the window's edge
    assert [len(found) for found in in_flight] == 2 * steps * [rows_and_keys]  # of two groups


def disassembled(binary: bytes, folder: Path) -> str:
    tool = shutil.which("nvdisasm", path=Path(triton.__file__).parent / "backends/nvidia/bin")
    if tool is None:
        pytest.skip("needs nvdisasm")
    path = folder / "kernel.cubin"
    path.write_bytes(binary)
    return subprocess.run([tool, "-c", str(path)], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    ("generation", "head_dim", "block_size", "dtype", "expected"),
    [
        (9, 128, 16, torch.bfloat16, True),
        (9, 64, 128, torch.float16, True),
        (8, 128, 16, torch.bfloat16, False),
        (10, 128, 16, torch.bfloat16, False),
        (9, 80, 16, torch.bfloat16, False),
        (9, 128, 24, torch.bfloat16, False),
        (9, 256, 128, torch.bfloat16, False),
        (9, 128, 4, torch.bfloat16, False),
        (9, 128, 16, torch.float32, False),
    ],
)
def test_what_it_is_for(
    monkeypatch: pytest.MonkeyPatch,
    generation: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    expected: bool,
) -> None:
    monkeypatch.setattr(hopper_prefill, "generation", lambda: generation)
    pool = torch.empty(block_size, 2, head_dim, dtype=dtype)
    assert hopper_prefill.HopperPrefill.is_for(pool, block_size) is expected


@pytest.mark.parametrize("language", OTHERS)
def test_a_triton_that_names_things_otherwise_has_none(
    monkeypatch: pytest.MonkeyPatch, language: ModuleType | None
) -> None:
    put_in_place(monkeypatch, language, "language.nvidia.hopper", "hopper_prefill")
    assert own.hopper_prefill.__wrapped__() is None
