"""The engine as its clients see it: submit, abort, close. Owns the loop's thread.

A client only puts a message into the inbox. The loop's thread alone touches scheduler and executor, and hands results
to the callback that came with the request. A callback must not block: it runs between two steps.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from gapless.config import EngineOptions
from gapless.core.params import SamplingParams, derive_seed
from gapless.core.processor import LogitsProcessor, applying, check_processors
from gapless.core.request import IntArray, Request
from gapless.errors import EngineClosed, InvalidRequest
from gapless.models.source import ModelSource
from gapless.pipeline.assembly import put_together
from gapless.pipeline.grammars import Grammars
from gapless.pipeline.inbox import Abort, Close, Compiled, Deliver, Loss, Ping, Submit, call_safely
from gapless.pipeline.intake import make_request
from gapless.pipeline.loop import run_loop
from gapless.pipeline.monitor import Monitor
from gapless.pipeline.readings import Load, Pulse, Stats
from gapless.pipeline.subscribers import Subscribers, refuse
from gapless.runner.memory import shortage_named
from gapless.runner.resolve import Resolved, resolve

log = logging.getLogger(__name__)

__all__ = ["Engine", "Load", "Monitor", "Pulse", "Resolved", "Stats", "derive_seed", "resolve"]


class Engine:
    """Runs requests until closed."""

    @shortage_named("the engine")
    def __init__(
        self,
        options: EngineOptions,
        source: ModelSource,
        progress: Callable[[int, int], None] | None = None,
        traced_steps: int | None = None,
        processors: Sequence[LogitsProcessor] = (),
    ) -> None:
        """traced_steps: how many steps a trace has at most; the last ones. processors: of logits, in this order."""
        self.options = options
        self._inbox: queue.SimpleQueue[Submit | Abort | Ping | Compiled | Loss | Close] = queue.SimpleQueue()
        self._subscribers = Subscribers(self.abort)
        self._processors = check_processors(processors)
        self._parts = put_together(
            options,
            source,
            self._subscribers.announce,
            lambda error: self._inbox.put(Loss(error)),
            progress,
            traced_steps,
            processed=bool(processors),
        )
        self.resolved = self._parts.built.resolved
        self.monitor = Monitor(options, self._parts)
        self._scheduler = self._parts.scheduler
        self._grammars = Grammars(self._parts.compiler, self._scheduler, lambda r: self._inbox.put(Compiled(r)))
        self._pid = os.getpid()
        self._num_turns = 0
        self._idle = False
        self._closing = False
        self._error: BaseException | None = None
        self._num_requests = 0
        self._lock = threading.Lock()  # of what callers share: closing and the request count
        self._thread = threading.Thread(target=self._run, name="gapless-loop", daemon=True)
        self._thread.start()

    # -- callers' side -------------------------------------------------------------------------------------------

    def make_request(
        self,
        prompt: Sequence[int] | IntArray,
        params: SamplingParams,
        *,
        streams: bool = False,
        generated: Sequence[int] | IntArray = (),
    ) -> Request:
        """Check a prompt against model and limits, and give it an id and a seed. Raises InvalidRequest.

        With `generated`, tokens that another engine already sampled for it with the same seed, the request goes on
        after them; they count as generated, not as prompt.
        """
        self.check_process()
        processors = applying(self._processors, params)
        with self._lock:
            number = self._num_requests
            seed = params.seed if params.seed is not None else derive_seed(self.options.seed, number)
            name = f"r{number}"
            found = make_request(name, prompt, params, seed, self.resolved, streams=streams, generated=generated)
            found.processors = processors
            self._num_requests += 1  # only now: who was refused leaves no trace in the seeds of others
        return found

    def compile(self, params: SamplingParams) -> Future[Any] | None:
        """Begin to compile the grammar of these parameters, if they have one. A failure is InvalidRequest.

        A request waits for its grammar in any case. This call tells early whether the grammar can be used.
        """
        self.check_process()
        if self._closing:  # no thread would take it
            raise EngineClosed("the engine is closed") from self._error
        return self._grammars.start(params)

    def prepare_grammars(self) -> None:
        """Load what the first grammar needs, in the background."""
        self._parts.compiler.prepare()

    def submit(self, request: Request, deliver: Deliver, on_start: Callable[[], None] | None = None) -> None:
        """Queue a request. `deliver` gets its Progress, if it streams, and at the end one Finished.

        `on_start` is called on the loop's thread before the request gets a row, and again after a preemption.
        """
        self.check_process()
        if not self._closing:
            self._grammars.start(request.params)  # before the loop hears of it, which then finds most grammars compiled
        with self._lock:
            if self._closing:
                raise EngineClosed("the engine is closed") from self._error
            self._inbox.put(Submit(request, deliver, on_start))

    def abort(self, request_id: str, reason: str = "abort") -> None:
        """End a request soon; its Finished comes as for any other. Unknown ids are ignored."""
        self._inbox.put(Abort(request_id, reason))

    def ping(self, answer: Callable[[], None]) -> None:
        """Have `answer` called by the loop's thread between two steps. A dead or stuck loop never calls."""
        self._inbox.put(Ping(answer))

    def pulse(self) -> Pulse:
        """Whether the loop moves, as seen from outside it."""
        return Pulse(self._num_turns, self._idle)

    @property
    def death(self) -> BaseException | None:
        """What the engine died of."""
        return self._error

    def close(self) -> None:
        """Abort what runs, deliver that, and stop. Can be called again; does nothing in a forked process."""
        if not self.in_this_process:
            return
        with self._lock:
            if not self._closing:
                self._closing = True
                self._inbox.put(Close())
        self._thread.join()

    @property
    def in_this_process(self) -> bool:
        """False in a child made by `os.fork`, which has no thread of the engine."""
        return os.getpid() == self._pid

    def check_process(self) -> None:
        """Raise EngineClosed in a forked child."""
        if not self.in_this_process:
            raise EngineClosed("the engine's threads do not exist in a forked process; load the model after the fork")

    # -- the loop's side -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        parts = self._parts
        try:
            parts.recorder.start()
            run_loop(
                parts.scheduler, parts.executor, parts.depth, self._admit, self._subscribers.deliver, parts.recorder
            )
        except BaseException as error:
            log.exception("the engine died")
            self._die(error)
        finally:
            parts.executor.close()
            parts.recorder.close()
            parts.compiler.close()

    def _admit(self, idle: bool) -> bool:
        """Take in what callers sent, waiting for it when idle; False when the engine is to stop."""
        if self.options.check:
            self._scheduler.check()
        self._num_turns += 1
        while True:
            self._idle = idle
            try:
                message = self._inbox.get(block=idle)
            except queue.Empty:
                return True
            if idle:
                self._parts.recorder.woken()
            self._idle = idle = False
            match message:
                case Submit():
                    self._add(message)
                case Abort(request_id, reason):
                    if (finished := self._scheduler.abort(request_id, reason)) is not None:
                        self._subscribers.end(finished)
                case Ping(answer):
                    call_safely(answer)
                case Compiled(request):
                    self._attend(request)
                case Loss(error):
                    raise error
                case Close():
                    for finished in self._scheduler.abort_all():
                        self._subscribers.end(finished)
                    return False

    def _add(self, message: Submit) -> None:
        try:
            self._scheduler.add(message.request)
        except InvalidRequest as error:  # the same request twice
            refuse(message, error)
        else:
            self._subscribers.add(message)
            self._attend(message.request)

    def _attend(self, request: Request) -> None:
        if (finished := self._grammars.attend(request)) is not None:
            self._subscribers.end(finished)

    def _die(self, error: BaseException) -> None:
        """Nobody waits for ever: fail what runs, what waits, and what is still in the inbox.

        The scheduler may be what failed, so nothing here depends on its state.
        """
        with self._lock:
            self._closing = True
            self._error = error
        closed = EngineClosed(f"the engine died: {error}")
        with contextlib.suppress(Exception):
            self._scheduler.abort_all()  # brings known tokens back into the requests
        self._subscribers.fail(closed)
        while not self._inbox.empty():
            if isinstance(message := self._inbox.get(), Submit):
                refuse(message, closed)
