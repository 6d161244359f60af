"""The scheme of quantized weights as GGUF files store them: rows of blocks, byte for byte.

Owns which kinds native products read, and what can be done with rows without decoding them. The native step multiplies
by them; torch gets them as numbers. Knows no file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gapless.models.linear import PLAIN_SCHEME, plain
from gapless.models.mxfp4_scheme import NO_NUMBER
from gapless.models.weight import GateBiases, GatedLinear, Linear, Weight

MXFP4 = 39
# Those that native products read, by the number that GGUF gives them; native/formats.h has the same list.
KINDS = {2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", MXFP4: "MXFP4"}
_HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}  # where a block's scales lie
PANEL = 16  # outputs that native products have side by side
PIECE_BYTES = 2**24  # read at once, where a file is mapped: then its pages are given back
_EXPONENT = 0x7C  # in the second byte of a half; all of it is set in infinities and NaN


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring rows of one kind."""

    kind: int  # a gguf.GGMLQuantizationType
    num_rows: int
    row_bytes: int


@dataclass(frozen=True, slots=True)
class GGUFScheme:
    """Weights as bytes, one run of rows after the other. Weights of different kinds may lie below each other.

    Those of all experts of a layer are one run, of equal parts. Mapped ones lie in a file that is mapped.
    """

    runs: tuple[Run, ...]
    num_parts: int = 1
    is_mapped: bool = False

    @property
    def name(self) -> str:
        return "gguf"

    def split(self, weight: Weight) -> list[tuple[Run, Tensor]]:
        """Each run, and its bytes [num_rows, row_bytes]."""
        parts = torch.split(weight.data, [run.num_rows * run.row_bytes for run in self.runs])
        return [(run, part.view(run.num_rows, run.row_bytes)) for run, part in zip(self.runs, parts, strict=True)]

    def dense(self, weight: Weight) -> Tensor:
        """As float32: the model's dtype does not say how these numbers are computed with."""
        return torch.cat([_dequantized(run.kind, part) for run, part in self.split(weight)])

    def stacked(self, weights: Sequence[Weight]) -> Weight:
        return _joined([part for weight in weights for part in _schemed(weight).split(weight)])

    def rows(self, weight: Weight, places: Tensor) -> Weight:
        """Neighbouring places whose rows have one kind become one run."""
        parts = self.split(weight)
        ends = torch.tensor([run.num_rows for run in self.runs]).cumsum(0)
        whose = torch.searchsorted(ends, places, right=True).tolist()
        found, first = [], 0
        for which, group in groupby(whose):
            count, (run, part) = len(list(group)), parts[which]
            chosen = part[places[first : first + count] - (int(ends[which]) - run.num_rows)]
            found.append((Run(run.kind, count, run.row_bytes), chosen))
            first += count
        return _joined(found)

    def parts(self, weight: Weight) -> list[Weight]:
        (run,) = self.runs
        one = Run(run.kind, run.num_rows // self.num_parts, run.row_bytes)
        scheme = GGUFScheme((one,), is_mapped=self.is_mapped)
        return [Weight(part, scheme) for part in weight.data.chunk(self.num_parts)]

    def transposed(self, weight: Weight) -> Weight:
        """As numbers: blocks lie along rows."""
        return plain(self.dense(weight).t().contiguous())

    def linear(self, weight: Weight, bias: Tensor | None) -> Linear:
        return PLAIN_SCHEME.linear(plain(self.dense(weight)), bias)

    def gated(self, gate: Weight, up: Weight, biases: GateBiases, activation: str) -> GatedLinear:
        return PLAIN_SCHEME.gated(plain(gate.dense()), plain(up.dense()), biases, activation)

    def activated(self, weight: Weight, bias: Tensor | None, activation: str) -> GatedLinear:
        return PLAIN_SCHEME.activated(plain(self.dense(weight)), bias, activation)


def stored_weight(kind: int, rows: npt.NDArray[np.uint8]) -> Weight:
    """A weight from the bytes of its rows [num_rows, row_bytes] in a mapped file, or of some experts'."""
    num_parts = len(rows) if rows.ndim > 2 else 1
    num_rows, row_bytes = rows.shape[-2:]
    scheme = GGUFScheme((Run(kind, num_parts * num_rows, row_bytes),), num_parts, is_mapped=True)
    return Weight(torch.from_numpy(rows).flatten(), scheme)


def has_finite_scales(kind: int, rows: npt.NDArray[np.uint8]) -> bool:
    """Whether rows [num_rows, row_bytes] hold numbers only. Codes always do, so that their scales decide."""
    import gguf

    blocks = rows.reshape(-1, gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)][1])
    if kind == MXFP4:
        return not (blocks[:, 0] == NO_NUMBER).any()
    places = _HALVES.get(KINDS[kind], (0,))
    return not any(((blocks[:, place + 1] & _EXPONENT) == _EXPONENT).any() for place in places)


def _joined(parts: Sequence[tuple[Run, Tensor]]) -> Weight:
    """Runs of one kind that come to lie together become one."""
    runs: list[Run] = []
    for run, _ in parts:
        if runs and (runs[-1].kind, runs[-1].row_bytes) == (run.kind, run.row_bytes):
            runs[-1] = Run(run.kind, runs[-1].num_rows + run.num_rows, run.row_bytes)
        else:
            runs.append(run)
    return Weight(torch.cat([part.flatten() for _, part in parts]), GGUFScheme(tuple(runs)))


def _schemed(weight: Weight) -> GGUFScheme:
    assert isinstance(weight.scheme, GGUFScheme)
    return weight.scheme


def _dequantized(kind: int, rows: Tensor) -> Tensor:
    import gguf

    return torch.from_numpy(gguf.quants.dequantize(rows.numpy(), gguf.GGMLQuantizationType(kind)))
