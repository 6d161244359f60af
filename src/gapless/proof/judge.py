"""Says whether a played schedule is right, and by which comparison.

Where tokens may not depend on the batch (float32 on a CPU, the batch-invariant mode), each request is compared with
the same request run alone at depth 1. Elsewhere rounding may depend on the batch, so the schedule is compared, step by
step and bit for bit, with itself at depth 1 for as long as the batches are the same. Knows nothing of how schedules
come about.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from gapless.proof.play import Batch, Played, Trouble, Watch, play
from gapless.proof.schedule import Ask, Schedule
from gapless.proof.stage import LONE_BLOCK_SIZE, ModelStage
from gapless.proof.tie import is_tie

ALONE = "each request against the same request alone, at depth 1"
SAME_BATCHES = "each step against the same step at depth 1, bit for bit, while the batches are the same"
PLAIN = Watch(conflicts=False, invariants=False)


@dataclass(frozen=True, slots=True)
class Alone:
    """What a request gives when nothing else runs."""

    tokens: tuple[int, ...]
    reason: str

    def cut(self, max_tokens: int) -> Alone:
        """The same with fewer tokens allowed."""
        return self if len(self.tokens) <= max_tokens else Alone(self.tokens[:max_tokens], "length")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of one schedule."""

    played: Played
    trouble: Trouble | None
    num_compared: int = 0  # tokens
    num_ties: int = 0  # differences that rounding explains
    num_apart: int = 0  # steps not compared, for the batches differed


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
        """Play a schedule with every check on, and compare what it gave."""
        played = play(self._stage, schedule)
        if played.trouble is not None:
            return Verdict(played, played.trouble)
        return self._against_alone(schedule, played) if self._stage.exact else self._against_sync(schedule, played)

    # -- alone ---------------------------------------------------------------------------------------------------

    def alone(self, ask: Ask) -> Alone:
        """What the request gives alone, in one row and at depth 1."""
        most = max(self._most_tokens, ask.params.max_tokens)
        params = dataclasses.replace(ask.params, max_tokens=most)
        key = dataclasses.replace(ask, id="alone", params=params, arrival=0, abort=None)
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
            return Alone((), f"{played.trouble.kind}: {played.trouble.message}")
        return Alone(played.tokens[ask.id], played.reasons[ask.id])

    def _against_alone(self, schedule: Schedule, played: Played) -> Verdict:
        num_compared = num_ties = 0
        trouble = _wrongly_failed(schedule, played)
        for ask in schedule.asks:
            if trouble is not None:
                break
            got, reason, alone = played.tokens[ask.id], played.reasons[ask.id], self.alone(ask)
            same = _common(got, alone.tokens)
            num_compared += min(same + 1, len(got))
            if same < min(len(got), len(alone.tokens)) and self._is_tie(ask, alone.tokens[:same], got[same]):
                num_ties += 1
            elif not _agrees(ask, got, reason, alone, failed=bool(schedule.failures)):
                trouble = Trouble("tokens", _difference(ask, got, reason, alone, same))
            elif tuple(played.streamed.get(ask.id, ()))[: len(got)] != got:
                trouble = Trouble("tokens", f"request {ask.id!r} streamed other tokens than it ended with")
        return Verdict(played, trouble, num_compared, num_ties)

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
        num_compared = num_same = 0
        for index, (mine, theirs) in enumerate(zip(played.batches, baseline.batches, strict=False)):
            if mine.members != theirs.members:
                break
            num_same += 1
            num_compared += len(mine.tokens)
            if mine.tokens != theirs.tokens and trouble is None:
                trouble = Trouble("tokens", _step_difference(index + 1, mine, theirs))
        return Verdict(played, trouble, num_compared, num_apart=len(played.batches) - num_same)

    def _sync(self, schedule: Schedule) -> Played:
        if self._baseline is None or self._baseline[0] != schedule:
            self._baseline = (schedule, play(self._stage, schedule))
        return self._baseline[1]


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """How many tokens both begin with."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _agrees(ask: Ask, got: tuple[int, ...], reason: str, alone: Alone, *, failed: bool) -> bool:
    """Whole, or cut off where the schedule says that it may be."""
    if (reason == "abort" and ask.abort is not None) or (reason == "error" and failed):
        return got == alone.tokens[: len(got)]
    return (got, reason) == (alone.tokens, alone.reason)


def _wrongly_failed(schedule: Schedule, played: Played) -> Trouble | None:
    """A failed step may end the requests that were in it, and no others."""
    members = {name for step in schedule.failures for name in _members(played, step)}
    wrong = [name for name, reason in played.reasons.items() if reason == "error" and name not in members]
    return Trouble("tokens", f"requests {wrong} ended with an error that is not theirs") if wrong else None


def _members(played: Played, step: int) -> list[str]:
    return [member.request for member in played.batches[step - 1].members] if step <= len(played.batches) else []


def _difference(ask: Ask, got: tuple[int, ...], reason: str, alone: Alone, same: int) -> str:
    return (
        f"request {ask.id!r} differs at token {same + 1}: {list(got[same : same + 3])} ({len(got)} tokens, {reason}), "
        f"alone {list(alone.tokens[same : same + 3])} ({len(alone.tokens)} tokens, {alone.reason})"
    )


def _step_difference(step: int, mine: Batch, theirs: Batch) -> str:
    at = _common(mine.tokens, theirs.tokens)
    return (
        f"step {step} of {len(mine.members)} members differs at sample {at + 1}: "
        f"{list(mine.tokens[at : at + 3])}, at depth 1 {list(theirs.tokens[at : at + 3])}"
    )
