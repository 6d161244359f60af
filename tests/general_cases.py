"""Decoders of transformers that no family describes: tiny configs, and what comes of each on the general path."""

from __future__ import annotations

from typing import Any

from family_cases import of

MLA = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
FAST: dict[str, dict[str, Any]] = {
    "stablelm": of("StableLmForCausalLM", "stablelm", hidden_size=64),
    "gemma": of("GemmaForCausalLM", "gemma", head_dim=16),
}
