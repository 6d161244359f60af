"""Models that transformers' own code runs, with our attention in its layers."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from family_cases import LENGTHS, MAX_LENGTH, NUM_STEPS, Case, check, random_tokens, save_hf
from gapless import LLM, SamplingParams
from gapless.errors import CorruptModel, UnsupportedModel
from gapless.models import transformers_attention
from gapless.models.spec import Feature
from gapless.proof.general_table import WRONG, outcomes, page_with, table
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


@pytest.mark.slow
def test_every_decoder_of_transformers_is_in_the_table() -> None:
    """None gives wrong tokens, and the page says what runs."""
    found = outcomes()
    assert WRONG not in found.values()
    page = Path(__file__, "../../../docs/models.md").resolve().read_text()
    assert page_with(page, table(found)) == page


def test_a_model_that_differs_with_our_attention_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales that the description gets wrong show in the logits once the weights are there."""
    make_case(tmp_path, **FAST["stablelm"])
    monkeypatch.setattr(transformers_attention, "_scale", lambda q, scale: 3.0)
    with pytest.raises(UnsupportedModel, match="with our attention its logits differ"):
        LLM(tmp_path, **OPTIONS)


def test_a_missing_weight_is_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    make_case(tmp_path, **FAST["stablelm"])
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CorruptModel, match=r"missing weights: model\.layers\.1\.mlp\.up_proj\.weight"):
        LLM(tmp_path, **OPTIONS)


def test_a_misshapen_weight_is_named_with_both_shapes(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    make_case(tmp_path, **FAST["stablelm"])
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    weights[name] = weights[name][:-1].clone()
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CorruptModel, match=r"up_proj\.weight has shape \(79, 64\), the config says \(80, 64\)$"):
        LLM(tmp_path, **OPTIONS)


def test_without_transformers_one_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_case(tmp_path, **FAST["stablelm"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedModel, match=r"StableLmForCausalLM is not supported.* need the package transformers"):
        LLM(tmp_path, **OPTIONS)


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
