"""Models that transformers' own code runs, with our attention in its layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from family_cases import LENGTHS, MAX_LENGTH, NUM_STEPS, Case, check, random_tokens, save_hf
from gapless import LLM, SamplingParams
from gapless.errors import UnsupportedModel
from gapless.models.spec import Feature
from general_cases import FAST

OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_batch_tokens": 16, "max_model_len": MAX_LENGTH}


@pytest.fixture(scope="module", params=FAST)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("model"), **FAST[request.param])


def make_case(path: Path, **changes: Any) -> Case:
    model = save_hf(path, **changes)
    model.set_attn_implementation("eager")
    return Case(path, model)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_tokens_and_scores_are_those_of_transformers(case: Case, depth: int) -> None:
    """Rows of unequal length; prompts in chunks of 16, beside decode rows."""
    params = SamplingParams(max_tokens=NUM_STEPS, temperature=0, ignore_eos=True, logprobs=2, prompt_logprobs=2)
    prompts = [random_tokens(count=count).tolist() for count in LENGTHS]
    with LLM(case.path, depth=depth, **OPTIONS) as llm:
        found = llm.generate(prompts, params)
        assert llm.engine.monitor.ledger()[Feature.GENERAL] >= NUM_STEPS
    for done in found:
        check(case, done)


def test_a_cached_prefix_changes_nothing(case: Case) -> None:
    prompt = random_tokens(count=40).tolist()
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    with LLM(case.path, block_size=4, **OPTIONS) as llm:
        first, again = (llm.generate([prompt], params)[0] for _ in range(2))
    assert again.num_cached_tokens > 0
    assert first.token_ids == again.token_ids


def test_recurrent_models_are_refused(tmp_path: Path) -> None:
    from transformers import JambaConfig

    JambaConfig(architectures=["JambaForCausalLM"]).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="recurrent state"):
        LLM(tmp_path, load_format="dummy", **OPTIONS)


def test_code_that_knows_no_attention_interface_is_refused(tmp_path: Path) -> None:
    from transformers import BloomConfig

    BloomConfig(architectures=["BloomForCausalLM"], hidden_size=32, n_head=4).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="BloomForCausalLM is not supported"):
        LLM(tmp_path, load_format="dummy", **OPTIONS)
