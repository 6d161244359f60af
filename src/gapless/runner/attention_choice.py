"""The attention that a GPU runs: the one that was asked for, or the fastest, timed when the engine is built.

Decode rows and chunks each have a choice of their own. A library that fails, or differs from our kernels, is left out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import geometric_mean

import torch

from gapless.attention.base import Attention
from gapless.attention.flash import LIBRARIES, Kernel, LibraryAttention
from gapless.attention.triton import TritonAttention
from gapless.config import EngineOptions
from gapless.core.limits import Limits
from gapless.errors import ConfigError
from gapless.models.config import ModelConfig
from gapless.runner.attention_trials import Measure, Trial, Trials

log = logging.getLogger(__name__)

OWN = "triton"
GAIN = 0.97  # of our time at most: what is closer may be noise, and ours takes no memory besides


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """The attentions that run, and why."""

    decode: str
    chunks: str
    why: str

    def __str__(self) -> str:
        what = self.decode if self.decode == self.chunks else f"{self.decode} for decode rows, {self.chunks} for chunks"
        return f"attention: {what} ({self.why})"


def candidates(options: EngineOptions, config: ModelConfig, dtype: torch.dtype) -> tuple[str, ...]:
    """Attentions that may run; the fastest of them will. Raises ConfigError if the one asked for cannot run."""
    wanted = options.attention
    if wanted in LIBRARIES:
        if reason := _why_not(wanted, options, config, dtype):
            raise ConfigError(f"attention {wanted}: {reason}")
        return (wanted,)
    if wanted == OWN:
        return (OWN,)
    found = [OWN]
    for name, library in LIBRARIES.items():
        if not library.is_installed():
            continue
        if reason := _why_not(name, options, config, dtype):
            log.info("attention %s is installed and not used: %s", name, reason)
        else:
            found.append(name)
    return tuple(found)


def _why_not(name: str, options: EngineOptions, config: ModelConfig, dtype: torch.dtype) -> str | None:
    library = LIBRARIES[name]
    if not library.is_installed():
        return f"{library.package} is not installed (no module {library.module})"
    if options.batch_invariant:
        return "batch_invariant needs our own kernels"
    return library.why_not(config.attention_specs(), options.block_size, dtype)


def make_attention(
    own: TritonAttention,
    limits: Limits,
    names: Sequence[str],
    measure: Measure,
    as_launch: Callable[[Kernel], Kernel] = lambda kernel: kernel,
) -> tuple[Attention, AttentionChoice]:
    """The attention to use of these names, and what was chosen; our own comes first where there is a choice.

    as_launch: makes a library's launches known to the device, since they need not pass through torch.
    """

    @cache
    def kernel(name: str) -> Kernel | None:
        return None if name == OWN else as_launch(LIBRARIES[name].load(own.specs[0].scale, own.pools[0].device))

    def make(decode: str, chunks: str) -> Attention:
        if decode == chunks == OWN:
            return own
        return LibraryAttention(own, limits.block_size, decode=kernel(decode), chunks=kernel(chunks))

    for_chunks = [name for name in names if name == OWN or LIBRARIES[name].has_chunks] or [OWN]
    if len(names) == 1:
        choice = AttentionChoice(names[0], for_chunks[0], "the only candidate")
    else:
        choice = _contest(names, for_chunks, Trials(own.pools, own.specs[0].num_heads, limits), make, measure)
    try:
        return make(choice.decode, choice.chunks), choice
    except Exception as error:  # whatever importing a library may raise
        raise ConfigError(f"attention {names[0]}: it is installed, but cannot be loaded: {error}") from error


@torch.inference_mode()
def _contest(
    names: Sequence[str],
    for_chunks: Sequence[str],
    trials: Trials,
    make: Callable[[str, str], Attention],
    measure: Measure,
) -> AttentionChoice:
    own = make(OWN, OWN)

    def times(attention: Attention, trials: Sequence[Trial]) -> list[float]:
        return [trial.seconds(attention, own, measure) for trial in trials]

    decodes, chunks = trials.decodes(), trials.chunks()
    decode, figures = fastest(names, lambda name: times(make(name, OWN), decodes))
    chunk, more = fastest(for_chunks, lambda name: times(make(OWN, name), chunks))
    trials.wipe()
    return AttentionChoice(decode, chunk, f"decode rows: {figures}; chunks: {more}")


def fastest(names: Sequence[str], seconds: Callable[[str], Sequence[float]]) -> tuple[str, str]:
    """The name whose trials take least, the first one where none is clearly faster; and the figures, in words."""
    first = seconds(names[0])
    best, least, words = names[0], GAIN, []
    for name in names[1:]:
        try:
            share = geometric_mean([other / ours for other, ours in zip(seconds(name), first, strict=True)])
        except Exception as error:  # whatever a library may raise: its build can lack this GPU or this shape
            log.warning("attention %s is left out: %s", name, error)
            words.append(f"{name} failed")
            continue
        words.append(f"{name} takes {share:.2f} of the time of {names[0]}")
        if share < least:
            best, least = name, share
    return best, ", ".join(words) or f"{names[0]} alone"
