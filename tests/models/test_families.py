"""Families: both generations of config.json, GGUF metadata, and everything that must be refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import raw_config, save_gguf

from family_cases import QWEN2_MOE
from gapless.errors import CorruptModel, ModelError, UnsupportedModel
from gapless.models.config import ModelConfig
from gapless.models.gguf_file import GGUFFile
from gapless.models.registry import FAMILIES, gguf_config, hf_config
from gapless.models.rope_config import RopeConfig

MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
LOCAL_GLOBAL = ["sliding_attention", "full_attention"]
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def rope_of(config: ModelConfig) -> RopeConfig:
    """Of every layer."""
    rope = config.layers[0].attention.rope
    assert rope is not None
    assert all(layer.attention.rope == rope for layer in config.layers)
    return rope


def windows_of(config: ModelConfig) -> list[int | None]:
    return [layer.attention.window for layer in config.layers]


def test_defaults() -> None:
    config = hf_config(raw_config(num_key_value_heads=...))
    assert (config.head_dim, config.num_kv_heads, rope_of(config)) == (12, 4, RopeConfig(10000.0))
    assert config.eos_token_ids == ()


def test_old_and_new_rope_keys_agree() -> None:
    old = hf_config(raw_config(rope_theta=5e5, rope_scaling={"type": "llama3", **LLAMA3}))
    new = hf_config(raw_config(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}))
    assert rope_of(old) == rope_of(new) == RopeConfig(5e5, "llama3", 8.0, 64, low_freq_factor=1.0, high_freq_factor=4.0)


@pytest.mark.parametrize(
    ("own", "generation", "joined"),
    [(2, None, (2,)), ([2, 5], 7, (2, 5, 7)), (2, [3, 2], (2, 3)), (None, [9], (9,)), (None, None, ())],
)
def test_end_tokens_are_joined(own: Any, generation: Any, joined: tuple[int, ...]) -> None:
    config = hf_config(raw_config(eos_token_id=own), {"eos_token_id": generation})
    assert config.eos_token_ids == joined


BAD_IDS: list[Any] = [2**31, -1, True, 1.0, "2", [[2]], [2, None], {"a": 1}, [2**31], [1, 2**64]]


@pytest.mark.parametrize("value", BAD_IDS)
def test_end_tokens_that_are_no_ids(value: Any) -> None:
    with pytest.raises(CorruptModel, match=r"^config\.json: eos_token_id holds"):
        hf_config(raw_config(eos_token_id=value))
    with pytest.raises(CorruptModel, match=r"generation_config\.json: eos_token_id holds"):
        hf_config(raw_config(), {"eos_token_id": value})


def test_end_tokens_past_the_vocabulary_are_dropped(caplog: pytest.LogCaptureFixture) -> None:
    assert hf_config(raw_config(eos_token_id=[2, 97])).eos_token_ids == (2,)
    assert "config.json: eos_token_id: 97 is ignored: the vocabulary has 97 tokens" in caplog.text


@pytest.mark.parametrize("value", ["2", 1.5, [1.5], 2**31])
def test_end_tokens_of_a_gguf_that_are_no_ids(tmp_path: Path, value: Any) -> None:
    with pytest.raises(CorruptModel, match=r"m\.gguf: tokenizer\.ggml\.eot_token_id holds"):
        from_gguf(tmp_path, tokenizer__ggml__eot_token_id=value)


def test_architecture_from_model_type() -> None:
    config = hf_config(raw_config(architectures=..., model_type="qwen2"))
    attention = config.layers[0].attention
    assert config.architecture == "Qwen2ForCausalLM"
    assert (attention.qkv_bias, attention.output_bias) == (True, False)


@pytest.mark.parametrize(
    "changes",
    [
        MISTRAL | {"sliding_window": None},
        MISTRAL | {"sliding_window": 128},
        QWEN2 | {"sliding_window": 64},
        QWEN2 | {"use_sliding_window": False, "sliding_window": 64, "layer_types": ["full_attention"] * 2},
        {"sliding_window": 64},
    ],
)
def test_windows_that_are_none(changes: dict[str, Any]) -> None:
    assert windows_of(hf_config(raw_config(**changes))) == [None, None]


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        (MISTRAL | {"sliding_window": 64}, [64, 64]),
        (MISTRAL | {"max_position_embeddings": 32768}, [4096, 4096]),
        (QWEN2 | {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}, [None, 64]),
        (QWEN2 | {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}, [64, 64]),
        (QWEN2 | {"use_sliding_window": True, "sliding_window": 64, "layer_types": LOCAL_GLOBAL}, [64, None]),
    ],
)
def test_windows(changes: dict[str, Any], windows: list[int | None]) -> None:
    assert windows_of(hf_config(raw_config(**changes))) == windows


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["BloomForCausalLM"]}, "BloomForCausalLM"),
        ({"architectures": ..., "model_type": "mamba"}, "mamba is not supported: it has layers with a recurrent state"),
        ({"architectures": ["JambaForCausalLM"], "model_type": "jamba"}, "JambaForCausalLM .* recurrent state"),
        ({"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"}, "encoder-decoder"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"hidden_act": "relu"}, "relu"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        (QWEN2 | {"layer_types": LOCAL_GLOBAL}, "sliding_attention"),
        (QWEN2 | {"layer_types": ["linear_attention", "full_attention"]}, "recurrent state"),
        (QWEN2 | {"layer_types": ["chunked_attention", "full_attention"]}, "chunked_attention"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "layer to layer"),
    ],
)
def test_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        hf_config(raw_config(**changes))


def test_refusal_lists_what_is_supported() -> None:
    with pytest.raises(UnsupportedModel) as caught:
        hf_config({"architectures": ["X"]})
    assert all(family.architecture in str(caught.value) for family in FAMILIES)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": ...}, "hidden_size"),
        ({"max_position_embeddings": ...}, "max_position_embeddings"),
        ({"architectures": ..., "model_type": ...}, "architectures"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"num_hidden_layers": -1}, "num_hidden_layers"),
        ({"num_hidden_layers": 1.5}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**9}, "layers"),
        (QWEN2_MOE | {"mlp_only_layers": "0"}, "mlp_only_layers is '0', not a list of layers"),
        (QWEN2_MOE | {"mlp_only_layers": [[0]]}, "mlp_only_layers"),
        (QWEN2_MOE | {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size"),
        (QWEN2_MOE | {"shared_expert_intermediate_size": 2**30}, "the size of the shared expert"),
        (QWEN2_MOE | {"num_experts_per_tok": 9}, "num_experts_per_tok is 9, there are 5 experts"),
        ({"num_key_value_heads": 3}, "key-value heads"),
        ({"head_dim": 7}, "odd"),
        ({"architectures": 5}, "architectures is 5"),
        ({"architectures": [5]}, "architectures"),
        ({"architectures": ..., "model_type": [1]}, "model_type"),
        ({"layer_types": 5}, "layer_types is 5"),
        ({"layer_types": [[1]]}, "layer_types"),
        ({"layer_types": ["full_attention"]}, "layer_types lists 1 layers, num_hidden_layers is 2"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "short_factor is None, not a list of numbers"),
        (
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1, 0], "long_factor": [1]}},
            "positive numbers",
        ),
        (
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1], "long_factor": [1]}},
            "the head has 6 pairs",
        ),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no', not true or false"),
        ({"vocab_size": 10**12}, "vocab_size is 1000000000000, not a whole number up to"),
        ({"vocab_size": 2**29}, "vocab_size is 536870912"),
        ({"hidden_size": 2**40}, "hidden_size"),
        ({"hidden_size": 2**29}, "hidden_size is 536870912"),
        ({"intermediate_size": 2**29}, "intermediate_size is 536870912"),
        ({"num_attention_heads": 2**16, "num_key_value_heads": 2**16, "head_dim": 2**16}, "number of heads"),
        ({"max_position_embeddings": 10**12}, "max_position_embeddings"),
        ({"max_position_embeddings": 10**400}, "max_position_embeddings"),
        ({"max_position_embeddings": float("nan")}, "max_position_embeddings is nan"),
        ({"max_position_embeddings": float("inf")}, "max_position_embeddings is inf"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"head_dim": 0}, "head_dim is 0"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_theta": 0.5}, "rope_theta"),
        ({"rope_theta": 1e300}, "rope_theta"),
        ({"rope_theta": "10000"}, "rope_theta is '10000'"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": "x", "mscale_all_dim": 1}}, "mscale is 'x'"),
        ({"rope_scaling": {"type": "llama3", **LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "low_freq_factor"),
    ],
)
def test_corrupt(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(CorruptModel, match=named):
        hf_config(raw_config(**changes))


def from_gguf(path: Path, arch: str = "llama", **metadata: Any) -> ModelConfig:
    save_gguf(path / "m.gguf", arch, **metadata)
    return gguf_config(GGUFFile(path / "m.gguf"))


def test_gguf(tmp_path: Path) -> None:
    tokens = {
        "tokenizer__ggml__eos_token_id": 2,
        "tokenizer__ggml__eot_token_id": 5,
    }
    config = from_gguf(tmp_path, "qwen3", **tokens)
    assert (config.architecture, config.vocab_size, config.head_dim) == ("Qwen3ForCausalLM", 97, 24)
    attention = config.layers[0].attention
    assert (attention.head_norm, config.tie_embeddings, attention.qkv_bias) == ("each", True, False)
    assert (config.eos_token_ids, attention.rope) == ((2, 5), RopeConfig(5000.0))


def test_a_gguf_with_a_window(tmp_path: Path) -> None:
    assert windows_of(from_gguf(tmp_path, ARCH__attention__sliding_window=32)) == [32]


def test_gguf_rope_kinds(tmp_path: Path) -> None:
    factor = {"ARCH__rope__scaling__factor": 4.0}
    for kind in ({"ARCH__rope__scaling__type": "linear"}, {}):
        assert rope_of(from_gguf(tmp_path, **kind, **factor)) == RopeConfig(5000.0, "linear", 4.0, 64)
    assert rope_of(from_gguf(tmp_path, ARCH__rope__scaling__type="none", **factor)).kind == "default"
    scaling = {"ARCH__rope__scaling__type": "yarn", "ARCH__rope__scaling__original_context_length": 16}
    yarn = rope_of(from_gguf(tmp_path, **scaling, **factor))
    hf = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5000.0, "original_max_position_embeddings": 16}
    assert yarn == rope_of(hf_config(raw_config(rope_parameters=hf)))


def test_gguf_frequency_factors(tmp_path: Path) -> None:
    factors = np.arange(1, 13, dtype=np.float32)
    assert rope_of(from_gguf(tmp_path, extra={"rope_freqs.weight": factors})).freq_factors == tuple(factors.tolist())
    for wrong in (factors[:5], factors.reshape(12, 1)):
        with pytest.raises(CorruptModel, match="rope"):
            from_gguf(tmp_path, extra={"rope_freqs.weight": wrong})


@pytest.mark.parametrize(
    ("arch", "options", "named"),
    [
        ("bloom", {}, "bloom"),
        ("llama", {"ARCH__rope__scaling__type": "longrope"}, "longrope"),
        ("llama", {"ARCH__rope__dimension_count": 12}, "rope"),
        ("qwen2", {"ARCH__expert_count": 8}, "qwen2' with experts"),
        ("llama", {"ARCH__attention__sliding_window_pattern": [1, 0]}, "true and false"),
        ("llama", {"drop": "embedding_length"}, "llama.embedding_length"),
        ("llama", {"drop": "token_embd.weight"}, "token_embd.weight"),
        ("llama", {"ARCH__attention__value_length": 12}, "values"),
    ],
)
def test_gguf_refused(tmp_path: Path, arch: str, options: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        from_gguf(tmp_path, arch, **options)
