"""The results of a check: counts for people and for machines, and the file that replays a failure.

Owns the words of the verdict and the format of both files. Plays nothing.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gapless import __version__
from gapless.core.windows import NO_WINDOWS
from gapless.errors import ConfigError
from gapless.proof.judge import Verdict
from gapless.proof.play import Trouble
from gapless.proof.schedule import Schedule
from gapless.proof.stage import Room

FEW_TIES, TIE_SHARE = 3, 1e-3  # more ties than these, of the tokens compared, are no accident


@dataclass(slots=True)
class Tally:
    """Counts over all schedules. They only grow."""

    num_schedules: int = 0  # each depth counts
    num_steps: int = 0
    num_compared: int = 0  # tokens
    num_scores: int = 0  # log-probabilities compared
    num_ties: int = 0
    num_apart: int = 0  # steps whose batch was different at depth 1
    num_preemptions: int = 0
    num_aborted: int = 0
    num_failed: int = 0  # requests ended by a step that was made to fail
    num_stopped: int = 0
    num_overrun: int = 0
    num_cached: int = 0  # prompt tokens found in the prefix cache
    num_accesses: int = 0  # of buffers
    num_block_reads: int = 0  # places of the KV cache
    num_conflicts: int = 0
    num_broken: int = 0  # invariants
    num_different: int = 0  # schedules with different tokens or log-probabilities

    def add(self, verdict: Verdict) -> None:
        played, counters = verdict.played, verdict.played.counters
        reasons = list(played.reasons.values())
        self.num_schedules += 1
        self.num_steps += counters.num_steps
        self.num_compared += verdict.num_compared
        self.num_scores += verdict.num_scores
        self.num_ties += verdict.num_ties
        self.num_apart += verdict.num_apart
        self.num_preemptions += counters.num_preemptions
        self.num_aborted += reasons.count("abort")
        self.num_failed += reasons.count("error")
        self.num_stopped += reasons.count("stop")
        self.num_overrun += counters.num_overrun
        self.num_cached += counters.num_cached_tokens
        self.num_accesses += played.num_accesses
        self.num_block_reads += played.num_block_reads
        if verdict.trouble is not None:
            self.num_conflicts += verdict.trouble.kind == "conflict"
            self.num_broken += verdict.trouble.kind == "invariant"
            self.num_different += verdict.trouble.kind in ("tokens", "log-probabilities")

    @property
    def passed(self) -> bool:
        return self.why_not is None

    @property
    def why_not(self) -> str | None:
        """Why this is not a pass, in a few words."""
        if self.num_conflicts + self.num_broken + self.num_different > 0:
            return "something is wrong; the smallest schedule that shows it follows"
        if self.num_compared == 0:
            return "no token was compared"
        if self.num_ties > FEW_TIES + self.num_compared * TIE_SHARE:
            return "more ties than rounding explains"
        return None


@dataclass(frozen=True, slots=True)
class ProofFailure:
    """A failing schedule, and the stage it was played on."""

    model: str
    options: Mapping[str, Any]  # of the engine, as far as they matter
    room: Room
    most_tokens: int
    schedule: Schedule
    trouble: Trouble

    def save(self, path: Path) -> None:
        value = dataclasses.asdict(self) | {"gapless": __version__, "schedule": self.schedule.to_json()}
        path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> ProofFailure:
        """Raises ConfigError."""
        try:
            value = json.loads(path.read_text("utf-8"))
            return cls(
                model=value["model"],
                options=value["options"],
                room=Room(**value["room"] | {"windows": tuple(value["room"].get("windows", NO_WINDOWS))}),
                most_tokens=value["most_tokens"],
                schedule=Schedule.from_json(value["schedule"]),
                trouble=Trouble(**value["trouble"]),
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}: cannot be replayed: {error}") from error


def lines(tally: Tally, comparison: str) -> list[str]:
    """The counts, and the verdict as the last line."""
    rows = {
        "compared": comparison,
        "schedules": f"{tally.num_schedules} tried, {tally.num_steps} steps, {tally.num_preemptions} preemptions, "
        f"{tally.num_aborted} aborts, {tally.num_stopped} stops, {tally.num_overrun} overruns, "
        f"{tally.num_cached} cached tokens",
        "tokens": f"{tally.num_compared} compared, and {tally.num_scores} log-probabilities; "
        f"{tally.num_different} schedules differ" + _asides(tally),
        "conflicts": f"{tally.num_conflicts} in {tally.num_accesses} accesses of buffers "
        f"and {tally.num_block_reads} reads of KV places",
        "invariants": f"{tally.num_broken} broken",
        "verdict": verdict_line(tally),
    }
    return [f"{name:11} {text}" for name, text in rows.items()]


def verdict_line(tally: Tally) -> str:
    if tally.why_not is not None:
        return f"FAIL: {tally.why_not}"
    return "PASS: asynchronous equals synchronous in everything that was tried"


def _asides(tally: Tally) -> str:
    ties = f"; {tally.num_ties} ties by rounding" if tally.num_ties else ""
    return ties + (f"; {tally.num_apart} steps in other batches not compared" if tally.num_apart else "")


def to_json(tally: Tally, comparison: str, about: Mapping[str, Any]) -> dict[str, Any]:
    return {**about, "comparison": comparison, "passed": tally.passed, **dataclasses.asdict(tally)}
