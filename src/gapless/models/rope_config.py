"""How a model rotates positions: the parameters of its rotary embedding, from config.json or from GGUF metadata.

Knows the kinds of scaling and their keys. `rope` computes with them.
"""

from dataclasses import dataclass
from math import log

from gapless.errors import CorruptModel, UnsupportedModel
from gapless.models.files import shown
from gapless.models.gguf_file import GGUFFile
from gapless.models.keys import Keys

ROPE_KINDS = ("default", "linear", "llama3", "yarn")


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

    def __post_init__(self) -> None:
        if self.theta <= 1.0:
            raise CorruptModel(f"rope_theta is {self.theta}; a base must be above 1")
        if self.kind == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise CorruptModel(
                f"rope: low_freq_factor {self.low_freq_factor} is not below high_freq_factor {self.high_freq_factor}"
            )


def hf_rope(keys: Keys) -> RopeConfig:
    rope = Keys({**keys.mapping("rope_scaling"), **keys.mapping("rope_parameters")}, "config.json, rope_parameters")
    if any(isinstance(value, dict) for value in rope.raw.values()):
        raise UnsupportedModel("rope_parameters that differ from layer to layer are not supported")
    kind = rope.get("rope_type") or rope.get("type", "default")
    if kind not in ROPE_KINDS:
        raise UnsupportedModel(f"rope type {shown(kind)} is not supported; Gapless runs {', '.join(ROPE_KINDS)}")
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


def _hf_yarn(rope: Keys, theta: float, factor: float, original: int) -> RopeConfig:
    default = _yarn_scale(factor)
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        scales = (_yarn_scale(factor, rope.number(key)) for key in ("mscale", "mscale_all_dim"))
        default = next(scales) / next(scales)
    return RopeConfig(
        theta,
        "yarn",
        factor,
        original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.flag("truncate", default=True),
        attention_factor=rope.number("attention_factor", default),
    )


def _yarn_scale(factor: float, multiplier: float = 1.0) -> float:
    return 0.1 * multiplier * log(factor) + 1.0 if factor > 1 else 1.0


def gguf_rope(file: GGUFFile, keys: Keys) -> RopeConfig:
    kind, known = keys.get("rope.scaling.type", "linear"), ("none", "linear", "yarn")
    if kind not in known:
        raise UnsupportedModel(
            f"{file.path}: rope type {shown(kind)} is not supported; Gapless runs {', '.join(known)}"
        )
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    return RopeConfig(
        keys.number("rope.freq_base", 10000.0),
        "default" if kind == "none" or factor == 1.0 else kind,
        factor,
        keys.size("rope.scaling.original_context_length", keys.size("context_length")),
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=_yarn_scale(factor) * keys.number("rope.scaling.attn_factor", 1.0) if kind == "yarn" else 1.0,
        freq_factors=_freq_factors(file),
    )


def _freq_factors(file: GGUFFile) -> tuple[float, ...] | None:
    name = "rope_freqs.weight"
    if name not in file.tensors:
        return None
    if len(file.tensors[name].shape) != 1:
        raise CorruptModel(f"{file.path}: tensor {name} has shape {file.tensors[name].shape}, not one dimension")
    return tuple(file.load(name).tolist())
