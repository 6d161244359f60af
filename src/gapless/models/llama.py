"""The Llama family (Llama, Mistral, Qwen2, Qwen3) as one class: token ids and positions in, logits out.

Owns the weights of one model on one device and the names they have in a checkpoint.
Knows nothing of batches, requests or the KV cache: attention is a function that the caller passes in.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from gapless.models.config import ModelConfig
from gapless.models.layers import Embedding, make_norm
from gapless.models.linear import Linear, make_gated, make_linear
from gapless.models.rope import RotaryTable, Rotation

# attend(layer, heads, rotation) rotates q and k, stores k and v, and returns attention [n, num_heads * head_dim].
# heads is [n, num_heads + 2 * num_kv_heads, head_dim]: q, k and v side by side.
Attend = Callable[[int, Tensor, Rotation], Tensor]
ReadWeight = Callable[[str], Tensor]  # by its name in a Hugging Face checkpoint, on the device, in the dtype

_EMBEDDING, _NORM, _HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


class CausalLM:
    """To be called under torch.inference_mode."""

    __slots__ = ("config", "embed", "head", "layers", "norm", "rotary")

    def __init__(self, config: ModelConfig, read: ReadWeight, max_positions: int | None = None) -> None:
        """max_positions: how many positions the rope table holds, all of the config's unless given."""
        self.config = config
        self.embed = Embedding(read(_EMBEDDING))
        table = self.embed.table
        self.layers = [DecoderLayer(config, index, read) for index in range(config.num_layers)]
        self.norm = make_norm(read(_NORM), config.rms_norm_eps)
        self.head = make_linear(table if config.tie_embeddings else read(_HEAD))
        num_positions = max_positions or config.max_position_embeddings
        self.rotary = RotaryTable(config.rope, config.head_dim, num_positions, table.dtype, table.device)

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """token_ids [n] int32 or int64, positions [n] int64 -> hidden [n, hidden_size]."""
        hidden = self.embed(token_ids)
        cos_sin = self.rotary.at(positions)
        for layer in self.layers:
            hidden = layer(hidden, cos_sin, attend)
        return self.norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [m, hidden_size] as `forward` gave it -> [m, vocab_size]."""
        return self.head(hidden)


class DecoderLayer:
    __slots__ = (
        "attention_norm",
        "down",
        "eps",
        "gate_up",
        "head_norm",
        "index",
        "mlp_norm",
        "out",
        "qkv",
        "view",
    )

    def __init__(self, config: ModelConfig, index: int, read: ReadWeight) -> None:
        prefix = f"model.layers.{index}."
        self.index, self.eps = index, config.rms_norm_eps
        self.view = (-1, config.num_heads + 2 * config.num_kv_heads, config.head_dim)
        self.attention_norm = make_norm(read(f"{prefix}input_layernorm.weight"), config.rms_norm_eps)
        self.mlp_norm = make_norm(read(f"{prefix}post_attention_layernorm.weight"), config.rms_norm_eps)
        self.head_norm = _head_norm(config, f"{prefix}self_attn.", read) if config.qk_norm else None
        self.qkv = _merged_qkv(config, f"{prefix}self_attn.", read)
        out, down = f"{prefix}self_attn.o_proj.", f"{prefix}mlp.down_proj."
        gate, up = f"{prefix}mlp.gate_proj.", f"{prefix}mlp.up_proj."
        self.out = make_linear(read(f"{out}weight"), _bias(read, out, config.output_bias))
        self.gate_up = make_gated(
            read(f"{gate}weight"),
            read(f"{up}weight"),
            _bias(read, gate, config.mlp_bias),
            _bias(read, up, config.mlp_bias),
        )
        self.down = make_linear(read(f"{down}weight"), _bias(read, down, config.mlp_bias))

    def __call__(self, hidden: Tensor, cos_sin: Tensor, attend: Attend) -> Tensor:
        heads = self.qkv(self.attention_norm(hidden)).view(self.view)
        attended = attend(self.index, heads, Rotation(cos_sin, self.head_norm, self.eps))
        hidden = self.out.add(attended, hidden)
        return self.down.add(self.gate_up(self.mlp_norm(hidden)), hidden)


def _bias(read: ReadWeight, prefix: str, has_bias: bool) -> Tensor | None:
    return read(f"{prefix}bias") if has_bias else None


def _merged_qkv(config: ModelConfig, prefix: str, read: ReadWeight) -> Linear:
    weight = torch.cat([read(f"{prefix}{x}_proj.weight") for x in "qkv"])
    bias = torch.cat([read(f"{prefix}{x}_proj.bias") for x in "qkv"]) if config.attention_bias else None
    return make_linear(weight, bias)


def _head_norm(config: ModelConfig, prefix: str, read: ReadWeight) -> Tensor:
    """Weights of the q and k norms, repeated for each head: [num_heads + num_kv_heads, head_dim]."""
    q, k = read(f"{prefix}q_norm.weight"), read(f"{prefix}k_norm.weight")
    return torch.cat((q.expand(config.num_heads, -1), k.expand(config.num_kv_heads, -1)))


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every weight that `CausalLM` reads, by its name in a Hugging Face checkpoint."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {_EMBEDDING: (config.vocab_size, hidden), _NORM: (hidden,)}
    if not config.tie_embeddings:
        shapes[_HEAD] = (config.vocab_size, hidden)
    layer = _layer_shapes(config)
    for index in range(config.num_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    if config.qk_norm:
        shapes |= {f"self_attn.{x}_norm.weight": (config.head_dim,) for x in "qk"}
    products = {
        "self_attn.q_proj": (q_size, hidden, config.attention_bias),
        "self_attn.k_proj": (kv_size, hidden, config.attention_bias),
        "self_attn.v_proj": (kv_size, hidden, config.attention_bias),
        "self_attn.o_proj": (hidden, q_size, config.output_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    for name, (rows, columns, has_bias) in products.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if has_bias:
            shapes[f"{name}.bias"] = (rows,)
    return shapes
