"""Logits processors written in Python: the protocol, and what they are told of a request.

A processor changes the logits of its requests before the engine's own parameters do. It sees facts: tokens that are
known, never a token in flight. docs/logits-processors.md has an example.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gapless.core.params import SamplingParams
from gapless.errors import ConfigError, InvalidRequest


@dataclass(frozen=True, slots=True)
class RowFacts:
    """What is known of a request whose next token is to be sampled."""

    request_id: str
    params: SamplingParams
    num_prompt: int
    tokens: npt.NDArray[np.int32]  # read-only: the prompt, then the generated tokens that are known


class LogitsProcessor(Protocol):
    """Changes logits, a batch at a time."""

    name: str  # in errors and in the ledger
    needs_newest: bool  # it must know all tokens before the one to be sampled; False: the latest may be missing

    def applies(self, params: SamplingParams) -> bool:
        """Whether requests with these parameters are its own. Asked once for each, on the caller's thread."""

    def __call__(self, logits: Any, rows: Sequence[RowFacts]) -> Any:
        """Logits in place of these, both torch tensors [len(rows), vocab_size] float32 on the engine's device.

        May write on `logits` and return it. Called on a thread of the engine, with rows of its own requests alone.
        """


def check_processors(processors: Sequence[LogitsProcessor]) -> tuple[LogitsProcessor, ...]:
    """Raises ConfigError for an object that is no processor, and for a name that comes twice."""
    names = set[str]()
    for processor in processors:
        kind = type(processor).__name__
        for attribute, wanted in (("name", str), ("needs_newest", bool)):
            if not isinstance(getattr(processor, attribute, None), wanted):
                raise ConfigError(f"logits_processors: {kind} has no {attribute} of type {wanted.__name__}")
        if not callable(processor) or not callable(getattr(processor, "applies", None)):
            raise ConfigError(f"logits_processors: {kind} lacks a method, __call__ or applies")
        if processor.name in names:
            raise ConfigError(f"logits_processors: the name {processor.name!r} comes twice")
        names.add(processor.name)
    return tuple(processors)


def applying(processors: Sequence[LogitsProcessor], params: SamplingParams) -> tuple[LogitsProcessor, ...]:
    """Those that apply to requests with these parameters. Raises InvalidRequest where one cannot tell."""
    found = []
    for processor in processors:
        try:
            if processor.applies(params):
                found.append(processor)
        except Exception as error:
            raise InvalidRequest(f"logits processor {processor.name}: {type(error).__name__}: {error}") from error
    return tuple(found)
