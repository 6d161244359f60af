"""The parts of a decoder layer, each a product with what stands around it: norm before, gate or residual after.

Owns the protocol, and the plain implementation that runs anywhere. Each part is few torch operations, because on a CPU
with small tensors the number of operations is the cost. A device's kit chooses the implementation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch.nn import functional as F

from gapless.models.linear import GatedLinear, Linear, make_gated, make_linear


@dataclass(frozen=True, slots=True)
class Hidden:
    """The residual stream [n, hidden_size]."""

    values: Tensor
    addend: Tensor | None = None  # the next norm adds it to the values, in place, as it reads them anyway
    num_squares: int = 0  # sums of squares that the last kernel left for the next norm; 0: none


class Layers(Protocol):
    """Makes the parts. Weights are [out, in], biases [out] or None; a norm is its weight [in] and its epsilon."""

    def embed(self, table: Tensor) -> Callable[[Tensor], Hidden]:
        """Token ids [n] -> their rows of the table."""

    def norm(self, norm: Norm) -> Callable[[Hidden], Tensor]:
        """The stream, normalized."""

    def norm_linear(self, norm: Norm, weight: Tensor, bias: Tensor | None) -> Callable[[Hidden], Tensor]:
        """The normalized stream's product."""

    def norm_gated(self, norm: Norm, gate: Gate) -> Callable[[Hidden], Tensor]:
        """silu(gate) * up of the normalized stream."""

    def add_linear(self, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor, Hidden], Hidden]:
        """The product of the first, added to the stream, whose old values are no longer used."""

    def linear(self, weight: Tensor) -> Callable[[Tensor], Tensor]:
        """A product alone; on a GPU its sums stay as they are, float32."""


@dataclass(frozen=True, slots=True)
class Norm:
    """A root-mean-square norm."""

    weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Gate:
    """The two products of a gated layer."""

    gate: Tensor
    up: Tensor
    gate_bias: Tensor | None
    up_bias: Tensor | None


class PlainLayers:
    """Products from `linear`, prepacked where that pays; norms from torch."""

    def embed(self, table: Tensor) -> Callable[[Tensor], Hidden]:
        return lambda token_ids: Hidden(F.embedding(token_ids, table))

    def norm(self, norm: Norm) -> Callable[[Hidden], Tensor]:
        return lambda hidden: rms_norm(hidden.values, norm)

    def norm_linear(self, norm: Norm, weight: Tensor, bias: Tensor | None) -> Callable[[Hidden], Tensor]:
        return PlainNormed(norm, make_linear(weight, bias))

    def norm_gated(self, norm: Norm, gate: Gate) -> Callable[[Hidden], Tensor]:
        return PlainNormed(norm, make_gated(gate.gate, gate.up, gate.gate_bias, gate.up_bias))

    def add_linear(self, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor, Hidden], Hidden]:
        product = make_linear(weight, bias)
        return lambda x, hidden: Hidden(product.add(x, hidden.values))

    def linear(self, weight: Tensor) -> Callable[[Tensor], Tensor]:
        return make_linear(weight)


PLAIN: Layers = PlainLayers()


class PlainNormed:
    """A norm, then a product."""

    __slots__ = ("norm", "product")

    def __init__(self, norm: Norm, product: Linear | GatedLinear) -> None:
        self.norm, self.product = norm, product

    def __call__(self, hidden: Hidden) -> Tensor:
        return self.product(rms_norm(hidden.values, self.norm))


def rms_norm(x: Tensor, norm: Norm) -> Tensor:
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.eps)
