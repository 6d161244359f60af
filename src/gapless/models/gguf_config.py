"""The description of a GGUF file: its metadata, read as if it were the config.json of its family.

A family's function reads the keys of config.json; here they get their names in GGUF metadata. What a config.json says
by a flag shows in a GGUF by which tensors there are. Knows no family.
"""

from dataclasses import replace
from math import log
from typing import Any

from gapless.errors import CorruptModel, UnsupportedModel
from gapless.models.config import ModelConfig
from gapless.models.family import Family, GGUFForm
from gapless.models.files import INT32_MAX, shown
from gapless.models.gguf_file import GGUFFile
from gapless.models.keys import Keys
from gapless.models.spec import LayerSpec

KEYS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "sliding_window": "attention.sliding_window",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    **{
        key: key for key in ("rope_theta", "partial_rotary_factor", "num_local_experts")
    },  # whatever a family calls them
}
ROPE_KINDS = ("none", "linear", "yarn")
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"


def read_gguf_config(file: GGUFFile, family: Family, form: GGUFForm) -> ModelConfig:
    """The family's description of the file."""
    prefix = f"{form.architecture}."
    metadata = Keys(file.metadata, file.path, prefix)
    raw = dict(file.metadata) | {prefix + key: value for key, value in _found(file, metadata, form).items()}
    keys = Keys(raw, file.path, prefix, KEYS | dict(form.keys))
    _refuse(keys)
    config, factors = family.from_hf(keys), _freq_factors(file)
    return replace(
        config,
        names=form.names,
        layers=tuple(_as_stored(layer, factors) for layer in config.layers),
        last_norm=replace(config.last_norm, offset=0.0),
    )


def _found(file: GGUFFile, keys: Keys, form: GGUFForm) -> dict[str, Any]:
    """Keys of a config.json that GGUF metadata has no place for."""
    layer, names = form.names.of_layer(0, ""), form.names

    def has_bias(name: str) -> bool:
        return f"{layer}{name}.bias" in file.tensors

    return {
        "vocab_size": _vocab_size(file),
        "tie_word_embeddings": f"{names.head}.weight" not in file.tensors,
        "attention_bias": has_bias(names.q),
        "mlp_bias": has_bias(names.down),
        "use_sliding_window": bool(keys.get("attention.sliding_window")),
        "attention.sliding_window": keys.get("attention.sliding_window") or None,  # 0: none
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(file, keys),
        **_window_pattern(keys),
    }


def _window_pattern(keys: Keys) -> dict[str, Any]:
    """Which layers have a window: a flag for each, or the step from one without to the next."""
    pattern = keys.get("attention.sliding_window_pattern")
    if not isinstance(pattern, list):
        return {} if pattern is None else {"sliding_window_pattern": pattern}
    if not all(isinstance(is_local, bool) for is_local in pattern):
        raise keys.wrong("attention.sliding_window_pattern", "a list of true and false")
    return {"layer_types": [f"{'sliding' if is_local else 'full'}_attention" for is_local in pattern]}


def _rope_scaling(file: GGUFFile, keys: Keys) -> dict[str, Any]:
    part = _rotated_part(keys)
    if LONG in file.tensors and SHORT in file.tensors:
        return part | _longrope(file, keys)
    kind = keys.get("rope.scaling.type", "linear")
    if kind not in ROPE_KINDS:
        raise UnsupportedModel(
            f"{file.path}: rope type {shown(kind)} is not supported; Gapless runs {', '.join(ROPE_KINDS)}"
        )
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    if kind == "none" or factor == 1.0:
        return part
    if kind == "linear":
        return part | {"rope_type": kind, "factor": factor}
    return part | {
        "rope_type": kind,
        "factor": factor,
        "original_max_position_embeddings": keys.size(
            "rope.scaling.original_context_length", keys.size("context_length")
        ),
        "beta_fast": keys.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": keys.number("rope.scaling.yarn_beta_slow", 1.0),
        # converters write what config.json calls attention_factor, which is the whole of it
        "attention_factor": keys.number("rope.scaling.attn_factor", 0.1 * log(factor) + 1.0),
    }


def _rotated_part(keys: Keys) -> dict[str, Any]:
    if keys.get("rope.dimension_count") is None:
        return {}
    num_heads = keys.size("attention.head_count")
    head_dim = keys.size("attention.key_length", keys.size("embedding_length") // num_heads or 1)
    return {"partial_rotary_factor": keys.size("rope.dimension_count") / head_dim}


def _longrope(file: GGUFFile, keys: Keys) -> dict[str, Any]:
    most = keys.size("context_length")
    return {
        "rope_type": "longrope",
        "short_factor": _vector(file, SHORT),
        "long_factor": _vector(file, LONG),
        "original_max_position_embeddings": keys.size("rope.scaling.original_context_length", most),
        "attention_factor": keys.number("rope.scaling.attn_factor", 1.0),
    }


def _as_stored(layer: LayerSpec, factors: tuple[float, ...] | None) -> LayerSpec:
    """Offsets of norms are in the weights already; factors of frequencies are a tensor."""
    norm, rope = replace(layer.norm, offset=0.0), layer.attention.rope
    if rope is not None and factors is not None:
        rope = replace(rope, freq_factors=factors)
    return replace(layer, norm=norm, attention=replace(layer.attention, rope=rope))


def _refuse(keys: Keys) -> None:
    if keys.get("attention.value_length", keys.get("head_dim")) != keys.get("head_dim"):
        raise UnsupportedModel(f"{keys.where}: values whose size differs from that of keys are not supported")


def _freq_factors(file: GGUFFile) -> tuple[float, ...] | None:
    return tuple(_vector(file, "rope_freqs.weight")) if "rope_freqs.weight" in file.tensors else None


def _vector(file: GGUFFile, name: str) -> list[float]:
    if len(file.tensors[name].shape) != 1:
        raise CorruptModel(f"{file.path}: tensor {name} has shape {file.tensors[name].shape}, not one dimension")
    values: list[float] = file.load(name).tolist()
    return values


def _vocab_size(file: GGUFFile) -> int:
    name = "token_embd.weight"
    if name not in file.tensors:
        raise CorruptModel(f"{file.path}: the tensor {name} is missing")
    shape = file.tensors[name].shape
    if len(shape) != 2 or not 0 < shape[0] <= INT32_MAX:
        raise CorruptModel(f"{file.path}: tensor {name} has shape {shape}, which is not a table of tokens")
    return shape[0]
