"""FP8 weights of a checkpoint, each with its scale, checked before any of them is read.

Shows weight and scale as the one weight that they stand for. Scales of inputs are left aside: rows of inputs are
scaled by what they hold. Scales of keys and values are read where the KV cache is FP8. Knows no model.
"""

import math
import re

import torch
from torch import Tensor

from gapless.errors import CorruptModel, UnsupportedModel
from gapless.models.fp8 import BLOCK, FP8
from gapless.models.names import WeightNames
from gapless.models.quantized import Fp8Format, Grain
from gapless.models.spec import KVUnits
from gapless.models.weights import SafetensorsWeights, Shapes

STORED = "F8_E4M3"  # in a safetensors file
_WEIGHT = "weight"
_NOT_READ = re.compile(r"\.(input_scale|activation_scale|input_scale_ub|[qkv]_scale|output_scale)$")


class Fp8Weights:
    """The tensors of a checkpoint, without the scales of its FP8 ones."""

    def __init__(self, weights: SafetensorsWeights, form: Fp8Format) -> None:
        self._weights, self._form = weights, form
        narrow = [name for name, kind in weights.dtypes.items() if kind == STORED]
        self._scales = {name: self._scale_of(name) for name in narrow}
        self._grains = {name: self._grain(name, scale) for name, scale in self._scales.items()}
        hidden = set(self._scales.values())
        self.shapes: Shapes = {
            name: shape for name, shape in weights.shapes.items() if name not in hidden and not _NOT_READ.search(name)
        }

    def is_narrow(self, name: str) -> bool:
        return name in self._scales

    def read(self, name: str) -> Tensor:
        """A weight that is not FP8, or the numbers of one that is, without its scale."""
        return self._weights.read(name)

    def read_scales(self, name: str) -> Tensor:
        """The scales of an FP8 weight, for each of its rows: [out, 1], or [out, in / 128], float32."""
        scale, grain = self._weights.read(self._scales[name]).float(), self._grains[name]
        num_rows = self.shapes[name][0]
        if grain == "block":
            return scale.repeat_interleave(BLOCK, dim=0)[:num_rows]
        return scale.reshape(-1, 1).expand(num_rows, 1).contiguous()

    def read_kv_units(self, names: WeightNames, num_layers: int) -> tuple[KVUnits, ...]:
        """Of each layer, the scales that the checkpoint has for its keys and values; 1 where it has none."""
        return tuple(
            KVUnits(
                *(self._kv_unit(names.of_layer(layer, name), part) for name, part in ((names.k, "k"), (names.v, "v")))
            )
            for layer in range(num_layers)
        )

    def _kv_unit(self, projection: str, part: str) -> float:
        """Its name is that of the attention, of the projection, or of the projection's outputs."""
        attention = projection.rpartition(".")[0]
        spellings = f"{attention}.{part}_scale", f"{projection}.{part}_scale", f"{projection}.output_scale"
        name = next((name for name in spellings if name in self._weights.shapes), None)
        if name is None:
            return 1.0
        if math.prod(self._weights.shapes[name]) != 1:
            shape = self._weights.shapes[name]
            raise UnsupportedModel(
                f"{self.origin(name)}: tensor {name} has shape {shape}; kv_dtype fp8 takes one scale"
            )
        unit = float(self._weights.read(name).flatten()[0])
        if not 0 < unit < math.inf:
            raise CorruptModel(f"{self.origin(name)}: tensor {name} is {unit}, which is no scale")
        return unit

    def origin(self, name: str) -> str:
        return self._weights.origin(name)

    def origin_of_scales(self, name: str) -> tuple[str, str]:
        """The file of a weight's scales, and their name in it."""
        return self._weights.origin(self._scales[name]), self._scales[name]

    def _scale_of(self, name: str) -> str:
        stem = name.removesuffix(_WEIGHT)
        names = [stem + scale for scale in self._form.scale]
        found = next((scale for scale in names if scale in self._weights.shapes), None)
        if found is None or stem == name:
            raise CorruptModel(
                f"{self._weights.origin(name)}: tensor {name} is FP8 and has no scale: {' or '.join(names)} is missing"
            )
        return found

    def _grain(self, name: str, scale: str) -> Grain:
        """What shares a scale, by the shape of the scales, which must be one that the config allows."""
        shape, found = self._weights.shapes[name], self._weights.shapes[scale]
        if len(shape) != 2:
            raise CorruptModel(f"{self._weights.origin(name)}: tensor {name} is FP8 of shape {shape}, not a matrix")
        rows, columns = shape
        shapes: dict[Grain, list[tuple[int, ...]]] = {
            "tensor": [(), (1,), (1, 1)],
            "channel": [(rows, 1), (rows,)],
            "block": [(-(-rows // BLOCK), -(-columns // BLOCK))],
        }
        for grain in self._form.grains:
            if found in shapes[grain]:
                return grain
        wanted = " or ".join(str(shapes[grain][0]) for grain in self._form.grains)
        raise CorruptModel(
            f"{self._weights.origin(scale)}: tensor {scale} has shape {found}, the config says {wanted} "
            f"({self._form.method}, a scale for each {' or '.join(self._form.grains)}) for {name} of shape {shape}"
        )


def are_numbers(data: Tensor, scales: Tensor) -> Tensor:
    """Whether all numbers and scales are numbers, [] bool, on their device."""
    assert data.dtype == FP8
    return ((data.view(torch.uint8) & 0x7F) != 0x7F).all() & scales.isfinite().all()
