"""One rank's parts of the weights, read without the rest.

Wraps a source that can read a part of a tensor, and shows the parts as if they were all there is. Knows no model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from gapless.errors import ConfigError
from gapless.models.cut import Cut
from gapless.models.weights import Shapes, Weights


class DivisibleWeights(Weights, Protocol):
    """A source that reads stretches of tensors."""

    def read_stretch(self, name: str, axis: int, begin: int, end: int) -> Tensor:
        """As `read`, from `begin` to `end` along this axis."""
        ...


class PartWeights:
    """What the cuts leave of the weights."""

    def __init__(self, weights: DivisibleWeights, cuts: Mapping[str, Cut]) -> None:
        self._weights, self._cuts = weights, cuts
        self.shapes: Shapes = {name: self._shape(name) for name in weights.shapes}
        self.num_bytes = 0  # read so far, as they are stored or dequantized

    def read(self, name: str) -> Tensor:
        cut = self._cuts.get(name)
        tensor = self._weights.read(name) if cut is None else self._read_part(name, cut)
        self.num_bytes += tensor.nbytes
        return tensor

    def origin(self, name: str) -> str:
        return self._weights.origin(name)

    def _shape(self, name: str) -> tuple[int, ...]:
        shape, cut = self._weights.shapes[name], self._cuts.get(name)
        return shape if cut is None else (*shape[: cut.axis], cut.width, *shape[cut.axis + 1 :])

    def _read_part(self, name: str, cut: Cut) -> Tensor:
        parts = [self._weights.read_stretch(name, cut.axis, *stretch) for stretch in cut.stretches]
        lacking = cut.width - sum(part.shape[cut.axis] for part in parts)
        if lacking:
            shape = list(parts[0].shape)
            shape[cut.axis] = lacking
            parts.append(parts[0].new_zeros(shape))
        # a stretch may be a view of the file, with gaps: a copy of it holds the rank's numbers alone
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, cut.axis)


def divisible(weights: Weights) -> DivisibleWeights:
    """The source as one that reads parts. Raises ConfigError."""
    if not hasattr(weights, "read_stretch"):
        first = next(iter(weights.shapes))
        raise ConfigError(f"tensor_parallel: {weights.origin(first)} has quantized weights that are not cut")
    return weights  # type: ignore[return-value]
