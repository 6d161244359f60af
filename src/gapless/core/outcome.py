"""The results of a step: new tokens, finished requests, and counters. Also when a request is over.

Values, which the scheduler makes and the output side reads. `how_over` is the rule for one request; the scheduler
applies it to all rows at once.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from gapless.core.params import SamplingParams
from gapless.core.request import IntArray, Request
from gapless.errors import ModelError


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of a token: natural logarithm, from the model's logits before temperature and filters."""

    token: int
    logprob: float
    rank: int  # 1: the likeliest; equally likely tokens share a rank
    top: tuple[tuple[int, float], ...]  # the likeliest tokens, best first; as many as requested


@dataclass(frozen=True, slots=True)
class Progress:
    """One new token of a request that streams."""

    request: Request
    token: int
    logprob: TokenLogprob | None = None  # if asked for


@dataclass(frozen=True, slots=True)
class Finished:
    """A request that has ended."""

    request: Request
    reason: str  # "stop", "length", "abort" or "error"
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Commit:
    """The results of one step, in the order of its rows."""

    num_tokens: int
    progress: tuple[Progress, ...]
    finished: tuple[Finished, ...]


def joined(commits: Sequence[Commit]) -> Commit:
    """Several results as one, in their order."""
    return Commit(
        sum(commit.num_tokens for commit in commits),
        tuple(item for commit in commits for item in commit.progress),
        tuple(item for commit in commits for item in commit.finished),
    )


@dataclass(slots=True)
class Counters:
    """Totals so far. They only grow."""

    num_steps: int = 0
    num_prompt_tokens: int = 0  # of admitted requests, each counted once
    num_cached_tokens: int = 0  # of those, found in the prefix cache
    num_generated: int = 0
    num_forced: int = 0  # of those, tokens that took no step of their own, because nothing else could come
    num_overrun: int = 0  # samples of requests that had already left their row
    num_preemptions: int = 0
    num_recomputed: int = 0  # positions discarded by preemptions


def not_finite(position: int, *, controlled: bool = False) -> ModelError:
    """Why a request ends that has nothing to sample from. controlled: a guide or a processor had its say."""
    cause = "the weights are damaged, or their data type overflows: try dtype float32"
    if controlled:
        cause = f"its guide or a logits processor leaves no token, or {cause}"
    return ModelError(f"the logits at position {position} are not finite; {cause}")


def progress_of(request: Request, token: int) -> Progress:
    """A new token of a request, with its log-probability if that was asked for."""
    num_top = request.params.logprobs
    if num_top is None:
        return Progress(request, token)
    return Progress(request, token, token_logprob(token, request.scores[-1], num_top))


def how_over(generated: Sequence[int], params: SamplingParams, stop_ids: Sequence[int], most: int) -> str | None:
    """How a request ends with the last of its generated tokens, "stop" or "length"; None if it goes on.

    stop_ids: its stop and end-of-sequence tokens. most: tokens that it may generate.
    """
    if len(generated) > params.min_tokens and generated[-1] in stop_ids:
        return "stop"
    return "length" if len(generated) >= most else None


def token_logprob(token: int, score: bytes, num_top: int) -> TokenLogprob:
    """A token's log-probability from the numbers of a step (see `score_width` in core/plan.py)."""
    width = len(score) // 8 - 1  # the largest k of the step
    logprob, rank, *tops = struct.unpack(f"=fi{width}i{width}f", score)
    return TokenLogprob(token, logprob, rank, tuple(zip(tops[:num_top], tops[width : width + num_top], strict=True)))


def completion_logprobs(request: Request, num_tokens: int) -> tuple[TokenLogprob, ...] | None:
    """For the first `num_tokens` generated tokens of a finished request; None if it has no `logprobs`."""
    if request.params.logprobs is None:
        return None
    return _logprobs(request.tokens[request.num_prompt :], request.scores[:num_tokens], request.params.logprobs)


def prompt_logprobs(request: Request) -> tuple[TokenLogprob | None, ...] | None:
    """One for each prompt token; None for the first, and for those missing after an early end."""
    if request.params.prompt_logprobs is None:
        return None
    scores = [score.tobytes() for chunk in request.prompt_scores for score in chunk]
    missing = request.num_prompt - 1 - len(scores)
    return (None, *_logprobs(request.prompt[1:], scores, request.params.prompt_logprobs), *[None] * missing)


def _logprobs(tokens: IntArray, scores: Sequence[bytes], num_top: int) -> tuple[TokenLogprob, ...]:
    """For as many tokens as there are scores."""
    pairs = zip(tokens[: len(scores)].tolist(), scores, strict=True)
    return tuple(token_logprob(token, score, num_top) for token, score in pairs)
