"""The product with a ring of weights is for Hopper alone; anywhere, it is compiled for it by the Triton there is."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

from gapless.models import skinny

PRODUCTS = {  # columns, inner size, rows
    "out of 0.6B": {"N": 1024, "K": 2048, "BLOCK_M": 32, "SPLITS": 4, "ADD": True, "BLOCK_N": 32, "BLOCK_K": 256},
    "gate of 8B": {"N": 14336, "K": 4096, "BLOCK_M": 16, "GATED": True, "NORM": True, "BLOCK_N": 64, "BLOCK_K": 256},
    "QKV of 8B": {"N": 6144, "K": 4096, "BLOCK_M": 32, "NORM": True, "LET_IN": True, "BLOCK_N": 64, "BLOCK_K": 256},
}
COMPILE = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from gapless.models.ring_kernels import ring_product
values = json.loads(sys.argv[1])
tile = [values["BLOCK_N"], values["BLOCK_K"]]
layout = gl.NVMMASharedLayout.get_default_for(tile, gl.bfloat16)
types = dict.fromkeys(["x", "out"], "*bf16") | dict.fromkeys(["parts", "squares_in", "squares_out"], "*fp32")
types |= {"weight": f"tensordesc<bf16{tile},{layout!r}>", "counters": "*i32"}
types |= {"num_rows": "i32", "num_squares": "i32", "eps": "fp32"} | dict.fromkeys(values, "constexpr")
names = ring_product.arg_names
aligned = {(names.index(name),): [["tt.divisibility", 16]] for name, kind in types.items() if kind[0] == "*"}
source = GluonASTSource(ring_product, types, values, aligned)
made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "launch_pdl": True})
print(json.dumps({"shared": made.metadata.shared, "ptx": made.asm["ptx"]}))
"""


@pytest.mark.parametrize("name", PRODUCTS)
def test_weights_are_under_way_before_the_wait(name: str) -> None:
    values = {
        "NUM_STAGES": 2, "SPLITS": 1, "NORM": False, "GATED": False, "ADD": False, "LET_IN": False,
        "MAX_SQUARES": 32, "SQUARES_STRIDE": 256, **PRODUCTS[name],
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
    assert before.count("cp.async.bulk") == (4 if values["GATED"] else 2)  # all stages of the ring
    assert "mma.sync" in after
    assert after.count("griddepcontrol.launch_dependents") == 1
    assert "st.global" not in before
    assert made["shared"] <= 227 * 1024


@pytest.mark.parametrize(("generation", "expected"), [(0, False), (8, False), (9, True), (10, False)])
def test_it_is_for_hopper(monkeypatch: pytest.MonkeyPatch, generation: int, expected: bool) -> None:
    monkeypatch.setattr(skinny, "generation", lambda: generation)
    assert skinny.has_ring.__wrapped__() is expected


def test_a_triton_that_names_things_otherwise_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skinny, "generation", lambda: 9)
    monkeypatch.delattr("gapless.models.ring_kernels", raising=False)
    monkeypatch.setitem(sys.modules, "gapless.models.ring_kernels", None)
    assert not skinny.has_ring.__wrapped__()
