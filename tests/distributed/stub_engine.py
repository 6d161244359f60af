"""An engine process without an engine: each token depends on all tokens before it, so one that is lost, doubled or out
of place changes every token after it. It starts fast, and dies where a prompt asks for it."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Sequence

from gapless.child import become_child
from gapless.server.channel import ChildChannel, Disconnected
from gapless.server.messages import (
    AbortFlight,
    CloseEngine,
    EnginePulse,
    Failed,
    LoadFailed,
    News,
    Over,
    PingLoop,
    Pong,
    Ready,
    Start,
    SubmitFlight,
    ToEngine,
)

STEP_S = 0.002
PULSE_STEPS = 50
POISON = 96  # a prompt with this token takes the engine down
NO_MODEL = "nowhere"
READY = Ready("stub", "float32", "Stub", 97, (), 4096, 8, 64, 16, (None,), 0)
STATS = ("num_generated", "num_prompt_tokens", "num_cached_tokens", "num_overrun", "num_steps", "busy_s")


def next_token(tokens: Sequence[int]) -> int:
    value = 7
    for token in tokens:
        value = (value * 31 + token + 1) % 1_000_003
    return value % 90


def continuation(prompt: Sequence[int], count: int) -> list[int]:
    """What the stub generates."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class Stub:
    """Requests that run, and the thread that steps them."""

    def __init__(self, channel: ChildChannel[ToEngine], started_fd: int) -> None:
        self._channel, self._started_fd = channel, started_fd
        self._flights: dict[int, tuple[list[int], int]] = {}  # tokens, and how many of them there are at the end
        self._lock = threading.Lock()
        self._num_generated = 0

    def submit(self, message: SubmitFlight) -> None:
        prompt, generated = (list(memoryview(data).cast("i")) for data in (message.prompt, message.generated))
        os.write(self._started_fd, message.id.to_bytes(8, "little"))
        with self._lock:
            self._flights[message.id] = (prompt + generated, len(prompt) + message.params.max_tokens)
        if POISON in prompt:
            self._channel.send(Failed("the stub was poisoned", [message.id]))
            os._exit(70)

    def abort(self, id: int) -> None:
        with self._lock:
            if self._flights.pop(id, None) is not None:
                self._channel.send(News([], [], [Over(id, "abort")]))

    def run(self) -> None:
        turn = 0
        while True:
            time.sleep(STEP_S)
            self._step()
            if turn % PULSE_STEPS == 0:
                stats = dict.fromkeys(STATS, 0.0) | {"num_generated": float(self._num_generated)}
                self._channel.send(EnginePulse(turn, False, len(self._flights), 0, 0, 2, 1.0, stats, {}, {"none": 1.0}))
            turn += 1

    def _step(self) -> None:
        with self._lock:
            ids, tokens, over = [], [], []
            for id, (history, end) in list(self._flights.items()):
                history.append(next_token(history))
                ids.append(id)
                tokens.append(history[-1])
                if len(history) == end:
                    over.append(Over(id, "length"))
                    del self._flights[id]
            self._num_generated += len(ids)
            if ids:
                self._channel.send(News(ids, tokens, over))


def main(socket_fd: int, started_fd: int) -> None:
    become_child()
    channel: ChildChannel[ToEngine] = ChildChannel(socket_fd, ToEngine)
    start = channel.receive()
    assert isinstance(start, Start)
    if start.options["model"] == NO_MODEL:
        channel.send(LoadFailed("no such model"))
        os._exit(70)
    channel.send(READY)
    stub = Stub(channel, started_fd)
    threading.Thread(target=stub.run, daemon=True).start()
    while not isinstance(message := channel.receive(), CloseEngine):
        match message:
            case SubmitFlight():
                stub.submit(message)
            case AbortFlight(id):
                stub.abort(id)
            case PingLoop(id):
                channel.send(Pong(id))


if __name__ == "__main__":
    with contextlib.suppress(Disconnected):
        main(int(sys.argv[1]), int(sys.argv[2]))
    os._exit(0)
