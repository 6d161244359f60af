"""The engine process: messages in, submissions to the engine; its news out, a batch at a time. No text, no HTTP.

    main thread     reads messages: submit, abort, ping
    loop's thread   the engine's own; puts news into the outbox and never waits for the socket
    sender thread   takes all that is in the outbox and sends it as one message
    pulse thread    tells every fraction of a second whether the loop moves

A request that is about to run for the first time is written to a pipe of its own by the loop's thread, before the step
is launched: what is in a pipe survives its writer, so the parent knows whom a crash may be due to.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import io
import itertools
import logging
import os
import queue
import struct
import sys
import threading
import time
from concurrent.futures import Future
from functools import partial
from typing import Any, NoReturn

import numpy as np

from gapless.child import become_child
from gapless.config import EngineOptions
from gapless.core.outcome import Finished, Progress, TokenLogprob, prompt_logprobs
from gapless.core.params import SamplingParams
from gapless.core.request import Request
from gapless.core.structured import Structured
from gapless.errors import CompilerBusy, EngineClosed, GaplessError, InvalidRequest, StepFailed
from gapless.garbage import collect_rarely
from gapless.models.source import resolve
from gapless.pipeline.engine import Engine
from gapless.server.channel import ChildChannel, Disconnected
from gapless.server.engine_readings import describe, read_pulse, read_timeline, write_trace
from gapless.server.messages import (
    AbortFlight,
    CloseEngine,
    CompileGrammar,
    Failed,
    GrammarChecked,
    LaneTimes,
    LoadFailed,
    Loading,
    Log,
    News,
    Over,
    PingLoop,
    Pong,
    ReadTimeline,
    ReadTrace,
    SavedTrace,
    Scores,
    Start,
    SubmitFlight,
    ToEngine,
    pack_scores,
)

PULSE_S = 0.2
CAUSES_EVERY = 5  # pulses, while requests run: why the device idled takes almost a millisecond to add up
TRACED_STEPS = 100_000  # 20 MB of memory, and some seconds to write
SCORES = 64  # log-probabilities of a prompt that are packed, and later unpacked, at once
EXIT_FAILED = 70
STARTED = struct.Struct("<q")
log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Scored:
    """Outbox: the log-probabilities of this request's prompt are known. The sender thread puts them into words."""

    id: int
    request: Request


Token = tuple[int, int, TokenLogprob | None]
Item = Token | Scored | Over | Pong | GrammarChecked


def main(socket_fd: int, started_fd: int) -> None:
    """Load what the first message says, then serve until told to close, or until the parent is gone."""
    become_child()
    faulthandler.enable()
    channel: ChildChannel[ToEngine] = ChildChannel(socket_fd, ToEngine)
    try:
        start = channel.receive()
        assert isinstance(start, Start)
        forward_logs(channel)
        engine = load(channel, EngineOptions.from_dict(start.options))
        collect_rarely()
        EngineProcess(engine, channel, started_fd).run()
        write_trace(engine)
    except Disconnected:
        os._exit(0)
    os._exit(0)  # the parent has all it wants; threads of libraries are not waited for


def load(channel: ChildChannel[ToEngine], options: EngineOptions) -> Engine:
    """Build the engine, telling how far it got; a failure is told too, and ends the process."""
    try:
        with LoadingSigns(channel) as signs:
            return Engine(options, resolve(options.model), signs.progress, TRACED_STEPS)
    except Exception as error:
        channel.send(LoadFailed(str(error) if isinstance(error, GaplessError) else f"{type(error).__name__}: {error}"))
        os._exit(EXIT_FAILED)


class LoadingSigns:
    """Tells the parent every fraction of a second how far loading has got, while the block runs."""

    def __init__(self, channel: ChildChannel[ToEngine]) -> None:
        self._channel = channel
        self._done, self._total = 0, 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=_or_exit, args=(self._send,), name="gapless-loading", daemon=True)

    def progress(self, done: int, total: int) -> None:
        self._done, self._total = done, total

    def __enter__(self) -> LoadingSigns:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join()

    def _send(self) -> None:
        while True:
            self._channel.send(Loading(self._done, self._total, round(time.process_time(), 1)))
            if self._over.wait(PULSE_S):
                return


class EngineProcess:
    """An engine, and the parent's requests in it."""

    def __init__(self, engine: Engine, channel: ChildChannel[ToEngine], started_fd: int) -> None:
        self._engine = engine
        self._channel = channel
        self._started_fd = started_fd
        os.set_blocking(started_fd, False)
        self._requests: dict[int, Request] = {}
        self._outbox: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._began_s = time.monotonic()
        self._suspects: list[int] = []
        self._scored: set[int] = set()  # requests whose prompt's log-probabilities were told

    def run(self) -> None:
        """Serve until the parent says close or is gone."""
        self._channel.send(describe(self._engine))
        self._engine.prepare_grammars()
        for name, target in (("sender", self._send_news), ("pulse", self._send_pulses)):
            threading.Thread(target=_or_exit, args=(target,), name=f"gapless-{name}", daemon=True).start()
        while not isinstance(message := self._channel.receive(), CloseEngine):
            self._handle(message)

    # -- main thread -------------------------------------------------------------------------------------------------

    def _handle(self, message: ToEngine) -> None:
        match message:
            case SubmitFlight():
                self._submit(message)
            case AbortFlight(id):
                if (request := self._requests.get(id)) is not None:
                    self._engine.abort(request.id)
            case PingLoop(id):
                self._engine.ping(partial(self._outbox.put, Pong(id)))
            case CompileGrammar(id, structured):
                self._compile(id, structured)
            case ReadTrace(id):
                data = io.BytesIO()
                self._engine.monitor.timeline().save(data)
                self._channel.send(SavedTrace(id, data.getvalue()))
            case ReadTimeline(id, seconds):
                self._channel.send(LaneTimes(id, *read_timeline(self._engine.monitor, seconds)))
            case _:
                raise AssertionError(f"unexpected {type(message).__name__}")

    def _submit(self, message: SubmitFlight) -> None:
        prompt, generated = (np.frombuffer(data, "<i4") for data in (message.prompt, message.generated))
        try:
            request = self._engine.make_request(prompt, message.params, streams=True, generated=generated)
            self._requests[message.id] = request
            self._engine.submit(
                request, partial(self._deliver, message.id), partial(self._write_started, STARTED.pack(message.id))
            )
        except InvalidRequest as error:
            self._requests.pop(message.id, None)
            self._outbox.put(Over(message.id, "invalid", error=str(error), param=error.param))
        except EngineClosed as error:
            self._fail(error)

    def _compile(self, id: int, structured: Structured) -> None:
        """Answer when the grammar is compiled, from whichever thread that is."""
        try:
            future = self._engine.compile(SamplingParams(structured=structured))
        except EngineClosed as error:
            self._fail(error)
        assert future is not None

        def answer(done: Future[Any]) -> None:
            error = done.exception()
            refusal = None if error is None else str(error)
            self._outbox.put(GrammarChecked(id, refusal, is_busy=isinstance(error, CompilerBusy)))

        future.add_done_callback(answer)

    # -- loop's thread -----------------------------------------------------------------------------------------------

    def _write_started(self, data: bytes) -> None:
        try:
            os.write(self._started_fd, data)
        except BlockingIOError:
            log.warning("the parent does not read which requests start")

    def _deliver(self, id: int, news: Progress | Finished) -> None:
        if isinstance(news, Progress):
            if news.request.params.prompt_logprobs is not None and id not in self._scored:
                self._scored.add(id)
                self._outbox.put(Scored(id, news.request))
            self._outbox.put((id, news.token, news.logprob))
            return
        if isinstance(news.error, EngineClosed):
            self._fail(news.error)
        if isinstance(news.error, StepFailed):
            self._suspects.append(id)
            if len(self._suspects) == 1:
                self._engine.ping(partial(self._fail, news.error))  # once all requests of the step were told
            return
        del self._requests[id]
        self._scored.discard(id)
        error = str(news.error) if news.error is not None else None
        if isinstance(news.error, InvalidRequest):  # its grammar turned out to be too complex
            self._outbox.put(Over(id, "invalid", news.request.num_cached, error, news.error.param))
        else:
            self._outbox.put(Over(id, news.reason, news.request.num_cached, error))

    def _fail(self, error: BaseException) -> NoReturn:
        """Last words. The parent starts another engine, in which everybody goes on; a suspect twice, alone."""
        self._channel.send(Failed(str(error), self._suspects))
        os._exit(EXIT_FAILED)

    # -- sender and pulse threads ------------------------------------------------------------------------------------

    def _send_news(self) -> None:
        while True:
            items = [self._outbox.get()]
            try:
                while True:
                    items.append(self._outbox.get_nowait())
            except queue.Empty:
                self._channel.send(self._news(items))
            for item in items:
                if isinstance(item, Pong | GrammarChecked):
                    self._channel.send(item)

    def _news(self, items: list[Item]) -> News:
        tokens = [item for item in items if isinstance(item, tuple)]
        scored = [item for item in items if isinstance(item, Scored)]
        return News(
            ids=[id for id, _, _ in tokens],
            tokens=[token for _, token, _ in tokens],
            over=[item for item in items if isinstance(item, Over)],
            logprobs={i: pack_scores([score]) for i, (_, _, score) in enumerate(tokens) if score is not None},
            prompt_logprobs={item.id: _prompt_scores(item.request) for item in scored},
        )

    def _send_pulses(self) -> None:
        engine, monitor = self._engine, self._engine.monitor
        for number in itertools.count():
            if engine.death is not None:  # while nobody had a request whose end would tell
                self._fail(EngineClosed(f"the engine died: {engine.death}"))
            if number % CAUSES_EVERY == 0 or engine.pulse().idle:
                idle_s = monitor.idle_by_cause()
            self._channel.send(read_pulse(engine, time.monotonic() - self._began_s, idle_s))
            time.sleep(PULSE_S)


def _or_exit(target: object) -> None:
    """A thread without which the parent would wait in vain takes the process along."""
    assert callable(target)
    try:
        target()
    except Disconnected:
        os._exit(0)
    except BaseException:
        log.exception("a thread of the engine process died")
        os._exit(EXIT_FAILED)


def _prompt_scores(request: Request) -> list[Scores]:
    scores = prompt_logprobs(request) or ()
    return [pack_scores(scores[start : start + SCORES]) for start in range(0, len(scores), SCORES)]


class _Forward(logging.Handler):
    """Log records to the parent, which has the one log."""

    def __init__(self, channel: ChildChannel[ToEngine]) -> None:
        super().__init__()
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        self._channel.send(Log(record.levelno, record.name, self.format(record)))


def forward_logs(channel: ChildChannel[ToEngine]) -> None:
    logging.root.handlers[:] = [_Forward(channel)]
    logging.root.setLevel(logging.INFO)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
