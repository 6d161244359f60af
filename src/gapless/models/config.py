"""The description of a model: sizes, a spec for each layer, names of weights, end tokens. Nothing is left to default.

Checks that the sizes fit together. Knows no file format and no family; families make these values.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from gapless.errors import CorruptModel, UnsupportedModel
from gapless.models.names import HF_NAMES, WeightNames
from gapless.models.quantized import Fp8Format
from gapless.models.rope_config import RopeConfig
from gapless.models.spec import AttentionSpec, Feature, LayerSpec, NormSpec, layer_features

_MAX_LAYERS = 10_000  # a damaged count must not make us list weights for ever
_MAX_WIDTH = 2**28  # rows of a weight; kernels count them in 32 bits


@dataclass(frozen=True, slots=True)
class Shard:
    """Which part of a model one rank holds."""

    rank: int
    num_ranks: int
    whole: "ModelConfig"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder."""

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    last_norm: NormSpec
    max_position_embeddings: int
    tie_embeddings: bool
    eos_token_ids: tuple[int, ...] = ()  # all of them in the vocabulary
    names: WeightNames = HF_NAMES
    embedding_scale: float = 1.0
    learned_positions: bool = False  # each position has a row of a table, which is added to the embedding
    logit_scale: float = 1.0  # part of the last norm's weights as they are computed with
    logit_soft_cap: float | None = None  # logits become cap * tanh(logit / cap)
    kinds: tuple[str, ...] = ()  # how a GGUF stores its matrices, such as Q8_0; that of most numbers first
    fp8: Fp8Format | None = None  # the scales of FP8 weights; None: the checkpoint has no such weights
    shard: Shard | None = None  # heads and MLP sizes are those of one rank; None: of the whole model
    is_general: bool = False  # transformers' own code runs it: layers describe attention alone, names are not used

    def __post_init__(self) -> None:
        if len({(spec.num_heads, spec.num_kv_heads, spec.head_dim) for spec in self.attention_specs()}) > 1:
            raise UnsupportedModel("layers whose heads differ in number or size are not supported")
        for layer in dict.fromkeys(self.layers):
            _check_attention(layer.attention)
        for name, width in self._widths():
            if width > _MAX_WIDTH:
                raise CorruptModel(f"{name} is {width}, which cannot be right; at most {_MAX_WIDTH} is possible")

    def attention_specs(self) -> list[AttentionSpec]:
        return [layer.attention for layer in self.layers]

    def features(self) -> Iterator[Feature]:
        """Features that the model needs beyond a plain decoder, its attention aside."""
        if self.is_general:
            yield Feature.GENERAL
        yield from layer_features(self.layers)
        if self.last_norm.kind == "layer":
            yield Feature.LAYER_NORM
        if self.last_norm.eps != self.layers[-1].norm.eps:
            yield Feature.MIXED_SIZES
        if self.embedding_scale != 1.0:
            yield Feature.EMBEDDING_SCALE
        if self.learned_positions:
            yield Feature.POSITIONS
        if self.logit_soft_cap is not None:
            yield Feature.LOGIT_CAP

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_heads(self) -> int:
        """Of each layer, as is what follows: the KV cache has one shape."""
        return self.layers[0].attention.num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.layers[0].attention.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.layers[0].attention.head_dim

    def _widths(self) -> Iterator[tuple[str, int]]:
        yield "vocab_size", self.vocab_size
        yield "hidden_size", self.hidden_size
        yield "intermediate_size", max(layer.mlp.size for layer in self.layers)
        experts = [layer.mlp.experts for layer in self.layers if layer.mlp.experts is not None]
        yield "the size of the shared expert", max((each.shared_size for each in experts), default=0)
        yield "head_dim times the number of heads", (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


def repeated(layer: LayerSpec, num_layers: int) -> tuple[LayerSpec, ...]:
    """The layers of a model whose layers are alike."""
    check_num_layers(num_layers)
    return (layer,) * num_layers


def check_num_layers(num_layers: int) -> None:
    """Before as many specs are made."""
    if num_layers > _MAX_LAYERS:
        raise CorruptModel(f"{num_layers} layers cannot be right")


def _check_attention(spec: AttentionSpec) -> None:
    if spec.num_heads % spec.num_kv_heads:
        raise CorruptModel(f"{spec.num_heads} attention heads cannot share {spec.num_kv_heads} key-value heads")
    if spec.head_dim % 2:
        raise CorruptModel(f"head_dim {spec.head_dim} is odd: the halves of a head cannot be rotated")
    if spec.rope is not None:
        _check_rope(spec.rope, spec.head_dim)


def _check_rope(rope: RopeConfig, head_dim: int) -> None:
    width = rope.width or head_dim
    if width % 2 or not 0 < width <= head_dim:
        raise CorruptModel(f"{width} of the {head_dim} numbers of a head cannot be rotated in pairs")
    for factors in (rope.freq_factors, rope.long_factors):
        if factors is not None and len(factors) != width // 2:
            raise CorruptModel(f"rope has {len(factors)} factors of frequencies, the head has {width // 2} pairs")
