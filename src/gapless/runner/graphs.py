"""Steps as replays of captured CUDA graphs, for a ladder of shapes.

A greedy decode step is one replay, any other is two, one for each half: rows in, logits; logits, tokens out. A shape
has two second halves, of which the short one serves greedy rows without scores. Steps are padded to the next shape with
a row that nobody owns. That holds for decode steps and for steps with chunks of any number and length, for any sampling
and for the log-probabilities of samples. Those of a prompt are computed after the replay, from the hidden states it
leaves. A step without a graph (one that copies blocks) runs as it is and is counted with the reason.
"""

from __future__ import annotations

import bisect
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from gapless.core.limits import Limits
from gapless.core.plan import Plan, score_width
from gapless.core.request import IntArray
from gapless.device.base import COMPUTE, STREAMS, Buffer, Device
from gapless.garbage import collections_paused
from gapless.kernels.ahead import compiled_ahead
from gapless.kernels.compilers import Compilers
from gapless.kernels.mixed import NO_SCORE
from gapless.runner.calls import process
from gapless.runner.capture import CaptureCost, Instantiation, record
from gapless.runner.fill import Filled
from gapless.runner.halves import NO_BLOCK, Halves, StaticInputs, decode_size
from gapless.runner.ladder import Shape, corners, decode_shapes, mixed_shapes
from gapless.runner.logprobs import score
from gapless.runner.mixed import in_slices, pack_mixed, score_places
from gapless.runner.runner import Runner
from gapless.runner.steering import Steering
from gapless.runner.step import Predicted, Step

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Captured:
    """A step's graphs, and the tensors they work on, which must live as long."""

    graphs: tuple[torch.cuda.CUDAGraph, ...]  # of the whole, or of its two halves
    inputs: StaticInputs


class GraphRunner:
    """Runs steps like the runner it wraps, from graphs where it has one."""

    def __init__(
        self,
        runner: Runner,
        step: Step,
        limits: Limits,
        device: Device,
        progress: Callable[[int, int], None] | None = None,
        slow_reason: str | None = None,
        *,
        processed: bool = False,
    ) -> None:
        """slow_reason: why layers are slower than they could be, as the ledger says it for every step.

        processed: there may be logits processors.
        """
        self._runner = runner
        self._slow_reason = slow_reason
        self._step = step
        self._limits = limits
        self._device = device
        self.ledger: Counter[str] = Counter()  # steps without a graph, by reason
        self.num_padding = 0  # tokens computed only to fill up a shape
        vocab_size = step.model.vocab_size
        self._halves = halves = Halves(runner.rows, limits, device.torch_device, vocab_size, processed=processed)
        static = (Buffer("graph.in", halves.packed, host=False), Buffer("graph.out", halves.out, host=False))
        self.buffers: Sequence[Buffer] = (*runner.buffers, *static)  # graphs share them: one replay at a time
        self.mask_words = runner.mask_words
        self._graphs: dict[tuple[Shape, bool], Captured] = {}  # by shape and whether all rows are greedy, unscored
        self._decode_shapes: list[Shape] = []  # captured, smallest first
        self._mixed_shapes: list[Shape] = []
        self._resident: tuple[Shape, IntArray] | None = None  # the decode rows that `packed` holds, if it does
        self._capture_all(progress)

    def fill(self, plan: Plan, out: IntArray) -> Filled:
        """Pack the plan the way its step will read it."""
        if self._slow_reason is not None:
            self.ledger[self._slow_reason] += 1
        shape = self._shape(plan)
        if shape is None:
            self._resident = None
            return self._runner.fill(plan, out)
        self.num_padding += shape.size - plan.num_tokens
        if shape.has_chunks:
            self._resident = None
            return Filled(plan, pack_mixed(plan, out, self._limits.num_rows), shape)
        return Filled(plan, self._fill_decode(plan, shape, out), shape)

    def _fill_decode(self, plan: Plan, shape: Shape, out: IntArray) -> int:
        """The same rows again without new blocks: nothing to tell. A block told before is told again to no effect.

        Rows get new owners, who may want other scores, in steps with chunks alone.
        """
        last, self._resident = self._resident, (shape, plan.decode_rows)
        if last and not len(plan.new_blocks) and last[0] == shape and np.array_equal(last[1], plan.decode_rows):
            return 0
        size, count = shape.num_rows, plan.num_decodes
        total = decode_size(size, self._limits)
        table = out[: total - 1].reshape(-1, size)
        rows, blocks, places = table[0], table[1:-1], table[-1]
        rows[:count] = plan.decode_rows
        rows[count:] = self._limits.num_rows
        blocks[:] = NO_BLOCK
        if len(plan.new_blocks):
            blocks[:, np.searchsorted(plan.decode_rows, plan.new_blocks[:, 0])] = plan.new_blocks[:, 2:].T
        places[:] = score_places(plan, size) if len(plan.score_samples) else NO_SCORE
        out[total - 1] = plan.num_top
        return total

    def step(self, filled: Filled, packed_plan: torch.Tensor, out: torch.Tensor) -> None:
        """Replay the plan's graph, or run it as it is."""
        plan, shape = filled.plan, filled.shape
        if shape is None:
            with self._without_graph(plan):
                self._runner.step(filled, packed_plan, out)
            return
        with self._resident_unless_it_raises():
            self._take_in(packed_plan)
            for graph in self._graphs[shape, _is_plain(plan)].graphs:
                graph.replay()
            self._give(plan, packed_plan, out)

    def forward(self, filled: Filled, packed_plan: torch.Tensor) -> None:
        """The first half of a step."""
        if filled.shape is None:
            with self._without_graph(filled.plan):
                self._runner.forward(filled, packed_plan)
            return
        with self._resident_unless_it_raises():
            self._take_in(packed_plan)
            self._graphs[filled.shape, False].graphs[0].replay()

    def sample(self, filled: Filled, packed_plan: torch.Tensor, steering: Steering, out: torch.Tensor) -> None:
        """The second half: new masks to the rows, tokens and scores to `out`."""
        if filled.shape is None:
            with self._device.watch():
                self._runner.sample(filled, packed_plan, steering, out)
            return
        with self._resident_unless_it_raises():
            self._runner.rows.take_masks(steering)
            if steering.calls:
                assert self._halves.logits is not None, "the graphs leave no logits for processors"
                process(self._halves.logits, steering.calls)
            self._graphs[filled.shape, False].graphs[1].replay()
            self._give(filled.plan, packed_plan, out)

    @contextmanager
    def _without_graph(self, plan: Plan) -> Iterator[None]:
        self.ledger[_why_no_graph(plan) or "no graph: none was captured"] += 1
        with self._device.watch():
            yield

    @contextmanager
    def _resident_unless_it_raises(self) -> Iterator[None]:
        resident, self._resident = self._resident, None
        yield
        self._resident = resident

    def _take_in(self, packed_plan: torch.Tensor) -> None:
        if len(packed_plan):
            self._halves.packed[: len(packed_plan)].copy_(packed_plan)

    def _give(self, plan: Plan, packed_plan: torch.Tensor, out: torch.Tensor) -> None:
        """What the graphs left, to `out`."""
        count, scores = plan.num_samples, len(plan.score_samples) * score_width(plan.num_top)
        out[:count].copy_(self._halves.out[:count])
        if scores:
            out[count : count + scores].copy_(self._halves.scores[:scores])
        if plan.num_targets:
            with self._device.watch():
                self._score_targets(plan, packed_plan, out[count + scores : plan.num_results])

    def _score_targets(self, plan: Plan, packed_plan: torch.Tensor, out: torch.Tensor) -> None:
        """A slice at a time: the logits of a whole prompt would not fit into memory."""
        size, width = self._limits.num_rows, score_width(plan.num_top)
        total = in_slices(plan.num_targets, size)
        places, targets = packed_plan[-2 * total :].long().view(2, total)
        for start in range(0, total, size):
            scores = out[start * width : (start + size) * width]  # of the last slice, fewer
            part = slice(start, start + size)
            scores.copy_(self._score_slice(places[part], targets[part], plan.num_top).view(-1)[: len(scores)])

    def _score_slice(self, places: torch.Tensor, targets: torch.Tensor, num_top: int) -> torch.Tensor:
        by = self._step.score or score
        return by(self._step.model.logits(self._halves.hidden[places]), targets, num_top)

    def _shape(self, plan: Plan) -> Shape | None:
        """The smallest captured shape that holds the plan."""
        if _why_no_graph(plan) is not None:
            return None
        if plan.chunks:
            return next((shape for shape in self._mixed_shapes if shape.holds(plan)), None)
        index = bisect.bisect_left(self._decode_shapes, plan.num_decodes, key=lambda shape: shape.num_rows)
        return self._decode_shapes[index] if index < len(self._decode_shapes) else None

    def _capture_all(self, progress: Callable[[int, int], None] | None) -> None:
        """As many as the budget allows; a shape that is left out is padded to a larger one.

        No garbage is collected meanwhile: a graph that dies during a capture would end that, too.
        """
        # the largest first: the others fit into its memory. Then decode steps, which miss a graph most
        largest, *mixes = reversed(mixed_shapes(self._limits))
        shapes = [largest, *reversed(decode_shapes(self._limits)), *mixes]
        self.cost = CaptureCost(num_wanted=len(shapes))
        self._rehearse(corners(shapes), progress)
        self.cost.begin_captures()
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        free, num_rehearsed = torch.cuda.mem_get_info()[0], self._device.late.num_kernels
        with collections_paused(), Instantiation() as instantiation:
            for shape in shapes:
                if not self.cost.within_budget():
                    break
                self._capture(shape, lambda body: instantiation.of(record(body, pool, stream)))
                self.cost.add(free - torch.cuda.mem_get_info()[0])
                if progress is not None:
                    progress(self.cost.num_shapes, len(shapes))
        self.cost.num_missed = self._device.late.num_kernels - num_rehearsed
        self._device.stream(STREAMS[COMPUTE]).run(self._replay_one_of_each, "first replays")
        torch.cuda.synchronize()
        self.cost.within_budget()
        log.info("%s", self.cost)

    @torch.inference_mode()
    def _replay_one_of_each(self) -> None:
        """The smallest step of each kind, of padding alone: a process takes longer for its first replay."""
        kinds = {(shape.has_chunks, is_plain): shape for shape, is_plain in self._graphs}
        for (_, is_plain), shape in kinds.items():
            self._halves.padding(shape)
            for graph in self._graphs[shape, is_plain].graphs:
                graph.replay()

    def _capture(self, shape: Shape, record: Callable[[Callable[[], None]], torch.cuda.CUDAGraph]) -> None:
        """All graphs of a shape.

        The logits between two halves are kept until the second ones are captured, which therefore leave them alone.
        """
        inputs, between = self._halves.padding(shape), list[Predicted]()

        def predict() -> None:
            between[:] = [self._halves.predict(self._step, inputs)]

        def finish(is_plain: bool) -> None:
            self._halves.finish(self._step, inputs, between[0], is_plain)

        first, general = record(predict), record(partial(finish, False))
        if shape.has_chunks:
            plain: tuple[torch.cuda.CUDAGraph, ...] = first, record(partial(finish, True))
        else:
            plain = (record(partial(self._halves.play, self._step, inputs)),)
        self._graphs |= {(shape, True): Captured(plain, inputs), (shape, False): Captured((first, general), inputs)}
        (self._mixed_shapes if shape.has_chunks else self._decode_shapes).insert(0, shape)

    def _rehearse(self, shapes: Sequence[Shape], progress: Callable[[int, int], None] | None) -> None:
        """Compile and load every kernel of the steps side by side. Libraries run as always, and load what they need."""
        step = self._step.rehearsal()
        with Compilers() as compilers, compiled_ahead(compilers, progress) as ahead:
            compilers.start_if_cold()
            for shape in shapes:
                self._halves.rehearse(step, shape)
        self.cost.num_kernels = len(ahead.names)
        # the allocator keeps memory for each stream apart, and this runs on the engine's own
        self._device.stream(STREAMS[COMPUTE]).run(self._rehearse_rest, "rehearsal")
        torch.cuda.synchronize()

    @torch.inference_mode()
    def _rehearse_rest(self) -> None:
        """What runs beside graphs: scores of prompts, and masks on their way to the rows."""
        nothing = torch.zeros(self._limits.num_rows, dtype=torch.int64, device=self._halves.packed.device)
        self._score_slice(nothing, nothing, num_top=0)
        self._runner.rows.take_masks(Steering(nothing[:1], self._runner.rows.masks[-1:].clone()))


def _why_no_graph(plan: Plan) -> str | None:
    return "no graph: block copies" if len(plan.block_copies) else None


def _is_plain(plan: Plan) -> bool:
    """Whether the graphs for greedy rows without scores will do."""
    return not (plan.needs or plan.num_scores or plan.is_split)
