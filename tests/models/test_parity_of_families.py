"""Every family equals transformers in float32: prompts whole and in chunks, decode rows, and past a window's end."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import load

from family_cases import (
    CASES,
    CLOSE,
    GEMMA3,
    LENGTHS,
    MAX_LENGTH,
    NUM_STEPS,
    Case,
    check,
    random_tokens,
    raw_config,
    save_hf,
)
from gapless import LLM, SamplingParams
from gapless.attention.base import AttentionBatch, Span
from gapless.attention.reference import ReferenceAttention
from gapless.models.decoder import CausalLM
from gapless.models.registry import FAMILIES, hf_config


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    path = tmp_path_factory.mktemp("model")
    model = save_hf(path, **CASES[request.param])
    model.set_attn_implementation("eager")  # the others leave out soft caps and sinks
    return Case(path, model)


def test_there_is_a_case_for_every_family() -> None:
    covered = {hf_config(raw_config(**changes)).architecture for changes in CASES.values()}
    assert covered | {"Gemma3ForConditionalGeneration"} == {family.architecture for family in FAMILIES}


def test_the_text_part_of_a_model_that_sees(tmp_path: Path) -> None:
    """The vision part is there, and left aside."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = raw_config(**GEMMA3, tie_word_embeddings=True, pad_token_id=0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(text_config=text, vision_config=sizes | {"image_size": 8, "patch_size": 4})
    torch.manual_seed(0)
    model = Gemma3ForConditionalGeneration(config).eval()
    model.set_attn_implementation("eager")
    model.save_pretrained(tmp_path)
    tokens = random_tokens()
    with torch.inference_mode():
        expected = model(tokens[None], token_type_ids=torch.zeros_like(tokens[None])).logits[0]
    found = paged_logits(load(tmp_path, max_positions=MAX_LENGTH), tokens)
    torch.testing.assert_close(found, expected, atol=CLOSE, rtol=CLOSE)


def test_logits(case: Case) -> None:
    tokens = random_tokens()
    found = paged_logits(load(case.path, max_positions=MAX_LENGTH), tokens)
    torch.testing.assert_close(found, case.logits(tokens.tolist()), atol=CLOSE, rtol=CLOSE)


def paged_logits(model: CausalLM, tokens: torch.Tensor) -> torch.Tensor:
    """Of one chunk, by the oracle of attention."""
    config, count, none = model.config, len(tokens), torch.zeros(0, dtype=torch.int64)
    pools = [torch.zeros(count, 2 * config.num_kv_heads, config.head_dim) for _ in config.layers]
    batch = AttentionBatch(
        slots=(torch.arange(count),),
        tables=(torch.zeros(1, 1, dtype=torch.int64),),
        decode_rows=none,
        decode_lengths=none,
        max_decode_length=0,
        num_chunk_tokens=count,
        chunk_rows=torch.zeros(1, dtype=torch.int32),
        chunk_offsets=torch.zeros(1, dtype=torch.int32),
        chunk_starts=torch.zeros(1, dtype=torch.int32),
        chunk_ends=torch.tensor([count], dtype=torch.int32),
        chunks=(Span(0, 0, count),),
    )
    with torch.inference_mode():
        attend = ReferenceAttention(pools, count, config.attention_specs()).begin(batch)
        return model.logits(model.forward(tokens, torch.arange(count), attend))


@pytest.mark.parametrize(("depth", "native"), [(1, False), (2, False), (2, True)], ids=["1", "2", "native"])
def test_generation(case: Case, depth: int, native: bool) -> None:
    """Rows of unequal length; prompts in chunks of 16, beside decode rows."""
    options = {"device": "cpu", "dtype": "float32", "max_batch_tokens": 16, "max_model_len": MAX_LENGTH}
    params = SamplingParams(max_tokens=NUM_STEPS, temperature=0, ignore_eos=True, logprobs=2, prompt_logprobs=2)
    prompts = [random_tokens(count=count).tolist() for count in LENGTHS]
    with LLM(case.path, depth=depth, native=native, **options) as llm:
        resolved = llm.engine.resolved
        if native and not resolved.native:
            pytest.skip(f"no native step: {resolved.slow_reason}")
        found = llm.generate(prompts, params)
    for done in found:
        check(case, done)
