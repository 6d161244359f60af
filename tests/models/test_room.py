"""There is room for a family that needs nearly all that a spec can say: a file, and a line in the registry."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gemma
import pytest
import torch
from tiny_models import random_tokens, save_hf

import oracles
from gapless import LLM, SamplingParams
from gapless.models import registry
from gapless.models.layers import PlainLayers
from gapless.models.loader import load_config
from gapless.models.source import resolve

LENGTHS = (40, 3, 9, 17)  # of prompts: some of several windows


@pytest.fixture
def reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The same model by transformers."""
    monkeypatch.setattr(registry, "FAMILIES", [*registry.FAMILIES, gemma.FAMILY])
    model = save_hf(tmp_path, **gemma.RAW)
    model.set_attn_implementation("eager")  # the others leave out soft caps
    return model


@pytest.mark.parametrize("depth", [1, 2])
def test_the_engine_equals_transformers(tmp_path: Path, reference: Any, depth: int) -> None:
    """Prompts in chunks, decode rows beside them, and blocks: by the torch path, for the reason that is counted."""
    prompts = [random_tokens(count=count).tolist() for count in LENGTHS]
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, logprobs=3, prompt_logprobs=3)
    with LLM(tmp_path, device="cpu", dtype="float32", max_batch_tokens=16, depth=depth) as llm:
        found = llm.generate(prompts, params)
        assert llm.engine.monitor.ledger()["no native call: sliding windows"] > 0
    for done in found:
        tokens = [*done.prompt_token_ids, *done.token_ids]
        with torch.inference_mode():
            logits = reference(torch.tensor([tokens])).logits[0].numpy()
        assert done.prompt_logprobs is not None
        assert done.logprobs is not None
        for place, score in enumerate([*done.prompt_logprobs[1:], *done.logprobs]):
            oracles.check_logprob(score, tokens[place + 1], logits[place], 3, atol=1e-4)


def test_what_cannot_run_it_says_so(tmp_path: Path, reference: Any) -> None:
    config = load_config(resolve(tmp_path))
    assert PlainLayers.why_not(config) is None
    pytest.importorskip("triton")
    from gapless.attention.triton import TritonAttention
    from gapless.models.skinny_layers import SkinnyLayers

    assert TritonAttention.why_not(config.attention_specs()) == "the attention kernels have no sliding windows"
    assert SkinnyLayers.why_not(config) == "its layers have no norms after attention and MLP"
