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
from collections.abc import Callable, Collection, Mapping, Sequence

from gapless.config import EngineOptions
from gapless.core.limits import all_stop_ids, most_new_tokens
from gapless.core.outcome import how_over
from gapless.core.params import SamplingParams
from gapless.core.structured import Structured
from gapless.errors import GaplessError
from gapless.server.channel import Disconnected
from gapless.server.doorbell import Doorbell
from gapless.server.engine_child import EngineLink, LinkSource, children, describe_exit
from gapless.server.engines import ONLY
from gapless.server.messages import (
    AbortFlight,
    CloseEngine,
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
    Pong,
    Ready,
    SavedTrace,
    Start,
    SubmitFlight,
    ToEngine,
    pack_tokens,
)
from gapless.server.questions import Questions
from gapless.server.roster import Flight, FlightMaker, Roster
from gapless.server.totals import EngineTotals
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
        self,
        options: EngineOptions,
        watchdog: Watchdog | None = None,
        links: LinkSource | None = None,
        doorbell: Doorbell | None = None,
    ) -> None:
        """links: where engine processes come from; default: children of this process."""
        self.options = options
        self.roster = Roster(2 if options.depth == "auto" else options.depth)
        self._doorbell = doorbell or Doorbell()
        self.info: Ready | None = None  # of the latest engine that was ready
        self.pulse: EnginePulse | None = None  # the latest, of the engine that runs
        self.num_restarts = 0
        self.on_over: list[Callable[[Flight], None]] = []
        self.on_crash: list[Callable[[], None]] = []
        self.on_open: list[Callable[[], None]] = []  # ready, and no suspects have to be tried first
        self.counters = EngineTotals()
        self.loaded_share = 0.0  # of the tensors of the engine that is starting
        self.first_ready = asyncio.Event()
        self.is_ready = False
        self._is_open = False
        self._watchdog = watchdog or Watchdog(LOAD_TIMEOUT_S, STEP_TIMEOUT_S)
        self._links = links or children(ENGINE_COMMAND)
        self._closing = False
        self._flights = FlightMaker(options.seed)
        self._questions = Questions(self._send)
        self._child: EngineLink | None = None  # the latest
        self._blamed: Collection[int] = ()
        self._cause = ""

    @property
    def pid(self) -> int | None:
        """Of the engine process."""
        return self._child.pid if self._child is not None else None

    # -- for the API -------------------------------------------------------------------------------------------------

    @property
    def in_quarantine(self) -> bool:
        return self.roster.in_quarantine

    @property
    def num_rows(self) -> int:
        return self.info.num_rows if self.info is not None else 0

    @property
    def status(self) -> str:
        """Whether it serves, in a word."""
        if not self.is_ready:
            return "loading" if self.info is None else "restarting"
        return "recovering" if self.in_quarantine else "ready"

    @property
    def num_running(self) -> int:
        return self.pulse.num_running if self.pulse is not None else 0

    @property
    def kv_use(self) -> float:
        """Share of the KV blocks."""
        return self.pulse.num_used_blocks / self.info.num_blocks if self.pulse and self.info else 0.0

    def unfinished(self) -> list[Flight]:
        return list(self.roster)

    def members(self) -> Mapping[str, Supervisor]:
        return {ONLY: self}

    def totals(self) -> Mapping[str, EngineTotals]:
        return {ONLY: self.counters}

    def submit(
        self, prompt: Sequence[int], params: SamplingParams, changed: asyncio.Event, session: str | None = None
    ) -> Flight:
        """A new flight. It is sent at once, or when the engine is back."""
        flight = self._flights.make(prompt, params, changed)
        self.adopt(flight)
        return flight

    def adopt(self, flight: Flight) -> None:
        """Take on a flight, which may have run in a different engine before: it goes on from the tokens it has."""
        self.roster.add(flight)
        self._send_due()

    def release(self, *, everybody: bool) -> list[Flight]:
        """Let go of flights, which other engines may take on: of those that wait, suspects apart, or of everybody."""
        self._end_unheard()
        flights = list(self.roster) if everybody else self.roster.idle()
        for flight in flights:
            if flight.sent:
                self._send(AbortFlight(flight.id))
            self.roster.remove(flight)
        return flights

    def abort(self, flight: Flight, reason: str = "abort") -> None:
        """End a flight now. The engine frees its blocks within a step."""
        if flight.over is None:
            sent = flight.sent
            self._end(Over(flight.id, reason))
            if sent:
                self._send(AbortFlight(flight.id))
            self._send_due()
            self._tell_open()

    async def ping(self, timeout_s: float) -> bool:
        """Whether the engine's loop answers."""
        return self.is_ready and await self._questions.ping(timeout_s)

    async def timeline(self, seconds: float, timeout_s: float) -> LaneTimes | None:
        """The last seconds of each lane, or None."""
        return await self._questions.timeline(seconds, timeout_s) if self.is_ready else None

    async def trace(self) -> bytes | None:
        """The timeline of the last steps, saved, or None."""
        return await self._questions.trace(TRACE_S) if self.is_ready else None

    async def check_grammar(self, structured: Structured, timeout_s: float) -> GrammarChecked | None:
        """Whether the engine can compile it; None if the engine did not answer."""
        return await self._questions.check_grammar(structured, timeout_s) if self.is_ready else None

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

    def retire(self) -> None:
        """End the engine, which has no requests any more, and start none after it."""
        self._closing = True
        self._send(CloseEngine())

    def kill(self) -> None:
        """End the engine process, now; unless closing, another one follows."""
        if self._child is not None:
            self._child.kill()

    def restart(self) -> None:
        """A single engine is not replaced while it runs: everybody would wait until the new one has loaded."""
        log.warning("nothing is restarted: that needs --replicas")

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

    async def _start(self) -> EngineLink:
        self._blamed, self._cause, self.loaded_share = (), "", 0.0
        self._child = child = await self._links(self.roster.start)
        self._watchdog.start()
        child.send(Start(dataclasses.asdict(self.options)))
        return child

    async def _bury(self, child: EngineLink) -> None:
        """Learn why it died, and hold everybody until the next one is ready."""
        child.close()
        self.is_ready = self._is_open = False
        self.pulse = None
        code = await child.wait()
        self._questions.give_up()
        self.counters.engine_died()
        if not self._closing and not self.first_ready.is_set():
            raise EngineFailed(self._cause or f"the engine process died while loading: {describe_exit(code)}")
        if not self._closing:
            was_killed = code == -signal.SIGKILL and not self._cause
            if was_killed and child.lacked_memory():
                self._cause = "out of memory"
            log.error("the engine process died: %s", self._cause or describe_exit(code), extra={"pid": child.pid})
            self._settle_crash(from_outside=was_killed and not self._cause)

    def _settle_crash(self, *, from_outside: bool) -> None:
        self._end_unheard()
        for flight in self.roster.crash(self._blamed, from_outside=from_outside):
            text = f"this request was running each time the engine died ({self._cause or 'killed'}); it is not retried"
            self._end(Over(flight.id, "refused", error=text))
            log.error("request refused: it took the engine down again", extra={"flight": flight.id})
        for callback in self.on_crash:
            callback()

    def _end_unheard(self) -> None:
        """End flights whose last token came, but not the word that it was the last."""
        for flight in self.roster:
            if flight.tokens and (reason := self._unheard_end(flight)) is not None:
                self._end(Over(flight.id, reason))

    def _unheard_end(self, flight: Flight) -> str | None:
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
        self.counters.observe(pulse)

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
            case Pong() | LaneTimes() | SavedTrace() | GrammarChecked():
                self._questions.take(message)
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
        self._tell_open()

    def _tell_open(self) -> None:
        if self.is_ready and not self._is_open and not self.in_quarantine:
            self._is_open = True
            for callback in self.on_open:
                callback()

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
            self._tell_open()

    def _end(self, over: Over) -> None:
        flight = self.roster.end(over)
        if flight is not None:
            for callback in self.on_over:
                callback(flight)
