"""Every family on a GPU against transformers: prompts in chunks, decode rows, past a window's end."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from family_cases import CASES, LENGTHS, MAX_LENGTH, NUM_STEPS, Case, check, random_tokens, save_hf
from gapless import LLM, SamplingParams
from gapless.errors import UnsupportedModel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
LARGE = {  # sizes for which there are kernels of Hopper's and fused products
    "mistral": {"head_dim": 128},
    "qwen2": {"head_dim": ...},
    "qwen3": {"head_dim": 128},
    "phi3 window": {"num_attention_heads": 8},
    "granite": {},
    "smollm3": {},
    "olmo2": {},
    "starcoder2": {},
    "command r7b": {},
    "gemma2": {"head_dim": 256},
    "gemma3": {"head_dim": 256, "num_key_value_heads": 1, "query_pre_attn_scalar": 4096},  # else rounding is too much
}
SIZES = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2}


def make_case(path: Path, **changes: Any) -> Case:
    model = save_hf(path, **changes)
    model.set_attn_implementation("eager")  # the others leave out soft caps and sinks
    return Case(path, model)


def generate(path: Path, **options: Any) -> list[Any]:
    """Rows of unequal length; prompts in chunks of 16, beside decode rows."""
    options = {"device": "cuda", "max_num_rows": 4, "max_batch_tokens": 16, "max_model_len": MAX_LENGTH} | options
    params = SamplingParams(max_tokens=NUM_STEPS, temperature=0, ignore_eos=True, logprobs=2, prompt_logprobs=2)
    prompts = [random_tokens(count=count).tolist() for count in LENGTHS]
    try:
        with LLM(path, **options) as llm:
            found = llm.generate(prompts, params)
            assert [reason for reason in llm.engine.monitor.ledger() if reason.startswith("no graph")] == []
            return found
    except UnsupportedModel as error:
        if "experts" in str(error):
            pytest.skip(str(error))
        raise


@pytest.mark.parametrize("name", CASES)
def test_float32_equals_transformers(tmp_path: Path, name: str) -> None:
    case = make_case(tmp_path, **CASES[name])
    for done in generate(case.path, dtype="float32", depth=1 if name in ("gemma2", "mistral") else 2):
        check(case, done)


@pytest.mark.parametrize("name", LARGE)
def test_bfloat16_is_near_transformers(tmp_path: Path, name: str) -> None:
    """Whole prompts too: log-probabilities within the rounding of bfloat16, as transformers has it."""
    case = make_case(tmp_path, spread=0.04, **CASES[name] | SIZES | LARGE[name])
    close = max(0.05, 1.5 * rounding(case))
    for done in (*generate(case.path, depth=2), *generate(case.path, depth=2, max_batch_tokens=256)):
        check(case, done, close)


def rounding(case: Case) -> float:
    """How far transformers in bfloat16 is from itself in float32, in log-probability, at most."""
    narrow = Case(case.path, copy.deepcopy(case.reference).to(torch.bfloat16))
    prompts = [random_tokens(count=count).tolist() for count in LENGTHS]
    gaps = [narrow.logits(prompt).float().log_softmax(-1) - case.logits(prompt).log_softmax(-1) for prompt in prompts]
    return max(gap.abs().max().item() for gap in gaps)
