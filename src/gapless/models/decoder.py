"""A decoder as its config describes it: token ids and positions in, logits out.

Owns the weights of one model on one device. Reads the spec of each layer, and knows no family and no kind of device.
Knows nothing of batches, requests or the KV cache: attention is a function that the caller passes in.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from copy import copy

import torch
from torch import Tensor

from gapless.models.config import ModelConfig
from gapless.models.layers import PLAIN, GatedWeights, Hidden, Layers, Norm
from gapless.models.names import WeightNames
from gapless.models.rope import RotaryRotation, RotaryTable
from gapless.models.spec import AttentionSpec, LayerSpec, MlpSpec, NormSpec
from gapless.models.weight import Weight, stacked

# attend(layer, heads, rotation) rotates q and k, stores k and v, and returns attention [n, num_heads * head_dim].
# heads is [n, num_heads + 2 * num_kv_heads, head_dim]: q, k and v side by side.
AttendLayer = Callable[[int, Tensor, RotaryRotation], Tensor]
ReadWeight = Callable[[str], Weight]  # by its name in a Hugging Face checkpoint, on the device, in the dtype


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
        """max_positions: how many positions a rope table holds, all of the config's unless given.

        layers: makes the parts, the way they run on this device.
        """
        self.config = config
        names = config.names
        table = read(f"{names.embedding}.weight")
        self.embed = layers.embed(table, config.embedding_scale)
        ropes = list(dict.fromkeys(spec.rope for spec in config.attention_specs()))
        self.layers = [
            DecoderLayer(spec, index, ropes.index(spec.attention.rope), LayerReader(names, index, read), layers)
            for index, spec in enumerate(config.layers)
        ]
        last_norm = read(f"{names.last_norm}.weight").dense()
        self.norm = layers.norm(make_norm(last_norm, config.last_norm))
        self.head = layers.linear(table if config.tie_embeddings else read(f"{names.head}.weight"))
        num_positions = max_positions or config.max_position_embeddings
        where = last_norm.dtype, last_norm.device  # a matrix may be stored in a different dtype
        self.rotary = [RotaryTable(rope, config.head_dim, num_positions, *where) for rope in ropes]

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    def forward(self, token_ids: Tensor, positions: Tensor, attend: AttendLayer) -> Tensor:
        """token_ids [n] int32 or int64, positions [n] int64 -> hidden [n, hidden_size]."""
        hidden = self.embed(token_ids)
        # on a GPU launched as usual, which attention counts on (kernels/launch)
        turns = [table.at(positions) for table in self.rotary]
        for layer in self.layers:
            hidden = layer(hidden, turns, attend)
        return self.norm(hidden)

    def few_layers(self) -> "CausalLM":
        """The same model with the first two layers of each kind: it launches every kernel that the whole one does."""
        kinds: Counter[LayerSpec] = Counter()
        found = copy(self)
        found.layers = []
        for spec, layer in zip(self.config.layers, self.layers, strict=True):
            kinds[spec] += 1
            if kinds[spec] <= 2:  # the first one's norm finds its sums of squares elsewhere
                found.layers.append(layer)
        return found

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [m, hidden_size] as `forward` gave it -> [m, vocab_size]."""
        logits, cap = self.head(hidden), self.config.logit_soft_cap
        return logits if cap is None else (logits / cap).tanh_().mul_(cap)


class DecoderLayer:
    """Attention, then the MLP, each added to the stream."""

    __slots__ = ("down", "eps", "gate_up", "head_norm", "index", "out", "qkv", "rope", "sinks", "view")

    def __init__(self, spec: LayerSpec, index: int, rope: int, weights: "LayerReader", make: Layers) -> None:
        """rope: which of the tables."""
        attention, names = spec.attention, weights.names
        self.index, self.rope, self.eps = index, rope, spec.norm.eps
        self.view = (-1, attention.num_heads + 2 * attention.num_kv_heads, attention.head_dim)
        self.head_norm = weights.head_norm(spec) if attention.head_norm else None
        self.sinks = weights.sinks() if attention.sinks else None
        self.qkv = make.norm_linear(weights.norm_before(names.attention_norm, spec.norm), *weights.qkv(attention))
        out = weights.linear(names.o, attention.output_bias)
        self.out = make.add_linear(*out, weights.norm_after(names.attention_norm_after, spec.norm))
        self.gate_up = make.norm_gated(weights.norm_before(names.mlp_norm, spec.norm), weights.gate(spec.mlp))
        down = weights.linear(names.down, spec.mlp.bias)
        self.down = make.add_linear(*down, weights.norm_after(names.mlp_norm_after, spec.norm))

    def __call__(self, hidden: Hidden, turns: Sequence[Tensor], attend: AttendLayer) -> Hidden:
        heads = self.qkv(hidden).view(self.view)
        rotation = RotaryRotation(turns[self.rope], self.head_norm, self.eps, self.sinks)
        hidden = self.out(attend(self.index, heads, rotation), hidden)
        return self.down(self.gate_up(hidden), hidden)


class LayerReader:
    """The weights of one layer, by their roles."""

    __slots__ = ("_index", "_read", "names")

    def __init__(self, names: WeightNames, index: int, read: ReadWeight) -> None:
        self.names, self._index, self._read = names, index, read

    def weight(self, name: str) -> Weight:
        return self._read(f"{self.names.of_layer(self._index, name)}.weight")

    def bias(self, name: str, has_bias: bool) -> Tensor | None:
        return self._read(f"{self.names.of_layer(self._index, name)}.bias").dense() if has_bias else None

    def linear(self, name: str, has_bias: bool) -> tuple[Weight, Tensor | None]:
        return self.weight(name), self.bias(name, has_bias)

    def qkv(self, spec: AttentionSpec) -> tuple[Weight, Tensor | None]:
        """q, k and v below each other."""
        names = (self.names.q, self.names.k, self.names.v)
        weight = stacked([self.weight(name) for name in names])
        biases = [bias for name in names if (bias := self.bias(name, spec.qkv_bias)) is not None]
        return weight, torch.cat(biases) if biases else None

    def gate(self, spec: MlpSpec) -> GatedWeights:
        gate, up = self.names.gate, self.names.up
        biases = self.bias(gate, spec.bias), self.bias(up, spec.bias)
        return GatedWeights(self.weight(gate), self.weight(up), *biases, spec.activation)

    def norm(self, name: str, spec: NormSpec) -> Norm:
        return make_norm(self.weight(name).dense(), spec)

    def norm_before(self, name: str, spec: NormSpec) -> Norm | None:
        return self.norm(name, spec) if spec.is_before else None

    def norm_after(self, name: str, spec: NormSpec) -> Norm | None:
        return self.norm(name, spec) if spec.is_after else None

    def head_norm(self, spec: LayerSpec) -> Tensor:
        """Weights of the q and k norms, repeated for each head: [num_heads + num_kv_heads, head_dim]."""
        q, k = (self.norm(name, spec.norm).weight for name in (self.names.q_norm, self.names.k_norm))
        return torch.cat((q.expand(spec.attention.num_heads, -1), k.expand(spec.attention.num_kv_heads, -1)))

    def sinks(self) -> Tensor:
        return self._read(self.names.of_layer(self._index, self.names.sinks)).dense()


def make_norm(weight: Tensor, spec: NormSpec) -> Norm:
    """The norm as it is computed: with the offset in its weight."""
    return Norm((weight.float() + spec.offset).to(weight.dtype) if spec.offset else weight, spec.eps)
