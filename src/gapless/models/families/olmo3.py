"""OLMo 3: OLMo 2 with a window in three layers of four, whose rope is not scaled. In GGUF files it is called olmo2."""

from gapless.models.config import ModelConfig
from gapless.models.families.olmo2 import NAMES, olmo_layer
from gapless.models.family import Family, GGUFForm, all_but, hf_head_dim, hf_layers, hf_model
from gapless.models.keys import Keys
from gapless.models.rope_config import hf_ropes

ARCHITECTURE = "Olmo3ForCausalLM"


def from_hf(keys: Keys) -> ModelConfig:
    theta = keys.number("rope_theta", 500000.0)
    ropes = hf_ropes(keys, hf_head_dim(keys), theta=theta, local_theta=theta)
    full, local = (olmo_layer(keys, rope=rope) for rope in ropes)
    layers = hf_layers(keys, full, local=local, always=True, is_local=all_but(4))
    return hf_model(keys, ARCHITECTURE, layers, names=NAMES)


GGUF_FORM = GGUFForm("olmo2", mark="attention.sliding_window")
FAMILY = Family(ARCHITECTURE, "olmo3", from_hf, GGUF_FORM, "OLMo 3")
