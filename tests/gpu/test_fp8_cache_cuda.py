"""A KV cache of FP8 on a GPU: whole engines. tests/attention compares the kernels with the reference, on a GPU too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_fp8_cuda import write_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def test_an_engine(tmp_path: Path) -> None:
    """Few requests and many, in captured steps and by themselves: tokens are mostly those of a cache in bfloat16."""
    from gapless import LLM, SamplingParams

    write_config(tmp_path)
    prompts = [[(7 * i + j) % 1000 for j in range(5 + 4 * (i % 40))] for i in range(48)]
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    found, blocks = [], []
    for kv_dtype in ("auto", "fp8"):
        options: dict[str, Any] = {"load_format": "dummy", "device": "cuda", "kv_memory": "16MiB", "max_num_rows": 64}
        with LLM(tmp_path, **options, kv_dtype=kv_dtype) as llm:
            many = [list(result.token_ids) for result in llm.generate(prompts, params)]
            few = [list(result.token_ids) for result in llm.generate(prompts[:3], params)]
            blocks.append(llm.engine.resolved.limits.num_blocks)
        found.append([tokens[:2] for tokens in many + few])
    assert blocks[1] == 2 * blocks[0]
    same = sum(a == b for a, b in zip(*found, strict=True))
    assert same > len(found[0]) // 2, same


def test_both_narrow(tmp_path: Path) -> None:
    """FP8 weights and an FP8 cache, in the checking mode."""
    from gapless import LLM, SamplingParams

    write_config(tmp_path)
    options: dict[str, Any] = {"load_format": "dummy", "device": "cuda", "num_blocks": 64, "max_num_rows": 8}
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    with LLM(tmp_path, **options, quantization="fp8", kv_dtype="fp8", check=True) as llm:
        results = llm.generate([list(range(5, 5 + n)) for n in (3, 40, 90, 130)] * 3, params)
    assert [len(result.token_ids) for result in results] == [24] * 12
