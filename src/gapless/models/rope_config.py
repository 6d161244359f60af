"""How a model rotates positions: the parameters of its rotary embedding, from config.json.

Knows the kinds of scaling and their keys. `rope` computes with them.
"""

from dataclasses import dataclass, replace
from math import log, sqrt

from gapless.errors import CorruptModel, UnsupportedModel
from gapless.models.files import shown
from gapless.models.keys import Keys

ROPE_KINDS = ("default", "linear", "llama3", "yarn", "longrope")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding. `factor` and what follows up to `long_factors` count only for the kinds that use them."""

    theta: float = 10000.0
    kind: str = "default"  # one of ROPE_KINDS
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    attention_factor: float = 1.0  # yarn, longrope: multiplies cos and sin
    long_factors: tuple[float, ...] | None = None  # longrope: in place of freq_factors past the original positions
    freq_factors: tuple[float, ...] | None = None  # [width / 2] divisors of the frequencies
    width: int | None = None  # how much of a head is rotated, from its start; None: all of it

    def __post_init__(self) -> None:
        if self.theta <= 1.0:
            raise CorruptModel(f"rope_theta is {self.theta}; a base must be above 1")
        if self.kind == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise CorruptModel(
                f"rope: low_freq_factor {self.low_freq_factor} is not below high_freq_factor {self.high_freq_factor}"
            )


def hf_rope(
    keys: Keys, head_dim: int, layer_type: str | None = None, *, theta: float = 10000.0, share: float | None = None
) -> RopeConfig:
    """Of layers of this type, where the types differ. theta: where the config has none.

    share: of a head that is rotated, where the config has none; None: the family rotates whole heads.
    """
    where = "config.json, rope_parameters"
    rope = Keys({**keys.mapping("rope_scaling"), **keys.mapping("rope_parameters")}, where)
    if layer_type is not None and any(isinstance(value, dict) for value in rope.raw.values()):
        rope = Keys(rope.mapping(layer_type), f"{where}, {layer_type}")
    if any(isinstance(value, dict) for value in rope.raw.values()):
        raise UnsupportedModel("rope_parameters that differ from layer to layer are not supported for this family")
    kind = rope.get("rope_type") or rope.get("type", "default")
    kind = "longrope" if kind == "su" else kind  # its first name
    if kind not in ROPE_KINDS:
        raise UnsupportedModel(f"rope type {shown(kind)} is not supported; Gapless runs {', '.join(ROPE_KINDS)}")
    part = rope.number("partial_rotary_factor", keys.number("partial_rotary_factor", share or 1.0))
    if part != 1.0 and share is None:
        raise UnsupportedModel("partial_rotary_factor is not supported: rope of this family rotates whole heads")
    width = None if part == 1.0 else int(head_dim * part)
    base = RopeConfig(rope.number("rope_theta", keys.number("rope_theta", theta)), width=width)
    if kind == "default":
        return base
    key, most = "original_max_position_embeddings", keys.size("max_position_embeddings")
    base = replace(base, kind=kind, original_max_positions=keys.size(key, rope.size(key, most)))
    if kind == "longrope":
        return _hf_longrope(rope, base, most)
    base = replace(base, factor=rope.number("factor"))
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        return replace(base, low_freq_factor=low, high_freq_factor=high)
    return _hf_yarn(rope, base) if kind == "yarn" else base


def hf_ropes(keys: Keys, head_dim: int, *, theta: float, local_theta: float) -> tuple[RopeConfig, RopeConfig]:
    """Of layers that see the whole context, and of those with a window, which are not scaled in old configs."""
    full = hf_rope(keys, head_dim, "full_attention", theta=theta)
    if any(isinstance(value, dict) for value in keys.mapping("rope_parameters").values()):
        return full, hf_rope(keys, head_dim, "sliding_attention", theta=local_theta)
    return full, RopeConfig(local_theta)


def _hf_longrope(rope: Keys, base: RopeConfig, max_positions: int) -> RopeConfig:
    """Two sets of factors; the factor of attention follows from how far the context was stretched."""
    original = base.original_max_positions
    factor = rope.number("factor", max_positions / original)
    attention_factor = sqrt(1 + log(factor) / log(original)) if factor > 1 and original > 1 else 1.0
    return replace(
        base,
        attention_factor=rope.number("attention_factor", attention_factor),
        freq_factors=tuple(rope.numbers("short_factor")),
        long_factors=tuple(rope.numbers("long_factor")),
    )


def _hf_yarn(rope: Keys, base: RopeConfig) -> RopeConfig:
    default = _yarn_scale(base.factor)
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        scales = (_yarn_scale(base.factor, rope.number(key)) for key in ("mscale", "mscale_all_dim"))
        default = next(scales) / next(scales)
    return replace(
        base,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.flag("truncate", default=True),
        attention_factor=rope.number("attention_factor", default),
    )


def _yarn_scale(factor: float, multiplier: float = 1.0) -> float:
    return 0.1 * multiplier * log(factor) + 1.0 if factor > 1 else 1.0
