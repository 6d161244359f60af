"""Log-probabilities of a finished request, compared with those of a second run.

Where bits may not depend on the batch they must be equal; where float32 rounds they must be close. Tokens that are
equally likely may be in any order among the likeliest. Knows no schedule.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gapless.core.outcome import TokenLogprob, completion_logprobs, prompt_logprobs
from gapless.core.params import SamplingParams
from gapless.core.request import Request

ROUNDING = 5e-4  # what float32 may change of a log-probability; a wrong row, place or step changes it by about 1
RANK_SHARE = 1e-3  # where rounding is allowed, ranks may differ by one, and by so much of the rank


@dataclass(frozen=True, slots=True)
class RequestScores:
    """One for each token for which they were requested; otherwise none."""

    completion: tuple[TokenLogprob, ...] = ()
    prompt: tuple[TokenLogprob | None, ...] = ()  # None: the first, or left out by an early end

    @classmethod
    def of(cls, request: Request, num_tokens: int) -> RequestScores:
        return cls(completion_logprobs(request, num_tokens) or (), prompt_logprobs(request) or ())


@dataclass(frozen=True, slots=True)
class Asked:
    """A request's scores and the right ones, as far as they can be compared."""

    params: SamplingParams
    got: RequestScores
    right: RequestScores  # may have more of everything
    num_tokens: int  # generated ones with the same history
    is_whole: bool  # no prompt token's may be missing

    def compare(self, rounding: float) -> tuple[int, str | None]:
        """How many are right before the first wrong one, and what is wrong with it."""
        num_right = 0
        for name, num_top, got, right in self._pairs():
            if got is None or right is None or not is_near(got, right, num_top, rounding):
                return num_right, f"{name} has {_show(got, num_top)}, alone {_show(right, num_top)}"
            num_right += 1
        return num_right, None

    def _pairs(self) -> Iterator[tuple[str, int, TokenLogprob | None, TokenLogprob | None]]:
        params, got, right = self.params, self.got, self.right
        if params.prompt_logprobs is not None:
            for index in range(1, len(right.prompt)):
                found = got.prompt[index] if index < len(got.prompt) else None
                if found is not None or self.is_whole:
                    yield f"prompt token {index + 1}", params.prompt_logprobs, found, right.prompt[index]
        if params.logprobs is not None:
            for index in range(self.num_tokens):
                found = got.completion[index] if index < len(got.completion) else None
                yield f"token {index + 1}", params.logprobs, found, right.completion[index]


def is_near(got: TokenLogprob, right: TokenLogprob, num_top: int, rounding: float) -> bool:
    """Whether they are equal except for rounding; 0 allows none. `right` may have more than `num_top` tokens."""
    ranks = abs(got.rank - right.rank) <= (1 + RANK_SHARE * right.rank if rounding else 0)
    own = got.token == right.token and abs(got.logprob - right.logprob) <= rounding and ranks
    return own and len(got.top) == num_top and len(dict(got.top)) == num_top and _tops_near(got, right, rounding)


def _tops_near(got: TokenLogprob, right: TokenLogprob, rounding: float) -> bool:
    """Equally likely place by place, and each token as likely as in the other; a missing one was next in line."""
    known = dict(right.top)
    return all(
        abs(logprob - there) <= rounding and abs(logprob - known.get(token, right.top[-1][1])) <= rounding
        for (token, logprob), (_, there) in zip(got.top, right.top, strict=False)
    )


def _show(score: TokenLogprob | None, num_top: int) -> str:
    if score is None:
        return "no log-probability"
    likeliest = f", likeliest {list(score.top[: min(num_top, 3)])}" if num_top else ""
    return f"{score.logprob:.6f} (token {score.token}, rank {score.rank}{likeliest})"
