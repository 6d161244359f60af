"""A layer as a value: attention, norms and MLP, with every choice spelled out.

A family writes specs. Attention, layers and the native step read them, and say before any weight is read what they
cannot do. Knows no device, no tensor and no name of a weight.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from gapless.models.rope_config import RopeConfig

NormPlace = Literal["before", "after", "around"]
HeadNorm = Literal["none", "each", "all", "layer"]  # native/model.h numbers them in this order, as the next ones
Activation = Literal["silu", "gelu", "gelu_tanh", "clamped"]  # clamped: that of GPT-OSS, with its gate


class Feature(StrEnum):
    """Features beyond the plain decoder, which has: whole context, RMS norms before each part, a gate with SiLU."""

    WINDOW = "sliding windows"
    SOFT_CAP = "soft caps of scores"
    SINKS = "attention sinks"
    SCALE = "scales other than 1 / sqrt(head_dim)"
    MIXED_SCALES = "scales that differ from layer to layer"
    MIXED_ROPES = "rotary embeddings that differ from layer to layer"
    MIXED_SIZES = "sizes that differ from layer to layer"
    HEAD_NORM = "norms of heads other than one RMS norm for each"
    LAYER_NORM = "layer norms"
    NORM_AFTER = "norms after attention and MLP"
    NORM_AFTER_EXPERTS = "norms after experts"
    ACTIVATION = "activations other than SiLU"
    PLAIN_MLP = "MLPs without a gate"
    EXPERTS = "experts"
    PARALLEL = "attention and MLP side by side"
    POSITIONS = "learned positions"
    EMBEDDING_SCALE = "scaled embeddings"
    LOGIT_CAP = "soft caps of logits"
    GENERAL = "general path: transformers' own code"


# Which backend has which of them.
KERNELS = frozenset(  # attention by our kernels for GPUs
    {Feature.WINDOW, Feature.SOFT_CAP, Feature.SINKS, Feature.SCALE, Feature.MIXED_SCALES}
)
INVARIANT_KERNELS = frozenset({Feature.SCALE})  # by our batch-invariant ones
LIBRARY_KERNELS = frozenset({Feature.SCALE})  # by libraries, as we call them
INVARIANT_LAYERS = frozenset(  # for GPUs, batch-invariant
    {Feature.MIXED_ROPES, Feature.MIXED_SIZES, Feature.EMBEDDING_SCALE, Feature.LOGIT_CAP, Feature.EXPERTS}
)
FUSED_LAYERS = INVARIANT_LAYERS | {Feature.NORM_AFTER, Feature.ACTIVATION, Feature.HEAD_NORM}  # for GPUs
GENERAL_LAYERS = frozenset(Feature) - {Feature.NORM_AFTER_EXPERTS}  # for GPUs, by torch
NATIVE = GENERAL_LAYERS - {Feature.MIXED_SIZES, Feature.GENERAL}  # the CPU's step in C++


@dataclass(frozen=True, slots=True)
class KVUnits:
    """What a 1 in a layer's KV cache stands for. It differs from 1 only in a cache of FP8."""

    k: float = 1.0
    v: float = 1.0


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """How one layer attends.

    Norms of heads: "each" is an RMS norm of every head, all with the same weights; "all" is one RMS norm of all query
    heads together and one of all key heads; "layer" is a layer norm of every head, each with weights of its own.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # of the scores, before the softmax
    rope: RopeConfig | None  # None: heads are not rotated
    qkv_bias: bool = False
    output_bias: bool = False
    head_norm: HeadNorm = "none"  # of queries and of keys, before they are rotated
    window: int | None = None  # how many positions a token sees, itself included; None: all of them
    soft_cap: float | None = None  # scores become cap * tanh(score / cap)
    sinks: bool = False  # each head has a learned score that takes part in the softmax and has no value


@dataclass(frozen=True, slots=True)
class NormSpec:
    """The norms of one layer, or the last norm of a model."""

    eps: float
    kind: Literal["rms", "layer"] = "rms"
    bias: bool = False  # of layer norms
    place: NormPlace = "before"  # of attention and of the MLP: on the way in, on the way out, or both
    offset: float = 0.0  # added to the weights as they are stored

    @property
    def is_before(self) -> bool:
        return self.place != "after"

    @property
    def is_after(self) -> bool:
        return self.place != "before"


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    """How a router chooses among MLPs."""

    count: int
    num_chosen: int  # for each token
    is_normalized: bool = True  # shares of the chosen add up to 1
    router_bias: bool = False
    shared_size: int = 0  # of an expert that every token has, with a gate of its own; 0: there is none


@dataclass(frozen=True, slots=True)
class MlpSpec:
    """The part after attention: activation(gate) * up, then down; or without a gate; or several with a router."""

    size: int
    kind: Literal["gated", "plain", "experts"] = "gated"
    activation: Activation = "silu"
    bias: bool = False
    experts: ExpertSpec | None = None  # for experts; the size is that of one

    @property
    def num_shared(self) -> int:
        """How many experts of this size the shared one is cut into; the last may be filled up with zeros."""
        return 0 if self.experts is None else -(-self.experts.shared_size // self.size)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer."""

    attention: AttentionSpec
    mlp: MlpSpec
    norm: NormSpec
    parallel: bool = False  # the MLP reads what attention reads, not what attention added to it


def attention_features(specs: Sequence[AttentionSpec]) -> Iterator[Feature]:
    """Features that the attention of these layers needs."""
    for spec in dict.fromkeys(specs):
        if spec.window is not None:
            yield Feature.WINDOW
        if spec.soft_cap is not None:
            yield Feature.SOFT_CAP
        if spec.sinks:
            yield Feature.SINKS
        if spec.scale != spec.head_dim**-0.5:
            yield Feature.SCALE
    if len({spec.scale for spec in specs}) > 1:
        yield Feature.MIXED_SCALES


def layer_features(layers: Sequence[LayerSpec]) -> Iterator[Feature]:
    """Features that these layers need around their attention."""
    for layer in dict.fromkeys(layers):
        if layer.attention.head_norm in ("all", "layer"):
            yield Feature.HEAD_NORM
        if layer.norm.kind == "layer":
            yield Feature.LAYER_NORM
        if layer.norm.is_after:
            yield Feature.NORM_AFTER
        if layer.mlp.activation != "silu":
            yield Feature.ACTIVATION
        if layer.mlp.kind != "gated":
            yield Feature.PLAIN_MLP if layer.mlp.kind == "plain" else Feature.EXPERTS
        if layer.mlp.experts is not None and layer.norm.is_after:
            yield Feature.NORM_AFTER_EXPERTS
        if layer.parallel:
            yield Feature.PARALLEL
    if len({layer.attention.rope for layer in layers}) > 1:
        yield Feature.MIXED_ROPES
    if len({(layer.mlp.size, layer.mlp.experts, layer.norm.eps, layer.attention.head_norm) for layer in layers}) > 1:
        yield Feature.MIXED_SIZES


def lacking(needed: Iterable[Feature], has: Collection[Feature]) -> Feature | None:
    """The first that is needed and not there."""
    return next((feature for feature in needed if feature not in has), None)
