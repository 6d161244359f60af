"""What a model is made of: sizes, rope, biases and special tokens, read once from config.json or from GGUF metadata.

Owns the list of supported architectures, and refuses what would be computed wrongly without an error.
Knows nothing of weights or of torch.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gapless.errors import CorruptModel, UnsupportedModel
from gapless.models.files import INT32_MAX, shown, token_ids
from gapless.models.gguf_file import GGUFFile
from gapless.models.keys import Keys
from gapless.models.rope_config import RopeConfig, gguf_rope, hf_rope

logger = logging.getLogger(__name__)

_MAX_LAYERS = 10_000  # a damaged count must not make us list weights for ever
_MAX_WIDTH = 2**28  # rows of a weight; kernels count them in 32 bits


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
_GGUF_END_KEYS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))


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
    eos_token_ids: tuple[int, ...]  # all of them in the vocabulary

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> "ModelConfig":
        """Reads a config.json of transformers 4 or 5, with the end tokens of generation_config.json added."""
        keys = Keys(raw, "config.json")
        family = _hf_family(keys)
        _refuse_hf_features(raw, keys, family)
        hidden_size, num_heads = keys.size("hidden_size"), keys.size("num_attention_heads")
        vocab_size = keys.size("vocab_size")
        attention_bias = family.has_attention_bias and keys.flag("attention_bias")
        return cls(
            architecture=family.architecture,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            num_layers=keys.size("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=keys.size("num_key_value_heads", num_heads),
            head_dim=keys.size("head_dim", family.default_head_dim or hidden_size // num_heads),
            intermediate_size=keys.size("intermediate_size"),
            rms_norm_eps=keys.number("rms_norm_eps", 1e-6),
            rope=hf_rope(keys),
            max_position_embeddings=keys.size("max_position_embeddings"),
            tie_embeddings=keys.flag("tie_word_embeddings"),
            attention_bias=attention_bias or family.qkv_bias,
            output_bias=attention_bias,
            mlp_bias=family.has_mlp_bias and keys.flag("mlp_bias"),
            qk_norm=family.qk_norm,
            eos_token_ids=_end_ids(
                vocab_size,
                {
                    "config.json: eos_token_id": keys.get("eos_token_id"),
                    "generation_config.json: eos_token_id": (generation_config or {}).get("eos_token_id"),
                },
            ),
        )

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> "ModelConfig":
        """Reads the metadata of a GGUF; biases and tied embeddings show by which tensors there are."""
        arch = file.metadata.get("general.architecture")
        if arch not in _GGUF_FAMILIES:
            raise _unsupported(f"GGUF architecture {shown(arch)}", _GGUF_FAMILIES)
        keys = Keys(file.metadata, file.path, f"{arch}.")
        hidden_size, num_heads = keys.size("embedding_length"), keys.size("attention.head_count")
        head_dim = keys.size("attention.key_length", hidden_size // num_heads)
        _refuse_gguf_features(keys, head_dim)
        tensors, vocab_size = file.tensors, _gguf_vocab_size(file)
        return cls(
            architecture=_FAMILIES[arch].architecture,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            num_layers=keys.size("block_count"),
            num_heads=num_heads,
            num_kv_heads=keys.size("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            intermediate_size=keys.size("feed_forward_length"),
            rms_norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
            rope=gguf_rope(file, keys),
            max_position_embeddings=keys.size("context_length"),
            tie_embeddings="output.weight" not in tensors,
            attention_bias="blk.0.attn_q.bias" in tensors,
            output_bias="blk.0.attn_output.bias" in tensors,
            mlp_bias="blk.0.ffn_gate.bias" in tensors,
            qk_norm="blk.0.attn_q_norm.weight" in tensors,
            eos_token_ids=_end_ids(
                vocab_size, {f"{file.path}: {key}": file.metadata.get(key) for key in _GGUF_END_KEYS}
            ),
        )

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise CorruptModel(f"{self.num_heads} attention heads cannot share {self.num_kv_heads} key-value heads")
        if self.head_dim % 2:
            raise CorruptModel(f"head_dim {self.head_dim} is odd: the halves of a head cannot be rotated")
        if self.num_layers > _MAX_LAYERS:
            raise CorruptModel(f"{self.num_layers} layers cannot be right")
        widths = {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "head_dim times the number of heads": (self.num_heads + 2 * self.num_kv_heads) * self.head_dim,
        }
        for name, width in widths.items():
            if width > _MAX_WIDTH:
                raise CorruptModel(f"{name} is {width}, which cannot be right; at most {_MAX_WIDTH} is possible")
        factors, num_pairs = self.rope.freq_factors, self.head_dim // 2
        if factors is not None and len(factors) != num_pairs:
            raise CorruptModel(f"rope_freqs.weight has {len(factors)} values, the head has {num_pairs} pairs")


def _unsupported(what: str, supported: tuple[str, ...]) -> UnsupportedModel:
    return UnsupportedModel(f"{what} is not supported; Gapless runs {', '.join(supported)}")


def _hf_family(keys: Keys) -> _Family:
    if "architectures" not in keys.raw and "model_type" not in keys.raw:
        raise CorruptModel("config.json: the key architectures is missing")
    names, model_type = keys.strings("architectures"), keys.string("model_type", "")
    if not names and model_type in _FAMILIES:
        return _FAMILIES[model_type]
    for family in _FAMILIES.values():
        if family.architecture in names:
            return family
    raise _unsupported(f"architecture {(names[0] if names else model_type)[:80]}", SUPPORTED_ARCHITECTURES)


def _refuse_hf_features(raw: Mapping[str, Any], keys: Keys, family: _Family) -> None:
    quantization = keys.mapping("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown")
        raise UnsupportedModel(
            f"quantization_config ({shown(method)}) is not supported; use the unquantized model or a GGUF"
        )
    if keys.get("hidden_act", "silu") not in ("silu", "swish"):
        raise UnsupportedModel(f"hidden_act {shown(raw['hidden_act'])} is not supported; Gapless has silu only")
    has_window = (family.has_window or keys.flag("use_sliding_window")) and raw.get("sliding_window", 4096) is not None
    if has_window and (window := keys.size("sliding_window", 4096)) < keys.size("max_position_embeddings"):
        raise UnsupportedModel(f"sliding_window {window} is not supported; Gapless attends to the whole context")
    kinds = set(keys.strings("layer_types"))
    if kinds - {"full_attention"}:
        raise UnsupportedModel(f"layer_types {shown(sorted(kinds))}: only full_attention is supported")


def _refuse_gguf_features(keys: Keys, head_dim: int) -> None:
    if keys.size("rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedModel(f"{keys.where}: rope over a part of the head is not supported")
    if keys.size("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModel(f"{keys.where}: values of another size than keys are not supported")
    if keys.get("expert_count"):
        raise UnsupportedModel(f"{keys.where}: mixture of experts is not supported")
    context_length = keys.size("context_length")
    if keys.get("attention.sliding_window") and keys.size("attention.sliding_window") < context_length:
        raise UnsupportedModel(f"{keys.where}: sliding_window is not supported; Gapless attends to the whole context")


def _gguf_vocab_size(file: GGUFFile) -> int:
    name = "token_embd.weight"
    if name not in file.tensors:
        raise CorruptModel(f"{file.path}: the tensor {name} is missing")
    shape = file.tensors[name].shape
    if len(shape) != 2 or not 0 < shape[0] <= INT32_MAX:
        raise CorruptModel(f"{file.path}: tensor {name} has shape {shape}, which is not a table of tokens")
    return shape[0]


def _end_ids(vocab_size: int, places: Mapping[str, object]) -> tuple[int, ...]:
    """The end tokens of all places. An id past the vocabulary is never sampled, so it is dropped with a warning."""
    found: list[int] = []
    for where, value in places.items():
        for token_id in token_ids(value, where):
            if token_id < vocab_size:
                found.append(token_id)
            else:
                logger.warning("%s: %d is ignored: the vocabulary has %d tokens", where, token_id, vocab_size)
    return tuple(dict.fromkeys(found))
