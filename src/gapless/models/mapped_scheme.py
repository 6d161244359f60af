"""The scheme of plain weights that stay where a file is mapped: rows of tensors, by number, none of them copied.

Owns what can be done with rows without touching them: to stack them, to put them into a different order, and to take
columns for rows. The native step takes their addresses. Knows no file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gapless.models.linear import PLAIN_SCHEME, plain
from gapless.models.weight import GateBiases, GatedLinear, Linear, Weight


@dataclass(frozen=True, slots=True, eq=False)
class MappedScheme:
    """The weight's data are numbers of rows, counted over all tensors [num_rows, num_inputs], or of a stack's parts."""

    tensors: tuple[Tensor, ...]

    @property
    def name(self) -> str:
        return "mapped"

    @property
    def step(self) -> int:
        """From a number of a row to the next."""
        (step,) = {tensor.stride(1) for tensor in self.tensors}
        return step

    def addresses(self, weight: Weight) -> Tensor:
        """Of each row, [num_rows] int64."""
        found = [
            tensor.data_ptr() + torch.arange(len(tensor)) * tensor.stride(0) * tensor.itemsize
            for tensor in self.tensors
        ]
        return torch.cat(found)[weight.data]

    def dense(self, weight: Weight) -> Tensor:
        return torch.cat(self.tensors)[weight.data]

    def stacked(self, weights: Sequence[Weight]) -> Weight:
        tensors: list[Tensor] = []
        places: list[Tensor] = []
        if len({_scheme(weight).step for weight in weights}) > 1:  # columns of different matrices
            return plain(torch.cat([weight.dense() for weight in weights]))
        for weight in weights:
            places.append(weight.data + sum(map(len, tensors)))
            tensors += _scheme(weight).tensors
        return Weight(torch.cat(places), MappedScheme(tuple(tensors)))

    def rows(self, weight: Weight, places: Tensor) -> Weight:
        return Weight(weight.data[places], self)

    def parts(self, weight: Weight) -> list[Weight]:
        (stack,) = self.tensors
        return [mapped(stack[place]) for place in weight.data.tolist()]

    def transposed(self, weight: Weight) -> Weight:
        """Of a whole matrix: its columns, where they are."""
        (matrix,) = self.tensors
        assert len(weight.data) == len(matrix), "some rows of a matrix have no columns"
        return Weight(torch.arange(matrix.shape[1]), MappedScheme((matrix.t(),)))

    def linear(self, weight: Weight, bias: Tensor | None) -> Linear:
        return PLAIN_SCHEME.linear(plain(self.dense(weight)), bias)

    def gated(self, gate: Weight, up: Weight, biases: GateBiases, activation: str) -> GatedLinear:
        return PLAIN_SCHEME.gated(plain(gate.dense()), plain(up.dense()), biases, activation)

    def activated(self, weight: Weight, bias: Tensor | None, activation: str) -> GatedLinear:
        return PLAIN_SCHEME.activated(plain(self.dense(weight)), bias, activation)


def mapped(tensor: Tensor) -> Weight:
    """A matrix, or a stack of some, whose memory belongs to a mapped file."""
    assert tensor.dim() > 1
    assert tensor.is_contiguous()
    return Weight(torch.arange(len(tensor)), MappedScheme((tensor,)))


def _scheme(weight: Weight) -> MappedScheme:
    assert isinstance(weight.scheme, MappedScheme)
    return weight.scheme
