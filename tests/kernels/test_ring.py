"""The product with a ring of weights is for Hopper alone; anywhere, it is compiled for it by the Triton there is."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from types import ModuleType

import pytest

pytest.importorskip("triton")

from other_gluon import OTHERS, put_in_place

from gapless.kernels import products
from gapless.kernels.cluster import is_known
from gapless.kernels.tilings import choose_tiling

PRODUCTS = {  # columns, inner size, rows, gated, adds
    "out of 0.6B": (1024, 2048, 32, False, True),
    "gate of 0.6B": (3072, 1024, 32, True, False),
    "gate of 8B": (14336, 4096, 16, True, False),
    "QKV of 8B": (6144, 4096, 32, False, False),
}
COMPILE = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from gapless.kernels.ring import ring_product
values = json.loads(sys.argv[1])
from gapless.kernels.cluster import copies
num_ctas = values.pop("num_ctas")
tile = [values["BLOCK_N"], values["BLOCK_K"]]
layout = gl.NVMMASharedLayout.get_default_for(tile, gl.bfloat16)
if num_ctas > 1:
    tile = [values["BLOCK_K"] // 64, values["BLOCK_N"], 64]
    layout = gl.NVMMASharedLayout(128, 16, rank=3, cga_layout=copies(3, num_ctas))
types = dict.fromkeys(["x", "out", "bias"], "*bf16") | dict.fromkeys(["parts", "squares_in", "squares_out"], "*fp32")
types |= {"weight": f"tensordesc<bf16{tile},{layout!r}>", "counters": "*i32"}
types |= {"num_rows": "i32", "num_squares": "i32", "eps": "fp32"} | dict.fromkeys(values, "constexpr")
names = ring_product.arg_names
aligned = {(names.index(name),): [["tt.divisibility", 16]] for name, kind in types.items() if kind[0] == "*"}
source = GluonASTSource(ring_product, types, values, aligned)
options = {"num_warps": 4, "launch_pdl": True, "num_ctas": num_ctas}
made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
print(json.dumps({"shared": made.metadata.shared, "ptx": made.asm["ptx"]}))
"""


@pytest.mark.parametrize("order_free", [False, True])
@pytest.mark.parametrize("name", PRODUCTS)
def test_weights_and_nothing_else_are_under_way_before_the_wait(name: str, order_free: bool) -> None:
    columns, inner, num_rows, gated, adds = PRODUCTS[name]
    tiling = choose_tiling(num_rows, columns, inner, gated=gated, adds=adds, ring=True, clusters=is_known())
    assert tiling is not None
    assert tiling.kernel == "ring"
    values = {
        "N": columns, "K": inner, "BLOCK_M": tiling.block_m, "BLOCK_N": tiling.block_n, "BLOCK_K": tiling.block_k,
        "NUM_STAGES": tiling.num_stages, "ROW_STAGES": tiling.row_stages or tiling.num_stages,
        "SPLITS": tiling.splits, "NORM": not adds, "GATED": gated, "ADD": adds,
        "MAX_SQUARES": 32, "SQUARES_STRIDE": 256, "TRIGGER": tiling.triggers, "ORDER_FREE": order_free,
        "HAS_BIAS": not gated, "ACTIVATION": "gelu_tanh" if gated else "",
        "num_ctas": tiling.splits if tiling.cluster else 1,
    }  # fmt: skip
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, "-c", COMPILE, json.dumps(values)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    made = json.loads(ran.stdout)
    before, after = made["ptx"].split("griddepcontrol.wait")
    assert before.count("cp.async.bulk") == tiling.num_stages * (2 if gated else 1)
    assert not re.search(r"ld\.global|cp\.async\.c[ag]|st\.global", before)
    assert "mma.sync" in after
    assert [part.count("griddepcontrol.launch_dependents") for part in (before, after)] == (
        [1, 0] if tiling.triggers == "at once" else [0, 1]
    )
    assert made["shared"] <= 227 * 1024
    assert ("st.shared::cluster" in after) == tiling.cluster == (is_known() and tiling.splits > 1)


@pytest.mark.parametrize(("generation", "expected"), [(0, False), (8, False), (9, True), (10, False)])
def test_it_is_for_hopper(monkeypatch: pytest.MonkeyPatch, generation: int, expected: bool) -> None:
    monkeypatch.setattr(products, "generation", lambda: generation)
    assert products.has_ring.__wrapped__() is expected


@pytest.mark.parametrize("language", OTHERS)
def test_a_triton_that_names_things_otherwise_has_none(
    monkeypatch: pytest.MonkeyPatch, language: ModuleType | None
) -> None:
    """A module or a name that is missing shows when the kernel's module is loaded."""
    monkeypatch.setattr(products, "generation", lambda: 9)
    put_in_place(monkeypatch, language, "language.nvidia.ampere", "ring")
    monkeypatch.setattr("triton.experimental.gluon.language.barrier", None, raising=False)
    assert not products.has_ring.__wrapped__()
