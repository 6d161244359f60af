"""The product with FP8 weights for Hopper; anywhere, it is compiled for it by the Triton there is."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

pytest.importorskip("triton")

from gapless.kernels.tilings import choose_tiling

PRODUCTS = {  # columns, inner size, rows, gated, adds, scales
    "gate of 8B": (14336, 4096, 32, True, False, "columns"),
    "down of 8B": (4096, 14336, 1, False, True, "blocks"),
}
COMPILE = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from gapless.kernels.narrow_ring import narrow_product
values = json.loads(sys.argv[1])
tile = [values["BLOCK_N"], values["BLOCK_K"]]
layout = gl.NVMMASharedLayout.get_default_for(tile, gl.float8e4nv)
types = dict.fromkeys(["x", "out", "bias"], "*bf16")
types |= dict.fromkeys(["parts", "squares_in", "squares_out", "scales"], "*fp32")
types |= {"weight": f"tensordesc<fp8e4nv{tile},{layout!r}>", "counters": "*i32"}
types |= {"num_rows": "i32", "num_squares": "i32", "eps": "fp32"} | dict.fromkeys(values, "constexpr")
names = narrow_product.arg_names
aligned = {(names.index(name),): [["tt.divisibility", 16]] for name, kind in types.items() if kind[0] == "*"}
source = GluonASTSource(narrow_product, types, values, aligned)
made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "launch_pdl": True})
print(json.dumps({"shared": made.metadata.shared, "ptx": made.asm["ptx"]}))
"""


@pytest.mark.parametrize("name", PRODUCTS)
def test_weights_and_nothing_else_are_under_way_before_the_wait(name: str) -> None:
    columns, inner, num_rows, gated, adds, scales = PRODUCTS[name]
    tiling = choose_tiling(num_rows, columns, inner, gated=gated, adds=adds, ring=True, narrow=True)
    assert tiling is not None
    assert tiling.kernel == "ring"
    values = {
        "N": columns, "K": inner, "BLOCK_M": tiling.block_m, "BLOCK_N": tiling.block_n, "BLOCK_K": tiling.block_k,
        "NUM_STAGES": tiling.num_stages, "SPLITS": tiling.splits, "NORM": not adds, "GATED": gated, "ADD": adds,
        "MAX_SQUARES": 32, "SQUARES_STRIDE": 256, "TRIGGER": tiling.triggers, "SCALES": scales, "HAS_BIAS": not gated,
        "ACTIVATION": "silu" if gated else "",
    }  # fmt: skip
    ran = subprocess.run(
        [sys.executable, "-c", COMPILE, json.dumps(values)],
        env={key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    made = json.loads(ran.stdout)
    before, after = made["ptx"].split("griddepcontrol.wait")
    assert before.count("cp.async.bulk") == tiling.num_stages * (2 if gated else 1)
    assert not re.search(r"ld\.global|st\.global", before)
    assert "wgmma.mma_async" in after
    assert made["shared"] <= 227 * 1024


@pytest.mark.parametrize("num_rows", [1, 32, 33])
def test_more_rows_are_the_librarys(num_rows: int) -> None:
    for ring in (False, True):
        assert (choose_tiling(num_rows, 6144, 4096, ring=ring, narrow=True) is None) == (num_rows > 32)
