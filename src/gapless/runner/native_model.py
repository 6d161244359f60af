"""The weights of a model, handed to the native library: packed, or lent where a file is mapped.

Owns the model's memory in the library, and says which models it can run. Knows no step.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Sequence
from typing import get_args

import torch
from torch import Tensor

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

DTYPES = (torch.float32, torch.bfloat16)
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
        native.check(self._library.gapless_pack_lent(self.handle))
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
            native.check(self._library.gapless_lend_matrix(*where, len(rows), scheme.step))
            return
        is_mapped = isinstance(scheme, GGUFScheme) and scheme.is_mapped
        for kind, rows in _pieces(weight, self.has_quantized_experts):
            where = (self.handle, _PART[part], layer, rows.data_ptr())
            native.check(self._library.gapless_set_matrix(*where, kind, len(rows), first, is_mapped))
            first += len(rows)

    def _set_vector(self, part: str, layer: int, values: Tensor) -> None:
        values = values.float().contiguous()
        where = (self.handle, _PART[part], layer, values.data_ptr())
        native.check(self._library.gapless_set_vector(*where, len(values), 0))


_models: weakref.WeakSet[NativeModel] = weakref.WeakSet()


def wait_until_packed() -> None:
    """Return when no model of this process has a matrix left to pack: for measurements."""
    while any(model.num_unpacked for model in list(_models)):
        time.sleep(0.001)


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
