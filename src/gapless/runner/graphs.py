"""Steps as replays of captured CUDA graphs, for a ladder of shapes.

A decode step that has a graph is one replay: rows in, tokens out, padded to the next size with a row that nobody owns.
Small models, whose mixed steps take the host longer to launch than the GPU to run, have graphs for those too. A step
without one (much prefill, or log-probabilities) runs as it is and is counted with the reason.
"""

from __future__ import annotations

import bisect
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from gapless.attention.base import Attention, AttentionBatch
from gapless.core.limits import Limits
from gapless.core.plan import Plan
from gapless.core.request import IntArray
from gapless.device.base import Buffer
from gapless.runner.fill import Sections, fill, unpack
from gapless.runner.graph_kernels import DecodeInputs, argmax, begin, end
from gapless.runner.padding import Shape, pad
from gapless.runner.runner import Model, Runner

log = logging.getLogger(__name__)

NO_BLOCK = -1
WARM_UPS = 2
NUM_CHUNKS = 8  # of a captured mixed step, one of them padding
CHUNK_TOKENS = (32, 64, 128, 256, 512)
WARM_UP_TOKENS = (15, 31, 63, 127, 191, 255)  # with a decode row: one size for each way in which products are cut
MIXED_ROWS = (8, 32, 128)
BUDGET_S = 120.0  # for all captures; what is left over then stays without a graph
BUDGET_BYTES = 3 * 2**30


def ladder(num_rows: int) -> list[int]:
    """Batch sizes to capture: every one that is small, then ever wider steps, and the largest."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 1024, 64), *range(1024, 65536, 256)]
    return [size for size in sizes if size < num_rows] + [num_rows]


def mixed_ladder(limits: Limits) -> list[Shape]:
    """Shapes of mixed steps to capture, the smallest first."""
    rows = [count for count in MIXED_ROWS if count < limits.num_rows] + [limits.num_rows]
    tokens = [count for count in CHUNK_TOKENS if count <= min(limits.max_batch_tokens, limits.max_model_len)]
    return [Shape(num_rows, count, NUM_CHUNKS) for num_rows in rows for count in tokens]


def warm_up_shapes(limits: Limits) -> list[Shape]:
    """Shapes of mixed steps to run once at the start."""
    most = min(limits.max_batch_tokens, limits.max_model_len)
    return [Shape(1, count, NUM_CHUNKS) for count in WARM_UP_TOKENS if count < most] or [Shape(1, most, NUM_CHUNKS)]


@dataclass(frozen=True, slots=True)
class Captured:
    """A graph, and the tensors it works on, which must live as long."""

    graph: torch.cuda.CUDAGraph
    inputs: DecodeInputs | None = None


@dataclass(slots=True)
class Cost:
    """What capturing took, kernels compiled for it and before it included."""

    num_graphs: int = 0
    num_wanted: int = 0
    seconds: float = 0.0
    memory_bytes: int = 0
    began_s: float = field(default_factory=time.perf_counter)

    def within_budget(self) -> bool:
        self.seconds = time.perf_counter() - self.began_s
        return self.seconds < BUDGET_S and self.memory_bytes < BUDGET_BYTES

    def __str__(self) -> str:
        return (
            f"{self.num_graphs} of {self.num_wanted} graphs captured in {self.seconds:.1f} s (at most {BUDGET_S:.0f}), "
            f"{self.memory_bytes / 2**30:.2f} GiB (at most {BUDGET_BYTES / 2**30:.0f})"
        )


class GraphRunner:
    """Runs steps like the runner it wraps, from graphs where it has one."""

    def __init__(
        self,
        runner: Runner,
        model: Model,
        attention: Attention,
        limits: Limits,
        progress: Callable[[int, int], None] | None = None,
        *,
        mixed: bool = False,
    ) -> None:
        """mixed: capture steps that prefill and decode too."""
        self._runner = runner
        self._model = model
        self._attention = attention
        self._limits = limits
        self.ledger: Counter[str] = Counter()  # steps without a graph, by reason
        decodes = [Shape(size, 0, 0) for size in ladder(limits.num_rows)]
        mixes = mixed_ladder(limits) if mixed else []
        wanted = [*reversed(decodes), *reversed(mixes)]  # the largest first: the others fit into its memory
        device = runner.rows.last_token.device
        first = warm_up_shapes(limits)
        size = max(_packed_size(shape) for shape in (*first, *wanted))
        self._packed = torch.zeros(size, dtype=torch.int32, device=device)
        self._out = torch.zeros(max(shape.num_samples for shape in (*first, *wanted)), dtype=torch.int32, device=device)
        static = (Buffer("graph.in", self._packed, host=False), Buffer("graph.out", self._out, host=False))
        self.buffers: Sequence[Buffer] = (*runner.buffers, *static)  # graphs share them: one replay at a time
        self._graphs: dict[tuple[Shape, bool], Captured] = {}
        self._decode_shapes: list[Shape] = []  # captured, smallest first
        self._mixed_shapes: list[Shape] = []
        self._decoding: tuple[Shape, IntArray] | None = None  # what `_packed` holds, if the last step was a decode step
        self.cost = Cost(num_wanted=2 * len(wanted))
        report = _counter(progress, len(first) + len(wanted))
        self._warm_up(first, report)
        self._capture_all(wanted, report)

    def fill(self, plan: Plan, out: IntArray) -> int:
        """Pack the plan the way its step will read it."""
        shape = self._shape(plan)
        if shape is not None and not shape.num_chunks:
            return self._fill_decode(plan, shape, out)
        self._decoding = None
        if shape is None:
            return self._runner.fill(plan, out)
        return fill(pad(plan, shape, self._limits.num_rows), out)

    def _fill_decode(self, plan: Plan, shape: Shape, out: IntArray) -> int:
        """The same rows again without new blocks: nothing to tell. A block told before is told again to no effect."""
        last, self._decoding = self._decoding, (shape, plan.decode_rows)
        if last and not len(plan.new_blocks) and last[0] == shape and np.array_equal(last[1], plan.decode_rows):
            return 0
        size, count = shape.num_decodes, plan.num_decodes
        rows, blocks = out[:size], out[size : 2 * size]
        rows[:count] = plan.decode_rows
        rows[count:] = self._limits.num_rows
        blocks[:] = NO_BLOCK
        if len(plan.new_blocks):
            blocks[np.searchsorted(plan.decode_rows, plan.new_blocks[:, 0])] = plan.new_blocks[:, 2]
        return 2 * size

    def step(self, plan: Plan, packed_plan: torch.Tensor, out: torch.Tensor) -> None:
        """Replay the plan's graph, or run it as it is."""
        shape = self._shape(plan)
        decoding, self._decoding = self._decoding, None  # unknown, should this raise
        if shape is None:
            self.ledger["no graph: log-probabilities" if plan.num_scores else "no graph: prefill"] += 1
            self._runner.step(plan, packed_plan, out)
            return
        if shape.num_chunks and (plan.seats or len(plan.new_blocks)):
            self._runner.rows.apply(unpack(packed_plan, shape.sections(plan)))
        if len(packed_plan):
            size = _packed_size(shape)
            self._packed[:size].copy_(packed_plan[:size])
        self._graphs[shape, _is_greedy(plan)].graph.replay()
        count = plan.num_decodes
        out[:count].copy_(self._out[:count])
        if plan.num_samples > count:
            out[count : plan.num_samples].copy_(self._out[shape.chunk_samples(plan)])
        self._decoding = decoding

    def _shape(self, plan: Plan) -> Shape | None:
        """The smallest captured shape that holds the plan."""
        if plan.num_scores:
            return None
        if plan.chunks:
            return next((shape for shape in self._mixed_shapes if shape.holds(plan)), None)
        index = bisect.bisect_left(self._decode_shapes, plan.num_decodes, key=lambda shape: shape.num_decodes)
        return self._decode_shapes[index] if index < len(self._decode_shapes) else None

    @torch.inference_mode()
    def _warm_up(self, shapes: Sequence[Shape], report: Callable[[], None]) -> None:
        """Mixed steps of padding alone: kernels are compiled now, and not when a prompt of that size comes."""
        for shape in shapes:
            self._mixed(self._pack_padding(shape), greedy=True)
            report()
        self._mixed(self._pack_padding(shapes[0]), greedy=False)
        torch.cuda.synchronize()

    def _capture_all(self, wanted: Sequence[Shape], report: Callable[[], None]) -> None:
        """As many as the budget allows; a shape that is left out is padded to a larger one."""
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()
        free = torch.cuda.mem_get_info()[0]
        for shape in wanted:
            if not self.cost.within_budget():
                break
            capture = self._capture_mixed if shape.num_chunks else self._capture_decode
            for greedy in (True, False):
                self._graphs[shape, greedy] = capture(shape, greedy, pool, stream)
            (self._mixed_shapes if shape.num_chunks else self._decode_shapes).insert(0, shape)
            self.cost.num_graphs += 2
            self.cost.memory_bytes = free - torch.cuda.mem_get_info()[0]
            report()
        torch.cuda.synchronize()
        self.cost.within_budget()
        log.info("%s", self.cost)

    @torch.inference_mode()
    def _capture_decode(self, shape: Shape, greedy: bool, pool: Any, stream: torch.cuda.Stream) -> Captured:
        size = shape.num_decodes
        self._packed[:size] = self._limits.num_rows  # padding alone
        self._packed[size : 2 * size] = NO_BLOCK
        inputs = DecodeInputs(size, self._packed.device)
        return Captured(_record(lambda: self._decode(inputs, greedy), pool, stream), inputs)

    @torch.inference_mode()
    def _capture_mixed(self, shape: Shape, greedy: bool, pool: Any, stream: torch.cuda.Stream) -> Captured:
        plan = self._pack_padding(shape)
        return Captured(_record(lambda: self._mixed(plan, greedy), pool, stream))

    def _pack_padding(self, shape: Shape) -> Plan:
        """A plan of this shape that does nothing, and its packed form in `_packed`."""
        plan = pad(_NO_PLAN, shape, self._limits.num_rows)
        packed = np.zeros(_packed_size(shape), np.int32)
        fill(plan, packed)
        self._packed[: len(packed)] = torch.from_numpy(packed).to(self._packed.device)
        return plan

    def _decode(self, inputs: DecodeInputs, greedy: bool) -> None:
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
        tokens = self._sample(logits, inputs.rows, inputs.lengths, greedy)
        end(tokens, inputs, rows.last_token, rows.length, self._out)

    def _sample(self, logits: torch.Tensor, rows: torch.Tensor, places: torch.Tensor, greedy: bool) -> torch.Tensor:
        if greedy:
            return argmax(logits)
        runner = self._runner
        return runner.sampler(logits, rows, places, runner.rows, random=True, filtered=True, min_tokens=True)

    def _mixed(self, plan: Plan, greedy: bool) -> None:
        """What the runner does with a padded plan, from `_packed` to `_out`."""
        rows = self._runner.rows
        packed = unpack(self._packed, Sections.of(plan))
        hidden, positions = self._runner.forward(plan, packed)
        chosen = packed.sample_tokens.long()
        logits = self._model.logits(hidden[chosen])
        tokens = self._sample(logits, packed.sample_rows.long(), positions[chosen] + 1, greedy)
        rows.advance(packed, tokens)
        rows.length[-1:].zero_()  # the padding row never gets anywhere
        rows.last_token[-1:].zero_()
        self._out[: len(tokens)] = tokens


def _record(body: Callable[[], None], pool: Any, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        body()
    return graph


def _counter(progress: Callable[[int, int], None] | None, total: int) -> Callable[[], None]:
    """A function that tells of one more that is done."""
    done = itertools.count(1)
    return lambda: progress(next(done), total) if progress is not None else None


def _packed_size(shape: Shape) -> int:
    """Numbers that a graph of this shape reads: of a decode step, rows and their new blocks."""
    if shape.num_chunks == 0:
        return 2 * shape.num_decodes
    return shape.sections(_NO_PLAN).total


def _is_greedy(plan: Plan) -> bool:
    return not plan.any_random and not plan.any_min_tokens


_NO_PLAN = Plan(
    step=-1,
    decode_rows=np.empty(0, np.int32),
    chunks=(),
    seats=(),
    new_blocks=np.empty((0, 3), np.int32),
    sample_rows=np.empty(0, np.int32),
    sample_epochs=np.empty(0, np.int64),
    max_decode_length=0,
    any_random=False,
    any_filtered=False,
    any_min_tokens=False,
)
