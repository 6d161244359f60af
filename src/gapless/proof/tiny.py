"""Tiny models of several families with random weights, made in memory, for the fuzz.

Weights have a wide spread, so that attention is sharp: a change of any earlier token, or of its position, changes the
output. The tokenizer has a character for each token. Knows nothing of schedules.
"""

from __future__ import annotations

from typing import Any
from zlib import crc32

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from gapless.errors import ConfigError
from gapless.models import registry
from gapless.models.config import ModelConfig
from gapless.models.decoder import CausalLM
from gapless.models.linear import plain
from gapless.models.shapes import weight_shapes
from gapless.models.weight import Weight
from gapless.proof.stage import LONE_BLOCK_SIZE, ModelStage, Room
from gapless.runner.layer_groups import LayerGroups
from gapless.runner.native_model import NativeModel
from gapless.runner.resolve import Resolved
from gapless.text.parts import TokenizerParts
from gapless.text.tokenizer import Tokenizer

TINY = "tiny/"  # a model of this module by name: tiny/llama/0, or tiny/llama/0/native
VOCAB_SIZE = 97
SPREAD = 0.2
ROOM = Room(num_rows=8, num_places=512, max_batch_tokens=96, max_model_len=96)

_WINDOW = {"sliding_window": 16}
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
} | {
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
}
_CHANGES: dict[str, dict[str, Any]] = {  # what is not as in `raw_config`, so that families differ in shape too
    "mistral": {"num_key_value_heads": 1},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 12, "num_hidden_layers": 3},
    "granite": {"embedding_multiplier": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3},
    "smollm3": {"no_rope_layer_interval": 2},
    "olmo3": _WINDOW,
    "phi3": _WINDOW | {"partial_rotary_factor": 0.5},
    "starcoder2": _WINDOW,
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "tie_word_embeddings": True},
    "cohere": {"logit_scale": 0.5},
    "cohere2": _WINDOW | {"logit_scale": 0.5},
    "gemma2": _WINDOW | {"head_dim": 8, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 9.0},
    "mixtral": _WINDOW | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    | {"shared_expert_intermediate_size": 24},
    "qwen3_moe": {"head_dim": 8, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "gpt_oss": _WINDOW | {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma3": {"text_config": _TEXT | _WINDOW | {"head_dim": 8, "sliding_window_pattern": 2}},
    "gemma3_text": _WINDOW | {"head_dim": 8, "sliding_window_pattern": 2},
}
FAMILIES: dict[str, dict[str, Any]] = {
    family.model_type: {"architectures": [family.architecture], "model_type": family.model_type}
    | _CHANGES.get(family.model_type, {})
    for family in registry.FAMILIES
}


def named_stage(name: str) -> ModelStage:
    """The stage of `tiny/family/seed` or `tiny/family/seed/native`. Raises ConfigError."""
    _, family, seed, kind = [*name.split("/"), "", "", ""][:4]
    if family not in FAMILIES or not seed.isdigit() or kind not in ("", "native"):
        raise ConfigError(f"{name}: a tiny model is tiny/FAMILY/SEED with one of {', '.join(FAMILIES)}")
    return tiny_stage(family, int(seed), native=kind == "native")


def tiny_config(family: str) -> ModelConfig:
    return registry.hf_config(raw_config(**FAMILIES[family]))


def mean_of(name: str, shape: tuple[int, ...]) -> float:
    """Of a random weight: norms have weights about 1."""
    return 1.0 if len(shape) == 1 and name.endswith(".weight") else 0.0


def tiny_stage(family: str, seed: int = 0, *, native: bool = False) -> ModelStage:
    """A stage with a random model of the family."""
    config = tiny_config(family)
    shapes = weight_shapes(config)

    def read(name: str) -> Weight:
        generator = torch.Generator().manual_seed(crc32(f"{seed} {name}".encode()))
        return plain(torch.empty(shapes[name]).normal_(mean_of(name, shapes[name]), SPREAD, generator=generator))

    with torch.inference_mode():
        model = NativeModel(config, read) if native else CausalLM(config, read)
    groups = LayerGroups.of([spec.window for spec in config.attention_specs()], ROOM.max_model_len)
    limits = ROOM.limits(LONE_BLOCK_SIZE)
    resolved = Resolved(config, "cpu", torch.float32, torch.float32, 0, limits, groups, native=native)
    return ModelStage(model, resolved, ROOM, _tokenizer())


def raw_config(**changes: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "eos_token_id": 0,
    } | changes


def _tokenizer() -> Tokenizer:
    backend = Backend(models.WordLevel({chr(32 + i): i for i in range(VOCAB_SIZE)}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    return Tokenizer(TokenizerParts(backend))
