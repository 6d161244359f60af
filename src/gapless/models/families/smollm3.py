"""SmolLM3: Llama with layers that do not rotate, by default every fourth."""

from dataclasses import replace

from gapless.errors import CorruptModel
from gapless.models.config import ModelConfig
from gapless.models.families import llama
from gapless.models.family import Family, GGUFForm
from gapless.models.keys import Keys

ARCHITECTURE = "SmolLM3ForCausalLM"


def from_hf(keys: Keys) -> ModelConfig:
    config = llama.from_hf(keys, theta=2e6)
    step = keys.size("no_rope_layer_interval", 4)
    rotates = keys.get("no_rope_layers", [(layer + 1) % step != 0 for layer in range(config.num_layers)])
    if not isinstance(rotates, list) or len(rotates) != config.num_layers:
        raise CorruptModel(f"{keys.where}: no_rope_layers is not a list with an entry for each layer")
    layers = [
        layer if turns else replace(layer, attention=replace(layer.attention, rope=None))
        for layer, turns in zip(config.layers, rotates, strict=True)
    ]
    tied = keys.flag("tie_word_embeddings", default=True)
    return replace(config, architecture=ARCHITECTURE, layers=tuple(layers), tie_embeddings=tied)


FAMILY = Family(ARCHITECTURE, "smollm3", from_hf, GGUFForm("smollm3", llama.PAIRS), "SmolLM3")
