"""MXFP4 weights of a checkpoint: blocks of 32 numbers of 4 bits and a power of two.

Shows each pair of tensors `X_blocks` and `X_scales` as the one tensor X that they stand for. It is made whole as it is
read, or read as it is stored, in a scheme of its own: GPUs multiply by such experts. Knows no model.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gapless.errors import CorruptModel
from gapless.models.linear import PLAIN_SCHEME, plain
from gapless.models.weight import GateBiases, GatedLinear, Linear, Weight
from gapless.models.weights import SafetensorsWeights, Shapes

BLOCKS, SCALES = "_blocks", "_scales"
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # then the same with a minus
_BLOCK_BYTES = 16  # two numbers in each, the first in the low half
_BIAS = 127  # of the powers
_NO_NUMBER = 255  # a scale that is none


class Mxfp4Scheme:
    """Weights as they are stored: data [out, groups, 16] bytes, scales [out, groups]. dtype: of weights made whole."""

    name = "mxfp4"

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def dense(self, weight: Weight) -> Tensor:
        assert weight.scales is not None
        return dequantize(weight.data[None], weight.scales[None])[0].to(self._dtype)

    def stacked(self, weights: Sequence[Weight]) -> Weight:
        scales = [weight.scales for weight in weights if weight.scales is not None]
        return Weight(torch.cat([weight.data for weight in weights]), self, torch.cat(scales))

    def rows(self, weight: Weight, places: Tensor) -> Weight:
        assert weight.scales is not None
        places = places.to(weight.data.device)
        return Weight(weight.data[places], self, weight.scales[places])

    def parts(self, weight: Weight) -> list[Weight]:
        assert weight.scales is not None
        return [Weight(data, self, scales) for data, scales in zip(weight.data, weight.scales, strict=True)]

    def transposed(self, weight: Weight) -> Weight:
        """The same: the numbers of an output lie side by side, although the whole weight would be [in, out]."""
        return weight

    def linear(self, weight: Weight, bias: Tensor | None) -> Linear:
        return PLAIN_SCHEME.linear(plain(self.dense(weight)), bias)

    def gated(self, gate: Weight, up: Weight, biases: GateBiases, activation: str) -> GatedLinear:
        return PLAIN_SCHEME.gated(plain(self.dense(gate)), plain(self.dense(up)), biases, activation)

    def activated(self, weight: Weight, bias: Tensor | None, activation: str) -> GatedLinear:
        return PLAIN_SCHEME.activated(plain(self.dense(weight)), bias, activation)


class Mxfp4Weights:
    """The tensors of a checkpoint, with those in MXFP4 [count, in, out], as it stores others of the kind."""

    def __init__(self, weights: SafetensorsWeights) -> None:
        self._weights = weights
        names = {name.removesuffix(BLOCKS): name for name in weights.shapes if name.endswith(BLOCKS)}
        self._shapes = {whole: self._shape(whole) for whole in names}
        parts = {f"{whole}{end}" for whole in names for end in (BLOCKS, SCALES)}
        rest = {name: shape for name, shape in weights.shapes.items() if name not in parts}
        self.shapes: Shapes = rest | self._shapes

    def _shape(self, name: str) -> tuple[int, ...]:
        blocks, scales = self._weights.shapes[name + BLOCKS], self._weights.shapes.get(name + SCALES)
        if len(blocks) != 4 or blocks[-1] != _BLOCK_BYTES or scales != blocks[:-1]:
            raise CorruptModel(
                f"{self._weights.origin(name + BLOCKS)}: tensor {name}{BLOCKS} has shape {blocks} and {name}{SCALES} "
                f"has {scales}: these are no blocks of 32 numbers with a scale each"
            )
        for part in (name + BLOCKS, name + SCALES):
            if (kind := self._weights.dtypes[part]) != "U8":
                raise CorruptModel(f"{self._weights.origin(part)}: tensor {part} is {kind}, not bytes")
        count, outputs, groups, _ = blocks
        return count, groups * 2 * _BLOCK_BYTES, outputs

    def read(self, name: str) -> Tensor:
        if name not in self._shapes:
            return self._weights.read(name)
        return dequantize(*self.read_stored(name)).transpose(1, 2)

    def is_narrow(self, name: str) -> bool:
        return name in self._shapes

    def read_stored(self, name: str) -> tuple[Tensor, Tensor]:
        """Blocks [count, out, groups, 16] and scales [count, out, groups]."""
        return self._weights.read(name + BLOCKS), self._weights.read(name + SCALES)

    def origin(self, name: str) -> str:
        return self._weights.origin(name + BLOCKS if name in self._shapes else name)


def dequantize(blocks: Tensor, scales: Tensor) -> Tensor:
    """blocks [count, out, groups, 16] and scales [count, out, groups], uint8 -> [count, out, in] bfloat16, exactly."""
    values = torch.tensor((*_VALUES, *(-value for value in _VALUES)), dtype=torch.bfloat16, device=blocks.device)
    shape = *blocks.shape[:2], scales.shape[2] * 2 * _BLOCK_BYTES
    whole = torch.empty(shape, dtype=torch.bfloat16, device=blocks.device)
    for number, (some, powers) in enumerate(zip(blocks, scales, strict=True)):  # an expert at a time: indices are wide
        halves = torch.stack((some & 15, some >> 4), dim=-1).flatten(2)  # [out, groups, 32]
        numbers = torch.ldexp(values[halves.int()], powers.int()[..., None] - _BIAS)
        whole[number] = numbers.flatten(1)
    return whole


def are_powers(scales: Tensor) -> Tensor:
    """Whether every scale is a power of two [] bool."""
    return (scales != _NO_NUMBER).all()
