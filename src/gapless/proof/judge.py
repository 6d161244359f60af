"""Says whether a played schedule is right, and by which comparison.

Where tokens may not depend on the batch (float32 on a CPU, the batch-invariant mode), each request is compared with the
same request run alone at depth 1. Elsewhere rounding may depend on the batch, so the schedule is compared, step by step
and bit for bit, with itself at depth 1 for as long as the batches are the same. Knows nothing of where schedules come
from.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from gapless.core.params import MAX_LOGPROBS
from gapless.proof.play import Batch, Played, Trouble, Watch, play
from gapless.proof.schedule import Ask, Schedule
from gapless.proof.scores import ROUNDING, Asked, RequestScores
from gapless.proof.stage import LONE_BLOCK_SIZE, ModelStage
from gapless.proof.tie import is_tie

ALONE = "each request against the same request alone, at depth 1"
SAME_BATCHES = "each step against the same step at depth 1, bit for bit, while the batches are the same"
PLAIN = Watch(conflicts=False, invariants=False)


@dataclass(frozen=True, slots=True)
class Alone:
    """The result of a request when nothing else runs."""

    tokens: tuple[int, ...]
    reason: str
    scores: RequestScores  # of every token, requested or not

    def cut(self, max_tokens: int) -> Alone:
        """The same with fewer tokens allowed."""
        return self if len(self.tokens) <= max_tokens else Alone(self.tokens[:max_tokens], "length", self.scores)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of one schedule."""

    played: Played
    trouble: Trouble | None
    num_compared: int = 0  # tokens
    num_scores: int = 0  # log-probabilities compared
    num_ties: int = 0  # differences that rounding explains
    num_apart: int = 0  # steps not compared, because the batches differed


class Judge:
    """Plays schedules on a stage and compares."""

    def __init__(self, stage: ModelStage, most_tokens: int) -> None:
        self._stage = stage
        self._most_tokens = most_tokens
        self._alone: dict[Ask, Alone] = {}
        self._baseline: tuple[Schedule, Played] | None = None

    @property
    def comparison(self) -> str:
        return ALONE if self._stage.exact else SAME_BATCHES

    def verdict(self, schedule: Schedule) -> Verdict:
        """Play a schedule with every check on, and compare the result."""
        played = play(self._stage, schedule)
        if played.trouble is not None:
            return Verdict(played, played.trouble)
        return self.compare(schedule, played)

    def compare(self, schedule: Schedule, played: Played) -> Verdict:
        """Compare the result of a run without trouble with the right one."""
        return self._against_alone(schedule, played) if self._stage.exact else self._against_sync(schedule, played)

    # -- alone ---------------------------------------------------------------------------------------------------

    def alone(self, ask: Ask) -> Alone:
        """The result of the request alone, in one row and at depth 1."""
        most = max(self._most_tokens, ask.params.max_tokens)
        num_top = min(MAX_LOGPROBS, self._stage.config.vocab_size)
        of_prompt = None if ask.params.prompt_logprobs is None else num_top
        params = dataclasses.replace(ask.params, max_tokens=most, logprobs=num_top, prompt_logprobs=of_prompt)
        seed = ask.seed if params.temperature > 0 else 0
        key = dataclasses.replace(ask, id="alone", params=params, seed=seed, arrival=0, abort=None)
        if key not in self._alone:
            self._alone[key] = self._run_alone(key)
        return self._alone[key].cut(ask.params.max_tokens)

    def _run_alone(self, ask: Ask) -> Alone:
        room = self._stage.room
        block_size = LONE_BLOCK_SIZE
        schedule = Schedule(
            asks=(ask,),
            num_rows=1,
            num_blocks=room.limits(block_size).num_blocks,
            block_size=block_size,
            max_batch_tokens=room.max_batch_tokens,
            max_model_len=room.max_model_len,
            prefix_cache=False,
        )
        played = play(self._stage, schedule, PLAIN)
        if played.trouble is not None:
            return Alone((), f"{played.trouble.kind}: {played.trouble.message}", RequestScores())
        return Alone(played.tokens[ask.id], played.reasons[ask.id], played.scores[ask.id])

    def _against_alone(self, schedule: Schedule, played: Played) -> Verdict:
        verdict = Verdict(played, _wrongly_failed(schedule, played))
        for ask in schedule.asks:
            if verdict.trouble is None:
                verdict = self._add_request(verdict, schedule, ask)
        return verdict

    def _add_request(self, verdict: Verdict, schedule: Schedule, ask: Ask) -> Verdict:
        """The verdict with one more request compared."""
        played, alone = verdict.played, self.alone(ask)
        got, reason = played.tokens[ask.id], played.reasons[ask.id]
        same = _common(got, alone.tokens)
        is_cut = _may_be_cut(ask, reason, failed=bool(schedule.failures))
        tie = same < min(len(got), len(alone.tokens)) and self._is_tie(ask, alone.tokens[:same], got[same])
        rounding = ROUNDING if self._stage.has_ties else 0
        scores = Asked(ask.params, played.scores[ask.id], alone.scores, same, not is_cut)
        num_scores, wrong_score = scores.compare(rounding)
        trouble = None
        if not tie and not _agrees(got, reason, alone, is_cut=is_cut):
            trouble = Trouble("tokens", _difference(ask, got, reason, alone, same))
        elif not _streamed_right(played, ask, len(got)):
            trouble = Trouble("tokens", f"request {ask.id!r} streamed something else than it ended with")
        elif wrong_score is not None:
            trouble = Trouble("log-probabilities", f"request {ask.id!r}: {wrong_score}")
        return dataclasses.replace(
            verdict,
            trouble=trouble,
            num_compared=verdict.num_compared + min(same + 1, len(got)),
            num_scores=verdict.num_scores + num_scores,
            num_ties=verdict.num_ties + tie,
        )

    def _is_tie(self, ask: Ask, known: tuple[int, ...], other: int) -> bool:
        return self._stage.has_ties and is_tie(self._stage, ask, known, other)

    # -- the same batches ----------------------------------------------------------------------------------------

    def _against_sync(self, schedule: Schedule, played: Played) -> Verdict:
        trouble = _wrongly_failed(schedule, played)
        if schedule.depth == 1:
            self._baseline = schedule, played
            return Verdict(played, trouble)
        baseline = self._sync(dataclasses.replace(schedule, depth=1))
        if baseline.trouble is not None:
            return Verdict(played, baseline.trouble)
        num_compared = num_scores = num_same = 0
        for index, (mine, theirs) in enumerate(zip(played.batches, baseline.batches, strict=False)):
            if mine.members != theirs.members:
                break
            num_same += 1
            num_compared += len(mine.tokens)
            num_scores += mine.num_scores
            trouble = trouble or _step_trouble(index + 1, mine, theirs)
        return Verdict(played, trouble, num_compared, num_scores, num_apart=len(played.batches) - num_same)

    def _sync(self, schedule: Schedule) -> Played:
        if self._baseline is None or self._baseline[0] != schedule:
            self._baseline = (schedule, play(self._stage, schedule))
        return self._baseline[1]


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """How many tokens both begin with."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _may_be_cut(ask: Ask, reason: str, *, failed: bool) -> bool:
    """Whether the schedule allows the request to end early."""
    return (reason == "abort" and ask.abort is not None) or (reason == "error" and failed)


def _agrees(got: tuple[int, ...], reason: str, alone: Alone, *, is_cut: bool) -> bool:
    return got == alone.tokens[: len(got)] if is_cut else (got, reason) == (alone.tokens, alone.reason)


def _streamed_right(played: Played, ask: Ask, num_tokens: int) -> bool:
    """Whether streamed values equal the final ones; a request that stopped may have streamed more."""
    sent = played.streamed.get(ask.id, [])[:num_tokens]
    scores = played.scores[ask.id].completion if ask.params.logprobs is not None else (None,) * num_tokens
    return tuple((news.token, news.logprob) for news in sent) == tuple(zip(played.tokens[ask.id], scores, strict=True))


def _wrongly_failed(schedule: Schedule, played: Played) -> Trouble | None:
    """A failed step may end the requests that were in it, a guide its own, and nobody any others."""
    members = {name for step in schedule.failures for name in _members(played, step)}
    members |= {ask.id for ask in schedule.asks if ask.rule is not None and ask.rule.fails_after is not None}
    wrong = [name for name, reason in played.reasons.items() if reason == "error" and name not in members]
    return Trouble("tokens", f"requests {wrong} ended with an error that is not theirs") if wrong else None


def _members(played: Played, step: int) -> list[str]:
    return [member.request for member in played.batches[step - 1].members] if step <= len(played.batches) else []


def _difference(ask: Ask, got: tuple[int, ...], reason: str, alone: Alone, same: int) -> str:
    return (
        f"request {ask.id!r} differs at token {same + 1}: {list(got[same : same + 3])} ({len(got)} tokens, {reason}), "
        f"alone {list(alone.tokens[same : same + 3])} ({len(alone.tokens)} tokens, {alone.reason})"
    )


def _step_trouble(step: int, mine: Batch, theirs: Batch) -> Trouble | None:
    """The difference between two steps with the same members."""
    for kind, got, right in (
        ("tokens", mine.tokens, theirs.tokens),
        ("log-probabilities", mine.scores, theirs.scores),
    ):
        if got != right:
            at = _common(got, right)
            found = f"{list(got[at : at + 3])}, at depth 1 {list(right[at : at + 3])}"
            return Trouble(
                kind, f"step {step} of {len(mine.members)} members differs at {at + 1} of its {kind}: {found}"
            )
    return None
