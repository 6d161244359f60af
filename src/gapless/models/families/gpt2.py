"""GPT-2: learned positions instead of rope, layer norms, biases, matrices stored [in, out]."""

from dataclasses import replace

from gapless.errors import UnsupportedModel
from gapless.models.config import ModelConfig
from gapless.models.family import Family, GGUFForm, hf_attention, hf_layer_norm, hf_mlp, hf_model
from gapless.models.keys import Keys
from gapless.models.names import GGUF_NAMES, WeightNames
from gapless.models.spec import LayerSpec

ARCHITECTURE = "GPT2LMHeadModel"
NAMES = WeightNames(
    embedding="transformer.wte",
    positions="transformer.wpe",
    last_norm="transformer.ln_f",
    layers="transformer.h",
    attention_norm="ln_1",
    mlp_norm="ln_2",
    q="attn.c_attn",
    k="attn.c_attn",
    v="attn.c_attn",
    o="attn.c_proj",
    gate="",
    up="mlp.c_fc",
    down="mlp.c_proj",
    transposed=True,
)
GGUF_FORM = replace(GGUF_NAMES, q="attn_qkv", k="attn_qkv", v="attn_qkv")
GGUF_KEYS = {"layer_norm_epsilon": "attention.layer_norm_epsilon"}
OLD_KEYS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
}


def from_hf(keys: Keys) -> ModelConfig:
    keys = keys.renamed(OLD_KEYS)
    if keys.flag("scale_attn_by_inverse_layer_idx") or not keys.flag("scale_attn_weights", default=True):
        raise UnsupportedModel("GPT-2 with scores that are not scaled by 1 / sqrt(head_dim) is not supported")
    num_heads = keys.size("num_attention_heads")
    attention = hf_attention(keys, num_kv_heads=num_heads, rope=None, qkv_bias=True, output_bias=True)
    size = keys.size("intermediate_size", 4 * keys.size("hidden_size"))
    mlp = hf_mlp(keys, key="activation_function", default="gelu_new", size=size, kind="plain", bias=True)
    return hf_model(
        keys,
        ARCHITECTURE,
        LayerSpec(attention, mlp, hf_layer_norm(keys, "layer_norm_epsilon")),
        names=NAMES,
        learned_positions=True,
        tie_embeddings=keys.flag("tie_word_embeddings", default=True),
    )


FAMILY = Family(ARCHITECTURE, "gpt2", from_hf, GGUFForm("gpt2", GGUF_FORM, GGUF_KEYS), "GPT-2, DistilGPT-2")
