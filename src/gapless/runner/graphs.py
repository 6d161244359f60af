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

from gapless.attention.base import AttentionBatch
from gapless.core.limits import Limits
from gapless.core.plan import Plan
from gapless.core.request import IntArray
from gapless.core.row_fields import ALL_NEEDS
from gapless.device.base import Buffer
from gapless.kernels.ends import DecodeInputs, begin, end
from gapless.runner.fill import Filled, Sections, Shape, fill, unpack
from gapless.runner.padding import pad
from gapless.runner.processors import SampledRows
from gapless.runner.runner import Runner
from gapless.runner.step import Inputs, Step

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
    """The cost of capturing graphs, with the kernels compiled for it and before it."""

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
        step: Step,
        limits: Limits,
        progress: Callable[[int, int], None] | None = None,
        *,
        mixed: bool = False,
    ) -> None:
        """mixed: capture steps that prefill and decode too."""
        self._runner = runner
        self._step = step
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
        self._resident: tuple[Shape, IntArray] | None = None  # the decode rows that `_packed` holds, if it does
        self.cost = Cost(num_wanted=2 * len(wanted))
        report = _counter(progress, len(first) + len(wanted))
        self._warm_up(first, report)
        self._capture_all(wanted, report)

    def fill(self, plan: Plan, out: IntArray) -> Filled:
        """Pack the plan the way its step will read it."""
        shape = self._shape(plan)
        if shape is not None and not shape.num_chunks:
            return Filled(plan, self._fill_decode(plan, shape, out), shape)
        self._resident = None
        packed = plan if shape is None else pad(plan, shape, self._limits.num_rows)
        return Filled(plan, fill(packed, out), shape)

    def _fill_decode(self, plan: Plan, shape: Shape, out: IntArray) -> int:
        """The same rows again without new blocks: nothing to tell. A block told before is told again to no effect."""
        last, self._resident = self._resident, (shape, plan.decode_rows)
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

    def step(self, filled: Filled, packed_plan: torch.Tensor, out: torch.Tensor) -> None:
        """Replay the plan's graph, or run it as it is."""
        plan, shape = filled.plan, filled.shape
        if shape is None:
            self.ledger[_why_no_graph(plan)] += 1
            self._runner.step(filled, packed_plan, out)
            return
        resident, self._resident = self._resident, None  # unknown, should this raise
        self._replay(plan, shape, packed_plan, out)
        self._resident = resident

    def _replay(self, plan: Plan, shape: Shape, packed_plan: torch.Tensor, out: torch.Tensor) -> None:
        if shape.num_chunks and (len(plan.seat_rows) or len(plan.new_blocks)):
            self._runner.rows.apply(unpack(packed_plan, shape.sections(plan)))
        if len(packed_plan):
            size = _packed_size(shape)
            self._packed[:size].copy_(packed_plan[:size])
        self._graphs[shape, plan.needs == 0].graph.replay()
        count = plan.num_decodes
        out[:count].copy_(self._out[:count])
        if plan.num_samples > count:
            out[count : plan.num_samples].copy_(self._out[shape.chunk_samples(plan)])

    def _shape(self, plan: Plan) -> Shape | None:
        """The smallest captured shape that holds the plan."""
        if plan.num_scores or len(plan.block_copies):
            return None
        if plan.chunks:
            return next((shape for shape in self._mixed_shapes if shape.holds(plan)), None)
        index = bisect.bisect_left(self._decode_shapes, plan.num_decodes, key=lambda shape: shape.num_decodes)
        return self._decode_shapes[index] if index < len(self._decode_shapes) else None

    @torch.inference_mode()
    def _warm_up(self, shapes: Sequence[Shape], report: Callable[[], None]) -> None:
        """Mixed steps of padding alone: kernels are compiled now, and not when a prompt of that size comes."""
        for shape in shapes:
            self._mixed(self._pack_padding(shape), needs=0)
            report()
        self._mixed(self._pack_padding(shapes[0]), ALL_NEEDS)
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
            for is_greedy in (True, False):
                self._graphs[shape, is_greedy] = capture(shape, 0 if is_greedy else ALL_NEEDS, pool, stream)
            (self._mixed_shapes if shape.num_chunks else self._decode_shapes).insert(0, shape)
            self.cost.num_graphs += 2
            self.cost.memory_bytes = free - torch.cuda.mem_get_info()[0]
            report()
        torch.cuda.synchronize()
        self.cost.within_budget()
        log.info("%s", self.cost)

    @torch.inference_mode()
    def _capture_decode(self, shape: Shape, needs: int, pool: Any, stream: torch.cuda.Stream) -> Captured:
        size = shape.num_decodes
        self._packed[:size] = self._limits.num_rows  # padding alone
        self._packed[size : 2 * size] = NO_BLOCK
        inputs = DecodeInputs(size, self._packed.device)
        return Captured(_record(lambda: self._decode(inputs, needs), pool, stream), inputs)

    @torch.inference_mode()
    def _capture_mixed(self, shape: Shape, needs: int, pool: Any, stream: torch.cuda.Stream) -> Captured:
        plan = self._pack_padding(shape)
        return Captured(_record(lambda: self._mixed(plan, needs), pool, stream))

    def _pack_padding(self, shape: Shape) -> Plan:
        """A plan of this shape that does nothing, and its packed form in `_packed`."""
        plan = pad(_NO_PLAN, shape, self._limits.num_rows)
        packed = np.zeros(_packed_size(shape), np.int32)
        fill(plan, packed)
        self._packed[: len(packed)] = torch.from_numpy(packed).to(self._packed.device)
        return plan

    def _decode(self, inputs: DecodeInputs, needs: int) -> None:
        """One token of each row, from `_packed` to `_out`: the same step, between two kernels of its own."""
        rows = self._runner.rows
        begin(self._packed, rows.last_token, rows.length, rows.blocks, self._limits.block_size, inputs)
        sampled = SampledRows(inputs.rows, inputs.lengths, rows.seats)
        fed = Inputs(inputs.ids, inputs.positions, self._decode_batch(inputs), sampled)
        end(self._step.run(fed, needs).tokens, inputs, rows.last_token, rows.length, self._out)

    def _decode_batch(self, inputs: DecodeInputs) -> AttentionBatch:
        nothing = self._packed[:0]
        return AttentionBatch(
            slots=inputs.slots,
            blocks=self._runner.rows.blocks,
            decode_rows=inputs.rows,
            decode_lengths=inputs.lengths,
            max_decode_length=self._limits.max_model_len,
            num_chunk_tokens=0,
            chunk_rows=nothing,
            chunk_offsets=nothing,
            chunk_starts=nothing,
            chunk_ends=nothing,
            chunks=(),
        )

    def _mixed(self, plan: Plan, needs: int) -> None:
        """A padded plan, from `_packed` to `_out`."""
        self._runner.run(plan, unpack(self._packed, Sections.of(plan)), needs, self._out)
        rows = self._runner.rows
        rows.length[-1:].zero_()  # the padding row never gets anywhere
        rows.last_token[-1:].zero_()


def _why_no_graph(plan: Plan) -> str:
    if plan.num_scores:
        return "no graph: log-probabilities"
    return "no graph: block copies" if len(plan.block_copies) else "no graph: prefill"


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


_NO_PLAN = Plan(
    step=-1,
    decode_rows=np.empty(0, np.int32),
    chunks=(),
    new_blocks=np.empty((0, 3), np.int32),
    sample_rows=np.empty(0, np.int32),
    sample_epochs=np.empty(0, np.int64),
    max_decode_length=0,
)
