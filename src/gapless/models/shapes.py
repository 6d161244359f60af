"""The weights that a model has, by name, and their shapes. Follows the specs; reads nothing."""

from collections.abc import Iterator

from gapless.models.config import ModelConfig
from gapless.models.names import WeightNames
from gapless.models.spec import AttentionSpec, ExpertSpec, LayerSpec, MlpSpec, NormSpec

_Shape = tuple[int, ...]


def weight_shapes(config: ModelConfig) -> dict[str, _Shape]:
    """Every weight of the model, by its name in the checkpoint."""
    names, table = config.names, (config.vocab_size, config.hidden_size)
    shapes: dict[str, _Shape] = {f"{names.embedding}.weight": table}
    if config.learned_positions:
        shapes[f"{names.positions}.weight"] = (config.max_position_embeddings, config.hidden_size)
    shapes |= _norm(names.last_norm, config.last_norm, config.hidden_size)
    if not config.tie_embeddings:
        shapes[f"{names.head}.weight"] = table
    for index, spec in enumerate(config.layers):
        shapes |= {names.of_layer(index, name): shape for name, shape in _layer(spec, names, config.hidden_size)}
    return shapes


def layer_matrices(config: ModelConfig) -> frozenset[str]:
    """Names of the large matrices of layers, those of experts aside: what quantization is for."""
    names = config.names
    roles = (names.q, names.k, names.v, names.o, names.gate, names.up, names.down)
    every = {f"{names.of_layer(index, role)}.weight" for index in range(config.num_layers) for role in roles}
    return frozenset(every & weight_shapes(config).keys())


def _layer(spec: LayerSpec, names: WeightNames, hidden: int) -> Iterator[tuple[str, _Shape]]:
    before, after = (names.attention_norm, names.mlp_norm), (names.attention_norm_after, names.mlp_norm_after)
    for name in (*(before if spec.norm.is_before else ()), *(after if spec.norm.is_after else ())):
        yield from _norm(name, spec.norm, hidden)
    yield from _attention(spec.attention, names, hidden)
    yield from _mlp(spec.mlp, names, hidden)


def _norm(name: str, spec: NormSpec, *shape: int) -> Iterator[tuple[str, _Shape]]:
    yield f"{name}.weight", shape
    if spec.bias:
        yield f"{name}.bias", shape


def _attention(spec: AttentionSpec, names: WeightNames, hidden: int) -> Iterator[tuple[str, _Shape]]:
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    yield from _head_norms(spec, names)
    parts = [(names.q, q_size), (names.k, kv_size), (names.v, kv_size)]
    if names.has_one_qkv:
        parts = [(names.q, q_size + 2 * kv_size)]
    for name, size in parts:
        yield from _linear(name, size, hidden, spec.qkv_bias, names)
    yield from _linear(names.o, hidden, q_size, spec.output_bias, names)
    if spec.sinks:
        yield names.sinks, (spec.num_heads,)


def _head_norms(spec: AttentionSpec, names: WeightNames) -> Iterator[tuple[str, _Shape]]:
    for name, num_heads in ((names.q_norm, spec.num_heads), (names.k_norm, spec.num_kv_heads)):
        if spec.head_norm == "each":
            yield f"{name}.weight", (spec.head_dim,)
        elif spec.head_norm == "all":
            yield f"{name}.weight", (num_heads * spec.head_dim,)
        elif spec.head_norm == "layer":
            yield f"{name}.weight", (num_heads, spec.head_dim)


def _mlp(spec: MlpSpec, names: WeightNames, hidden: int) -> Iterator[tuple[str, _Shape]]:
    if spec.experts is not None:
        yield from _experts(spec, spec.experts, names, hidden)
        return
    if spec.kind == "gated" and names.has_one_gate_up:
        yield from _linear(names.up, 2 * spec.size, hidden, spec.bias, names)
    else:
        for name in (names.gate, names.up) if spec.kind == "gated" else (names.up,):
            yield from _linear(name, spec.size, hidden, spec.bias, names)
    yield from _linear(names.down, hidden, spec.size, spec.bias, names)


def _experts(spec: MlpSpec, experts: ExpertSpec, names: WeightNames, hidden: int) -> Iterator[tuple[str, _Shape]]:
    yield from _linear(names.router, experts.count, hidden, experts.router_bias, names)
    if experts.shared_size:
        yield from _shared_expert(experts.shared_size, names, hidden)
    if names.experts_in_columns:
        for name, inputs, outputs in ((names.expert_up, hidden, 2 * spec.size), (names.expert_down, spec.size, hidden)):
            yield name, (experts.count, inputs, outputs)
            yield f"{name}_bias", (experts.count, outputs)
        return
    inner, outer = (spec.size, hidden), (hidden, spec.size)
    for name, shape in ((names.expert_gate, inner), (names.expert_up, inner), (names.expert_down, outer)):
        if "{}" not in name:
            yield f"{name}.weight", (experts.count, *shape)
            if spec.bias:
                yield f"{name}.bias", (experts.count, shape[0])
        else:
            for number in range(experts.count):
                yield from _linear(name.format(number), *shape, spec.bias, names)


def _shared_expert(size: int, names: WeightNames, hidden: int) -> Iterator[tuple[str, _Shape]]:
    yield f"{names.shared_router}.weight", (hidden,) if names.shared_router_is_flat else (1, hidden)
    for name, shape in (
        (names.shared_gate, (size, hidden)),
        (names.shared_up, (size, hidden)),
        (names.shared_down, (hidden, size)),
    ):
        yield f"{name}.weight", shape


def _linear(
    name: str, num_outputs: int, num_inputs: int, has_bias: bool, names: WeightNames
) -> Iterator[tuple[str, _Shape]]:
    yield f"{name}.weight", (num_inputs, num_outputs) if names.transposed else (num_outputs, num_inputs)
    if has_bias:
        yield f"{name}.bias", (num_outputs,)
