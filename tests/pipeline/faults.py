"""All mistakes of the tables beside this file, and who sees them.

    python tests/pipeline/faults.py        prints the table

Each mistake is made alone, and the same schedules are played with each of three detectors by itself: the checker
(happens-before, block ledger, poison), the tokens and log-probabilities (against those of each request alone, without
the mistake), the invariants (conservation of rows and blocks, and the assertions of the code). A mistake that nobody
sees fails the suite.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any

import count_faults
import mask_faults
import native_faults
import score_faults
import state_faults
import torch
import window_faults
from fault import GRAPHS, WINDOWED, Fault
from mutants import MISTAKES, Mistake
from stages import stage, why_no_stage

from gapless.core.params import SamplingParams
from gapless.proof.judge import Judge
from gapless.proof.play import Watch, play
from gapless.proof.rule import Rule
from gapless.proof.schedule import Ask, Schedule
from toy import toy_requests

CHECKER, TOKENS, INVARIANT = DETECTORS = ("checker", "tokens", "invariant")
ANYBODY = "anybody"
WATCHES = {ANYBODY: Watch(), CHECKER: Watch(True, False), TOKENS: Watch(False, False), INVARIANT: Watch(False, True)}
MOST_TOKENS = 16
SCORED: dict[str, dict[str, Any]] = {  # who asks for which log-probabilities
    "a": {"logprobs": 2, "prompt_logprobs": 1},
    "c": {"logprobs": 0},
    "d": {"logprobs": 5, "prompt_logprobs": 3},
    "e": {"prompt_logprobs": 0},
    "f": {"logprobs": 1, "prompt_logprobs": 2},
}


# -- what is played ------------------------------------------------------------------------------------------------


@cache
def schedules(on: str) -> list[Schedule]:
    """Made so that blocks run out, steps fail, requests share prefixes, are aborted and would stop too early."""
    asks = (*(Ask(r.id, tuple(r.prompt.tolist()), r.params, r.seed, r.stop_ids) for r in toy_requests()), _eager(on))
    late = tuple(replace(ask, arrival=2 * number) for number, ask in enumerate(asks))
    aborted = tuple(replace(ask, abort=7) if ask.id in "bg" else ask for ask in late)
    if on == WINDOWED:
        return _past_windows()
    plain = Schedule(asks, num_rows=4, num_blocks=24, block_size=4, max_batch_tokens=12, max_model_len=48, order=3)
    return [
        replace(plain, depth=2),
        replace(plain, asks=late, num_blocks=9, depth=3, order=1),
        replace(plain, asks=aborted, num_rows=2, max_batch_tokens=5, depth=2, order=5),
        replace(plain, asks=late, failures=(4, 9), depth=3, order=2),
        replace(plain, asks=late, num_rows=6, num_blocks=12, block_size=3, depth=2, order=8),
        replace(plain, asks=_alike(), failures=(1,), depth=2),
        replace(plain, asks=_alike(), block_size=2, depth=3),
        replace(plain, asks=_scored(asks), num_rows=3, depth=3, order=4),
        replace(plain, asks=_scored(late), num_blocks=9, max_batch_tokens=5, depth=2, order=6),
        replace(plain, asks=_scored(aborted), num_blocks=14, max_batch_tokens=7, failures=(6,), depth=3, order=7),
        replace(plain, asks=_crowded(), num_rows=2, num_blocks=6, max_batch_tokens=3, depth=2),
        replace(plain, asks=_guided(late, fixed="bcg"), num_blocks=9, depth=3, order=9),
        replace(plain, asks=_guided(aborted, fixed=""), num_blocks=9, failures=(7,), depth=2, order=10),
        replace(plain, asks=_forced(late), num_blocks=9, depth=3, order=11),
        replace(plain, asks=_forced(asks), num_rows=6, depth=2, order=12),
    ]


def _past_windows() -> list[Schedule]:
    """Two groups of layers, one with a window of 16. Prompts and outputs are longer, and many begin alike."""
    shared = tuple(range(1, 30))
    prompts = [(*shared[:22], 40), (7, 8), (*shared, 41), (60,) * 19, (*shared[:22], 42), shared[:13], (*shared, 43)]
    asks = tuple(
        Ask(f"w{i}", prompt, SamplingParams(max_tokens=MOST_TOKENS, temperature=0.5 * (i % 2)), i, arrival=4 * i)
        for i, prompt in enumerate(prompts)
    )
    plain = Schedule(asks, num_rows=3, num_blocks=60, block_size=4, max_batch_tokens=12, max_model_len=48, order=3)
    return [
        replace(plain, depth=2),
        replace(plain, num_blocks=26, depth=3, order=1),
        replace(plain, num_blocks=44, max_batch_tokens=33, block_size=2, depth=4, order=2, failures=(9,)),
    ]


def _eager(on: str) -> Ask:
    """Would stop at its first token, if it were not for its minimum length."""
    params = SamplingParams(max_tokens=8, temperature=0)
    plain = Ask("h", (2, 7, 1), params, 0)
    stops = judge(on).alone(plain).tokens[:2]
    return replace(plain, params=replace(params, stop_token_ids=stops, min_tokens=3), stop_ids=stops)


def _alike() -> tuple[Ask, ...]:
    """The second shares a prefix that the first is still computing; the fourth begins as the third goes on; the fifth
    is nothing but a prefix."""
    shared = tuple(range(1, 14))
    prompts = [(*shared, 20), (*shared, 30), (9, 9, 9, 9, 5, 6, 7, 8, 1), (5, 6, 7, 8, 2), shared[:12]]
    params = SamplingParams(max_tokens=8, temperature=0)
    return tuple(Ask(f"p{number}", prompt, params, 0, arrival=number) for number, prompt in enumerate(prompts))


def _crowded() -> tuple[Ask, ...]:
    """The second gives way to the first in the middle of its prompt."""
    first = Ask("q0", (3, 5), SamplingParams(max_tokens=12, temperature=0, logprobs=1), 0)
    params = SamplingParams(max_tokens=4, temperature=0, prompt_logprobs=1)
    return first, Ask("q1", tuple(range(20, 37)), params, 0, arrival=1)


def _guided(asks: tuple[Ask, ...], fixed: str) -> tuple[Ask, ...]:
    """Most of them: some by a mask that never changes, one until it is over."""
    rules = {id: Rule(1, waits=id not in fixed) for id in "abcfgh"} | {"e": Rule(2, over_after=4)}
    return tuple(replace(ask, rule=rules.get(ask.id)) for ask in asks)


def _forced(asks: tuple[Ask, ...]) -> tuple[Ask, ...]:
    """All of them: at some places nothing but a few tokens can come."""
    return tuple(replace(ask, rule=Rule(number, forces=True)) for number, ask in enumerate(asks))


def _scored(asks: tuple[Ask, ...]) -> tuple[Ask, ...]:
    return tuple(replace(ask, params=replace(ask.params, **SCORED.get(ask.id, {}))) for ask in asks)


@cache
def judge(on: str) -> Judge:
    """Knows what each request gives alone, once it was asked."""
    return Judge(stage(on), MOST_TOKENS)


def learn(on: str) -> None:
    """Have the judge run every request alone, before any mistake is made."""
    for schedule in schedules(on):
        for ask in schedule.asks:
            judge(on).alone(ask)


# -- who sees it -----------------------------------------------------------------------------------------------------


def of_executor(mistake: Mistake) -> Fault:
    return Fault(mistake.name, make=lambda: partial(mistake.make, edit=mistake.edit()))


def _of_graphs() -> list[Fault]:
    if why_no_stage(GRAPHS) is not None:
        return []
    import shape_faults

    return shape_faults.FAULTS + mask_faults.of_graphs()


FAULTS = [
    fault
    for fault in (
        *state_faults.FAULTS,
        *count_faults.FAULTS,
        *count_faults.OF_GRAPHS,
        *score_faults.FAULTS,
        *mask_faults.FAULTS,
        *_of_graphs(),
        *native_faults.FAULTS,
        *window_faults.FAULTS,
    )
    if why_no_stage(fault.stage) is None
]
ALL = [of_executor(mistake) for mistake in MISTAKES] + FAULTS
STAGES = tuple(dict.fromkeys(fault.stage for fault in ALL))


def seen_by(fault: Fault, detector: str) -> Iterator[str]:
    """Who sees the mistake while one detector looks, schedule after schedule."""
    learn(fault.stage)
    for schedule in schedules(fault.stage):
        with fault.apply():
            played = play(stage(fault.stage), schedule, WATCHES[detector], make_executor=fault.make())
        if played.trouble is not None:
            yield CHECKER if played.trouble.kind == "conflict" else INVARIANT
        elif (
            not all(ask.id in played.reasons for ask in schedule.asks)
            or judge(fault.stage).compare(schedule, played).trouble is not None
        ):
            yield TOKENS


def is_seen(fault: Fault) -> bool:
    """Whether anybody sees the mistake, all looking."""
    return any(True for _ in seen_by(fault, ANYBODY))


def all_who_see(fault: Fault) -> set[str]:
    """Every detector that sees the mistake in some schedule."""
    found: set[str] = set()
    for detector in DETECTORS:
        for who in seen_by(fault, detector):
            found.add(who)
            if detector in found:
                break
    return found


@contextmanager
def timed() -> Iterator[Callable[[], float]]:
    began = time.monotonic()
    yield lambda: time.monotonic() - began


def main() -> int:
    torch.set_num_threads(1)
    num_seen, counts, alone = 0, Counter[str](), Counter[str]()
    with timed() as elapsed:
        for on in STAGES:
            assert not all_who_see(Fault("none", stage=on)), f"something is seen where nothing is wrong: {on}"
        print(f"{'one thing wrong':66} " + " ".join(f"{name:9}" for name in DETECTORS))
        for fault in ALL:
            found = all_who_see(fault)
            num_seen += bool(found)
            counts.update(found)
            alone.update(found if len(found) == 1 else ())
            print(f"{fault.name:66} " + " ".join(f"{'seen' if name in found else '-':9}" for name in DETECTORS))
        for title, sums in (("seen by", counts), ("seen by nobody else", alone)):
            print(f"{title:66} " + " ".join(f"{sums[name]:<9}" for name in DETECTORS))
        print(f"{num_seen} of {len(ALL)} seen ({100 * num_seen / len(ALL):.0f}%), {elapsed():.0f} s")
    return 0 if num_seen == len(ALL) else 1


if __name__ == "__main__":
    sys.exit(main())
