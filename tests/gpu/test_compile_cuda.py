"""`gapless compile` on a real GPU: an engine that is built after it, in a process of its own, compiles nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 1000,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 512,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
LATER = """
import json, sys
from gapless import LLM, SamplingParams
with LLM(sys.argv[1], load_format="dummy", device="cuda", max_num_rows=16, max_batch_tokens=256) as llm:
    drawn = SamplingParams(max_tokens=20, temperature=0.7, top_p=0.9, logprobs=2, ignore_eos=True)
    llm.generate([[1 + i] * (5 + 30 * i) for i in range(20)], drawn)
    llm.generate([[7] * 40], SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))
    print(json.dumps([llm.engine.monitor.kernels(), llm.engine.monitor.ledger()]))
"""
KEYS = """
import json, pkgutil, sys
from importlib import import_module
import gapless.kernels
from gapless.kernels.keys import settle_keys
from triton.runtime.jit import JITFunction
settle_keys()
found = {}
for module in pkgutil.iter_modules(gapless.kernels.__path__):
    for value in vars(import_module(f"gapless.kernels.{module.name}")).values():
        if isinstance(value, JITFunction):
            found[f"{value.fn.__module__}.{value.fn.__name__}"] = value
names = sorted(found, reverse=sys.argv[1] == "reverse")
print(json.dumps({name: found[name].cache_key for name in names}))
"""


def run(cache: Path, *args: str) -> str:
    """The output of a process whose kernels are cached in that folder."""
    done = subprocess.run(
        [sys.executable, *args],
        env={**os.environ, "TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_an_engine_after_it_compiles_nothing(tmp_path: Path) -> None:
    model, cache = tmp_path / "model", tmp_path / "cache"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    sizes = ("--max-num-rows", "16", "--max-batch-tokens", "256")
    compile_it = ("-m", "gapless", "compile", "--model", str(model), *sizes)
    first = re.search(r"(\d+) kernels compiled, 0 were in the cache", run(cache, *compile_it))
    assert first is not None
    count = int(first[1])
    assert count > 20
    assert f"0 kernels compiled, {count} were in the cache" in run(cache, *compile_it)
    kernels, ledger = json.loads(run(cache, "-c", LATER, str(model)).splitlines()[-1])
    assert (kernels.get("compiled", 0), kernels["found in the cache"]) == (0, count)
    assert [key for key in ledger if key.startswith("after ready")] == []


def test_keys_do_not_depend_on_the_order_of_compilations(tmp_path: Path) -> None:
    """Of all kernels, with this machine's Triton: else a later process looks for some of them in vain."""
    first, second = (json.loads(run(tmp_path, "-c", KEYS, order)) for order in ("forward", "reverse"))
    assert len(first) > 100
    assert first == second
