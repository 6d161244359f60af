"""MXFP4 weights of a checkpoint: `X_blocks` and `X_scales` as the one tensor X that they stand for.

It is made whole as it is read, or read as it is stored. Knows no model.
"""

from torch import Tensor

from gapless.errors import CorruptModel
from gapless.models.mxfp4_scheme import BLOCK_BYTES, dequantize
from gapless.models.weights import SafetensorsWeights, Shapes

BLOCKS, SCALES = "_blocks", "_scales"


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
        if len(blocks) != 4 or blocks[-1] != BLOCK_BYTES or scales != blocks[:-1]:
            raise CorruptModel(
                f"{self._weights.origin(name + BLOCKS)}: tensor {name}{BLOCKS} has shape {blocks} and {name}{SCALES} "
                f"has {scales}: these are no blocks of 32 numbers with a scale each"
            )
        for part in (name + BLOCKS, name + SCALES):
            if (kind := self._weights.dtypes[part]) != "U8":
                raise CorruptModel(f"{self._weights.origin(part)}: tensor {part} is {kind}, not bytes")
        count, outputs, groups, _ = blocks
        return count, groups * 2 * BLOCK_BYTES, outputs

    def read(self, name: str) -> Tensor:
        if name not in self._shapes:
            return self._weights.read(name)
        return dequantize(*self.read_mxfp4(name)).transpose(1, 2)

    def is_mapped(self, name: str) -> bool:
        return name not in self._shapes and self._weights.is_mapped(name)

    def is_mxfp4(self, name: str) -> bool:
        return name in self._shapes

    def read_mxfp4(self, name: str) -> tuple[Tensor, Tensor]:
        """Blocks [count, out, groups, 16] and scales [count, out, groups]."""
        self._weights.give_back(name + BLOCKS)  # those before it are made use of, or will be read again
        return self._weights.read(name + BLOCKS), self._weights.read(name + SCALES)

    def origin(self, name: str) -> str:
        return self._weights.origin(name + BLOCKS if name in self._shapes else name)
