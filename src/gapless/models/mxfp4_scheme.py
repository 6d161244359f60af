"""The scheme of MXFP4 weights: blocks of 32 numbers of 4 bits and a power of two.

Weights are made whole, exactly, or stay as they are: GPUs and native steps multiply by such experts. Knows no file.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gapless.models.linear import PLAIN_SCHEME, plain
from gapless.models.weight import GateBiases, GatedLinear, Linear, Weight

BLOCK_BYTES = 16  # two numbers in each, the first in the low half
NO_NUMBER = 255  # a scale that is none
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # then the same with a minus
_BIAS = 127  # of the powers


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


def dequantize(blocks: Tensor, scales: Tensor) -> Tensor:
    """blocks [count, out, groups, 16] and scales [count, out, groups], uint8 -> [count, out, in] bfloat16, exactly."""
    values = torch.tensor((*_VALUES, *(-value for value in _VALUES)), dtype=torch.bfloat16, device=blocks.device)
    shape = *blocks.shape[:2], scales.shape[2] * 2 * BLOCK_BYTES
    whole = torch.empty(shape, dtype=torch.bfloat16, device=blocks.device)
    for number, (some, powers) in enumerate(zip(blocks, scales, strict=True)):  # an expert at a time: indices are wide
        halves = torch.stack((some & 15, some >> 4), dim=-1).flatten(2)  # [out, groups, 32]
        numbers = torch.ldexp(values[halves.int()], powers.int()[..., None] - _BIAS)
        whole[number] = numbers.flatten(1)
    return whole


def split_blocks(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of a GGUF [..., bytes], blocks of a power and 16 bytes, as blocks and powers apart.

    There a byte has a number of the first half of its block and one of the second; here it has neighbours.
    """
    blocks = rows.view(*rows.shape[:-1], -1, 1 + BLOCK_BYTES)
    numbers = torch.cat((blocks[..., 1:] & 15, blocks[..., 1:] >> 4), -1)
    return numbers[..., ::2] | numbers[..., 1::2] << 4, blocks[..., 0].contiguous()


def join_blocks(blocks: Tensor, scales: Tensor) -> Tensor:
    """The reverse of `split_blocks`: [..., groups, 16] and [..., groups] to rows [..., bytes]."""
    first, second = blocks.chunk(2, -1)
    low = torch.stack((first & 15, first >> 4), -1).flatten(-2)
    high = torch.stack((second << 4, second & 240), -1).flatten(-2)
    return torch.cat((scales[..., None], low | high), -1).flatten(-2)


def are_powers(scales: Tensor) -> Tensor:
    """Whether every scale is a power of two [] bool."""
    return (scales != NO_NUMBER).all()
