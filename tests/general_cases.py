"""Decoders of transformers that no family describes: tiny configs for the general path."""

from __future__ import annotations

from typing import Any

from family_cases import of

LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
LATENT |= {"head_dim": 8, "num_key_value_heads": 4}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
EXPERTS |= {"n_group": 1, "topk_group": 1}
FAST: dict[str, dict[str, Any]] = {
    "stablelm": of("StableLmForCausalLM", "stablelm", hidden_size=64),
    "gemma": of("GemmaForCausalLM", "gemma", head_dim=16),
    "opt": of("OPTForCausalLM", "opt", ffn_dim=80, word_embed_proj_dim=48),
    "exaone 4, with windows": of("Exaone4ForCausalLM", "exaone4", num_hidden_layers=4, sliding_window=24),
    "deepseek v3, values narrower than keys": of("DeepseekV3ForCausalLM", "deepseek_v3", **LATENT, **EXPERTS),
}
