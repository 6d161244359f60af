"""The general path on a GPU: transformers' own code with our kernels for attention, in float32 against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from family_cases import LENGTHS, MAX_LENGTH, NUM_STEPS, Case, check, random_tokens, save_hf
from gapless import LLM, SamplingParams
from gapless.models.spec import Feature
from gapless.runner.kits.cuda import NOT_CAPTURED
from general_cases import FAST

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
COPIES = ("deepseek v3, values narrower than keys",)  # to the GPU, in the middle of a step, which no graph can hold


@pytest.mark.parametrize("name", FAST)
def test_tokens_and_scores_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    model = save_hf(tmp_path, **FAST[name])
    model.set_attn_implementation("eager")
    params = SamplingParams(max_tokens=NUM_STEPS, temperature=0, ignore_eos=True, logprobs=2, prompt_logprobs=2)
    prompts = [random_tokens(count=count).tolist() for count in LENGTHS]
    options = {"device": "cuda", "dtype": "float32", "max_num_rows": 4, "max_batch_tokens": 16}
    with LLM(tmp_path, depth=2, max_model_len=MAX_LENGTH, **options) as llm:
        found = llm.generate(prompts, params)
        ledger = llm.engine.monitor.ledger()
    assert ledger[NOT_CAPTURED if name in COPIES else Feature.GENERAL] >= NUM_STEPS
    assert not [reason for reason in ledger if reason.startswith("no graph")], ledger
    for done in found:
        check(Case(tmp_path, model), done)
