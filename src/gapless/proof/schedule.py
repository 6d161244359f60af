"""A schedule as a value: arrivals, aborts and failures by step, and the available memory.

It contains everything that decides a run, so a schedule and a model reproduce the run. Written to JSON and read back
unchanged. Knows no engine.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from gapless.core.guide import Guide
from gapless.core.limits import Limits
from gapless.core.params import SamplingParams
from gapless.errors import ConfigError
from gapless.guides.tokens import join
from gapless.guides.words import guide_of
from gapless.proof.rule import Rule


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: its parameters, the step before which it arrives, and the step before which it is aborted."""

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    stop_ids: tuple[int, ...] = ()  # end-of-sequence and stop tokens, already merged
    arrival: int = 0
    abort: int | None = None
    rule: Rule | None = None  # which tokens may come; None: all

    @property
    def length(self) -> int:
        """Prompt and output together, at most."""
        return len(self.prompt) + self.params.max_tokens

    def guide(self, vocab_size: int) -> Guide | None:
        """A guide by the rule and by the parameters, that has heard nothing yet."""
        return join(None if self.rule is None else self.rule.guide(), guide_of(self.params, vocab_size))


@dataclass(frozen=True, slots=True)
class Schedule:
    """A run, fully described."""

    asks: tuple[Ask, ...]
    num_rows: int
    num_blocks: int
    block_size: int
    max_batch_tokens: int
    max_model_len: int
    prefix_cache: bool = True
    depth: int = 1
    order: int | None = None  # a seed: of the order of streams, or of delays where there is none to choose
    threads: bool = False  # on a CPU: streams as threads with delays, as the engine has them, and no chosen order
    failures: tuple[int, ...] = ()  # steps that raise on the device

    @property
    def limits(self) -> Limits:
        return Limits(
            num_rows=self.num_rows,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_batch_tokens=self.max_batch_tokens,
            max_model_len=self.max_model_len,
            prefix_cache=self.prefix_cache,
        )

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> Schedule:
        """Raises ConfigError for anything that `to_json` cannot have written."""
        try:
            asks = tuple(_ask(item) for item in value["asks"])
            return cls(**value | {"asks": asks, "failures": tuple(value["failures"])})
        except (TypeError, KeyError, ValueError) as error:
            raise ConfigError(f"not a schedule: {error}") from error

    def describe(self) -> str:
        """One line for people."""
        tokens = sum(len(ask.prompt) for ask in self.asks)
        most = sum(ask.params.max_tokens for ask in self.asks)
        extras = [f"{sum(ask.abort is not None for ask in self.asks)} aborted"] if self._num_aborts else []
        extras += [f"{num_guided} guided"] if (num_guided := sum(ask.rule is not None for ask in self.asks)) else []
        extras += [f"failing steps {list(self.failures)}"] if self.failures else []
        extras += ["prefix cache"] if self.prefix_cache else []
        extras += [f"order {self.order}"] if self.order is not None else []
        extras += ["threads"] if self.threads else []
        return (
            f"depth {self.depth}, {len(self.asks)} requests, {tokens} prompt tokens, {most} to generate, "
            f"{self.num_rows} rows, {self.num_blocks} blocks of {self.block_size}, "
            f"{self.max_batch_tokens} tokens a step" + "".join(f", {extra}" for extra in extras)
        )

    @property
    def _num_aborts(self) -> int:
        return sum(ask.abort is not None for ask in self.asks)


def _ask(value: Any) -> Ask:
    tuples = {"prompt": tuple(value["prompt"]), "stop_ids": tuple(value["stop_ids"])}
    rule = None if value.get("rule") is None else Rule(**value["rule"])
    return Ask(**value | tuples | {"params": SamplingParams.from_dict(value["params"]), "rule": rule})
