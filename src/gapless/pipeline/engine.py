"""The engine as its clients see it: submit, abort, stats, close. Owns the loop's thread.

Whoever submits only puts a message into the inbox; the loop's thread alone touches scheduler and executor, and hands
results to the callback that came with the request. A callback must not block: it runs between two steps.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from gapless.config import EngineOptions
from gapless.core.outcome import Commit, Counters, Finished
from gapless.core.pace import Pace
from gapless.core.params import SamplingParams, derive_seed
from gapless.core.request import IntArray, Request
from gapless.core.scheduler import Scheduler
from gapless.errors import EngineClosed, InvalidRequest
from gapless.models.source import ModelSource
from gapless.pipeline.checked import CheckedExecutor
from gapless.pipeline.depth import AutoDepth, FixedDepth
from gapless.pipeline.executor import Executor, LocalExecutor
from gapless.pipeline.inbox import Abort, Close, Deliver, Ping, Submit, call_safely
from gapless.pipeline.intake import make_request
from gapless.pipeline.loop import Depth, run_loop
from gapless.pipeline.readings import Load, Pulse, Stats
from gapless.runner.build import Built, build
from gapless.runner.memory import shortage_named
from gapless.runner.resolve import Resolved, resolve
from gapless.trace.null_recorder import NullRecorder
from gapless.trace.recorder import KEPT_STEPS, Recorder
from gapless.trace.timeline import Timeline

log = logging.getLogger(__name__)

__all__ = ["Engine", "Load", "Pulse", "Resolved", "Stats", "derive_seed", "resolve"]

AUTO_DEPTHS = (1, 2)


class Engine:
    """Runs requests until closed."""

    @shortage_named("the engine")
    def __init__(
        self,
        options: EngineOptions,
        source: ModelSource,
        progress: Callable[[int, int], None] | None = None,
        traced_steps: int | None = None,
    ) -> None:
        """traced_steps: how many steps a trace has at most; the last ones."""
        self.options = options
        self._built: Built = _in_a_thread(partial(build, options, source, progress))
        self.resolved = self._built.resolved
        pace = Pace(options.max_step_time or math.inf, self.resolved.limits.max_batch_tokens)
        self._scheduler = Scheduler(self.resolved.limits, self._announce, pace)
        fixed = options.depth != "auto"
        self._recorder = self._make_recorder(traced_steps) if options.record else NullRecorder()
        self._depth: Depth = FixedDepth(int(options.depth)) if fixed else AutoDepth(AUTO_DEPTHS)
        num_slots = int(options.depth) if fixed else max(AUTO_DEPTHS)
        self._executor = self._make_executor(num_slots)
        self._inbox: queue.SimpleQueue[Submit | Abort | Ping | Close] = queue.SimpleQueue()
        self._submitted: dict[str, Submit] = {}  # of requests that are not over
        self._pid = os.getpid()
        self._num_turns = 0
        self._idle = False
        self._closing = False
        self._error: BaseException | None = None
        self._num_requests = 0
        self._lock = threading.Lock()  # of what callers share: closing and the request count
        self._thread = threading.Thread(target=self._run, name="gapless-loop", daemon=True)
        self._thread.start()

    def _make_recorder(self, traced_steps: int | None) -> Recorder:
        return Recorder(
            kept_steps=traced_steps if self.options.trace else KEPT_STEPS,
            counts=self._scheduler.counters,
            missed=self._built.runner.ledger,
        )

    def _make_executor(self, num_slots: int) -> Executor:
        make = partial(LocalExecutor, recorder=self._recorder)
        device, runner, limits = self._built.device, self._built.runner, self.resolved.limits
        if self.options.check:
            return CheckedExecutor(device, runner, limits, num_slots, self._scheduler, self._built.layers, make)
        return make(device, runner, limits, num_slots)

    # -- callers' side -------------------------------------------------------------------------------------------

    @property
    def depth(self) -> int:
        """Steps that may be in flight, now."""
        return self._depth.depth

    @property
    def depth_is_final(self) -> bool:
        """False while "auto" is still trying."""
        return self._depth.decided

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
        with self._lock:
            number = self._num_requests
            seed = params.seed if params.seed is not None else derive_seed(self.options.seed, number)
            name = f"r{number}"
            found = make_request(name, prompt, params, seed, self.resolved, streams=streams, generated=generated)
            self._num_requests += 1  # only now: who was refused leaves no trace in the seeds of others
        return found

    def submit(self, request: Request, deliver: Deliver, on_start: Callable[[], None] | None = None) -> None:
        """Queue a request. `deliver` gets its Progress, if it streams, and at the end one Finished.

        `on_start` is called on the loop's thread before the request gets a row, and again after a preemption.
        """
        self.check_process()
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

    def load(self) -> Load:
        """Who is here, now; a reading may be a step old."""
        scheduler = self._scheduler
        pool = scheduler.pool
        return Load(scheduler.num_running, scheduler.num_waiting, pool.num_used, pool.num_blocks)

    def stats(self) -> Stats:
        """All counters, now."""
        counters: Counters = self._scheduler.counters
        values = (getattr(counters, f.name) for f in fields(counters))
        return Stats(time.perf_counter(), self._recorder.busy_s, *values)

    def device_memory(self) -> int:
        """Bytes of device memory in use at most so far; 0 on a CPU."""
        return self._built.device.memory_held()

    def ledger(self) -> dict[str, int]:
        """How often a fast path was missed or overlap reduced, by reason."""
        found = {**self._built.runner.ledger, **self._recorder.ledger}  # copied at once: the loop may add a reason
        if self._depth.num_reduced:
            found["depth reduced"] = self._depth.num_reduced
        return found

    def waste(self) -> dict[str, int]:
        """What asynchrony cost: tokens sampled past a stop not yet known, KV blocks held for steps in flight."""
        return {
            "wasted_tokens": self._scheduler.counters.num_overrun,
            "blocks_in_flight": self._recorder.num_blocks_in_flight,
            "max_blocks_in_flight": self._recorder.max_blocks_in_flight,
        }

    def idle_by_cause(self) -> dict[str, float]:
        """Seconds that the compute stream idled so far, for every cause there is. Only grows. Any thread may ask."""
        return self._recorder.idle_by_cause()

    def timeline_tail(self, seconds: float) -> dict[str, Any]:
        """The last seconds of the lanes "cpu", "h2d", "gpu" and "d2h": lists of [begin, end, name, step].

        Times are in seconds before now, so below 0. Plain lists and numbers, ready for JSON. Any thread may ask.
        """
        return self._recorder.tail(seconds)

    def timeline(self, label: str = "", before: Stats | None = None) -> Timeline:
        """What was recorded, from an earlier reading on: with `trace` all of it, else the last few thousand steps."""
        stats = self.stats() if before is None else self.stats() - before
        facts = {
            "depth": self.depth,
            "device": self.resolved.device_name,
            "model": Path(self.options.model).name,
            "num_generated": stats.num_generated,
            "num_prompt_tokens": stats.num_prompt_tokens,
            "num_overrun": stats.num_overrun,
            "num_preemptions": stats.num_preemptions,
            "max_blocks_in_flight": self._recorder.max_blocks_in_flight,
            "ledger": self.ledger(),
        }
        found = f" ({self.depth})" if self.options.depth == "auto" else ""  # others were tried in the same run
        name = label or f"depth {self.options.depth}{found}"
        return self._recorder.timeline(name, None if before is None else before.time_s, **facts)

    def capture_cost(self) -> str:
        """What capturing graphs took at the start, in words; empty where there are none."""
        return self._built.capture_cost

    def attention(self) -> str:
        """Which attention runs and why, in words; empty where there was no choice."""
        return self._built.attention

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
        try:
            self._recorder.start()
            run_loop(self._scheduler, self._executor, self._depth, self._admit, self._deliver, self._recorder)
        except BaseException as error:
            log.exception("the engine died")
            self._die(error)
        finally:
            self._executor.close()
            self._recorder.close()

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
                self._recorder.woken()
            self._idle = idle = False
            match message:
                case Submit():
                    self._add(message)
                case Abort(request_id, reason):
                    self._notify(self._scheduler.abort(request_id, reason))
                case Ping(answer):
                    call_safely(answer)
                case Close():
                    for finished in self._scheduler.abort_all():
                        self._notify(finished)
                    return False

    def _add(self, message: Submit) -> None:
        try:
            self._scheduler.add(message.request)
        except InvalidRequest as error:  # the same request twice
            call_safely(message.deliver, Finished(message.request, "error", error))
        else:
            self._submitted[message.request.id] = message

    def _announce(self, request: Request) -> None:
        """The scheduler is about to give the request a row."""
        on_start = self._submitted[request.id].on_start
        if on_start is not None and not call_safely(on_start):
            self._inbox.put(Abort(request.id, "abort"))

    def _deliver(self, commit: Commit) -> None:
        for progress in commit.progress:
            if not call_safely(self._submitted[progress.request.id].deliver, progress):
                self._inbox.put(Abort(progress.request.id, "abort"))
        for finished in commit.finished:
            self._notify(finished)

    def _notify(self, finished: Finished | None) -> None:
        if finished is not None:
            call_safely(self._submitted.pop(finished.request.id).deliver, finished)

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
        waiting = list(self._submitted.values())
        while not self._inbox.empty():
            message = self._inbox.get()
            if isinstance(message, Submit):
                waiting.append(message)
        for submitted in waiting:
            call_safely(submitted.deliver, Finished(submitted.request, "error", closed))


def _in_a_thread(fn: Callable[[], Built]) -> Built:
    """Run `fn` on a thread that ends with it.

    A thread that multiplies on a CPU keeps a team of helper threads for life. Once there are more of them than cores,
    all teams, the compute stream's too, stop waiting actively, and steps take up to twice as long.
    """
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(fn).result()
