"""What a model is made of: sizes, rope, biases and special tokens, read once from config.json or from GGUF metadata.

Owns the list of supported architectures, and refuses what would be computed wrongly without an error.
Knows nothing of weights or of torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, log
from pathlib import Path
from typing import Any

from gapless.errors import CorruptModel, UnsupportedModel
from gapless.models.gguf_file import GGUFFile

ROPE_KINDS = ("default", "linear", "llama3", "yarn")
_MAX_LAYERS = 10_000  # a damaged count must not make us list weights for ever


@dataclass(frozen=True, slots=True)
class _Family:
    architecture: str
    qkv_bias: bool = False  # always, whatever attention_bias says
    has_attention_bias: bool = False  # the key attention_bias counts, for q, k, v and o
    has_mlp_bias: bool = False
    qk_norm: bool = False
    has_window: bool = False  # sliding_window counts even without use_sliding_window
    default_head_dim: int | None = None  # None: hidden_size / num_heads


_FAMILIES = {
    "llama": _Family("LlamaForCausalLM", has_attention_bias=True, has_mlp_bias=True),
    "mistral": _Family("MistralForCausalLM", has_window=True),
    "qwen2": _Family("Qwen2ForCausalLM", qkv_bias=True),
    "qwen3": _Family("Qwen3ForCausalLM", has_attention_bias=True, qk_norm=True, default_head_dim=128),
}
SUPPORTED_ARCHITECTURES = tuple(family.architecture for family in _FAMILIES.values())
_GGUF_FAMILIES = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding over the whole head. `factor` and what follows count only for the kinds that use them."""

    theta: float = 10000.0
    kind: str = "default"  # one of ROPE_KINDS
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    attention_factor: float = 1.0  # yarn: multiplies cos and sin
    freq_factors: tuple[float, ...] | None = None  # [head_dim / 2] divisors that some GGUFs store


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of the Llama family, with nothing left to default."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_embeddings: bool
    attention_bias: bool  # on q, k and v
    output_bias: bool  # on o_proj
    mlp_bias: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype_name: str | None  # as stored: "bfloat16"; None when the file does not say

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> "ModelConfig":
        """Reads a config.json of transformers 4 or 5, with the end tokens of generation_config.json added."""
        family = _hf_family(raw)
        keys = _Keys(raw, "config.json")
        _refuse_hf_features(raw, keys, family)
        hidden_size, num_heads = keys.size("hidden_size"), keys.size("num_attention_heads")
        attention_bias = family.has_attention_bias and bool(raw.get("attention_bias"))
        return cls(
            architecture=family.architecture,
            vocab_size=keys.size("vocab_size"),
            hidden_size=hidden_size,
            num_layers=keys.size("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=keys.size("num_key_value_heads", num_heads),
            head_dim=keys.size("head_dim", family.default_head_dim or hidden_size // num_heads),
            intermediate_size=keys.size("intermediate_size"),
            rms_norm_eps=keys.number("rms_norm_eps", 1e-6),
            rope=_hf_rope(keys),
            max_position_embeddings=keys.size("max_position_embeddings"),
            tie_embeddings=bool(raw.get("tie_word_embeddings")),
            attention_bias=attention_bias or family.qkv_bias,
            output_bias=attention_bias,
            mlp_bias=family.has_mlp_bias and bool(raw.get("mlp_bias")),
            qk_norm=family.qk_norm,
            eos_token_ids=_join_ids(raw.get("eos_token_id"), (generation_config or {}).get("eos_token_id")),
            bos_token_id=raw.get("bos_token_id"),
            dtype_name=raw.get("dtype") or raw.get("torch_dtype"),
        )

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> "ModelConfig":
        """Reads the metadata of a GGUF; biases and tied embeddings show by which tensors there are."""
        arch = file.metadata.get("general.architecture")
        if arch not in _GGUF_FAMILIES:
            raise _unsupported(f"GGUF architecture {arch!r}", _GGUF_FAMILIES)
        keys = _Keys(file.metadata, file.path, f"{arch}.")
        hidden_size, num_heads = keys.size("embedding_length"), keys.size("attention.head_count")
        head_dim = keys.size("attention.key_length", hidden_size // num_heads)
        _refuse_gguf_features(keys, head_dim)
        tensors = file.tensors
        return cls(
            architecture=_FAMILIES[arch].architecture,
            vocab_size=_gguf_vocab_size(file),
            hidden_size=hidden_size,
            num_layers=keys.size("block_count"),
            num_heads=num_heads,
            num_kv_heads=keys.size("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            intermediate_size=keys.size("feed_forward_length"),
            rms_norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
            rope=_gguf_rope(file, keys),
            max_position_embeddings=keys.size("context_length"),
            tie_embeddings="output.weight" not in tensors,
            attention_bias="blk.0.attn_q.bias" in tensors,
            output_bias="blk.0.attn_output.bias" in tensors,
            mlp_bias="blk.0.ffn_gate.bias" in tensors,
            qk_norm="blk.0.attn_q_norm.weight" in tensors,
            eos_token_ids=_join_ids(
                *(file.metadata.get(f"tokenizer.ggml.{e}_token_id") for e in ("eos", "eot", "eom"))
            ),
            bos_token_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
            dtype_name=None,
        )

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise CorruptModel(f"{self.num_heads} attention heads cannot share {self.num_kv_heads} key-value heads")
        if self.head_dim % 2:
            raise CorruptModel(f"head_dim {self.head_dim} is odd: the halves of a head cannot be rotated")
        if self.num_layers > _MAX_LAYERS:
            raise CorruptModel(f"{self.num_layers} layers cannot be right")
        factors, num_pairs = self.rope.freq_factors, self.head_dim // 2
        if factors is not None and len(factors) != num_pairs:
            raise CorruptModel(f"rope_freqs.weight has {len(factors)} values, the head has {num_pairs} pairs")


class _Keys:
    """Checked access to one mapping; what is wrong is named with its file and key."""

    def __init__(self, raw: Mapping[str, Any], where: str | Path, prefix: str = "") -> None:
        self.raw, self.where, self.prefix = raw, where, prefix

    def get(self, key: str, default: Any = None) -> Any:
        value = self.raw.get(self.prefix + key)
        return default if value is None else value

    def mapping(self, key: str) -> Mapping[str, Any]:
        value = self.get(key, {})
        if not isinstance(value, dict):
            raise CorruptModel(f"{self.where}: {self.prefix}{key} is {value!r}, not an object")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if value is None:
            raise CorruptModel(f"{self.where}: the key {self.prefix}{key} is missing")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < inf:
            raise CorruptModel(f"{self.where}: {self.prefix}{key} is {value!r}, not a positive number")
        return float(value)

    def size(self, key: str, default: int | None = None) -> int:
        value = self.number(key, default)
        if value != int(value):
            raise CorruptModel(f"{self.where}: {self.prefix}{key} is {value!r}, not a whole number")
        return int(value)


def _unsupported(what: str, supported: tuple[str, ...]) -> UnsupportedModel:
    return UnsupportedModel(f"{what} is not supported; Gapless runs {', '.join(supported)}")


def _hf_family(raw: Mapping[str, Any]) -> _Family:
    if "architectures" not in raw and "model_type" not in raw:
        raise CorruptModel("config.json: the key architectures is missing")
    names = raw.get("architectures") or [getattr(_FAMILIES.get(raw.get("model_type", "")), "architecture", None)]
    for family in _FAMILIES.values():
        if family.architecture in names:
            return family
    raise _unsupported(f"architecture {names[0] or raw.get('model_type')}", SUPPORTED_ARCHITECTURES)


def _refuse_hf_features(raw: Mapping[str, Any], keys: _Keys, family: _Family) -> None:
    quantization = keys.mapping("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown")
        raise UnsupportedModel(f"quantization_config ({method}) is not supported; use the unquantized model or a GGUF")
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise UnsupportedModel(f"hidden_act {raw['hidden_act']!r} is not supported; Gapless has silu only")
    has_window = (family.has_window or raw.get("use_sliding_window")) and raw.get("sliding_window", 4096) is not None
    if has_window and (window := keys.size("sliding_window", 4096)) < keys.size("max_position_embeddings"):
        raise UnsupportedModel(f"sliding_window {window} is not supported; Gapless attends to the whole context")
    if set(raw.get("layer_types") or ()) - {"full_attention"}:
        raise UnsupportedModel(f"layer_types {sorted(set(raw['layer_types']))}: only full_attention is supported")


def _hf_rope(keys: _Keys) -> RopeConfig:
    rope = _Keys({**keys.mapping("rope_scaling"), **keys.mapping("rope_parameters")}, "config.json, rope_parameters")
    if any(isinstance(value, dict) for value in rope.raw.values()):
        raise UnsupportedModel("rope_parameters that differ from layer to layer are not supported")
    kind = rope.get("rope_type") or rope.get("type", "default")
    if kind not in ROPE_KINDS:
        raise _unsupported(f"rope type {kind!r}", ROPE_KINDS)
    if rope.get("partial_rotary_factor", keys.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UnsupportedModel("partial_rotary_factor is not supported; Gapless rotates whole heads")
    theta = rope.number("rope_theta", keys.number("rope_theta", 10000.0))
    if kind == "default":
        return RopeConfig(theta)
    key, factor = "original_max_position_embeddings", rope.number("factor")
    original = keys.size(key, rope.size(key, keys.size("max_position_embeddings")))
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        return RopeConfig(theta, kind, factor, original, low_freq_factor=low, high_freq_factor=high)
    return _hf_yarn(rope, theta, factor, original) if kind == "yarn" else RopeConfig(theta, kind, factor, original)


def _hf_yarn(rope: _Keys, theta: float, factor: float, original: int) -> RopeConfig:
    scale, scale_all = rope.get("mscale"), rope.get("mscale_all_dim")
    default = (
        _yarn_scale(factor, scale) / _yarn_scale(factor, scale_all) if scale and scale_all else _yarn_scale(factor)
    )
    return RopeConfig(
        theta,
        "yarn",
        factor,
        original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.get("truncate", True),
        attention_factor=rope.number("attention_factor", default),
    )


def _yarn_scale(factor: float, multiplier: float = 1.0) -> float:
    return 0.1 * multiplier * log(factor) + 1.0 if factor > 1 else 1.0


def _refuse_gguf_features(keys: _Keys, head_dim: int) -> None:
    if keys.size("rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedModel(f"{keys.where}: rope over a part of the head is not supported")
    if keys.size("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModel(f"{keys.where}: values of another size than keys are not supported")
    if keys.get("expert_count"):
        raise UnsupportedModel(f"{keys.where}: mixture of experts is not supported")
    context_length = keys.size("context_length")
    if keys.get("attention.sliding_window") and keys.size("attention.sliding_window") < context_length:
        raise UnsupportedModel(f"{keys.where}: sliding_window is not supported; Gapless attends to the whole context")


def _gguf_rope(file: GGUFFile, keys: _Keys) -> RopeConfig:
    kind = keys.get("rope.scaling.type", "linear")
    if kind not in ("none", "linear", "yarn"):
        raise _unsupported(f"{file.path}: rope type {kind!r}", ("none", "linear", "yarn"))
    has_factors = "rope_freqs.weight" in file.tensors
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    return RopeConfig(
        keys.number("rope.freq_base", 10000.0),
        "default" if kind == "none" or factor == 1.0 else kind,
        factor,
        keys.size("rope.scaling.original_context_length", keys.size("context_length")),
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=_yarn_scale(factor) * keys.number("rope.scaling.attn_factor", 1.0) if kind == "yarn" else 1.0,
        freq_factors=tuple(file.load("rope_freqs.weight").tolist()) if has_factors else None,
    )


def _gguf_vocab_size(file: GGUFFile) -> int:
    if "token_embd.weight" not in file.tensors:
        raise CorruptModel(f"{file.path}: the tensor token_embd.weight is missing")
    return file.tensors["token_embd.weight"].shape[0]


def _join_ids(*values: int | list[int] | None) -> tuple[int, ...]:
    ids = [i for value in values if value is not None for i in (value if isinstance(value, list) else [value])]
    if not all(isinstance(i, int) for i in ids):
        raise CorruptModel(f"eos_token_id holds {ids!r}, not token ids")
    return tuple(dict.fromkeys(ids))
