"""Readers of flights: woken for every token while they are few, in turns and with several tokens when they are many."""

from __future__ import annotations

import asyncio

from gapless.core.params import SamplingParams
from gapless.server.doorbell import MOST_AT_ONCE, Doorbell
from gapless.server.messages import Over
from gapless.server.roster import Flight, Roster


def flights(count: int) -> list[Flight]:
    return [Flight(i, [1], SamplingParams(seed=i), asyncio.Event()) for i in range(count)]


def woken(some: list[Flight]) -> list[int]:
    """Who was woken since the last look; they look, too."""
    found = [flight.id for flight in some if flight.changed.is_set()]
    for flight in some:
        flight.changed.clear()
    return found


def test_few_readers_are_woken_at_once() -> None:
    async def main() -> None:
        few, bell = flights(8), Doorbell(reader_s=1e-3, clock=lambda: 0.0)
        for flight in few:
            bell.line_up(flight)
        bell.ring()
        assert woken(few) == list(range(8))

    asyncio.run(main())


def test_many_readers_are_woken_in_turns_in_their_order() -> None:
    async def main() -> None:
        now_s = [0.0]
        many, bell = flights(MOST_AT_ONCE + 100), Doorbell(reader_s=1e-3, clock=lambda: now_s[0])

        def step() -> list[int]:
            for flight in many:
                bell.line_up(flight)
            bell.ring()
            return woken(many)

        assert step() == list(range(MOST_AT_ONCE))
        assert step() == []  # no time has passed
        now_s[0] += 0.0105
        assert step() == list(range(MOST_AT_ONCE, MOST_AT_ONCE + 10))  # one a millisecond, those that waited longest
        turns = [step() for _ in range(1)]
        for _ in range(400):
            now_s[0] += 0.001
            turns.append(step())
        counts = [sum(turn.count(flight.id) for turn in turns) for flight in many]
        assert min(counts) >= 1
        assert max(counts) - min(counts) <= 1  # nobody is served twice while another waits

    asyncio.run(main())


def test_who_is_left_is_woken_though_nobody_rings_again() -> None:
    async def main() -> None:
        many, bell = flights(MOST_AT_ONCE + 5), Doorbell(reader_s=1e-4)
        for flight in many:
            bell.line_up(flight)
        bell.ring()
        assert len(woken(many)) < len(many)
        async with asyncio.timeout(10):
            await asyncio.gather(*(flight.changed.wait() for flight in many[MOST_AT_ONCE:]))

    asyncio.run(main())


def test_a_reader_that_was_told_is_not_woken_again() -> None:
    async def main() -> None:
        (flight,), bell = flights(1), Doorbell(reader_s=1e-3, clock=lambda: 0.0)
        flight.changed.set()
        bell.line_up(flight)
        assert not flight.in_line
        flight.changed.clear()
        bell.line_up(flight)
        flight.over = Over(0, "stop")
        bell.ring()
        assert not flight.changed.is_set()  # its end was told by the roster

    asyncio.run(main())


def test_the_first_token_and_the_end_do_not_stand_in_line() -> None:
    roster, (flight,) = Roster(), flights(1)
    roster.add(flight)
    roster.due()
    roster.start(0)
    roster.take_token(0, 5)
    assert woken([flight]) == [0]
    roster.take_token(0, 6)
    assert woken([flight]) == []
    roster.end(Over(0, "stop"))
    assert woken([flight]) == [0]
