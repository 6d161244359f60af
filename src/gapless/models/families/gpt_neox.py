"""GPT-NeoX: attention and MLP side by side, layer norms, biases, rope over a part of the head; q, k and v by head."""

from dataclasses import replace

from gapless.models.config import ModelConfig
from gapless.models.family import Family, GGUFForm, hf_attention, hf_head_dim, hf_layer_norm, hf_mlp, hf_model
from gapless.models.keys import Keys
from gapless.models.names import GGUF_NAMES, WeightNames
from gapless.models.rope_config import hf_rope
from gapless.models.spec import LayerSpec

ARCHITECTURE = "GPTNeoXForCausalLM"
QKV = "attention.query_key_value"
NAMES = WeightNames(
    embedding="gpt_neox.embed_in",
    last_norm="gpt_neox.final_layer_norm",
    head="embed_out",
    layers="gpt_neox.layers",
    q=QKV,
    k=QKV,
    v=QKV,
    o="attention.dense",
    gate="",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
    head_by_head=True,
)
GGUF_FORM = replace(GGUF_NAMES, q="attn_qkv", k="attn_qkv", v="attn_qkv")
OLD_KEYS = {"partial_rotary_factor": "rotary_pct", "rope_theta": "rotary_emb_base"}


def from_hf(keys: Keys) -> ModelConfig:
    keys = keys.renamed(OLD_KEYS)
    bias = keys.flag("attention_bias", default=True)
    rope = hf_rope(keys, hf_head_dim(keys), share=0.25)
    num_heads = keys.size("num_attention_heads")
    attention = hf_attention(keys, num_kv_heads=num_heads, rope=rope, qkv_bias=bias, output_bias=bias)
    mlp = hf_mlp(keys, default="gelu", kind="plain", bias=True)
    parallel = keys.flag("use_parallel_residual", default=True)
    return hf_model(keys, ARCHITECTURE, LayerSpec(attention, mlp, hf_layer_norm(keys), parallel), names=NAMES)


FAMILY = Family(ARCHITECTURE, "gpt_neox", from_hf, GGUFForm("gptneox", GGUF_FORM), "Pythia, GPT-NeoX 20B, Dolly 2")
