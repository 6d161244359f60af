"""Gemma 3 from 4B on: the text part of a model that also sees. What it sees with is left aside."""

from dataclasses import replace

from gapless.models.config import ModelConfig
from gapless.models.families import gemma3
from gapless.models.families.gemma2 import NAMES as TEXT_NAMES
from gapless.models.family import Family
from gapless.models.keys import Keys

ARCHITECTURE = "Gemma3ForConditionalGeneration"
NAMES = replace(
    TEXT_NAMES,
    embedding="language_model.model.embed_tokens",
    last_norm="language_model.model.norm",
    head="language_model.lm_head",
    layers="language_model.model.layers",
)
DEFAULTS = {  # of transformers; published configs leave out what is equal to them
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
}


def from_hf(keys: Keys) -> ModelConfig:
    text = Keys(
        {**DEFAULTS, "quantization_config": keys.get("quantization_config"), **keys.mapping("text_config")},
        "config.json, text_config",
    )
    return replace(gemma3.from_hf(text), architecture=ARCHITECTURE, names=NAMES)


FAMILY = Family(ARCHITECTURE, "gemma3", from_hf, models="Gemma 3 4B, 12B and 27B, for text", gguf_name="gemma3")
