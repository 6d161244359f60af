"""A decoder as its config describes it: token ids and positions in, logits out.

Owns the weights of one model on one device. Reads the spec of each layer, and knows no family and no kind of device.
Knows nothing of batches, requests or the KV cache: attention is a function that the caller passes in.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from copy import copy

from torch import Tensor
from torch.nn import functional as F

from gapless.models.config import ModelConfig
from gapless.models.layers import PLAIN, Hidden, Layers
from gapless.models.reader import LayerReader, ReadWeight, read_last_norm
from gapless.models.rope import RotaryRotation, RotaryTable
from gapless.models.spec import AttentionSpec, KVUnits, LayerSpec

# attend(layer, heads, rotation) rotates q and k, stores k and v, and returns attention [n, num_heads * head_dim].
# heads is [n, num_heads + 2 * num_kv_heads, head_dim]: q, k and v side by side.
AttendLayer = Callable[[int, Tensor, RotaryRotation], Tensor]


class CausalLM:
    """To be called under torch.inference_mode."""

    __slots__ = ("config", "embed", "head", "kv_units", "layers", "norm", "places", "rotary")

    def __init__(
        self,
        config: ModelConfig,
        read: ReadWeight,
        max_positions: int | None = None,
        *,
        layers: Layers = PLAIN,
        kv_units: tuple[KVUnits, ...] = (),
    ) -> None:
        """max_positions: how many positions a rope table holds, all of the config's unless given.

        layers: makes the parts, the way they run on this device. kv_units: of each layer, for an FP8 cache.
        """
        self.config, self.kv_units = config, kv_units
        names = config.names
        table = read(f"{names.embedding}.weight")
        self.embed = layers.embed(table, config.embedding_scale)
        self.places = read(f"{names.positions}.weight").dense() if config.learned_positions else None
        ropes = list(dict.fromkeys(spec.rope for spec in config.attention_specs()))
        self.layers = [
            DecoderLayer(spec, index, ropes.index(spec.attention.rope), LayerReader(names, index, spec, read), layers)
            for index, spec in enumerate(config.layers)
        ]
        self.norm = layers.norm(read_last_norm(config, read))
        self.head = layers.linear(table if config.tie_embeddings else read(f"{names.head}.weight"))
        num_positions = max_positions or config.max_position_embeddings
        where = table.dense().dtype, table.dense().device
        self.rotary = [RotaryTable(rope, config.head_dim, num_positions, *where) for rope in ropes]

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    def forward(self, token_ids: Tensor, positions: Tensor, attend: AttendLayer) -> Tensor:
        """token_ids [n] int32 or int64, positions [n] int64 -> hidden [n, hidden_size]."""
        hidden = self.embed(token_ids)
        if self.places is not None:
            hidden = Hidden(hidden.values + F.embedding(positions, self.places))
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
    """Attention and the MLP, each added to the stream."""

    __slots__ = ("down", "experts", "gate_up", "head_norm", "index", "out", "qkv", "rope", "sinks", "spec", "view")

    def __init__(self, spec: LayerSpec, index: int, rope: int, weights: LayerReader, make: Layers) -> None:
        """rope: which of the tables."""
        attention = spec.attention
        self.spec, self.index, self.rope = spec, index, rope
        self.view = (-1, attention.num_heads + 2 * attention.num_kv_heads, attention.head_dim)
        self.head_norm, self.sinks = weights.head_norm(), weights.sinks()
        before, after = weights.norms_before(), weights.norms_after()
        self.qkv = make.norm_linear(before[0], *weights.qkv())
        self.out = make.add_linear(*weights.out(), after[0])
        self.experts: Callable[[Hidden], Hidden] | None = None
        if spec.mlp.experts is not None:
            assert not spec.parallel
            self.experts = make.experts(before[1], spec.mlp, weights.experts(), after[1])
            return
        self.gate_up = make.norm_gated(before[1], weights.gate())
        self.down = make.add_linear(*weights.down(), after[1])

    def __call__(self, hidden: Hidden, turns: Sequence[Tensor], attend: AttendLayer) -> Hidden:
        inner = self.gate_up(hidden) if self.spec.parallel else None
        heads, norm = self.qkv(hidden).view(self.view), self.head_norm
        if norm is not None and self.spec.attention.head_norm != "each":
            normalize_heads(heads, self.spec.attention, norm, self.spec.norm.eps)
            norm = None
        rotation = RotaryRotation(turns[self.rope], norm, self.spec.norm.eps, self.sinks)
        hidden = self.out(attend(self.index, heads, rotation), hidden)
        if self.experts is not None:
            return self.experts(hidden)
        return self.down(self.gate_up(hidden) if inner is None else inner, hidden)


def normalize_heads(heads: Tensor, spec: AttentionSpec, weight: Tensor, eps: float) -> None:
    """Norms of queries and keys that attention does not know, in place.

    heads [n, num_heads + 2 * num_kv_heads, head_dim], weight [num_heads + num_kv_heads, head_dim].
    """
    both = heads[:, : len(weight)]
    if spec.head_norm == "layer":
        both.copy_(F.layer_norm(both, both.shape[-1:], eps=eps) * weight)
        return
    sizes = (spec.num_heads, spec.num_kv_heads)
    for part, of_part in zip(both.split_with_sizes(sizes, 1), weight.split_with_sizes(sizes), strict=True):
        part.copy_(F.rms_norm(part, part.shape[1:], of_part, eps))
