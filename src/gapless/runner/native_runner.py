"""A CPU's step as one native call, which holds no lock of the interpreter.

`NativeRunner` runs plans like `Runner` does, and only hands memory to the library. Greedy tokens are chosen inside the
call; for anything else `logits` come back, and sampler and scores go on from there.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gapless.core.limits import Limits
from gapless.core.plan import Plan
from gapless.core.request import IntArray
from gapless.core.row_fields import PROCESSED_SCORES
from gapless.device.base import Buffer, Device
from gapless.errors import CapacityError
from gapless.native import library as native
from gapless.runner.calls import Call, process
from gapless.runner.fill import Filled, Packed, Sections, fill, unpack
from gapless.runner.kv_store import KVStore
from gapless.runner.layer_groups import LayerGroups
from gapless.runner.native_model import NativeModel
from gapless.runner.processors import MASKED, SampledRows
from gapless.runner.row_store import RowStore, seat_columns
from gapless.runner.sampler import judged, sample
from gapless.runner.steering import Steering
from gapless.runner.step import Targets, write_scores

UNPACKED = "weights are being packed"


class NativeRunner:
    """Runs steps like `Runner`. Its KV cache has a layout of its own (native/attention.h)."""

    def __init__(
        self, device: Device, limits: Limits, model: NativeModel, kv: KVStore, groups: LayerGroups | None = None
    ) -> None:
        """groups: of the layers; None: there is one."""
        found = groups or LayerGroups.single(model.config.num_layers)
        self._layers = torch.tensor((found.of_layer, found.places), dtype=torch.int32)
        self._model, self._kv = model, kv  # the library has pointers into all three
        self._library: Any = native.load_library()
        self._num_blocks = limits.num_blocks + 1
        self.rows = RowStore(device, limits, model.config.vocab_size)
        self.buffers: Sequence[Buffer] = (self.rows.buffer, kv.buffer)
        self.mask_words = self.rows.masks.shape[1]
        self.ledger: Counter[str] = Counter()
        self._is_packed = False
        self.num_padding = 0
        shape = (limits.num_rows, model.config.vocab_size)
        self.logits = device.buffer("logits", shape, torch.float32).tensor  # of the last step that was not all greedy
        self._engine = self._library.gapless_engine(
            model.handle, *(ctypes.byref(x) for x in _engine_parts(limits, model, kv, self._layers, self.rows))
        )
        if not self._engine:
            raise CapacityError("no memory for the native step")
        weakref.finalize(self, self._library.gapless_drop_engine, self._engine).atexit = False

    def fill(self, plan: Plan, out: IntArray) -> Filled:
        """Pack the plan."""
        return Filled(plan, fill(plan, out))

    def step(self, filled: Filled, packed_plan: Tensor, out: Tensor) -> None:
        """Run the plan whose packed form is in `packed_plan`; leave the sampled tokens at the head of `out`.

        The scores, if the plan has any, follow them.
        """
        plan = filled.plan
        if plan.needs or plan.num_scores:
            self.forward(filled, packed_plan)
            self._finish(plan, unpack(packed_plan, Sections.of(plan)), out)
        else:
            self._call(plan, packed_plan, None, out.data_ptr())  # does all of it

    def forward(self, filled: Filled, packed_plan: Tensor) -> None:
        """The first half of a step: the call, which leaves the logits."""
        self._call(filled.plan, packed_plan, self.logits.data_ptr(), None)

    def sample(self, filled: Filled, packed_plan: Tensor, steering: Steering, out: Tensor) -> None:
        """The second half: new masks to the rows, tokens and scores to `out`."""
        self.rows.take_masks(steering)
        self._finish(filled.plan, unpack(packed_plan, Sections.of(filled.plan)), out, steering.calls)

    def _call(self, plan: Plan, packed_plan: Tensor, logits: int | None, tokens: int | None) -> None:
        """Logits to one address, or tokens to the other."""
        if not self._is_packed:
            self._is_packed = self._model.num_unpacked == 0
            if not self._is_packed:
                self.ledger[UNPACKED] += 1
        sections = Sections.of(plan)
        if len(plan.seat_rows):
            self.rows.apply(unpack(packed_plan, sections))
        if len(plan.block_copies):
            self._copy_blocks(unpack(packed_plan, sections).block_copies)
        counts = native.CSections(
            sections.num_decodes,
            sections.num_chunk_tokens,
            sections.num_chunks,
            sections.num_samples,
            sections.num_score_samples,
            sections.num_targets,
            sections.num_new_blocks,
        )
        native.check(self._library.gapless_step(self._engine, packed_plan.data_ptr(), counts, logits, tokens))

    def _copy_blocks(self, copies: Tensor) -> None:
        """Whole blocks: the memory of one lies together here."""
        sources, targets = copies.long().unbind(1)
        blocks = self._kv.buffer.tensor.view(self._num_blocks, -1)
        blocks[targets] = blocks[sources]

    @torch.inference_mode()
    def _finish(self, plan: Plan, packed: Packed, out: Tensor, calls: Sequence[Call] = ()) -> None:
        """Sample from the logits, and score what wants it."""
        scored = packed.score_samples.long()
        raw = self.logits[scored]  # a copy, for a sampler may write on the logits
        tokens = out[: plan.num_samples]
        process(self.logits[: plan.num_samples], calls)
        sample_rows, needs = packed.sample_rows.long(), plan.needs
        if needs & MASKED:
            self._mask(sample_rows)
            needs &= ~MASKED
        if needs & PROCESSED_SCORES:
            rows = sample_rows[scored]
            sampled = SampledRows(rows, self.rows.length[rows], self.rows.state)
            raw = judged(raw, self.logits[scored], sampled, needs)
        if plan.num_samples:
            tokens[:] = self._sample(sample_rows, needs)
        if plan.num_scores:
            numbers = torch.arange(plan.num_samples, plan.num_samples + len(packed.score_targets))
            targets = Targets(packed.score_targets.long(), numbers, self._predict, len(self.logits))
            write_scores(out[plan.num_samples : plan.num_results], plan.num_top, raw, tokens.long()[scored], targets)

    def _mask(self, rows: Tensor) -> None:
        """In place, and only rows that have a mask: the sampler's own processor would copy all of them."""
        has_mask, masks = seat_columns(self.rows.seats)["masked"], self.rows.masks
        logits, vocab = self.logits.data_ptr(), self.logits.shape[1]
        where = has_mask.data_ptr(), has_mask.stride(0)
        self._library.gapless_mask(logits, vocab, rows.data_ptr(), len(rows), masks.data_ptr(), masks.shape[1], *where)

    def _sample(self, rows: Tensor, needs: int) -> Tensor:
        places = self.rows.length[rows]  # already past this step's tokens: the place of the next
        tokens = sample(self.logits[: len(rows)], SampledRows(rows, places, self.rows.state), needs)
        self.rows.keep(rows, tokens, needs)
        return tokens

    def _predict(self, picked: Tensor) -> Tensor:
        """Logits of some of the step's picked tokens (native/step.cpp), numbered one after the other."""
        count = len(picked)
        native.check(self._library.gapless_predict(self._engine, int(picked[0]), count, self.logits.data_ptr()))
        return self.logits[:count]


def _engine_parts(
    limits: Limits, model: NativeModel, kv: KVStore, layers: Tensor, rows: RowStore
) -> tuple[native.Cache, native.Rows, native.Rotary, native.Sizes]:
    config = model.config
    pointers = (kv.buffer.tensor.data_ptr(), layers[0].data_ptr(), layers[1].data_ptr())
    kept = (rows.last_token, rows.length, rows.blocks)
    return (
        native.Cache(*pointers, len(kv.memory), limits.block_size, config.num_kv_heads, config.head_dim),
        native.Rows(*(tensor.data_ptr() for tensor in kept), *rows.blocks.shape),
        native.Rotary(model.rotary.data_ptr(), model.rotary.shape[1]),
        native.Sizes(limits.max_batch_tokens, limits.num_rows, torch.get_num_threads()),
    )
