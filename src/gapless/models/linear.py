"""The plain scheme: products with weights as they are, and with weights prepacked by oneDNN for the CPU.

Owns the choice between the two, by device type and dtype. On the CPU the residual add, the activation and the gate's
product are fused into the packed products as oneDNN post-ops. Knows nothing of layers.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from gapless.models.weight import GateBiases, GatedLinear, Linear, Weight

_GATE_LIMIT, _GATE_SLOPE = 7.0, 1.702  # of GPT-OSS; its configs do not say them
_PACK_ROWS = 16  # only a hint: with it, 1 row and 2048 rows are as fast as when packed for them


class PlainScheme:
    """Weights as tensors of the model's dtype."""

    name = "plain"

    def dense(self, weight: Weight) -> Tensor:
        return weight.data

    def stacked(self, weights: Sequence[Weight]) -> Weight:
        return plain(torch.cat([weight.data for weight in weights]))

    def rows(self, weight: Weight, places: Tensor) -> Weight:
        return plain(weight.data[places.to(weight.data.device)])

    def parts(self, weight: Weight) -> list[Weight]:
        return [plain(part) for part in weight.data.unbind(0)]

    def transposed(self, weight: Weight) -> Weight:
        return plain(weight.data.t().contiguous())

    def linear(self, weight: Weight, bias: Tensor | None) -> Linear:
        """A packed product keeps no reference to the weight."""
        return _LINEARS.get(_key(weight.data), PlainLinear)(weight.data, bias)

    def gated(self, gate: Weight, up: Weight, biases: GateBiases, activation: str) -> GatedLinear:
        if activation == "clamped":
            return ClampedGated(self.linear(gate, biases[0]), self.linear(up, biases[1]))
        return _GATED.get(_key(gate.data), PlainGated)(gate.data, up.data, *biases, activation)

    def activated(self, weight: Weight, bias: Tensor | None, activation: str) -> GatedLinear:
        return _ACTIVATED.get(_key(weight.data), PlainActivated)(weight.data, bias, activation)


PLAIN_SCHEME = PlainScheme()


def plain(data: Tensor) -> Weight:
    return Weight(data, PLAIN_SCHEME)


class PlainLinear:
    __slots__ = ("bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias).add_(residual)


class PlainGated:
    """gate and up as one product."""

    __slots__ = ("activate", "both")

    def __init__(
        self, gate: Tensor, up: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None, activation: str
    ) -> None:
        self.activate = ACTIVATIONS[activation]
        bias = None if gate_bias is None or up_bias is None else torch.cat((gate_bias, up_bias))
        self.both = PlainLinear(torch.cat((gate, up)), bias)

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, dim=-1)
        return self.activate(gate).mul_(up)


class PlainActivated:
    __slots__ = ("activate", "product")

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: str) -> None:
        self.activate, self.product = ACTIVATIONS[activation], PlainLinear(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self.activate(self.product(x))


class ClampedGated:
    """The gate of GPT-OSS: both sides are kept within a limit, and one is added to `up`."""

    __slots__ = ("gate", "up")

    def __init__(self, gate: Linear, up: Linear) -> None:
        self.gate, self.up = gate, up

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.gate(x).clamp_(max=_GATE_LIMIT), self.up(x).clamp_(-_GATE_LIMIT, _GATE_LIMIT)
        return gate.mul_(torch.sigmoid(gate * _GATE_SLOPE)).mul_(up.add_(1.0))


class PackedLinear:
    __slots__ = ("bias", "packed")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS)
        self.bias = None if bias is None else bias.contiguous()  # oneDNN takes no notice of strides

    def __call__(self, x: Tensor) -> Tensor:
        product: Tensor = _product(x, self.packed, self.bias, "none", [], "")
        return product

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        total: Tensor = _product_with(x, residual, self.packed, self.bias, "add")
        return total


class PackedGated:
    """Two products: the first ends in the activation, the second in the multiplication by the first."""

    __slots__ = ("algorithm", "gate", "post_op", "up")

    def __init__(
        self, gate: Tensor, up: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None, activation: str
    ) -> None:
        self.gate, self.up = PackedLinear(gate, gate_bias), PackedLinear(up, up_bias)
        self.post_op, self.algorithm = _POST_OPS[activation]

    def __call__(self, x: Tensor) -> Tensor:
        gate = _product(x, self.gate.packed, self.gate.bias, self.post_op, [], self.algorithm)
        gated: Tensor = _product_with(x, gate, self.up.packed, self.up.bias, "mul")
        return gated


class PackedActivated:
    """A product that ends in the activation."""

    __slots__ = ("algorithm", "post_op", "product")

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: str) -> None:
        self.product = PackedLinear(weight, bias)
        self.post_op, self.algorithm = _POST_OPS[activation]

    def __call__(self, x: Tensor) -> Tensor:
        found: Tensor = _product(x, self.product.packed, self.product.bias, self.post_op, [], self.algorithm)
        return found


def _key(weight: Tensor) -> tuple[str, torch.dtype]:
    return weight.device.type, weight.dtype


def _packable_dtypes() -> list[torch.dtype]:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return []
    return [torch.float32, *([torch.bfloat16] if torch.ops.mkldnn._is_mkldnn_bf16_supported() else [])]


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}
_POST_OPS = {"silu": ("swish", ""), "gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh")}  # of oneDNN
_PACKABLE = [("cpu", dtype) for dtype in _packable_dtypes()]
_LINEARS: dict[tuple[str, torch.dtype], type[PackedLinear]] = dict.fromkeys(_PACKABLE, PackedLinear)
_GATED: dict[tuple[str, torch.dtype], type[PackedGated]] = dict.fromkeys(_PACKABLE, PackedGated)
_ACTIVATED: dict[tuple[str, torch.dtype], type[PackedActivated]] = dict.fromkeys(_PACKABLE, PackedActivated)
if _PACKABLE:
    # The overloads, looked up once: picking one among them by argument costs microseconds a call.
    _product = torch.ops.mkldnn._linear_pointwise.default
    _product_with = torch.ops.mkldnn._linear_pointwise.binary
