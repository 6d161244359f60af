"""Our attention behind transformers' attention interface, and the requests of a model to it, learned from one pass.

Two implementations are registered: one that calls the step's attention, and one for models without memory (on the meta
device), which only notes every call. A model whose calls our attention cannot answer is refused then, before any weight
is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gapless.errors import UnsupportedModel
from gapless.models.spec import AttentionSpec

RUNS, NOTES = "gapless", "gapless_notes"  # names of the two implementations
_PLACE = "_gapless_place"  # of a module: who answers its calls
# Arguments of a call that do not change its result in a step without a cache of transformers, and those we read.
_IDLE = frozenset({"attention_mask", "cache_position", "position_ids", "position_embeddings"})
_READ = frozenset({"scaling", "sliding_window", "softcap", "s_aux", "is_causal", "dropout"})


class Answers(Protocol):
    """Whoever answers the calls of a module."""

    def answer(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, extra: Mapping[str, Any]) -> Tensor:
        """[1, n, num_heads, value_dim] for q, k and v [1, heads, n, dim]."""


def register() -> None:
    """Make both implementations known to transformers. Done again, it changes nothing.

    Only the one that notes has masks: for the other one transformers makes none.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(RUNS, _call)
    AttentionInterface.register(NOTES, _call)
    AttentionMaskInterface.register(NOTES, _noted_mask)


def place(module: nn.Module, answers: Answers) -> None:
    """Let `answers` answer the calls of the module."""
    module.__dict__[_PLACE] = answers


def _call(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *_: Any, **extra: Any
) -> tuple[Tensor, None]:
    answers: Answers = module.__dict__[_PLACE]
    return answers.answer(module, query, key, value, attention_mask, extra), None


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One layer's call."""

    name: str  # of the module
    spec: AttentionSpec
    value_dim: int  # of a head of the values, which may be narrower than one of queries and keys


@dataclass(slots=True)
class Notes:
    """The calls of one pass, in their order, which is that of the layers."""

    names: Mapping[nn.Module, str]
    calls: list[AttentionCall] = field(default_factory=list)

    def answer(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, extra: Mapping[str, Any]) -> Tensor:
        name = self.names[module]
        if any(call.name == name for call in self.calls):
            raise UnsupportedModel("one of its layers attends twice in a pass")
        if q.shape[2] != k.shape[2] or k.shape[:3] != v.shape[:3] or v.shape[-1] > q.shape[-1]:
            shapes = ", ".join(str(list(tensor.shape)) for tensor in (q, k, v))
            raise UnsupportedModel(f"queries, keys and values of shapes {shapes} are not those of a decoder")
        self.calls.append(AttentionCall(name, _spec(module, q, k, mask, extra), v.shape[-1]))
        return torch.empty(1, q.shape[2], q.shape[1], v.shape[-1], dtype=q.dtype, device=q.device)


def _spec(module: nn.Module, q: Tensor, k: Tensor, mask: Any, extra: Mapping[str, Any]) -> AttentionSpec:
    for name, value in extra.items():
        if isinstance(value, Tensor) and name not in _IDLE | _READ:
            raise UnsupportedModel(f"its attention takes {name}, which Gapless does not know")
    if mask is not None and not hasattr(mask, "gapless_window"):
        raise UnsupportedModel("it changes the mask of its attention")
    if extra.get("is_causal", getattr(module, "is_causal", True)) is False and mask is None:
        raise UnsupportedModel("its attention is not causal")
    scale, cap = extra.get("scaling"), extra.get("softcap")
    return AttentionSpec(
        num_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        head_dim=q.shape[3],
        scale=_scale(q, scale),
        rope=None,  # heads come rotated
        window=extra.get("sliding_window") if mask is None else mask.gapless_window,
        soft_cap=None if cap is None else float(cap),
        sinks=extra.get("s_aux") is not None,
    )


def _scale(q: Tensor, scale: float | None) -> float:
    return float(q.shape[3] ** -0.5 if scale is None else scale)


def _noted_mask(
    *, q_length: int, kv_length: int, mask_function: Callable[..., Any], local_size: int | None = None, **_: Any
) -> Tensor:
    """A tensor that stands for a mask and knows its window. Raises UnsupportedModel for masks with other shapes."""
    far = 2 * (local_size or 0) + 3
    queries, keys = torch.arange(far)[:, None], torch.arange(far)[None]
    nothing = torch.zeros((), dtype=torch.int64)
    seen = torch.as_tensor(mask_function(nothing, nothing, queries, keys)).expand(far, far)
    expected = keys <= queries
    if local_size is not None:
        expected = expected & (keys > queries - local_size)
    if not torch.equal(seen, expected):
        kind = "chunks of the context" if local_size is not None else "other positions than the earlier ones"
        raise UnsupportedModel(f"its attention sees {kind}, which Gapless has no mask for")
    mask = torch.empty(1, 1, q_length, kv_length, device="meta")
    mask.gapless_window = local_size  # type: ignore[attr-defined]
    return mask


class Unrotated:
    """The rotation of heads that come rotated, and the sinks."""

    __slots__ = ("_heads", "sinks")

    norm_weight: Tensor | None = None
    eps = 0.0

    def __init__(self, heads: Tensor, sinks: Tensor | None) -> None:
        self._heads, self.sinks = heads, sinks

    @property
    def cos_sin(self) -> Tensor:
        """A turn by nothing, for kernels that always turn."""
        turn = self._heads.new_zeros(len(self._heads), 2, self._heads.shape[-1])
        turn[:, 0] = 1.0
        return turn

    def apply(self, heads: Tensor) -> Tensor:
        return heads
