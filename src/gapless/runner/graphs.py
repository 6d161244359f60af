"""Decode steps as replays of captured CUDA graphs, one for each batch size of a ladder.

A step that has a graph is one replay: rows in, tokens out, padded to the next size with a row that nobody owns. A step
that has none (it prefills, or gives log-probabilities) runs as it is and is counted with the reason.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gapless.attention.base import Attention, AttentionBatch
from gapless.core.limits import Limits
from gapless.core.plan import Plan
from gapless.core.request import IntArray
from gapless.device.base import Buffer
from gapless.runner.draw_kernels import pick
from gapless.runner.graph_kernels import DecodeInputs, argmax, begin, end
from gapless.runner.runner import Model, Runner

NO_BLOCK = -1
WARM_UPS = 2


def ladder(num_rows: int) -> list[int]:
    """Batch sizes to capture: every one that is small, then ever wider steps, and the largest."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 1024, 64), *range(1024, 65536, 256)]
    return [size for size in sizes if size < num_rows] + [num_rows]


@dataclass(frozen=True, slots=True)
class Captured:
    """A graph, and the tensors it works on, which must live as long."""

    graph: torch.cuda.CUDAGraph
    inputs: DecodeInputs


class GraphRunner:
    """Runs steps like the runner it wraps, decode steps from graphs."""

    def __init__(
        self,
        runner: Runner,
        model: Model,
        attention: Attention,
        limits: Limits,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._runner = runner
        self._model = model
        self._attention = attention
        self._limits = limits
        self.buffers: Sequence[Buffer] = runner.buffers
        self.ledger: Counter[str] = Counter()  # steps without a graph, by reason
        self._sizes = ladder(limits.num_rows)
        device = runner.rows.last_token.device
        self._packed = torch.zeros(2 * self._sizes[-1], dtype=torch.int32, device=device)
        self._out = torch.zeros(self._sizes[-1], dtype=torch.int32, device=device)
        self._graphs: dict[tuple[int, bool], Captured] = {}
        self._capture_all(progress)

    def fill(self, plan: Plan, out: IntArray) -> int:
        """Pack the plan the way its step will read it."""
        size = self._size(plan)
        if size is None:
            return self._runner.fill(plan, out)
        count = plan.num_decodes
        rows, blocks = out[:size], out[size : 2 * size]
        rows[:count] = plan.decode_rows
        rows[count:] = self._limits.num_rows
        blocks[:] = NO_BLOCK
        if len(plan.new_blocks):
            blocks[np.searchsorted(plan.decode_rows, plan.new_blocks[:, 0])] = plan.new_blocks[:, 2]
        return 2 * size

    def step(self, plan: Plan, packed_plan: torch.Tensor, out: torch.Tensor) -> None:
        """Replay the plan's graph, or run it as it is."""
        size = self._size(plan)
        if size is None:
            self.ledger["no graph: prefill" if plan.chunks else "no graph: log-probabilities"] += 1
            self._runner.step(plan, packed_plan, out)
            return
        self._packed[: 2 * size].copy_(packed_plan[: 2 * size])
        self._graphs[size, _is_greedy(plan)].graph.replay()
        out[: plan.num_decodes].copy_(self._out[: plan.num_decodes])

    def _size(self, plan: Plan) -> int | None:
        if plan.chunks or plan.num_scores:
            return None
        return self._sizes[bisect.bisect_left(self._sizes, plan.num_decodes)]

    def _capture_all(self, progress: Callable[[int, int], None] | None) -> None:
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()
        wanted = [(size, greedy) for size in reversed(self._sizes) for greedy in (True, False)]
        self._packed.fill_(self._limits.num_rows)  # capture on padding alone
        for index, key in enumerate(wanted):
            self._graphs[key] = self._capture(*key, pool, stream)
            if progress is not None:
                progress(index + 1, len(wanted))
        torch.cuda.synchronize()

    @torch.inference_mode()
    def _capture(self, size: int, greedy: bool, pool: Any, stream: torch.cuda.Stream) -> Captured:
        self._packed[:size] = self._limits.num_rows
        self._packed[size : 2 * size] = NO_BLOCK
        inputs = DecodeInputs(size, self._packed.device)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                self._body(inputs, greedy)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            self._body(inputs, greedy)
        return Captured(graph, inputs)

    def _body(self, inputs: DecodeInputs, greedy: bool) -> None:
        rows = self._runner.rows
        begin(self._packed, rows.last_token, rows.length, rows.blocks, self._limits.block_size, inputs)
        nothing = self._packed[:0]
        batch = AttentionBatch(
            slots=inputs.slots,
            blocks=rows.blocks,
            decode_rows=inputs.rows,
            decode_lengths=inputs.lengths,
            max_decode_length=self._limits.max_model_len,
            chunk_rows=nothing,
            chunk_offsets=nothing,
            chunk_starts=nothing,
            chunk_ends=nothing,
            chunks=(),
        )
        hidden = self._model.forward(inputs.ids, inputs.positions, self._attention.begin(batch))
        logits = self._model.logits(hidden)
        tokens = argmax(logits) if greedy else pick(logits, inputs.rows, inputs.lengths, rows)
        end(tokens, inputs, rows.last_token, rows.length, self._out)


def _is_greedy(plan: Plan) -> bool:
    return not plan.any_random and not plan.any_min_tokens
