"""A layer as a value: attention, norms and MLP, with every choice spelled out.

A family writes specs. Attention, layers and the native step read them, and say before any weight is read what they
cannot do. Knows no device, no tensor and no name of a weight.
"""

from dataclasses import dataclass
from typing import Literal

from gapless.models.rope_config import RopeConfig

NormPlace = Literal["before", "after", "around"]


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """How one layer attends."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # of the scores, before the softmax
    rope: RopeConfig | None  # None: heads are not rotated
    qkv_bias: bool = False
    output_bias: bool = False
    head_norm: bool = False  # each query and key head is normalized before it is rotated
    window: int | None = None  # how many positions a token sees, itself included; None: all of them
    soft_cap: float | None = None  # scores become cap * tanh(score / cap)
    sinks: bool = False  # each head has a learned score that takes part in the softmax and has no value


@dataclass(frozen=True, slots=True)
class NormSpec:
    """The norms of one layer, or the last norm of a model."""

    eps: float
    kind: Literal["rms", "layer"] = "rms"
    place: NormPlace = "before"  # of attention and of the MLP: on the way in, on the way out, or both
    offset: float = 0.0  # added to the weights as they are stored

    @property
    def is_before(self) -> bool:
        return self.place != "after"

    @property
    def is_after(self) -> bool:
        return self.place != "before"


@dataclass(frozen=True, slots=True)
class MlpSpec:
    """What follows attention: activation(gate) * up, then down; or without a gate; or several with a router."""

    size: int
    kind: Literal["gated", "plain", "experts"] = "gated"
    activation: Literal["silu", "gelu_tanh"] = "silu"
    bias: bool = False


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer."""

    attention: AttentionSpec
    mlp: MlpSpec
    norm: NormSpec
