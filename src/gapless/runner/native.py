"""A CPU's step as one native call, which holds no lock of the interpreter.

`NativeModel` packs the weights, `NativeRunner` runs plans like `Runner` does, and both only hand memory to the library.
Greedy tokens are chosen inside the call; for anything else `logits` come back, and sampler and scores go on from there.
"""

from __future__ import annotations

import ctypes
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from gapless.core.limits import Limits
from gapless.core.plan import Plan
from gapless.core.request import IntArray
from gapless.core.row_fields import PROCESSED_SCORES
from gapless.device.base import Buffer, Device
from gapless.errors import CapacityError
from gapless.models.config import ModelConfig
from gapless.models.gguf_scheme import MXFP4, PANEL, PIECE_BYTES, GGUFScheme
from gapless.models.layers import ExpertWeights, GatedWeights, Norm
from gapless.models.linear import plain
from gapless.models.mapped_scheme import MappedScheme
from gapless.models.mxfp4_scheme import Mxfp4Scheme, join_blocks
from gapless.models.reader import LayerReader, ReadWeight, read_last_norm
from gapless.models.rope import RotaryTable
from gapless.models.rope_config import RopeConfig
from gapless.models.spec import (
    NATIVE,
    Activation,
    HeadNorm,
    LayerSpec,
    attention_features,
    lacking,
)
from gapless.models.weight import Weight
from gapless.native import library as native
from gapless.runner.calls import Call, process
from gapless.runner.fill import Filled, Packed, Sections, fill, unpack
from gapless.runner.kv_store import KVStore
from gapless.runner.layer_groups import LayerGroups
from gapless.runner.processors import MASKED, SampledRows
from gapless.runner.row_store import RowStore, seat_columns
from gapless.runner.sampler import judged, sample
from gapless.runner.steering import Steering
from gapless.runner.step import Targets, write_scores

DTYPES = (torch.float32, torch.bfloat16)
FAILURES = {
    1: "a token id outside the vocabulary",
    2: "a position beyond the rope table",
    3: "more tokens or samples than the engine has room for",
}
UNPACKED = "weights are being packed"
NO_MEMORY = 4  # step.cpp has the same numbers
_PART = {name: index for index, name in enumerate(native.PARTS)}


def why_not(dtype: torch.dtype, model: ModelConfig | None = None) -> str | None:
    """Why steps with weights of this type, and of this model, cannot be native; None where they can."""
    if dtype not in DTYPES:
        return f"{str(dtype).removeprefix('torch.')} weights"
    missing = (
        None if model is None else lacking((*attention_features(model.attention_specs()), *model.features()), NATIVE)
    )
    return native.why_unavailable() if missing is None else str(missing)


class NativeModel:
    """The weights of one model, packed by the library. Read-only once made; engines may share it."""

    def __init__(
        self, config: ModelConfig, read: ReadWeight, max_positions: int | None = None, *, narrow_experts: bool = False
    ) -> None:
        """max_positions: how many positions the rope table holds, all of the config's unless given.

        narrow_experts: all of them are MXFP4, and stay so.
        """
        self.config = config
        self._library = native.load_library()
        table = read(f"{config.names.embedding}.weight")
        self.is_quantized = isinstance(table.scheme, GGUFScheme)
        self._lent: list[MappedScheme] = []  # the library has addresses in them
        dtype = torch.float32 if self.is_quantized else _dtype(table)
        ropes = list(dict.fromkeys(spec.rope for spec in config.attention_specs()))
        shapes = (native.CLayerShape * config.num_layers)(*(_layer_shape(spec, ropes) for spec in config.layers))
        weights = "QUANTIZED" if self.is_quantized else {torch.bfloat16: "BFLOAT16"}.get(dtype, "FLOAT32")
        self.has_quantized_experts = self.is_quantized or narrow_experts
        self.handle = self._library.gapless_model(
            _shape(config, dtype), shapes, native.WEIGHTS.index(weights), self.has_quantized_experts
        )
        if not self.handle:
            raise CapacityError("no memory for the weights")
        weakref.finalize(self, self._library.gapless_drop_model, self.handle).atexit = False
        self._set_ends(table, read)
        del table  # the largest weight: else a second copy of it would stay while the others are read
        for layer, spec in enumerate(config.layers):
            self._set_layer(layer, spec, LayerReader(config.names, layer, spec, read))
        positions, where = max_positions or config.max_position_embeddings, (torch.float32, torch.device("cpu"))
        self.rotary = torch.empty(len(ropes), positions, 2, config.head_dim)
        for number, rope in enumerate(ropes):  # one after the other: with long contexts they are large
            self.rotary[number] = RotaryTable(rope, config.head_dim, positions, *where).table
        _check(self._library.gapless_pack_lent(self.handle))
        _models.add(self)

    @property
    def num_unpacked(self) -> int:
        """Matrices that are not packed yet: products pack them each time they need them, which is slower."""
        return int(self._library.gapless_num_unpacked(self.handle))

    def _set_ends(self, table: Weight, read: ReadWeight) -> None:
        if self.config.tie_embeddings:
            self._set_matrix("HEAD", 0, table)
        else:
            self._set_matrix("EMBEDDING", 0, table)
            self._set_matrix("HEAD", 0, read(f"{self.config.names.head}.weight"))
        if self.config.learned_positions:
            self._set_matrix("POSITIONS", 0, plain(read(f"{self.config.names.positions}.weight").dense()))
        self._set_norm("LAST_NORM", 0, read_last_norm(self.config, read))

    def _set_layer(self, layer: int, spec: LayerSpec, weights: LayerReader) -> None:
        self._set_linear("QKV", layer, *weights.qkv())
        self._set_linear("OUT", layer, *weights.out())
        if spec.mlp.experts is None:
            self._set_gate("", layer, weights.gate())
            self._set_linear("DOWN", layer, *weights.down())
        else:
            self._set_experts(layer, weights.experts(cuts_shared=False))
        norms = (*weights.norms_before(), *weights.norms_after())
        for part, norm in zip(("FIRST_NORM", "SECOND_NORM", "FIRST_AFTER", "SECOND_AFTER"), norms, strict=True):
            if norm is not None:
                self._set_norm(part, layer, norm)
        if (heads := weights.head_norm()) is not None:
            self._set_vector("Q_NORM", layer, heads[: spec.attention.num_heads].flatten())
            self._set_vector("K_NORM", layer, heads[spec.attention.num_heads :].flatten())
        if (sinks := weights.sinks()) is not None:
            self._set_vector("SINKS", layer, sinks)

    def _set_gate(self, prefix: str, layer: int, gate: GatedWeights) -> None:
        if gate.gate is not None:
            self._set_linear(f"{prefix}GATE", layer, gate.gate, gate.gate_bias)
        self._set_linear(f"{prefix}UP", layer, gate.up, gate.up_bias)

    def _set_experts(self, layer: int, weights: ExpertWeights) -> None:
        router = weights.router.dense()
        router = router.float() if self.has_quantized_experts else router
        self._set_linear("ROUTER", layer, plain(router), weights.router_bias)
        for number, expert in enumerate(weights.experts, layer * len(weights.experts)):
            self._set_gate("EXPERT_", number, expert.gate)
            self._set_linear("EXPERT_DOWN", number, expert.down, expert.down_bias)

    def _set_norm(self, part: str, layer: int, norm: Norm) -> None:
        self._set_vector(part, layer, norm.weight)
        if norm.bias is not None:
            self._set_vector(f"{part}_BIAS", layer, norm.bias)

    def _set_linear(self, part: str, layer: int, weight: Weight, bias: Tensor | None) -> None:
        self._set_matrix(part, layer, weight)
        if bias is not None:
            self._set_vector(part, layer, bias)

    def _set_matrix(self, part: str, layer: int, weight: Weight) -> None:
        """Rows of one kind after the other: where they are quantized, kinds may differ."""
        scheme, first = weight.scheme, 0
        if isinstance(scheme, MappedScheme):
            self._lent.append(scheme)
            rows = scheme.addresses(weight)
            where = (self.handle, _PART[part], layer, rows.data_ptr())
            _check(self._library.gapless_lend_matrix(*where, len(rows), scheme.step))
            return
        is_mapped = isinstance(scheme, GGUFScheme) and scheme.is_mapped
        for kind, rows in _pieces(weight, self.has_quantized_experts):
            where = (self.handle, _PART[part], layer, rows.data_ptr())
            _check(self._library.gapless_set_matrix(*where, kind, len(rows), first, is_mapped))
            first += len(rows)

    def _set_vector(self, part: str, layer: int, values: Tensor) -> None:
        values = values.float().contiguous()
        _check(self._library.gapless_set_vector(self.handle, _PART[part], layer, values.data_ptr(), len(values), 0))


_models: weakref.WeakSet[NativeModel] = weakref.WeakSet()


def wait_until_packed() -> None:
    """Return when no model of this process has a matrix left to pack: for measurements."""
    while any(model.num_unpacked for model in list(_models)):
        time.sleep(0.001)


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
        _check(self._library.gapless_step(self._engine, packed_plan.data_ptr(), counts, logits, tokens))

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
        _check(self._library.gapless_predict(self._engine, int(picked[0]), count, self.logits.data_ptr()))
        return self.logits[:count]


def _pieces(weight: Weight, keeps_mxfp4: bool) -> Iterator[tuple[int, Tensor]]:
    """Rows and their kind; those of a mapped file a few at a time, whole panels of them."""
    scheme = weight.scheme
    if keeps_mxfp4 and isinstance(scheme, Mxfp4Scheme):
        assert weight.scales is not None
        yield MXFP4, join_blocks(weight.data, weight.scales)
        return
    if not isinstance(scheme, GGUFScheme):
        yield 0, weight.dense().contiguous()
        return
    for run, rows in scheme.split(weight):
        count = max(1, PIECE_BYTES // run.row_bytes // PANEL) * PANEL if scheme.is_mapped else len(rows)
        yield from ((run.kind, some) for some in torch.split(rows, count))


def _dtype(weight: Weight) -> torch.dtype:
    scheme = weight.scheme
    return scheme.tensors[0].dtype if isinstance(scheme, MappedScheme) else weight.dense().dtype


def _check(status: int) -> None:
    if status == NO_MEMORY:
        raise CapacityError("no memory for the native step")
    if status != 0:
        raise RuntimeError(f"the plan holds {FAILURES[status]}")


def _shape(config: ModelConfig, dtype: torch.dtype) -> native.CShape:
    layer, norm = config.layers[0], config.layers[0].norm
    experts = layer.mlp.experts
    return native.CShape(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        inner_size=layer.mlp.size,
        tied=config.tie_embeddings,
        head_norm=get_args(HeadNorm).index(layer.attention.head_norm),
        layer_norm=norm.kind == "layer",
        norm_before=norm.is_before,
        norm_after=norm.is_after,
        parallel=layer.parallel,
        gated=layer.mlp.kind != "plain",
        activation=get_args(Activation).index(layer.mlp.activation),
        num_experts=0 if experts is None else experts.count,
        num_chosen=0 if experts is None else experts.num_chosen,
        shared_size=0 if experts is None else experts.shared_size,
        shares_of_all=experts is not None and not experts.is_normalized,
        num_positions=config.max_position_embeddings if config.learned_positions else 0,
        eps=norm.eps,
        last_eps=config.last_norm.eps,
        embedding_scale=torch.tensor(config.embedding_scale, dtype=dtype).item(),  # rounded as the model was trained
        logit_cap=config.logit_soft_cap or 0.0,
    )


def _layer_shape(spec: LayerSpec, ropes: Sequence[RopeConfig | None]) -> native.CLayerShape:
    attention = spec.attention
    return native.CLayerShape(
        rope=ropes.index(attention.rope),
        window=attention.window or 0,
        has_sinks=attention.sinks,
        soft_cap=attention.soft_cap or 0.0,
        scale=attention.scale,
    )


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
