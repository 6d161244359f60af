"""When an engine process counts as stuck, by a clock that the test moves."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from gapless.server.engine_process import LoadingSigns
from gapless.server.messages import EnginePulse, Loading
from gapless.server.watchdog import Watchdog


@dataclass
class Clock:
    now_s: float = 50.0

    def __call__(self) -> float:
        return self.now_s


def make() -> tuple[Watchdog, Clock]:
    clock = Clock()
    watchdog = Watchdog(load_timeout_s=10.0, step_timeout_s=2.0, clock=clock)
    watchdog.start()
    return watchdog, clock


def pulse(num_turns: int, *, idle: bool = False) -> EnginePulse:
    return EnginePulse(num_turns, idle, 1, 0, 1, 2, 1.0, {}, {}, {})


def test_a_load_in_silence_is_overdue() -> None:
    watchdog, clock = make()
    clock.now_s += 9.0
    assert watchdog.overdue() is None
    clock.now_s += 2.0
    assert watchdog.overdue() == "loading made no progress within 10 s"


def test_a_load_that_moves_may_take_as_long_as_it_takes() -> None:
    """Tensors count, and so does work that loads none: compiling, capturing."""
    watchdog, clock = make()
    for number in range(20):
        clock.now_s += 9.0
        watchdog.see_loading(Loading(number, 20, 1.0) if number < 10 else Loading(10, 20, float(number)))
        assert watchdog.overdue() is None


def test_a_load_that_is_stuck_is_overdue_although_its_signs_come() -> None:
    watchdog, clock = make()
    for _ in range(12):
        clock.now_s += 1.0
        watchdog.see_loading(Loading(3, 20, 1.0))
    assert watchdog.overdue() is not None


def test_a_new_process_has_all_of_the_time() -> None:
    watchdog, clock = make()
    clock.now_s += 11.0
    watchdog.start()
    assert watchdog.overdue() is None


def test_steps_have_a_deadline_of_their_own() -> None:
    watchdog, clock = make()
    watchdog.ready()
    for turn in range(5):
        clock.now_s += 1.5
        watchdog.see_pulse(pulse(turn))
        assert watchdog.overdue() is None
    clock.now_s += 1.5
    watchdog.see_pulse(pulse(4))
    clock.now_s += 1.0
    assert watchdog.overdue() == "no step ended within 2 s"
    watchdog.see_pulse(pulse(4, idle=True))
    assert watchdog.overdue() is None


@dataclass
class FakeChannel:
    sent: list[Any] = field(default_factory=list)

    def send(self, message: Any) -> None:
        self.sent.append(message)


def test_a_loading_engine_gives_signs_by_itself() -> None:
    channel: Any = FakeChannel()
    with LoadingSigns(channel) as signs:
        signs.progress(3, 7)
        deadline = time.monotonic() + 20.0
        while len(channel.sent) < 4 and time.monotonic() < deadline:  # the loading thread does nothing meanwhile
            time.sleep(0.01)
    count = len(channel.sent)
    assert count >= 4
    assert (channel.sent[-1].done, channel.sent[-1].total) == (3, 7)
    time.sleep(0.3)
    assert len(channel.sent) == count
