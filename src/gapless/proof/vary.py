"""Variants of a request with the same prompt: greedy or sampled, with a different seed, log-probabilities or stops.

Stops are taken from the output of the prompt alone, so that they occur. A prompt has few variants, always the same, so
that the output of each alone is computed once. Knows no schedule.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from gapless.core.params import MAX_STOP_IDS
from gapless.proof.rule import Rule
from gapless.proof.schedule import Ask
from gapless.text.tokenizer import Tokenizer

NUM_VARIANTS = 4  # of a prompt, itself included
SAMPLING: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 1.2, "min_p": 0.05},
    {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {"temperature": 0.9, "presence_penalty": 1.0, "typical_p": 0.9, "bad_token_ids": (5, 6)},
)


@dataclass(frozen=True, slots=True)
class Variety:
    """Draws variants of requests."""

    alone: Callable[[Ask], tuple[int, ...]]  # the tokens that a request gives alone
    tokenizer: Tokenizer | None

    def __call__(self, dice: random.Random, ask: Ask) -> Ask:
        """The request itself, or one of its variants."""
        number = dice.randrange(NUM_VARIANTS)
        return ask if number == 0 else self.variant(ask, number)

    def variant(self, ask: Ask, number: int) -> Ask:
        dice = random.Random(f"{ask.id}/{number}")
        changes = {"logprobs": dice.choice((None, 0, 3)), "prompt_logprobs": dice.choice((None, None, 0, 2))}
        params = replace(ask.params, **dice.choice(SAMPLING) | changes)
        seed, waits = dice.randrange(2**31), dice.random() < 0.8
        rule = Rule(seed, waits=waits, forces=waits and dice.random() < 0.5) if dice.random() < 0.4 else None
        ask = replace(ask, id=f"{ask.id}/{number}", params=params, seed=dice.randrange(-(2**63), 2**63), rule=rule)
        stop = dice.choice((None, _stop_at, _stop_later, self._stop_text))
        return ask if stop is None else stop(dice, ask, self.alone(ask))

    def _stop_text(self, dice: random.Random, ask: Ask, tokens: tuple[int, ...]) -> Ask:
        """Stops before the text of a token, or of two."""
        if self.tokenizer is None or not tokens:
            return ask
        at = dice.randrange(len(tokens))
        text = self.tokenizer.decode(list(tokens[at : at + dice.randint(1, 2)]))
        return replace(ask, params=replace(ask.params, stop=(text,))) if text.strip("\ufffd") else ask


def _stop_at(dice: random.Random, ask: Ask, tokens: tuple[int, ...]) -> Ask:
    """Stops at a token that it is known to generate."""
    if not tokens or len(ask.stop_ids) >= MAX_STOP_IDS:
        return ask
    return replace(ask, stop_ids=tuple(dict.fromkeys((*ask.stop_ids, dice.choice(tokens)))))


def _stop_later(dice: random.Random, ask: Ask, tokens: tuple[int, ...]) -> Ask:
    """Would stop at its first token without its minimum length."""
    least = min(max(2, ask.params.min_tokens), ask.params.max_tokens)
    return replace(_stop_at(dice, ask, tokens[:1]), params=replace(ask.params, min_tokens=least))
