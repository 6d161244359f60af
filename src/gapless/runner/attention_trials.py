"""The attention of steps on its own, to time and compare attentions on the engine's KV pools.

Sizes are bounded, so that all trials of an attention take the device some tenths of a second at most. Trials run once,
before anything is stored in the cache, and leave it zeroed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from gapless.attention.base import Attention, AttentionBatch, Span
from gapless.core.limits import Limits
from gapless.models.rope import RotaryRotation

AGREEMENT = 0.02  # of the output's norm: several times the rounding of bfloat16
MAX_LAYERS = 16
CONTEXTS = (256, 2048)  # tokens of each decode row, at most
CHUNKS = ((4096, 0), (512, 1536))  # tokens of a chunk and how many come before it, at most

Measure = Callable[[Callable[[], object]], float]  # seconds of the device for what a function queues


@dataclass(frozen=True, slots=True)
class Trial:
    """The attention of some layers over one batch."""

    batch: AttentionBatch
    heads: torch.Tensor  # [num_tokens, num_heads + 2 * num_kv_heads, head_dim]
    rotation: RotaryRotation
    num_layers: int

    def seconds(self, attention: Attention, own: Attention, measure: Measure) -> float:
        """Seconds that it takes. Raises ValueError if its output differs from that of our own."""
        found, expected = self.run(attention).float(), self.run(own).float()
        error = float((found - expected).norm() / expected.norm())
        if not error <= AGREEMENT:
            raise ValueError(f"it differs from our own kernels by {error:.3f} of the output")
        return measure(partial(self.run, attention))

    def run(self, attention: Attention) -> torch.Tensor:
        """Attend in each layer; return what the last one gave."""
        attend = attention.begin(self.batch)
        for layer in range(self.num_layers):
            out = attend(layer, self.heads, self.rotation)
        return out


class Trials:
    """Makes trials within the limits; what they write into the pools, `wipe` zeroes."""

    def __init__(self, pools: Sequence[torch.Tensor], num_heads: int, limits: Limits) -> None:
        self._pools = pools[:MAX_LAYERS]
        self._limits = limits
        self._num_heads = num_heads + pools[0].shape[1]
        self._device = pools[0].device
        self._generator = torch.Generator(self._device).manual_seed(0)
        self._slots: list[torch.Tensor] = []

    def decodes(self) -> list[Trial]:
        """One row, and as many as there can be, over short and long contexts."""
        counts = dict.fromkeys((1, min(self._limits.num_rows, self._limits.num_blocks)))
        return [self._decode(count, context) for count in counts for context in CONTEXTS]

    def chunks(self) -> list[Trial]:
        """A whole prompt, and the end of a long one."""
        return [self._chunk(count, start) for count, start in CHUNKS]

    def wipe(self) -> None:
        for pool in self._pools:
            for slots in self._slots:
                pool[slots] = 0

    def _decode(self, num_rows: int, context: int) -> Trial:
        limits = self._limits
        context = min(context, limits.max_model_len, limits.num_blocks // num_rows * limits.block_size)
        rows = torch.arange(num_rows, device=self._device)
        return self._trial(rows, torch.full_like(rows, context - 1), ())

    def _chunk(self, count: int, start: int) -> Trial:
        limits = self._limits
        room = min(limits.max_model_len, limits.num_blocks * limits.block_size)
        count = min(count, limits.max_batch_tokens, room)
        start = min(start, room - count)
        places = torch.arange(start, start + count, device=self._device)
        return self._trial(places[:1] * 0, places, (Span(0, start, count),))

    def _trial(self, rows: torch.Tensor, places: torch.Tensor, spans: tuple[Span, ...]) -> Trial:
        """Rows with one token each at these places, or one row with a chunk there."""
        size, length = self._limits.block_size, int(places.max()) + 1
        blocks = self._blocks(len(rows), -(-length // size))
        slots = blocks[rows, places // size] * size + places % size
        self._slots.append(slots)
        num_decodes = 0 if spans else len(rows)
        batch = AttentionBatch(
            slots=(slots,) * self._limits.num_groups,
            tables=(blocks,) * self._limits.num_groups,
            decode_rows=rows[:num_decodes],
            decode_lengths=places[:num_decodes] + 1,
            max_decode_length=length,
            num_chunk_tokens=sum(span.count for span in spans),
            chunk_rows=self._ints([0 for _ in spans]),
            chunk_offsets=self._ints([span.offset for span in spans]),
            chunk_starts=self._ints([span.start for span in spans]),
            chunk_ends=self._ints([span.length for span in spans]),
            chunks=spans,
        )
        head_dim = self._pools[0].shape[2]
        turns = RotaryRotation(self._random(len(slots), 2, head_dim), None, 1e-6)  # by anything: both sides turn alike
        return Trial(batch, self._random(len(slots), self._num_heads, head_dim), turns, len(self._pools))

    def _blocks(self, num_rows: int, used: int) -> torch.Tensor:
        """Tables as wide as the engine's, blocks from all over the cache, none of them shared."""
        order = torch.randperm(self._limits.num_blocks, generator=self._generator, device=self._device)
        blocks = torch.zeros(num_rows, self._limits.max_blocks, dtype=torch.int64, device=self._device)
        blocks[:, :used] = order[: num_rows * used].view(num_rows, used)
        return blocks

    def _random(self, *size: int) -> torch.Tensor:
        drawn = torch.randn(*size, generator=self._generator, device=self._device)
        return drawn.to(self._pools[0].dtype)

    def _ints(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self._device)
