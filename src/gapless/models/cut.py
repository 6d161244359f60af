"""How a model is cut for tensor parallel ranks: the config of one rank, and its part of each weight.

Heads, MLP sizes and the vocabulary are divided; norms, routers and positions are whole on every rank. A rank's config
describes its own heads and sizes, so everything behind the reader runs as for a model that is that small. Reads
nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from gapless.errors import ConfigError
from gapless.models.config import ModelConfig, Shard
from gapless.models.names import WeightNames
from gapless.models.spec import AttentionSpec, LayerSpec, MlpSpec

Between = tuple[int, int]  # begin and end, along an axis


@dataclass(frozen=True, slots=True)
class Cut:
    """A rank's part of a weight: these stretches along one axis, one behind the other."""

    axis: int
    stretches: tuple[Between, ...]
    width: int  # along the axis; zeros fill up what the stretches lack

    @classmethod
    def of(cls, axis: int, *stretches: Between) -> Cut:
        return cls(axis, stretches, sum(end - begin for begin, end in stretches))


def why_not_cut(config: ModelConfig, num_ranks: int) -> str | None:
    """Why so many ranks cannot hold the model together; None where they can."""
    if config.is_general:
        return "the general path runs transformers' own code, which is not cut"
    if config.fp8 is not None:
        return "FP8 weights of a checkpoint are not cut"
    for layer in dict.fromkeys(config.layers):
        if (reason := _why_not_layer(layer, num_ranks)) is not None:
            return reason
    return None


def _why_not_layer(layer: LayerSpec, num_ranks: int) -> str | None:
    spec = layer.attention
    if spec.num_heads % num_ranks:
        return f"{spec.num_heads} attention heads cannot be divided among {num_ranks} ranks"
    if spec.num_kv_heads % num_ranks and num_ranks % spec.num_kv_heads:
        return f"{spec.num_kv_heads} key-value heads cannot be divided among, or repeated on, {num_ranks} ranks"
    if spec.head_norm == "all":
        return "one norm over all heads needs them on one rank"
    if layer.mlp.size % num_ranks:
        return f"an MLP of size {layer.mlp.size} cannot be divided among {num_ranks} ranks"
    if layer.mlp.experts is not None and layer.mlp.experts.shared_size % num_ranks:
        return f"a shared expert of size {layer.mlp.experts.shared_size} cannot be divided among {num_ranks} ranks"
    return None


def cut_config(config: ModelConfig, rank: int, num_ranks: int) -> ModelConfig:
    """The config of one rank. Raises ConfigError."""
    if (reason := why_not_cut(config, num_ranks)) is not None:
        raise ConfigError(f"tensor_parallel {num_ranks}: {config.architecture}: {reason}")
    layers = tuple(_cut_layer(layer, num_ranks) for layer in config.layers)
    return replace(config, layers=layers, shard=Shard(rank, num_ranks, config))


def _cut_layer(layer: LayerSpec, num_ranks: int) -> LayerSpec:
    spec = layer.attention
    attention = replace(
        spec, num_heads=spec.num_heads // num_ranks, num_kv_heads=max(1, spec.num_kv_heads // num_ranks)
    )
    mlp, experts = replace(layer.mlp, size=layer.mlp.size // num_ranks), layer.mlp.experts
    if experts is not None:
        mlp = replace(mlp, experts=replace(experts, shared_size=experts.shared_size // num_ranks))
    return replace(layer, attention=attention, mlp=mlp)


def weight_cuts(shard: Shard) -> dict[str, Cut]:
    """The rank's part of each weight, by name; what is not there is whole on every rank."""
    config, names = shard.whole, shard.whole.names
    table = _of_table(config.vocab_size, shard)
    found = {f"{names.embedding}.weight": table, f"{names.head}.weight": table}
    for index, layer in enumerate(config.layers):
        for name, cut in (*_attention(layer.attention, names, shard), *_mlp(layer.mlp, names, shard)):
            found[names.of_layer(index, name)] = cut
    return found


def _of_table(vocab_size: int, shard: Shard) -> Cut:
    """Ranks have equally many rows, so that logits are gathered as one tensor; the last rows may be of zeros."""
    width = -(-vocab_size // shard.num_ranks)
    begin, end = (min((shard.rank + add) * width, vocab_size) for add in (0, 1))
    return Cut(0, ((begin, end),), width)


def _attention(spec: AttentionSpec, names: WeightNames, shard: Shard) -> Iterator[tuple[str, Cut]]:
    heads = _stretch(spec.num_heads, shard)
    kv_heads = _stretch(spec.num_kv_heads, shard) if spec.num_kv_heads >= shard.num_ranks else _repeated(spec, shard)
    q, k = _times(heads, spec.head_dim), _times(kv_heads, spec.head_dim)
    if names.has_one_qkv:
        yield from _outputs(names.q, _one_qkv(spec, names, heads, q, k), names)
    else:
        for name, stretch in ((names.q, q), (names.k, k), (names.v, k)):
            yield from _outputs(name, (stretch,), names)
    yield from _inputs(names.o, q, names)
    if spec.sinks:
        yield names.sinks, Cut.of(0, heads)
    if spec.head_norm == "layer":
        yield f"{names.q_norm}.weight", Cut.of(0, heads)
        yield f"{names.k_norm}.weight", Cut.of(0, kv_heads)


def _one_qkv(spec: AttentionSpec, names: WeightNames, heads: Between, q: Between, k: Between) -> tuple[Between, ...]:
    """q, k and v in one weight, one below the other or head by head."""
    if names.head_by_head:
        return (_times(heads, 3 * spec.head_dim),)
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return q, _moved(k, q_size), _moved(k, q_size + kv_size)


def _mlp(spec: MlpSpec, names: WeightNames, shard: Shard) -> Iterator[tuple[str, Cut]]:
    size = _stretch(spec.size, shard)
    if spec.experts is not None:
        yield from _experts(spec.experts.count, size, names)
        if spec.experts.shared_size:
            shared = _stretch(spec.experts.shared_size, shard)
            for name in (names.shared_gate, names.shared_up):
                yield f"{name}.weight", Cut.of(0, shared)
            yield f"{names.shared_down}.weight", Cut.of(1, shared)
        return
    if spec.kind == "gated" and names.has_one_gate_up:
        yield from _outputs(names.up, (size, _moved(size, spec.size)), names)
    else:
        for name in (names.gate, names.up) if spec.kind == "gated" else (names.up,):
            yield from _outputs(name, (size,), names)
    yield from _inputs(names.down, size, names)


def _experts(count: int, size: Between, names: WeightNames) -> Iterator[tuple[str, Cut]]:
    """Every rank has all experts, each a slice of its size."""
    if names.experts_in_columns:
        both = _times(size, 2)  # gate and up alternate
        yield names.expert_up, Cut.of(2, both)
        yield f"{names.expert_up}_bias", Cut.of(1, both)
        yield names.expert_down, Cut.of(1, size)
        return
    for name in (names.expert_gate, names.expert_up, names.expert_down):
        for each in [name.format(number) for number in range(count)] if "{}" in name else ():
            yield from _inputs(each, size, names) if name == names.expert_down else _outputs(each, (size,), names)
        if "{}" not in name:
            yield f"{name}.weight", Cut.of(2 if name == names.expert_down else 1, size)
            if name != names.expert_down:
                yield f"{name}.bias", Cut.of(1, size)


def _outputs(name: str, stretches: Sequence[Between], names: WeightNames) -> Iterator[tuple[str, Cut]]:
    """A product whose outputs are divided, and its bias."""
    yield f"{name}.weight", Cut.of(1 if names.transposed else 0, *stretches)
    yield f"{name}.bias", Cut.of(0, *stretches)


def _inputs(name: str, stretch: Between, names: WeightNames) -> Iterator[tuple[str, Cut]]:
    """A product whose inputs are divided: its results are parts of a sum, to which the bias is added once."""
    yield f"{name}.weight", Cut.of(0 if names.transposed else 1, stretch)


def _stretch(count: int, shard: Shard) -> Between:
    size = count // shard.num_ranks
    return shard.rank * size, (shard.rank + 1) * size


def _repeated(spec: AttentionSpec, shard: Shard) -> Between:
    """The one key-value head that the rank's query heads share."""
    head = shard.rank * spec.num_kv_heads // shard.num_ranks
    return head, head + 1


def _times(stretch: Between, factor: int) -> Between:
    return stretch[0] * factor, stretch[1] * factor


def _moved(stretch: Between, by: int) -> Between:
    return stretch[0] + by, stretch[1] + by
