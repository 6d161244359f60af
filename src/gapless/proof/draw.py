"""Draws random schedules: arrivals, aborts, chunk sizes, so little memory that requests are preempted, stream orders.

The same dice give the same schedule. Knows the limits of a stage, and nothing of how a schedule is played.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gapless.core.params import SamplingParams, derive_seed
from gapless.proof.rule import Rule
from gapless.proof.schedule import Ask, Schedule
from gapless.proof.stage import Room


@dataclass(frozen=True, slots=True)
class Menu:
    """The choices from which schedules are drawn."""

    block_sizes: Sequence[int] = (4, 8, 16)
    most_requests: int = 8
    most_tokens: int = 8  # to generate, each
    last_arrival: int = 12
    failing_share: float = 0.0  # of the schedules in which a step fails
    threads_share: float = 0.2  # of those that run on threads, on a CPU
    repeated_share: float = 0.3  # of those in which a prompt comes several times at once, with a seed each
    steady_share: float = 0.0  # of those whose batches are the same at any depth: nothing is scarce, nothing ends early


Vary = Callable[[random.Random, Ask], Ask]


def draw_schedule(
    dice: random.Random,
    asks: Sequence[Ask],
    room: Room,
    menu: Menu,
    vary: Vary = lambda dice, ask: ask,
) -> Schedule:
    """A schedule of some of the asks, each perhaps more than once and each perhaps as a variant."""
    steady = dice.random() < menu.steady_share
    count = dice.randint(2, menu.most_requests)
    picked = [vary(dice, dice.choice(asks)) for _ in range(count)]
    chosen = [_place(dice, ask, number, menu, steady=steady) for number, ask in enumerate(picked)]
    if dice.random() < menu.repeated_share:
        chosen = _repeated(chosen, dice.randint(2, count))
    block_size = dice.choice(menu.block_sizes)
    most = room.limits(block_size).num_blocks
    needed = max(room.least_blocks(ask.length, block_size) for ask in chosen)
    num_rows = count if steady else min(room.num_rows, max(dice.randint(1, count), dice.randint(1, count)))
    scarce = not steady and dice.random() < 0.6
    return Schedule(
        asks=tuple(chosen),
        num_rows=num_rows,
        num_blocks=min(most, needed + dice.randint(0, -(-needed // 3))) if scarce else most,
        block_size=block_size,
        max_batch_tokens=_batch_tokens(dice, num_rows, room),
        max_model_len=room.max_model_len,
        prefix_cache=dice.random() < 0.75,
        depth=2,
        order=dice.randrange(2**31),
        threads=dice.random() < menu.threads_share,
        failures=_failures(dice, menu),
    )


def _repeated(asks: Sequence[Ask], times: int) -> list[Ask]:
    """The first of them this many times, like one client's `n` completions, and others of the rest."""
    first = asks[0]
    copies = [dataclasses.replace(first, id=f"{first.id}.n{i}", seed=derive_seed(first.seed, i)) for i in range(times)]
    return [*copies, *asks[times:]]


def _place(dice: random.Random, ask: Ask, number: int, menu: Menu, *, steady: bool) -> Ask:
    arrival = dice.choice((0, dice.randint(0, 3), dice.randint(0, menu.last_arrival)))
    abort = arrival + dice.randint(0, 2 * menu.most_tokens) if dice.random() < 0.2 else None
    most = min(menu.most_tokens, ask.params.max_tokens)
    max_tokens = dice.randint(max(1, ask.params.min_tokens, most // 2), max(1, ask.params.min_tokens, most))
    changes = {"max_tokens": max_tokens, "stop": ()} if steady else {"max_tokens": max_tokens}
    params = dataclasses.replace(ask.params, **changes)
    stop_ids, rule = () if steady else ask.stop_ids, ask.rule
    if steady and rule is not None:
        rule = dataclasses.replace(rule, over_after=None, fails_after=None)
    name = f"{ask.id}.{number}"
    return dataclasses.replace(ask, id=name, params=params, stop_ids=stop_ids, arrival=arrival, abort=abort, rule=rule)


def _batch_tokens(dice: random.Random, num_rows: int, room: Room) -> int:
    """Every row must fit into a step; a small value splits prompts into chunks."""
    wanted = dice.choice((num_rows, num_rows + 3, 8, 16, 33, 64, room.max_batch_tokens))
    return min(max(wanted, num_rows), room.max_batch_tokens)


def _failures(dice: random.Random, menu: Menu) -> tuple[int, ...]:
    if dice.random() >= menu.failing_share:
        return ()
    return tuple(sorted(dice.sample(range(1, 30), dice.randint(1, 3))))


def draw_asks(
    dice: random.Random, vocab_size: int, count: int, most_tokens: int, *, longest: int = 24, text_stops: bool = False
) -> list[Ask]:
    """Requests of random tokens, many with common prefixes, with random sampling parameters."""
    shared = [dice.randrange(vocab_size) for _ in range(longest)]
    asks = []
    for number in range(count):
        begins = shared[: dice.choice((0, 0, dice.randint(1, longest)))]
        prompt = begins + [dice.randrange(vocab_size) for _ in range(dice.randint(0, longest // 2))]
        params = _params(dice, vocab_size, most_tokens, text_stops=text_stops)
        seed = dice.randrange(-(2**63), 2**63)
        rule = draw_rule(dice, most_tokens)
        asks.append(Ask(f"r{number}", tuple(prompt or shared[:1]), params, seed, params.stop_token_ids, rule=rule))
    return asks


def draw_rule(dice: random.Random, most_tokens: int) -> Rule | None:
    """Often none; a mask that changes with each token or never does; one that ends, fails, or leaves no choice."""
    if dice.random() < 0.6:
        return None
    if dice.random() < 0.2:
        return Rule(dice.randrange(2**31), waits=False)
    over, fails = (dice.randint(1, most_tokens) if dice.random() < 0.15 else None for _ in range(2))
    return Rule(dice.randrange(2**31), over_after=over, fails_after=fails, forces=dice.random() < 0.5)


def _params(dice: random.Random, vocab_size: int, most_tokens: int, *, text_stops: bool) -> SamplingParams:
    max_tokens = dice.randint(1, most_tokens)
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=dice.choice((0, 0, dice.randint(0, max_tokens))),
        temperature=dice.choice((0.0, 0.0, 0.5, 1.0, 2.0)),
        top_k=dice.choice((0, 0, 1, 7)),
        top_p=dice.choice((1.0, 1.0, 0.9, 0.5)),
        min_p=dice.choice((0.0, 0.0, 0.1)),
        typical_p=dice.choice((1.0, 1.0, 1.0, 0.8)),
        top_n_sigma=dice.choice((0.0, 0.0, 0.0, 1.5)),
        repetition_penalty=dice.choice((1.0, 1.0, 0.7, 1.3)),
        presence_penalty=dice.choice((0.0, 0.0, 0.0, -1.0)),
        frequency_penalty=dice.choice((0.0, 0.0, -0.5, 2.0)),
        logit_bias=tuple((token, dice.uniform(-3, 3)) for token in _few(dice, vocab_size, (0, 0, 0, 1, 5))),
        bad_token_ids=_few(dice, vocab_size, (0, 0, 0, 3)),
        bad_words=tuple(_few(dice, vocab_size, (2,)) for _ in range(dice.choice((0, 0, 0, 9)))),
        stop=tuple(dice.sample("aeiotnABCDE ", 3)) if text_stops and dice.random() < 0.2 else (),
        stop_token_ids=tuple(dice.sample(range(vocab_size), dice.choice((0, 0, 1, 8)))),
        logprobs=dice.choice((None, None, 0, 3)),
        prompt_logprobs=dice.choice((None, None, None, 0, 5)),
    )


def _few(dice: random.Random, vocab_size: int, counts: Sequence[int]) -> tuple[int, ...]:
    """Different tokens, as many as one of these counts."""
    return tuple(dice.sample(range(vocab_size), min(dice.choice(counts), vocab_size - 1)))
