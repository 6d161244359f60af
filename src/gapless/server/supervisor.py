"""Starts the engine process, watches it, and starts it again when it dies, with everybody in it.

Owns the engine process of the moment and the roster. A client's stream never ends because the engine did: its
flight is sent again with the tokens it already has, and the draws of the rest depend on seed and position only.
Knows no text and no HTTP.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import signal
import sys
import time
from collections.abc import Callable, Collection, Sequence

from gapless.config import EngineOptions
from gapless.core.limits import all_stop_ids, most_new_tokens
from gapless.core.outcome import how_over
from gapless.core.params import SamplingParams, derive_seed
from gapless.core.structured import Structured
from gapless.errors import GaplessError
from gapless.server.channel import Disconnected
from gapless.server.doorbell import Doorbell
from gapless.server.engine_child import EngineChild, describe_exit
from gapless.server.messages import (
    AbortFlight,
    CloseEngine,
    CompileGrammar,
    EnginePulse,
    Failed,
    FromEngine,
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
    Ready,
    Start,
    SubmitFlight,
    ToEngine,
    pack_tokens,
)
from gapless.server.roster import Flight, Roster
from gapless.server.watchdog import Watchdog

log = logging.getLogger(__name__)

ENGINE_COMMAND = (sys.executable, "-m", "gapless.server.engine_process")
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 30.0  # before a restart; doubled while the engine does not become ready
WATCH_S = 0.1
CLOSE_S = 2.0  # for the engine process to end by itself
TRACE_S = 60.0  # and to write its timeline, where one is wanted
LOAD_TIMEOUT_S, STEP_TIMEOUT_S = 120.0, 60.0


class EngineFailed(GaplessError):
    """The first engine could not be loaded. Later ones are tried again and again."""


class Supervisor:
    """The engine as the API sees it: submit, abort, ping; always there, sometimes slow."""

    def __init__(
        self, options: EngineOptions, watchdog: Watchdog | None = None, command: Sequence[str] = ENGINE_COMMAND
    ) -> None:
        self.options = options
        self.roster = Roster(2 if options.depth == "auto" else options.depth)
        self._doorbell = Doorbell()
        self.info: Ready | None = None  # of the latest engine that was ready
        self.pulse: EnginePulse | None = None  # the latest, of the engine that runs
        self.num_restarts = 0
        self.on_over: list[Callable[[Flight], None]] = []
        self.on_pulse: list[Callable[[EnginePulse], None]] = []
        self.on_crash: list[Callable[[], None]] = []
        self.loaded_share = 0.0  # of the tensors of the engine that is starting
        self.first_ready = asyncio.Event()
        self.is_ready = False
        self._watchdog = watchdog or Watchdog(LOAD_TIMEOUT_S, STEP_TIMEOUT_S)
        self._command = tuple(command)
        self._closing = False
        self._num_flights = 0
        self._num_questions = 0
        self._answers: dict[int, asyncio.Future[Pong | LaneTimes | GrammarChecked]] = {}
        self._child: EngineChild | None = None  # the latest
        self._blamed: Collection[int] = ()
        self._cause = ""

    @property
    def pid(self) -> int | None:
        """Of the engine process."""
        return self._child.pid if self._child is not None else None

    # -- for the API -------------------------------------------------------------------------------------------------

    def submit(self, prompt: Sequence[int], params: SamplingParams, changed: asyncio.Event) -> Flight:
        """A new flight. It is sent at once, or when the engine is back."""
        if params.seed is None:
            params = dataclasses.replace(params, seed=derive_seed(self.options.seed, self._num_flights))
        flight = Flight(self._num_flights, prompt, params, changed)
        self._num_flights += 1
        self.roster.add(flight)
        self._send_due()
        return flight

    def abort(self, flight: Flight, reason: str = "abort") -> None:
        """End a flight now. The engine frees its blocks within a step."""
        if flight.over is None:
            sent = flight.sent
            self._end(Over(flight.id, reason))
            if sent:
                self._send(AbortFlight(flight.id))
            self._send_due()

    async def ping(self, timeout_s: float) -> bool:
        """Whether the engine's loop answers."""
        return await self._ask(PingLoop, timeout_s) is not None

    async def timeline(self, seconds: float, timeout_s: float) -> LaneTimes | None:
        """The last seconds of each lane, or None."""
        answer = await self._ask(lambda id: ReadTimeline(id, seconds), timeout_s)
        return answer if isinstance(answer, LaneTimes) else None

    async def check_grammar(self, structured: Structured, timeout_s: float) -> GrammarChecked | None:
        """Whether the engine can compile it; None if the engine did not answer."""
        answer = await self._ask(lambda id: CompileGrammar(id, structured), timeout_s)
        return answer if isinstance(answer, GrammarChecked) else None

    async def _ask(
        self, question: Callable[[int], PingLoop | ReadTimeline | CompileGrammar], timeout_s: float
    ) -> Pong | LaneTimes | GrammarChecked | None:
        if not self.is_ready:
            return None
        self._num_questions += 1
        id = self._num_questions
        self._answers[id] = asyncio.get_running_loop().create_future()
        self._send(question(id))
        try:
            async with asyncio.timeout(timeout_s):
                return await self._answers[id]
        except (TimeoutError, Disconnected):
            return None
        finally:
            del self._answers[id]

    # -- the life of engines -----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep an engine running until closed. Raises EngineFailed when there never can be one."""
        pause_s = FIRST_PAUSE_S
        while not self._closing:
            was_ready = await self._run_once()
            if self._closing:
                return
            pause_s = FIRST_PAUSE_S if was_ready else min(2 * pause_s, LONGEST_PAUSE_S)
            self.num_restarts += 1
            await asyncio.sleep(pause_s)

    async def close(self) -> None:
        """End the engine and all flights."""
        self._closing = True
        for flight in self.roster:
            self._end(Over(flight.id, "abort"))
        self._send(CloseEngine())
        if self._child is not None:
            deadline = time.monotonic() + (TRACE_S if self.options.trace else CLOSE_S)
            while self._child.is_alive and time.monotonic() < deadline:
                await asyncio.sleep(0.01)
        self.kill()

    def kill(self) -> None:
        """End the engine process, now; unless closing, another one follows."""
        if self._child is not None:
            self._child.kill()

    async def _run_once(self) -> bool:
        """One engine process, from start to death; whether it was ever ready."""
        child = await self._start()
        watch = asyncio.create_task(self._watch())
        was_ready = False
        try:
            while True:
                self._take(await child.receive())
                was_ready = was_ready or self.is_ready
        except Disconnected:
            self.kill()  # its socket is closed: if it is still there, it is of no more use
        finally:
            watch.cancel()
            await self._bury(child)
        return was_ready

    async def _start(self) -> EngineChild:
        self._blamed, self._cause, self.loaded_share = (), "", 0.0
        self._watchdog.start()
        self._child = child = EngineChild(self._command, self.roster.start)
        await child.open()
        child.send(Start(dataclasses.asdict(self.options)))
        return child

    async def _bury(self, child: EngineChild) -> None:
        """Learn why it died, and hold everybody until the next one is ready."""
        child.close()
        self.is_ready = False
        self.pulse = None
        code = await child.wait()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(Disconnected())
        if not self._closing and not self.first_ready.is_set():
            raise EngineFailed(self._cause or f"the engine process died while loading: {describe_exit(code)}")
        if not self._closing:
            was_killed = code == -signal.SIGKILL and not self._cause
            if was_killed and child.lacked_memory():
                self._cause = "out of memory"
            log.error("the engine process died: %s", self._cause or describe_exit(code), extra={"pid": child.pid})
            self._settle_crash(from_outside=was_killed and not self._cause)

    def _settle_crash(self, *, from_outside: bool) -> None:
        for flight in self.roster:
            if (reason := self._unheard_end(flight)) is not None:
                self._end(Over(flight.id, reason))
        for flight in self.roster.crash(self._blamed, from_outside=from_outside):
            text = f"this request was running each time the engine died ({self._cause or 'killed'}); it is not retried"
            self._end(Over(flight.id, "refused", error=text))
            log.error("request refused: it took the engine down again", extra={"flight": flight.id})
        for callback in self.on_crash:
            callback()

    def _unheard_end(self, flight: Flight) -> str | None:
        """How a flight ended whose last token came, but not the word that it was the last."""
        params, info = flight.params, self.info
        assert info is not None
        stop_ids = all_stop_ids(params, info.eos_token_ids, info.vocab_size)
        return how_over(flight.tokens, params, stop_ids, most_new_tokens(len(flight.prompt), params, info))

    # -- watching ----------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Kill an engine that stands still."""
        while (overdue := self._watchdog.overdue()) is None:
            await asyncio.sleep(WATCH_S)
        self._cause = overdue
        self.kill()

    def _observe(self, pulse: EnginePulse) -> None:
        self.pulse = pulse
        self._watchdog.see_pulse(pulse)
        for callback in self.on_pulse:
            callback(pulse)

    # -- messages ----------------------------------------------------------------------------------------------------

    def _send(self, message: ToEngine) -> None:
        if self._child is not None:
            self._child.send(message)

    def _send_due(self) -> None:
        if self.is_ready:
            for flight in self.roster.due():
                params = dataclasses.replace(flight.params, stop=())
                if flight.tokens:  # its prompt's log-probabilities came with the first of them
                    params = dataclasses.replace(params, prompt_logprobs=None)
                self._send(SubmitFlight(flight.id, pack_tokens(flight.prompt), flight.tokens.tobytes(), params))

    def _take(self, message: FromEngine) -> None:
        match message:
            case News():
                self._take_news(message)
            case EnginePulse():
                self._observe(message)
            case Pong(id) | LaneTimes(id) | GrammarChecked(id):
                if (answer := self._answers.get(id)) is not None and not answer.done():
                    answer.set_result(message)
            case Ready():
                self._be_ready(message)
            case Log(level, name, text):
                logging.getLogger(name).log(level, text)
            case Failed(text, suspects):
                self._cause, self._blamed = text, suspects
            case LoadFailed(text):
                self._cause = text
            case Loading(done, total):
                self._watchdog.see_loading(message)
                self.loaded_share = done / max(total, 1)

    def _be_ready(self, info: Ready) -> None:
        self.info = info
        self._watchdog.ready()
        self.is_ready = True
        self.first_ready.set()
        log.info("the engine is ready", extra={"pid": self.pid, "device": info.device, "resumed": len(self.roster)})
        self._send_due()

    def _take_news(self, news: News) -> None:
        in_quarantine = self.roster.in_quarantine
        for id, scores in news.prompt_logprobs.items():
            self.roster.take_prompt_logprobs(id, scores)
        for index, (id, token) in enumerate(zip(news.ids, news.tokens, strict=True)):
            if (flight := self.roster.take_token(id, token, news.logprobs.get(index))) is not None:
                self._doorbell.line_up(flight)
        for over in news.over:
            if not self.roster.take_back(over):
                self._end(over)
        self._doorbell.ring()
        if in_quarantine:
            if (heard := self.roster.due_back()) is not None:
                self._send(AbortFlight(heard.id))
            self._send_due()

    def _end(self, over: Over) -> None:
        flight = self.roster.end(over)
        if flight is not None:
            for callback in self.on_over:
                callback(flight)
