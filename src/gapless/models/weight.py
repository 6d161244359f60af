"""A weight as it reaches the layers: its numbers, and the scheme that says how they are stored and multiplied by.

A scheme is a file: `linear` has the plain one. Layers ask the scheme for products and do not look inside a weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """[out, in], or a vector."""

    data: Tensor  # as the scheme stores it
    scheme: Scheme
    scales: Tensor | None = None  # for schemes that have them

    def dense(self) -> Tensor:
        """The numbers themselves."""
        return self.scheme.dense(self)


class Scheme(Protocol):
    """How weights are stored, and how to multiply by them. A product picks its way by the number of rows it is given,
    for few rows wait for memory and many for arithmetic."""

    @property
    def name(self) -> str:
        """Of all schemes that understand each other's weights."""

    def dense(self, weight: Weight) -> Tensor:
        """The numbers themselves, in the model's dtype."""

    def stacked(self, weights: Sequence[Weight]) -> Weight:
        """The rows of all of them, one weight below the other."""

    def rows(self, weight: Weight, places: Tensor) -> Weight:
        """The rows at these places, in their order."""

    def parts(self, weight: Weight) -> list[Weight]:
        """Of a weight [count, out, in]."""

    def transposed(self, weight: Weight) -> Weight:
        """[in, out] as [out, in]."""

    def linear(self, weight: Weight, bias: Tensor | None) -> Linear:
        """The product, which may keep the weight in a form of its own."""

    def gated(self, gate: Weight, up: Weight, biases: GateBiases, activation: str) -> GatedLinear:
        """The two products of a gated layer as one."""

    def activated(self, weight: Weight, bias: Tensor | None, activation: str) -> GatedLinear:
        """A product and an activation, for a layer without a gate."""


GateBiases = tuple[Tensor | None, Tensor | None]  # of gate and up


class Linear(Protocol):
    def __call__(self, x: Tensor) -> Tensor: ...  # [n, in] -> [n, out]

    def add(self, x: Tensor, residual: Tensor) -> Tensor: ...  # [n, in], [n, out] -> [n, out], a new tensor


class GatedLinear(Protocol):
    def __call__(self, x: Tensor) -> Tensor: ...  # [n, in] -> [n, out]: activation(gate(x)) * up(x), or without up


def stacked(weights: Sequence[Weight]) -> Weight:
    """Weights one below the other."""
    weights = alike(weights)
    return shared_scheme(weights).stacked(weights)


def alike(weights: Sequence[Weight]) -> Sequence[Weight]:
    """Weights of one scheme: where one of them is plain and others are not, those are made whole."""
    schemes = {weight.scheme.name: weight.scheme for weight in weights}
    if len(schemes) == 1 or "plain" not in schemes:
        return weights
    return [Weight(weight.dense(), schemes["plain"]) for weight in weights]


def shared_scheme(weights: Sequence[Weight]) -> Scheme:
    """The scheme of all of them: the numbers of one scheme mean nothing to a different one."""
    scheme = weights[0].scheme
    assert all(weight.scheme.name == scheme.name for weight in weights), "weights of different schemes in one product"
    return scheme
