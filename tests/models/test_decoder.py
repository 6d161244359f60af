"""Logits of whole sequences equal those of transformers in float32, for every variant of the family."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import full_logits, load, random_tokens, raw_config, save_gguf, save_hf
from torch import Tensor

from gapless.models.decoder import CausalLM
from gapless.models.linear import plain
from gapless.models.registry import hf_config
from gapless.models.rope import RotaryRotation
from gapless.models.shapes import weight_shapes
from gapless.models.source import resolve

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 24}
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None}
VARIANTS: dict[str, dict[str, Any]] = {
    "gqa tied": {},
    "untied": {"tie_word_embeddings": False},
    "mqa": {"num_key_value_heads": 1},
    "mha by default": {"num_key_value_heads": ...},
    "all biases": {"attention_bias": True, "mlp_bias": True},
    "head_dim 20": {"head_dim": 20},
    "head_dim 24, hidden 40": {"head_dim": 24, "hidden_size": 40},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 700.0}},
    "llama3": {"rope_parameters": LLAMA3 | {"rope_theta": 5000.0}},
    "yarn": {"rope_parameters": YARN | {"rope_theta": 10000.0}},
    "yarn with all keys": {
        "rope_parameters": YARN
        | {"beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.3, "truncate": False, "rope_theta": 1e4}
    },
    "yarn mscale": {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.9, "rope_theta": 1e4}},
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen2 mqa untied": QWEN2 | {"num_key_value_heads": 1, "tie_word_embeddings": False},
    "qwen3": QWEN3,
    "qwen3 biases": QWEN3 | {"attention_bias": True},
    "qwen3 default head_dim": QWEN3 | {"head_dim": ...},
}


TOKENS = random_tokens()


def reference_logits(model: Any, token_ids: Tensor) -> Tensor:
    with torch.inference_mode():
        return model(token_ids[None]).logits[0]


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_logits_equal_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    reference = save_hf(tmp_path, **changes)
    torch.testing.assert_close(
        full_logits(load(tmp_path), TOKENS), reference_logits(reference, TOKENS), atol=1e-4, rtol=1e-4
    )


def test_sharded_checkpoint(tmp_path: Path) -> None:
    reference = save_hf(tmp_path, max_shard_size="30KB", tie_word_embeddings=False)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    torch.testing.assert_close(
        full_logits(load(tmp_path), TOKENS), reference_logits(reference, TOKENS), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("changes", [{"attention_bias": True, "mlp_bias": True}, QWEN3], ids=["llama", "qwen3"])
def test_plain_products(tmp_path: Path, changes: dict[str, Any]) -> None:
    """float64 is never packed, so this is the path that a GPU takes."""
    reference = save_hf(tmp_path, **changes).double()
    ours = full_logits(load(tmp_path, dtype=torch.float64), TOKENS)
    torch.testing.assert_close(ours, reference_logits(reference, TOKENS).double(), atol=1e-5, rtol=1e-5)


def test_bfloat16_is_near_float32(tmp_path: Path) -> None:
    save_hf(tmp_path)
    exact, rounded = full_logits(load(tmp_path), TOKENS), full_logits(load(tmp_path, dtype=torch.bfloat16), TOKENS)
    assert rounded.dtype == torch.bfloat16
    assert (exact - rounded.float()).abs().mean() < 0.02 * exact.std()


def test_int32_tokens_and_few_positions(tmp_path: Path) -> None:
    save_hf(tmp_path)
    short = load(tmp_path, max_positions=len(TOKENS))
    assert short.rotary[0].table.shape[0] == len(TOKENS)
    torch.testing.assert_close(full_logits(short, TOKENS.int()), full_logits(load(tmp_path), TOKENS))


def test_sinks_reach_attention_and_layers_choose_their_rope() -> None:
    plain_config = hf_config(raw_config())
    first = plain_config.layers[0]
    second = replace(first, attention=replace(first.attention, sinks=True, rope=None))
    config = replace(plain_config, layers=(first, second))
    shapes = weight_shapes(config)
    assert shapes["model.layers.1.self_attn.sinks"] == (4,)
    model = CausalLM(config, lambda name: plain(torch.full(shapes[name], 0.5)))
    seen: list[RotaryRotation] = []

    def attend(layer: int, heads: Tensor, rotation: RotaryRotation) -> Tensor:
        seen.append(rotation)
        return heads[:, :4].flatten(1)

    model.forward(TOKENS, torch.arange(len(TOKENS)), attend)
    assert seen[0].sinks is None
    assert torch.equal(seen[1].sinks, torch.full((4,), 0.5))
    heads = torch.randn(len(TOKENS), 6, 12)
    assert torch.equal(seen[1].apply(heads), heads)
    assert not torch.allclose(seen[0].apply(heads), heads)


def test_few_layers_are_two_of_each_kind_and_the_model_keeps_all() -> None:
    plain_config = hf_config(raw_config())
    one = plain_config.layers[0]
    other = replace(one, attention=replace(one.attention, rope=None))
    config = replace(plain_config, layers=(one, other, one, one, other, other))
    shapes = weight_shapes(config)
    model = CausalLM(config, lambda name: plain(torch.full(shapes[name], 0.5)))
    assert [layer.index for layer in model.few_layers().layers] == [0, 1, 2, 4]
    assert [layer.index for layer in model.layers] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_gguf_logits_equal_transformers(tmp_path: Path, arch: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    weights = save_gguf(tmp_path / "tiny.gguf", arch)
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24, "vocab_size": 97}
    rope = {"rope_type": "default", "rope_theta": 5000.0}
    config = AutoConfig.for_model(
        arch,
        **sizes,
        num_hidden_layers=1,
        intermediate_size=96,
        rms_norm_eps=1e-5,
        rope_parameters=rope,
        tie_word_embeddings=True,
    )
    reference = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    state = {name: torch.from_numpy(array) for name, array in weights.items()}
    reference.load_state_dict(state | {"lm_head.weight": state["model.embed_tokens.weight"]})
    torch.testing.assert_close(
        full_logits(load(tmp_path), TOKENS), reference_logits(reference, TOKENS), atol=1e-4, rtol=1e-4
    )


def test_smollm2_equals_transformers() -> None:
    from transformers import AutoModelForCausalLM

    path = resolve("smollm2").path
    reference = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    ids = random_tokens(49152, 24)
    torch.testing.assert_close(
        full_logits(load("smollm2"), ids), reference_logits(reference, ids), atol=1e-3, rtol=1e-4
    )
