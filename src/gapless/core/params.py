"""Sampling parameters of a request, checked before it enters the queue.

Owns the meaning, the defaults and the limits of each parameter. Knows no tokenizer and no model.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from gapless.core.structured import Structured, read_structured
from gapless.errors import InvalidRequest

MAX_STOP_IDS = 16  # stop token ids of one request, the model's end-of-sequence ids included
MAX_STOP_STRINGS = 16
MAX_CHOICES = 1024  # candidates of one prompt
MAX_LOGPROBS = 20  # most alternatives returned with each token
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")
MAX_BIASES = 1024  # tokens with a bias
MAX_BAD_WORDS = 1024
MAX_WORD = 256  # characters of a bad word, or tokens


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to continue a prompt. Immutable, and valid once it exists."""

    max_tokens: int = 256  # most tokens to generate
    min_tokens: int = 0  # ignore end-of-sequence tokens, stop tokens and stop strings before this many tokens
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # keep the k likeliest tokens; 0 keeps all
    top_p: float = 1.0  # keep the likeliest tokens that together reach this probability; 0 is greedy
    min_p: float = 0.0  # keep tokens at least this likely, relative to the likeliest
    typical_p: float = 1.0  # keep the tokens whose information is closest to the average, up to this probability
    top_n_sigma: float = 0.0  # keep tokens within so many standard deviations of the largest logit; 0 keeps all
    repetition_penalty: float = 1.0  # divide the logits of tokens seen before, in prompt or output; negative ones grow
    presence_penalty: float = 0.0  # subtract from the logits of tokens generated before
    frequency_penalty: float = 0.0  # subtract for each time that a token was generated before
    logit_bias: tuple[tuple[int, float], ...] = ()  # add to the logits of these tokens; given as a mapping or as pairs
    allowed_token_ids: tuple[int, ...] | None = None  # only these tokens may come
    bad_token_ids: tuple[int, ...] = ()  # these tokens never come
    bad_words: tuple[str | tuple[int, ...], ...] = ()  # texts, or sequences of tokens, that are never completed
    seed: int | None = None  # same seed, same tokens; None derives one from the engine's seed
    stop: tuple[str, ...] = ()  # end at any of these strings
    stop_token_ids: tuple[int, ...] = ()  # end at any of these tokens
    include_stop_str_in_output: bool = False  # keep the stop string, or the stop token's text, in the text
    ignore_eos: bool = False  # continue past the model's end-of-sequence token
    logprobs: int | None = None  # log-probability of each generated token, and of the k likeliest
    logprobs_mode: str = "raw_logprobs"  # of the model's logits, or "processed_logprobs": of those that are drawn from
    prompt_logprobs: int | None = None  # the same for the prompt's tokens
    n: int = 1  # completions to return, each with a seed of its own
    best_of: int | None = None  # completions to generate; the n with the highest mean log-probability are returned
    structured: Structured | None = None  # the shape of the text; may be given as a mapping, {"regex": "[0-9]+"}

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids"):
            object.__setattr__(self, name, _as_tuple(name, getattr(self, name)))
        _integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _integer("min_tokens", self.min_tokens, 0, self.max_tokens, "max_tokens")
        _number("temperature", self.temperature, 0.0, 100.0)
        _integer("top_k", self.top_k, 0, 2**31 - 1)
        _number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0:  # keeps the likeliest token alone
            object.__setattr__(self, "temperature", 0.0)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("typical_p", self.typical_p, 0.0, 1.0)
        _number("top_n_sigma", self.top_n_sigma, -1.0, 100.0)
        object.__setattr__(self, "top_n_sigma", max(self.top_n_sigma, 0.0))  # -1 is off in llama.cpp
        _number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        object.__setattr__(self, "logit_bias", _as_biases(self.logit_bias))
        object.__setattr__(self, "allowed_token_ids", _as_ids("allowed_token_ids", self.allowed_token_ids))
        object.__setattr__(self, "bad_token_ids", _as_ids("bad_token_ids", self.bad_token_ids))
        object.__setattr__(self, "bad_words", _as_words(self.bad_words))
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**63 - 1)
        _check_stops(self.stop, self.stop_token_ids)
        for name in ("include_stop_str_in_output", "ignore_eos"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(f"{name} must be true or false, got {getattr(self, name)!r}", name)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, MAX_LOGPROBS)
        if self.logprobs_mode not in LOGPROBS_MODES:
            known = " or ".join(LOGPROBS_MODES)
            raise InvalidRequest(f"logprobs_mode must be {known}, got {self.logprobs_mode!r}", "logprobs_mode")
        _check_choices(self.n, self.best_of)
        if self.structured is not None:
            object.__setattr__(self, "structured", read_structured(self.structured))
            _check_ends(self.structured, self.min_tokens, self.ignore_eos)

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Build from untrusted input; an unknown name is an error."""
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                listed = ", ".join(known)
                raise InvalidRequest(f"unknown parameter {name!r}{_suggest(name, known)}; known: {listed}", name)
        return cls(**values)


def derive_seed(seed: int, number: int, step: int = 0x9E3779B97F4A7C15) -> int:
    """A seed for the request with this number: steps (by default golden-ratio ones), folded into 64 bits."""
    value = (seed + (number + 1) * step) % 2**64
    return value - 2**64 if value >= 2**63 else value


def _as_tuple(name: str, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise InvalidRequest(f"{name} must be a list, got {value!r}", name)
    return tuple(value)


def _integer(
    name: str, value: Any, low: int, high: int, high_name: str | None = None, *, param: str | None = None
) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidRequest(f"{name} must be a whole number, got {value!r}", param or name)
    if not low <= value <= high:
        limit = f"{high_name} = {high}" if high_name else str(high)
        raise InvalidRequest(f"{name} must be between {low} and {limit}, got {value}", param or name)


def _number(name: str, value: Any, low: float, high: float, *, param: str | None = None) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or value != value:
        raise InvalidRequest(f"{name} must be a number, got {value!r}", param or name)
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must be at least {low} and at most {high}, got {value}", param or name)


def _as_biases(given: Any) -> tuple[tuple[int, float], ...]:
    """Pairs of a token and its bias, by token. An id may be a number or its digits, as in JSON."""
    pairs = list(given.items()) if isinstance(given, Mapping) else given
    if not isinstance(pairs, (list, tuple)) or any(
        not isinstance(pair, (list, tuple)) or len(pair) != 2 for pair in pairs
    ):
        raise InvalidRequest(f"logit_bias must be a mapping from token ids to numbers, got {given!r}", "logit_bias")
    if len(pairs) > MAX_BIASES:
        raise InvalidRequest(f"logit_bias has at most {MAX_BIASES} tokens, got {len(pairs)}", "logit_bias")
    found: dict[int, float] = {}
    for key, value in pairs:
        token = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10 else key
        _integer("a token id in logit_bias", token, 0, 2**31 - 1, param="logit_bias")
        _number(f"the logit_bias of token {token}", value, -100.0, 100.0, param="logit_bias")
        if token in found:
            raise InvalidRequest(f"logit_bias names token {token} twice", "logit_bias")
        found[token] = float(value)
    return tuple(sorted(found.items()))


def _as_ids(name: str, given: Any) -> tuple[int, ...] | None:
    if given is None and name == "allowed_token_ids":
        return None
    ids = _as_tuple(name, given)
    for token in ids:
        _integer(f"a token id in {name}", token, 0, 2**31 - 1, param=name)
    if not ids and name == "allowed_token_ids":
        raise InvalidRequest("allowed_token_ids is empty: no token could come", name)
    return ids


def _as_words(given: Any) -> tuple[str | tuple[int, ...], ...]:
    words = _as_tuple("bad_words", given)
    if len(words) > MAX_BAD_WORDS:
        raise InvalidRequest(f"at most {MAX_BAD_WORDS} bad words, got {len(words)}", "bad_words")
    for word in words:
        if not isinstance(word, (str, list, tuple)) or not (word.strip() if isinstance(word, str) else word):
            raise InvalidRequest(f"a bad word must be text or token ids, and not empty, got {word!r}", "bad_words")
        if len(word) > MAX_WORD:
            raise InvalidRequest(
                f"a bad word has at most {MAX_WORD} characters or tokens, got {len(word)}", "bad_words"
            )
        for token in () if isinstance(word, str) else word:
            _integer("a token id in bad_words", token, 0, 2**31 - 1, param="bad_words")
    return tuple(word if isinstance(word, str) else tuple(word) for word in words)


def _check_stops(stop: tuple[Any, ...], stop_token_ids: tuple[Any, ...]) -> None:
    if len(stop) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"at most {MAX_STOP_STRINGS} stop strings, got {len(stop)}", "stop")
    for text in stop:
        if not isinstance(text, str) or not text:
            raise InvalidRequest(f"a stop string must be non-empty text, got {text!r}", "stop")
    if len(stop_token_ids) > MAX_STOP_IDS:
        raise InvalidRequest(f"at most {MAX_STOP_IDS} stop token ids, got {len(stop_token_ids)}", "stop_token_ids")
    for token in stop_token_ids:
        _integer("a stop token id", token, 0, 2**31 - 1, param="stop_token_ids")


def _check_choices(n: Any, best_of: Any) -> None:
    _integer("n", n, 1, MAX_CHOICES)
    if best_of is not None:
        _integer("best_of", best_of, 1, MAX_CHOICES)
        if best_of < n:
            raise InvalidRequest(f"best_of must be at least n = {n}, got {best_of}", "best_of")


def _check_ends(structured: Structured, min_tokens: int, ignore_eos: bool) -> None:
    """The shape alone says where a text may end. Free text around structural tags may be kept from ending."""
    if structured.kind == "structural_tag":
        return
    for name, given in (("min_tokens", min_tokens > 0), ("ignore_eos", ignore_eos)):
        if given:
            raise InvalidRequest(
                f"{name} contradicts {structured.param}: the {structured.kind} says where to end", name
            )


def _suggest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
