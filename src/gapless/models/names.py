"""Names of weights by their role, and how those of a layer are stored, in a checkpoint or in a GGUF file.

A family gives its own names. GGUF files share one set, from which a family may differ. Knows no shapes.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WeightNames:
    """Each without its ending `.weight` or `.bias`, which sinks do not have.

    Those of a layer stand below `layers` and its number. Where q, k and v have one name they are one weight, one below
    the other; so are gate and up.
    """

    embedding: str = "model.embed_tokens"
    positions: str = ""
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
    router: str = "mlp.gate"
    expert_gate: str = "mlp.experts.{}.gate_proj"  # with a place for the expert's number, or one weight for all
    expert_up: str = "mlp.experts.{}.up_proj"
    expert_down: str = "mlp.experts.{}.down_proj"
    shared_router: str = "mlp.shared_expert_gate"
    shared_gate: str = "mlp.shared_expert.gate_proj"
    shared_up: str = "mlp.shared_expert.up_proj"
    shared_down: str = "mlp.shared_expert.down_proj"
    shared_router_is_flat: bool = False  # it is [hidden_size], not [1, hidden_size]
    experts_in_columns: bool = False  # weights of all experts are [count, in, out], gate and up alternate in columns
    transposed: bool = False  # matrices of layers are [in, out]
    head_by_head: bool = False  # in the one weight of q, k and v: those of the first head, then of the next
    pairs: bool = False  # rows of q and k that are rotated together lie side by side, not half a head apart

    def of_layer(self, layer: int | str, name: str) -> str:
        """The full name of a layer's weight, without its ending."""
        return f"{self.layers}.{layer}.{name}"

    @property
    def has_one_qkv(self) -> bool:
        return self.q == self.k

    @property
    def has_one_gate_up(self) -> bool:
        return self.gate == self.up


HF_NAMES = WeightNames()
GGUF_NAMES = WeightNames(
    embedding="token_embd",
    positions="position_embd",
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
    sinks="attn_sinks.weight",
    gate="ffn_gate",
    up="ffn_up",
    down="ffn_down",
    router="ffn_gate_inp",
    expert_gate="ffn_gate_exps",
    expert_up="ffn_up_exps",
    expert_down="ffn_down_exps",
    shared_router="ffn_gate_inp_shexp",
    shared_gate="ffn_gate_shexp",
    shared_up="ffn_up_shexp",
    shared_down="ffn_down_shexp",
    shared_router_is_flat=True,
)
