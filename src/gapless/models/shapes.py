"""The weights that a model has, by name, and their shapes. Follows the specs; reads nothing."""

from collections.abc import Iterator

from gapless.models.config import ModelConfig
from gapless.models.names import WeightNames
from gapless.models.spec import AttentionSpec, LayerSpec, MlpSpec, NormSpec

_Shape = tuple[int, ...]


def weight_shapes(config: ModelConfig) -> dict[str, _Shape]:
    """Every weight of the model, by its name in a Hugging Face checkpoint."""
    names, table = config.names, (config.vocab_size, config.hidden_size)
    shapes: dict[str, _Shape] = {f"{names.embedding}.weight": table, f"{names.last_norm}.weight": table[1:]}
    if not config.tie_embeddings:
        shapes[f"{names.head}.weight"] = table
    for index, spec in enumerate(config.layers):
        shapes |= {names.of_layer(index, name): shape for name, shape in _layer(spec, names, config.hidden_size)}
    return shapes


def _layer(spec: LayerSpec, names: WeightNames, hidden: int) -> Iterator[tuple[str, _Shape]]:
    yield from _norms(spec.norm, names, hidden)
    yield from _attention(spec.attention, names, hidden)
    yield from _mlp(spec.mlp, names, hidden)


def _norms(spec: NormSpec, names: WeightNames, hidden: int) -> Iterator[tuple[str, _Shape]]:
    before, after = (names.attention_norm, names.mlp_norm), (names.attention_norm_after, names.mlp_norm_after)
    for name in (*(before if spec.is_before else ()), *(after if spec.is_after else ())):
        yield f"{name}.weight", (hidden,)


def _attention(spec: AttentionSpec, names: WeightNames, hidden: int) -> Iterator[tuple[str, _Shape]]:
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    if spec.head_norm:
        yield from ((f"{name}.weight", (spec.head_dim,)) for name in (names.q_norm, names.k_norm))
    for name, size in ((names.q, q_size), (names.k, kv_size), (names.v, kv_size)):
        yield from _linear(name, size, hidden, spec.qkv_bias)
    yield from _linear(names.o, hidden, q_size, spec.output_bias)
    if spec.sinks:
        yield names.sinks, (spec.num_heads,)


def _mlp(spec: MlpSpec, names: WeightNames, hidden: int) -> Iterator[tuple[str, _Shape]]:
    yield from _linear(names.gate, spec.size, hidden, spec.bias)
    yield from _linear(names.up, spec.size, hidden, spec.bias)
    yield from _linear(names.down, hidden, spec.size, spec.bias)


def _linear(name: str, num_outputs: int, num_inputs: int, has_bias: bool) -> Iterator[tuple[str, _Shape]]:
    yield f"{name}.weight", (num_outputs, num_inputs)
    if has_bias:
        yield f"{name}.bias", (num_outputs,)
