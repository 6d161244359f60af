"""Rotary position embedding: the frequencies of each kind, the table of cosines and sines, and the rotation.

Knows the conventions of transformers (a head is rotated in halves) and matches it to float32 precision.
Kinds whose frequencies depend on the length of the sequence are refused by `rope_config`, because keys stay as rotated;
longrope's depend on the longest sequence that there may be.
"""

from collections.abc import Callable
from math import ceil, floor, log, pi

import torch
from torch import Tensor
from torch.nn import functional as F

from gapless.errors import CorruptModel
from gapless.models.rope_config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int, max_positions: int = 0) -> Tensor:  # [head_dim / 2] float32
    """Zero for what is not rotated. max_positions decides between the two sets of factors of longrope.

    Raises CorruptModel for parameters that no table of angles can be made of.
    """
    width = rope.width or head_dim
    inverse = _inverse_frequencies(rope, width, max_positions)
    return F.pad(inverse, (0, (head_dim - width) // 2))


def _inverse_frequencies(rope: RopeConfig, head_dim: int, max_positions: int) -> Tensor:
    inverse = 1.0 / _wavelengths(rope, head_dim)
    is_long = rope.long_factors is not None and max_positions > rope.original_max_positions
    factors = rope.long_factors if is_long else rope.freq_factors
    if factors is not None:
        inverse = inverse / torch.tensor(factors)
    try:
        scaled = _SCALINGS[rope.kind](inverse, rope, head_dim)
    except (ArithmeticError, ValueError) as error:
        raise CorruptModel(f"{_named(rope)}: no frequencies can be computed ({error})") from error
    if not bool(scaled.isfinite().all()):
        raise CorruptModel(f"{_named(rope)}: the frequencies are not all finite")
    return scaled


def _named(rope: RopeConfig) -> str:
    return f"rope of kind {rope.kind} with theta {rope.theta} and factor {rope.factor}"


def _wavelengths(rope: RopeConfig, head_dim: int) -> Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return torch.pow(rope.theta, exponents)


def _scale_llama3(inverse: Tensor, rope: RopeConfig, head_dim: int) -> Tensor:
    """Long waves are stretched by the factor, short ones kept, and those between are mixed."""
    turns = rope.original_max_positions * inverse / (2 * pi)  # over the original context
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0, 1)
    return kept * inverse + (1 - kept) * inverse / rope.factor


def _scale_yarn(inverse: Tensor, rope: RopeConfig, head_dim: int) -> Tensor:
    """Like llama3, but the mixing ramp is linear in the index of the frequency."""
    low, high = _dim_of_turns(rope.beta_fast, rope, head_dim), _dim_of_turns(rope.beta_slow, rope, head_dim)
    if rope.truncate:
        low, high = floor(low), ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001  # a ramp of no width is a step
    stretched = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return inverse / rope.factor * stretched + inverse * (1 - stretched)


def _dim_of_turns(num_turns: float, rope: RopeConfig, head_dim: int) -> float:
    """The index of the frequency that turns so often over the original context."""
    return head_dim * log(rope.original_max_positions / (num_turns * 2 * pi)) / (2 * log(rope.theta))


_SCALINGS: dict[str, Callable[[Tensor, RopeConfig, int], Tensor]] = {
    "default": lambda inverse, rope, head_dim: inverse,
    "linear": lambda inverse, rope, head_dim: inverse / rope.factor,
    "llama3": _scale_llama3,
    "yarn": _scale_yarn,
    "longrope": lambda inverse, rope, head_dim: inverse,  # its factors divide already
}


class RotaryTable:
    """cos and sin of every position, side by side so that one gather reads both.

    The sign of the rotation lies in the table: the first half of each sin row is negated.
    """

    __slots__ = ("table",)

    def __init__(
        self, rope: RopeConfig | None, head_dim: int, max_positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Without a rope no position turns anything."""
        positions = torch.arange(max_positions, dtype=torch.float32)
        inverse = torch.zeros(head_dim // 2) if rope is None else inverse_frequencies(rope, head_dim, max_positions)
        angles = torch.outer(positions, inverse)  # [max_positions, head_dim / 2] float32
        factor = 1.0 if rope is None else rope.attention_factor
        cos, sin = angles.cos(), angles.sin() * factor
        cos[:, : num_rotated(rope, head_dim) // 2] *= factor
        rows = torch.cat((cos, cos, -sin, sin), dim=-1).view(max_positions, 2, head_dim)
        self.table = rows.to(device=device, dtype=dtype)

    def at(self, positions: Tensor) -> Tensor:
        """cos and signed sin of the positions [n]: [n, 2, head_dim]."""
        return self.table.index_select(0, positions)


def num_rotated(rope: RopeConfig | None, head_dim: int) -> int:
    """How many numbers of a head are rotated."""
    return 0 if rope is None else rope.width or head_dim


def head_order(rope: RopeConfig | None, head_dim: int, *, pairs: bool) -> Tensor | None:
    """The order of a head's numbers, as they are stored, that lets the table rotate halves; None: they are in it.

    Two numbers that are rotated together must lie half a head apart. They may be stored side by side (pairs), or half
    of what is rotated apart, with the rest of the head behind. Scores do not change if queries and keys are reordered
    alike, so nothing else has to know.
    """
    width = num_rotated(rope, head_dim)
    if width == 0 or (width == head_dim and not pairs):
        return None
    rotated, rest = torch.arange(width), torch.arange(width, head_dim)
    firsts, seconds = (rotated[::2], rotated[1::2]) if pairs else rotated.chunk(2)
    low, high = rest.view(2, -1).unbind(0)
    return torch.cat((firsts, low, seconds, high))


def apply_rope(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotates heads x [n, heads, head_dim] by what `RotaryTable.at` gave for their positions."""
    cos, sin = cos_sin.split_with_sizes((1, 1), 1)
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


class RotaryRotation:
    """The operations of one layer on queries and keys before attention: an optional norm of each head, then rope.

    Carries the layer's sinks too, where it has them.
    """

    __slots__ = ("cos_sin", "eps", "norm_weight", "sinks")

    def __init__(self, cos_sin: Tensor, norm_weight: Tensor | None, eps: float, sinks: Tensor | None = None) -> None:
        self.cos_sin = cos_sin  # [n, 2, head_dim]
        self.norm_weight = norm_weight  # [num_heads + num_kv_heads, head_dim]
        self.eps = eps
        self.sinks = sinks  # [num_heads]

    def apply(self, heads: Tensor) -> Tensor:
        """Queries and keys [n, num_heads + num_kv_heads, head_dim], normalized and rotated."""
        if self.norm_weight is not None:
            heads = F.rms_norm(heads, heads.shape[-1:], None, self.eps) * self.norm_weight
        return apply_rope(heads, self.cos_sin)
