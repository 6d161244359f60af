"""Every family equals transformers in float32: prompts whole and in chunks, decode rows, and past a window's end."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import load, random_tokens, raw_config, save_hf

import oracles
from gapless import LLM, SamplingParams
from gapless.attention.base import AttentionBatch, Span
from gapless.attention.reference import ReferenceAttention
from gapless.models.decoder import CausalLM
from gapless.models.registry import FAMILIES, hf_config

LENGTHS = (40, 3, 17)  # of prompts: some longer than a chunk, and than a window
NUM_STEPS = 64
MAX_LENGTH = max(LENGTHS) + NUM_STEPS
CLOSE = 1e-4


def of(architecture: str, model_type: str, **changes: Any) -> dict[str, Any]:
    return {"architectures": [architecture], "model_type": model_type} | changes


GRANITE = of(
    "GraniteForCausalLM",
    "granite",
    embedding_multiplier=3.0,
    residual_multiplier=0.4,
    attention_multiplier=0.3,
    logits_scaling=1.5,
)
SMOLLM3 = of("SmolLM3ForCausalLM", "smollm3", num_hidden_layers=3)
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.3], "long_factor": [2.0, 5.0], "rope_theta": 1e4}
PHI3 = of("Phi3ForCausalLM", "phi3", head_dim=..., sliding_window=None)
PYTHIA = of("GPTNeoXForCausalLM", "gpt_neox", hidden_act="gelu", rms_norm_eps=..., num_key_value_heads=...)
GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "vocab_size": 97,
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
} | dict.fromkeys(raw_config().keys() - {"architectures", "model_type", "vocab_size"}, ...)
COHERE = of("CohereForCausalLM", "cohere", logit_scale=0.3, layer_norm_eps=1e-5)
COHERE2 = COHERE | of("Cohere2ForCausalLM", "cohere2", sliding_window=24, num_hidden_layers=3)
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 24, "num_hidden_layers": 3}
GEMMA2 = of("Gemma2ForCausalLM", "gemma2", **GEMMA, attn_logit_softcapping=2.0, final_logit_softcapping=3.0)
GEMMA3 = of("Gemma3ForCausalLM", "gemma3_text", **GEMMA)
OLMO3 = of("Olmo3ForCausalLM", "olmo3", sliding_window=24, num_hidden_layers=3)
BY_TYPE = {
    "full_attention": {"rope_type": "linear", "factor": 3.0, "rope_theta": 7000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
}
LINEAR = {"rope_type": "linear", "factor": 3.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
PARTIAL = {"hidden_size": 32, "partial_rotary_factor": 0.5}
LOCAL_FIRST = ["sliding_attention", "full_attention", "sliding_attention"]
MOE = {"num_experts_per_tok": 2, "tie_word_embeddings": False}
QWEN3_MOE = of("Qwen3MoeForCausalLM", "qwen3_moe", num_experts=5, moe_intermediate_size=16, head_dim=12, **MOE)
GPT_OSS = of("GptOssForCausalLM", "gpt_oss", num_local_experts=4, head_dim=12, sliding_window=24, **MOE) | {
    "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "truncate": False, "rope_theta": 1000.0}
    | {"original_max_position_embeddings": 32, "beta_fast": 32.0, "beta_slow": 1.0}
}
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "falcon 3": {"head_dim": 16, "tie_word_embeddings": False, "rope_theta": 1000042},
    "mistral": of("MistralForCausalLM", "mistral", sliding_window=24),
    "qwen2": of("Qwen2ForCausalLM", "qwen2", use_sliding_window=True, sliding_window=24, max_window_layers=1),
    "qwen3": of("Qwen3ForCausalLM", "qwen3", head_dim=12),
    "granite": GRANITE,
    "smollm3": SMOLLM3 | {"no_rope_layer_interval": 2},
    "smollm3 by list": SMOLLM3 | {"no_rope_layers": [0, 1, 0], "tie_word_embeddings": ...},
    "olmo2": of("Olmo2ForCausalLM", "olmo2"),
    "olmo3": OLMO3 | {"layer_types": LOCAL_FIRST, "rope_parameters": BY_TYPE},
    "olmo3 before version 5": OLMO3 | {"num_hidden_layers": 4, "rope_scaling": YARN, "rope_theta": 5000.0},
    "phi3": PHI3,
    "phi3 long": PHI3 | {"original_max_position_embeddings": 32, "rope_scaling": LONGROPE, **PARTIAL},
    "phi3 short": PHI3 | {"original_max_position_embeddings": 110, "rope_scaling": LONGROPE, **PARTIAL},
    "phi3 window": PHI3 | {"sliding_window": 24},
    "starcoder2": of("Starcoder2ForCausalLM", "starcoder2", hidden_act="gelu_pytorch_tanh", sliding_window=24),
    "starcoder2 plain": of("Starcoder2ForCausalLM", "starcoder2", hidden_act="gelu", use_bias=False),
    "pythia": PYTHIA | {"rotary_pct": 0.5, "rotary_emb_base": 900},
    "neox in order": PYTHIA
    | {"use_parallel_residual": False, "attention_bias": False, "tie_word_embeddings": False, "hidden_size": 32},
    "gpt2": GPT2,
    "gpt2 wide": GPT2 | {"n_inner": 72, "activation_function": "gelu"},
    "command r": COHERE,
    "command r+": COHERE | {"use_qk_norm": True, "attention_bias": True},
    "command r7b": COHERE2 | {"layer_types": LOCAL_FIRST},
    "command r7b by pattern": COHERE2 | {"num_hidden_layers": 4},
    "gemma2": GEMMA2,
    "gemma2 without caps": GEMMA2 | {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    "gemma3": GEMMA3 | {"layer_types": LOCAL_FIRST, "rope_parameters": BY_TYPE},
    "mixtral": of("MixtralForCausalLM", "mixtral", num_local_experts=4, sliding_window=24, **MOE),
    "qwen3 moe": QWEN3_MOE,
    "qwen3 moe in part": QWEN3_MOE | {"norm_topk_prob": True, "mlp_only_layers": [0]},
    "gpt oss": GPT_OSS,
    "gpt oss in full": GPT_OSS | {"layer_types": ["full_attention"] * 2, "attention_bias": False},
    "gemma3 before version 5": GEMMA3
    | {"rope_local_base_freq": 300.0, "rope_scaling": LINEAR, "rope_theta": 7000.0, "num_hidden_layers": 6},
}


@dataclass(frozen=True)
class Case:
    """A model on disk, and the same by transformers."""

    path: Path
    reference: Any

    def logits(self, tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return self.reference(torch.tensor([tokens])).logits[0]


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
        slots=torch.arange(count),
        blocks=torch.zeros(1, 1, dtype=torch.int64),
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


def check(case: Case, done: Any) -> None:
    """Each token is the likeliest after those before it, and its log-probability is that of transformers."""
    tokens = [*done.prompt_token_ids, *done.token_ids]
    logits = case.logits(tokens).numpy()
    for place, score in enumerate([*done.prompt_logprobs[1:], *done.logprobs]):
        oracles.check_logprob(score, tokens[place + 1], logits[place], 2, atol=CLOSE)
    for place in range(len(done.prompt_token_ids), len(tokens)):
        assert logits[place - 1, tokens[place]] >= logits[place - 1].max() - CLOSE
