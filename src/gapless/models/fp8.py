"""The scheme of FP8 weights: numbers of 8 bits (e4m3), and scales that they are multiplied by.

A weight is [out, in] with scales [out, n]: n is 1, a scale for each row, or there is one for every 128 inputs. A scale
of a whole tensor or of a block of rows is repeated for each row, so that rows can be stacked and picked. On a GPU
products keep the weight as it is; elsewhere it is made whole. A weight that is still to be quantized has no scales yet:
a norm may be folded into it first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gapless.models.linear import ACTIVATIONS, PLAIN_SCHEME, ClampedGated, plain
from gapless.models.weight import GateBiases, GatedLinear, Linear, Weight

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # that FP8 can say
SMALLEST_SCALE = 1e-30  # of a row of zeros
BLOCK = 128  # inputs that share a scale


MakeLinear = Callable[[Weight, Tensor | None], Linear]  # of a weight with scales, and its bias


class Fp8Scheme:
    """FP8 weights of one model. dtype: of the model, and of weights made whole."""

    name = "fp8"

    def __init__(self, dtype: torch.dtype, linear: MakeLinear | None = None) -> None:
        """linear: the product on this device; None: weights are made whole for it."""
        self._dtype, self._linear = dtype, linear

    def dense(self, weight: Weight) -> Tensor:
        weight = self.quantized(weight)
        assert weight.scales is not None
        return dequantize(weight.data, weight.scales, self._dtype)

    def quantized(self, weight: Weight, gain: Tensor | None = None) -> Weight:
        """The weight with its scales. gain [in]: of a norm, folded into a weight that is not quantized yet."""
        if weight.scales is not None:
            assert gain is None
            return weight
        data = weight.data if gain is None else weight.data.float() * gain.float()
        found, scales = quantize(data)
        return Weight(found, self, scales)

    def stacked(self, weights: Sequence[Weight]) -> Weight:
        if all(weight.scales is None for weight in weights):
            return Weight(torch.cat([weight.data for weight in weights]), self)
        known = [self.quantized(weight) for weight in weights]
        scales = [weight.scales for weight in known if weight.scales is not None]
        width = max(scale.shape[1] for scale in scales)
        both = torch.cat([scale.expand(-1, width) for scale in scales])
        return Weight(_cat([weight.data for weight in known]), self, both)

    def rows(self, weight: Weight, places: Tensor) -> Weight:
        places = places.to(weight.data.device)
        if weight.scales is None:
            return Weight(weight.data[places], self)
        return Weight(weight.data.view(torch.uint8)[places].view(FP8), self, weight.scales[places])

    def parts(self, weight: Weight) -> list[Weight]:
        """Those of experts: made whole."""
        return PLAIN_SCHEME.parts(plain(self.dense(weight)))

    def transposed(self, weight: Weight) -> Weight:
        """Scales are those of rows, so a weight that has them is made whole."""
        if weight.scales is None:
            return Weight(weight.data.t().contiguous(), self)
        return PLAIN_SCHEME.transposed(plain(self.dense(weight)))

    def linear(self, weight: Weight, bias: Tensor | None) -> Linear:
        if self._linear is None:
            return PLAIN_SCHEME.linear(plain(self.dense(weight)), bias)
        return self._linear(self.quantized(weight), bias)

    def gated(self, gate: Weight, up: Weight, biases: GateBiases, activation: str) -> GatedLinear:
        if self._linear is None:
            whole = plain(self.dense(gate)), plain(self.dense(up))
            return PLAIN_SCHEME.gated(*whole, biases, activation)
        products = self.linear(gate, biases[0]), self.linear(up, biases[1])
        return ClampedGated(*products) if activation == "clamped" else Fp8Gated(*products, activation)

    def activated(self, weight: Weight, bias: Tensor | None, activation: str) -> GatedLinear:
        if self._linear is None:
            return PLAIN_SCHEME.activated(plain(self.dense(weight)), bias, activation)
        product, activate = self.linear(weight, bias), ACTIVATIONS[activation]
        return lambda x: activate(product(x))


class Fp8Gated:
    """Two products, each with its scales."""

    __slots__ = ("_activate", "_gate", "_up")

    def __init__(self, gate: Linear, up: Linear, activation: str) -> None:
        self._gate, self._up, self._activate = gate, up, ACTIVATIONS[activation]

    def __call__(self, x: Tensor) -> Tensor:
        return self._activate(self._gate(x)).mul_(self._up(x))


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[out, in] -> the nearest numbers of 8 bits, and a scale for each row [out, 1] by which its largest just fits."""
    scales = (weight.abs().amax(dim=1, keepdim=True).float() / LARGEST).clamp_(min=SMALLEST_SCALE)
    return (weight.float() / scales).clamp_(-LARGEST, LARGEST).to(FP8), scales


def dequantize(data: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers that data [out, in] and scales [out, n] stand for, rounded to dtype once."""
    num_inputs = data.shape[1]
    if scales.shape[1] > 1:
        scales = scales.repeat_interleave(BLOCK, dim=1)[:, :num_inputs]
    return (data.float() * scales).to(dtype)


def _cat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.view(torch.uint8) for tensor in tensors]).view(FP8)
