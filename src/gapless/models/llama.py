"""The Llama family (Llama, Mistral, Qwen2, Qwen3) as one class: token ids and positions in, logits out.

Owns the weights of one model on one device and the names they have in a checkpoint.
Knows nothing of batches, requests or the KV cache: attention is a function that the caller passes in.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from gapless.models.config import ModelConfig
from gapless.models.layers import PLAIN, Gate, Hidden, Layers, Norm
from gapless.models.rope import RotaryTable, Rotation

# attend(layer, heads, rotation) rotates q and k, stores k and v, and returns attention [n, num_heads * head_dim].
# heads is [n, num_heads + 2 * num_kv_heads, head_dim]: q, k and v side by side.
Attend = Callable[[int, Tensor, Rotation], Tensor]
ReadWeight = Callable[[str], Tensor]  # by its name in a Hugging Face checkpoint, on the device, in the dtype

_EMBEDDING, _NORM, _HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


class CausalLM:
    """To be called under torch.inference_mode."""

    __slots__ = ("config", "embed", "head", "layers", "norm", "rotary")

    def __init__(
        self,
        config: ModelConfig,
        read: ReadWeight,
        max_positions: int | None = None,
        *,
        layers: Layers = PLAIN,
    ) -> None:
        """max_positions: how many positions the rope table holds, all of the config's unless given.

        layers: makes the parts, the way they run on this device.
        """
        self.config = config
        table = read(_EMBEDDING)
        self.embed = layers.embed(table)
        self.layers = [DecoderLayer(config, index, read, layers) for index in range(config.num_layers)]
        self.norm = layers.norm(Norm(read(_NORM), config.rms_norm_eps))
        self.head = layers.linear(table if config.tie_embeddings else read(_HEAD))
        num_positions = max_positions or config.max_position_embeddings
        self.rotary = RotaryTable(config.rope, config.head_dim, num_positions, table.dtype, table.device)

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """token_ids [n] int32 or int64, positions [n] int64 -> hidden [n, hidden_size]."""
        hidden = self.embed(token_ids)
        cos_sin = self.rotary.at(positions)  # on a GPU launched as usual, which attention counts on (kernels/launch)
        for layer in self.layers:
            hidden = layer(hidden, cos_sin, attend)
        return self.norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [m, hidden_size] as `forward` gave it -> [m, vocab_size]."""
        return self.head(hidden)


class DecoderLayer:
    """Attention, then the gated product, each added to the stream."""

    __slots__ = ("down", "eps", "gate_up", "head_norm", "index", "out", "qkv", "view")

    def __init__(self, config: ModelConfig, index: int, read: ReadWeight, make: Layers) -> None:
        prefix = f"model.layers.{index}."
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        self.index, self.eps = index, config.rms_norm_eps
        self.view = (-1, config.num_heads + 2 * config.num_kv_heads, config.head_dim)
        self.head_norm = _head_norm(config, attention, read) if config.qk_norm else None
        qkv = torch.cat([read(f"{attention}{x}_proj.weight") for x in "qkv"])
        qkv_bias = torch.cat([read(f"{attention}{x}_proj.bias") for x in "qkv"]) if config.attention_bias else None
        self.qkv = make.norm_linear(Norm(read(f"{prefix}input_layernorm.weight"), self.eps), qkv, qkv_bias)
        out_bias = _bias(read, f"{attention}o_proj.", config.output_bias)
        self.out = make.add_linear(read(f"{attention}o_proj.weight"), out_bias)
        norm = Norm(read(f"{prefix}post_attention_layernorm.weight"), self.eps)
        self.gate_up = make.norm_gated(norm, _gate(config, mlp, read))
        self.down = make.add_linear(read(f"{mlp}down_proj.weight"), _bias(read, f"{mlp}down_proj.", config.mlp_bias))

    def __call__(self, hidden: Hidden, cos_sin: Tensor, attend: Attend) -> Hidden:
        heads = self.qkv(hidden).view(self.view)
        hidden = self.out(attend(self.index, heads, Rotation(cos_sin, self.head_norm, self.eps)), hidden)
        return self.down(self.gate_up(hidden), hidden)


def _bias(read: ReadWeight, prefix: str, has_bias: bool) -> Tensor | None:
    return read(f"{prefix}bias") if has_bias else None


def _gate(config: ModelConfig, prefix: str, read: ReadWeight) -> Gate:
    gate, up = (f"{prefix}{x}_proj." for x in ("gate", "up"))
    biases = (_bias(read, name, config.mlp_bias) for name in (gate, up))
    return Gate(read(f"{gate}weight"), read(f"{up}weight"), *biases)


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
