"""Gemma 3, text: Gemma 2 with norms of heads in place of caps; windows in five layers of six, with their own rope."""

from gapless.models.config import ModelConfig
from gapless.models.families.gemma2 import gemma_ends, gemma_layer
from gapless.models.family import Family, GGUFForm, all_but, hf_head_dim, hf_layers, hf_model
from gapless.models.keys import Keys
from gapless.models.rope_config import hf_ropes

ARCHITECTURE = "Gemma3ForCausalLM"
GGUF_KEYS = {"rope_local_base_freq": "rope.freq_base_swa"}


def from_hf(keys: Keys) -> ModelConfig:
    theta = keys.number("rope_local_base_freq", 10000.0)
    ropes = hf_ropes(keys, hf_head_dim(keys, 256), theta=1000000.0, local_theta=theta)
    full, local = (gemma_layer(keys, cap=None, rope=rope, head_norm="each") for rope in ropes)
    is_local = all_but(keys.size("sliding_window_pattern", 6))
    layers = hf_layers(keys, full, local=local, always=True, is_local=is_local)
    return hf_model(keys, ARCHITECTURE, layers, **gemma_ends(keys, cap=None))


FAMILY = Family(ARCHITECTURE, "gemma3_text", from_hf, GGUFForm("gemma3", keys=GGUF_KEYS), "Gemma 3 270M and 1B")
