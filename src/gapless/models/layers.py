"""The parts of a decoder layer, each a product with what stands around it: norm before, gate or residual after.

Owns the protocol, and the plain implementation that runs anywhere. Each part is few torch operations, because on a CPU
with small tensors the number of operations is the cost. A device's kit chooses the implementation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from gapless.models.config import ModelConfig
from gapless.models.experts import Experts
from gapless.models.spec import MlpSpec
from gapless.models.weight import GatedLinear, Linear, Weight, shared_scheme


@dataclass(frozen=True, slots=True)
class Hidden:
    """The residual stream [n, hidden_size]."""

    values: Tensor
    addend: Tensor | None = None  # the next norm adds it to the values, in place, as it reads them anyway
    num_squares: int = 0  # sums of squares that the last kernel left for the next norm; 0: none


class Layers(Protocol):
    """Makes the parts. Weights are [out, in], biases [out] or None."""

    @staticmethod
    def why_not(config: ModelConfig) -> str | None:
        """Why these parts do not make up the model; None where they do. Asked before any weight is read."""

    def embed(self, table: Weight, scale: float = 1.0) -> Callable[[Tensor], Hidden]:
        """Token ids [n] -> their rows of the table, times the scale."""

    def norm(self, norm: Norm) -> Callable[[Hidden], Tensor]:
        """The stream, normalized."""

    def norm_linear(self, norm: Norm | None, weight: Weight, bias: Tensor | None) -> Callable[[Hidden], Tensor]:
        """The product of the stream, normalized where there is a norm."""

    def norm_gated(self, norm: Norm | None, gate: GatedWeights) -> Callable[[Hidden], Tensor]:
        """activation(gate) * up of the stream, normalized where there is a norm; without a gate activation(up)."""

    def add_linear(
        self, weight: Weight, bias: Tensor | None, norm: Norm | None = None
    ) -> Callable[[Tensor, Hidden], Hidden]:
        """The product of the first, normalized where there is a norm, added to the stream.

        The stream's old values are no longer used.
        """

    def experts(
        self, norm: Norm | None, spec: MlpSpec, weights: ExpertWeights, after: Norm | None = None
    ) -> Callable[[Hidden], Hidden]:
        """What the chosen experts make of the stream, normalized where there is a norm, added to it.

        The stream's old values are no longer used.
        """

    def linear(self, weight: Weight) -> Callable[[Tensor], Tensor]:
        """A product alone; on a GPU its sums stay as they are, float32."""


@dataclass(frozen=True, slots=True)
class Norm:
    """A root-mean-square norm, or a layer norm."""

    weight: Tensor
    eps: float
    bias: Tensor | None = None
    kind: str = "rms"

    def __call__(self, x: Tensor) -> Tensor:
        shape, weight = self.weight.shape, self.weight
        if weight.dtype != x.dtype:  # float32, to be exact
            return F.rms_norm(x.float(), shape, weight, self.eps).to(x.dtype)
        if self.kind == "layer":
            return F.layer_norm(x, shape, weight, self.bias, self.eps)
        return F.rms_norm(x, shape, weight, self.eps)


@dataclass(frozen=True, slots=True)
class GatedWeights:
    """The first products of an MLP."""

    gate: Weight | None  # None: there is only `up`
    up: Weight
    gate_bias: Tensor | None
    up_bias: Tensor | None
    activation: str = "silu"


@dataclass(frozen=True, slots=True)
class ExpertWeight:
    """One expert."""

    gate: GatedWeights
    down: Weight
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The experts of a layer, and the router that chooses among them.

    Where the layer has a shared expert, the last experts are its parts, and the router's last row is its gate.
    """

    router: Weight  # [count, hidden_size]
    router_bias: Tensor | None
    experts: tuple[ExpertWeight, ...]


class PlainLayers:
    """Products of the weights' schemes; norms from torch."""

    @staticmethod
    def why_not(config: ModelConfig) -> str | None:
        """They make up any."""
        return None

    def embed(self, table: Weight, scale: float = 1.0) -> Callable[[Tensor], Hidden]:
        rows = table.dense()
        if scale == 1.0:
            return lambda token_ids: Hidden(F.embedding(token_ids, rows))
        factor = torch.tensor(scale, dtype=rows.dtype, device=rows.device)  # rounded as the model was trained
        return lambda token_ids: Hidden(F.embedding(token_ids, rows) * factor)

    def norm(self, norm: Norm) -> Callable[[Hidden], Tensor]:
        return lambda hidden: norm(hidden.values)

    def norm_linear(self, norm: Norm | None, weight: Weight, bias: Tensor | None) -> Callable[[Hidden], Tensor]:
        return _after_norm(norm, weight.scheme.linear(weight, bias))

    def norm_gated(self, norm: Norm | None, gate: GatedWeights) -> Callable[[Hidden], Tensor]:
        if gate.gate is None:
            return _after_norm(norm, gate.up.scheme.activated(gate.up, gate.up_bias, gate.activation))
        biases = gate.gate_bias, gate.up_bias
        scheme = shared_scheme((gate.gate, gate.up))
        return _after_norm(norm, scheme.gated(gate.gate, gate.up, biases, gate.activation))

    def add_linear(
        self, weight: Weight, bias: Tensor | None, norm: Norm | None = None
    ) -> Callable[[Tensor, Hidden], Hidden]:
        product = weight.scheme.linear(weight, bias)
        if norm is None:
            return lambda x, hidden: Hidden(product.add(x, hidden.values))
        return lambda x, hidden: Hidden(norm(product(x)).add_(hidden.values))

    def experts(
        self, norm: Norm | None, spec: MlpSpec, weights: ExpertWeights, after: Norm | None = None
    ) -> Callable[[Hidden], Hidden]:
        experts = make_experts(spec, weights)

        def apply(hidden: Hidden) -> Hidden:
            x = experts(hidden.values if norm is None else norm(hidden.values))
            return Hidden((x if after is None else after(x)).add_(hidden.values))

        return apply

    def linear(self, weight: Weight) -> Callable[[Tensor], Tensor]:
        return weight.scheme.linear(weight, None)


def make_experts(spec: MlpSpec, weights: ExpertWeights) -> Experts:
    """The experts alone, in plain torch."""
    assert spec.experts is not None
    router = weights.router.scheme.linear(weights.router, weights.router_bias)
    return Experts(spec.experts, router, [_products(expert) for expert in weights.experts])


def _products(expert: ExpertWeight) -> tuple[GatedLinear, Linear]:
    gate = expert.gate
    assert gate.gate is not None
    scheme = shared_scheme((gate.gate, gate.up))
    inner = scheme.gated(gate.gate, gate.up, (gate.gate_bias, gate.up_bias), gate.activation)
    return inner, expert.down.scheme.linear(expert.down, expert.down_bias)


def _after_norm(norm: Norm | None, product: Linear | GatedLinear) -> Callable[[Hidden], Tensor]:
    return PlainNormed(norm, product) if norm is not None else lambda hidden: product(hidden.values)


PLAIN: Layers = PlainLayers()


class PlainNormed:
    """A norm, then a product."""

    __slots__ = ("norm", "product")

    def __init__(self, norm: Norm, product: Linear | GatedLinear) -> None:
        self.norm, self.product = norm, product

    def __call__(self, hidden: Hidden) -> Tensor:
        return self.product(self.norm(hidden.values))
