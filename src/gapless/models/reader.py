"""The weights of a model by their roles, in the one form that decoders know, however a checkpoint stores them.

Takes apart weights that are stored as one, transposes, and orders the numbers of heads so that halves of a head are
rotated together. Torch's decoder and the native step read through it. Knows no file and no device.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from gapless.models.config import ModelConfig
from gapless.models.layers import ExpertWeight, ExpertWeights, GatedWeights, Norm
from gapless.models.linear import plain
from gapless.models.names import WeightNames
from gapless.models.rope import head_order
from gapless.models.spec import AttentionSpec, LayerSpec, MlpSpec, NormSpec
from gapless.models.weight import Weight, alike, stacked

ReadWeight = Callable[[str], Weight]  # by its name in the checkpoint, on the device, in the dtype


def read_last_norm(config: ModelConfig, read: ReadWeight) -> Norm:
    """With the scale of the logits in its weights: what follows is the product that gives them."""
    norm, scale = _read_norm(config.names.last_norm, config.last_norm, read), config.logit_scale
    if scale == 1.0:
        return norm
    bias = None if norm.bias is None else norm.bias * scale
    return Norm(norm.weight * scale, norm.eps, bias, norm.kind)


class LayerReader:
    """The weights of one layer."""

    __slots__ = ("_index", "_read", "_spec", "names")

    def __init__(self, names: WeightNames, index: int, spec: LayerSpec, read: ReadWeight) -> None:
        self.names, self._index, self._spec, self._read = names, index, spec, read

    def qkv(self) -> tuple[Weight, Tensor | None]:
        """q, k and v below each other."""
        spec, names = self._spec.attention, self.names
        if names.has_one_qkv:
            weight, bias = self._linear(names.q, spec.qkv_bias)
        else:
            parts = [self._linear(name, spec.qkv_bias) for name in (names.q, names.k, names.v)]
            biases = [bias for _, bias in parts if bias is not None]
            weight, bias = stacked([weight for weight, _ in parts]), torch.cat(biases) if biases else None
        rows = qkv_rows(spec, names)
        if rows is None:
            return weight, bias
        return weight.scheme.rows(weight, rows), None if bias is None else bias[rows]

    def out(self) -> tuple[Weight, Tensor | None]:
        return self._linear(self.names.o, self._spec.attention.output_bias)

    def gate(self) -> GatedWeights:
        """Of the MLP; without a gate where it has none."""
        spec, names = self._spec.mlp, self.names
        if spec.kind == "plain":
            up, bias = self._linear(names.up, spec.bias)
            return GatedWeights(None, up, None, bias, spec.activation)
        if names.has_one_gate_up:
            return self._split_gate(spec)
        gate, gate_bias = self._linear(names.gate, spec.bias)
        up, up_bias = self._linear(names.up, spec.bias)
        gate, up = alike((gate, up))
        return GatedWeights(gate, up, gate_bias, up_bias, spec.activation)

    def _split_gate(self, spec: MlpSpec) -> GatedWeights:
        both, bias = self._linear(self.names.up, spec.bias)
        places = torch.arange(2 * spec.size).chunk(2)
        gate, up = (both.scheme.rows(both, rows) for rows in places)
        gate_bias, up_bias = (None, None) if bias is None else bias.chunk(2)
        return GatedWeights(gate, up, gate_bias, up_bias, spec.activation)

    def experts(self, *, cuts_shared: bool = True) -> ExpertWeights:
        """All of them, one after the other, and their router. cuts_shared: the shared one, into some of their size."""
        spec, names = self._spec.mlp, self.names
        assert spec.experts is not None
        router, bias = self._linear(names.router, spec.experts.router_bias)
        found = self._experts_in_columns(spec) if names.experts_in_columns else self._experts_in_rows(spec)
        if spec.num_shared:
            last = plain(self._vector(f"{names.shared_router}.weight").view(1, -1))
            router = stacked(alike((router, last)))
            found = [*found, *(self._shared_parts(spec) if cuts_shared else [self._shared(spec)])]
            bias = None if bias is None else functional.pad(bias, (0, 1))
        return ExpertWeights(router, bias, tuple(found))

    def _shared(self, spec: MlpSpec) -> ExpertWeight:
        names = self.names
        (gate, _), (up, _), (down, _) = (
            self._linear(name, has_bias=False) for name in (names.shared_gate, names.shared_up, names.shared_down)
        )
        gate, up = alike((gate, up))
        return ExpertWeight(GatedWeights(gate, up, None, None, spec.activation), down, None)

    def _shared_parts(self, spec: MlpSpec) -> list[ExpertWeight]:
        """The last one is filled up with zeros."""
        whole, found = self._shared(spec), []
        assert whole.gate.gate is not None
        gate, up, down = (weight.dense() for weight in (whole.gate.gate, whole.gate.up, whole.down))
        rest = spec.num_shared * spec.size - len(up)
        rows = (functional.pad(weight, (0, 0, 0, rest)).chunk(spec.num_shared) for weight in (gate, up))
        columns = functional.pad(down, (0, rest)).chunk(spec.num_shared, 1)
        for some_gate, some_up, some_down in zip(*rows, columns, strict=True):
            inner = GatedWeights(plain(some_gate), plain(some_up), None, None, spec.activation)
            found.append(ExpertWeight(inner, plain(some_down.contiguous()), None))
        return found

    def _experts_in_rows(self, spec: MlpSpec) -> list[ExpertWeight]:
        names = self.names
        gates, ups, downs = (self._of_experts(n) for n in (names.expert_gate, names.expert_up, names.expert_down))
        found = []
        for (gate, gate_bias), (up, up_bias), (down, down_bias) in zip(gates, ups, downs, strict=True):
            gate, up = alike((gate, up))
            inner = GatedWeights(gate, up, gate_bias, up_bias, spec.activation)
            found.append(ExpertWeight(inner, down, down_bias))
        return found

    def _experts_in_columns(self, spec: MlpSpec) -> list[ExpertWeight]:
        (both, bias), (down, down_bias) = (
            self._columns(name) for name in (self.names.expert_up, self.names.expert_down)
        )
        places = torch.arange(2 * spec.size)
        found = []
        for number, weight in enumerate(both):
            gate, up = (weight.scheme.rows(weight, rows) for rows in (places[::2], places[1::2]))
            inner = GatedWeights(gate, up, bias[number, ::2], bias[number, 1::2], spec.activation)
            found.append(ExpertWeight(inner, down[number], down_bias[number]))
        return found

    def _columns(self, name: str) -> tuple[list[Weight], Tensor]:
        weight = self._read(self.names.of_layer(self._index, name))
        return [part.scheme.transposed(part) for part in weight.scheme.parts(weight)], self._vector(f"{name}_bias")

    def _of_experts(self, name: str) -> list[tuple[Weight, Tensor | None]]:
        spec = self._spec.mlp
        assert spec.experts is not None
        if "{}" in name:
            return [self._linear(name.format(number), spec.bias) for number in range(spec.experts.count)]
        weight = self._read(f"{self.names.of_layer(self._index, name)}.weight")
        parts = weight.scheme.parts(weight)
        biases = self._vector(f"{name}.bias") if spec.bias else [None] * len(parts)
        return list(zip(parts, biases, strict=True))

    def down(self) -> tuple[Weight, Tensor | None]:
        return self._linear(self.names.down, self._spec.mlp.bias)

    def norms_before(self) -> tuple[Norm | None, Norm | None]:
        """Of attention and of the MLP. Where both have one name, it is one norm."""
        if not self._spec.norm.is_before:
            return None, None
        first, second = self.names.attention_norm, self.names.mlp_norm
        norm = self.norm(first)
        return norm, norm if first == second else self.norm(second)

    def norms_after(self) -> tuple[Norm | None, Norm | None]:
        if not self._spec.norm.is_after:
            return None, None
        return self.norm(self.names.attention_norm_after), self.norm(self.names.mlp_norm_after)

    def norm(self, name: str) -> Norm:
        return _read_norm(self.names.of_layer(self._index, name), self._spec.norm, self._read)

    def head_norm(self) -> Tensor | None:
        """Weights of the q and k norms for each head, in its order: [num_heads + num_kv_heads, head_dim]."""
        spec = self._spec.attention
        if spec.head_norm == "none":
            return None
        parts = [
            self._vector(f"{name}.weight").view(-1, spec.head_dim).expand(count, -1)
            for name, count in ((self.names.q_norm, spec.num_heads), (self.names.k_norm, spec.num_kv_heads))
        ]
        offset, order = self._spec.norm.offset, head_order(spec.rope, spec.head_dim, pairs=self.names.pairs)
        both = torch.cat(parts) if order is None else torch.cat(parts)[:, order]
        return (both.float() + offset).to(both.dtype) if offset else both

    def sinks(self) -> Tensor | None:
        return self._vector(self.names.sinks) if self._spec.attention.sinks else None

    def _linear(self, name: str, has_bias: bool) -> tuple[Weight, Tensor | None]:
        full = self.names.of_layer(self._index, name)
        weight = self._read(f"{full}.weight")
        if self.names.transposed:
            weight = weight.scheme.transposed(weight)
        return weight, self._read(f"{full}.bias").dense() if has_bias else None

    def _vector(self, name: str) -> Tensor:
        return self._read(self.names.of_layer(self._index, name)).dense()


def qkv_rows(spec: AttentionSpec, names: WeightNames) -> Tensor | None:
    """Where the rows of q, k and v lie, in the order that decoders know; None: they lie in it."""
    order = head_order(spec.rope, spec.head_dim, pairs=names.pairs)
    if order is None and not names.head_by_head:
        return None
    num_rotated, size = spec.num_heads + spec.num_kv_heads, spec.head_dim
    heads = torch.arange((num_rotated + spec.num_kv_heads) * size).view(-1, size)
    if names.head_by_head:
        heads = heads.view(spec.num_heads, 3, size).transpose(0, 1).reshape(-1, size)
    if order is not None:
        heads[:num_rotated] = heads[:num_rotated, order]
    return heads.view(-1)


def _read_norm(name: str, spec: NormSpec, read: ReadWeight) -> Norm:
    """As it is computed: with the offset in its weight, which stays float32 then, for the sum would be rounded."""
    weight = read(f"{name}.weight").dense()
    if spec.offset:
        weight = weight.float() + spec.offset
    bias = read(f"{name}.bias").dense() if spec.bias else None
    return Norm(weight, spec.eps, bias, spec.kind)
