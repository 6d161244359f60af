"""Cohere's Command R7B: Command R with a window in three layers of four; the fourth sees all and does not rotate."""

from dataclasses import replace

from gapless.models.config import ModelConfig
from gapless.models.families.cohere import GGUF_FORM, cohere_ends, cohere_layer
from gapless.models.family import Family, GGUFForm, all_but, hf_layers, hf_model
from gapless.models.keys import Keys

ARCHITECTURE = "Cohere2ForCausalLM"


def from_hf(keys: Keys) -> ModelConfig:
    local = cohere_layer(keys)
    full = replace(local, attention=replace(local.attention, rope=None))
    is_local = all_but(keys.size("sliding_window_pattern", 4))
    layers = hf_layers(keys, full, local=local, always=True, is_local=is_local)
    return hf_model(keys, ARCHITECTURE, layers, **cohere_ends(keys))


FAMILY = Family(ARCHITECTURE, "cohere2", from_hf, GGUFForm("cohere2", GGUF_FORM), "Command R7B, Command A")
