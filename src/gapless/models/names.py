"""Names of weights by their role, in a Hugging Face checkpoint and in a GGUF file.

A family gives its own names; all GGUF files share one set. Knows no shapes.
"""

import re
from dataclasses import dataclass, fields

_ENDS = ("embedding", "last_norm", "head", "layers")  # of a model; the other names are those of a layer
_GGUF_PATTERN = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class WeightNames:
    """Each without its ending `.weight` or `.bias`, which sinks do not have.

    Those of a layer stand below `layers` and its number.
    """

    embedding: str = "model.embed_tokens"
    last_norm: str = "model.norm"
    head: str = "lm_head"
    layers: str = "model.layers"
    attention_norm: str = "input_layernorm"
    attention_norm_after: str = ""
    mlp_norm: str = "post_attention_layernorm"
    mlp_norm_after: str = ""
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    o: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    sinks: str = "self_attn.sinks"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"

    def of_layer(self, layer: int | str, name: str) -> str:
        """The full name of a layer's weight, without its ending."""
        return f"{self.layers}.{layer}.{name}"


HF_NAMES = WeightNames()
GGUF_NAMES = WeightNames(
    embedding="token_embd",
    last_norm="output_norm",
    head="output",
    layers="blk",
    attention_norm="attn_norm",
    attention_norm_after="post_attention_norm",
    mlp_norm="ffn_norm",
    mlp_norm_after="post_ffw_norm",
    q="attn_q",
    k="attn_k",
    v="attn_v",
    o="attn_output",
    q_norm="attn_q_norm",
    k_norm="attn_k_norm",
    sinks="",
    gate="ffn_gate",
    up="ffn_up",
    down="ffn_down",
)
_ROLES = {name: field.name for field in fields(WeightNames) if (name := getattr(GGUF_NAMES, field.name))}


def name_from_gguf(gguf_name: str, names: WeightNames) -> str | None:
    """The family's name of a GGUF tensor; None for a tensor that has no role."""
    match = _GGUF_PATTERN.fullmatch(gguf_name)
    if match is None:
        return None
    layer, part, ending = match.groups()
    role = _ROLES.get(part)
    if role is None or (role in _ENDS) != (layer is None) or not (name := getattr(names, role)):
        return None
    return f"{name if layer is None else names.of_layer(layer, name)}.{ending}"
