"""Compiles grammars away from the loop's thread, keeps those that were compiled, and gives up on those that take long.

A few threads of its own do the work; llguidance holds no interpreter lock meanwhile. They have deep stacks, because
native code that recurses into a long chain of rules would otherwise end the process. A thread that is stuck in native
code cannot be stopped: whoever waits for it is refused after a time limit, and a new thread takes its place. The limit
counts from where a thread begins with the grammar: the vocabulary is loaded, and the library of automata built, before.
A grammar that no thread takes in time is refused too, but may be tried again.

A short source that has an automaton is compiled at once, by the caller: that takes some tens of microseconds of native
code, less than to hand it to a thread.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from gapless.core.guide import Guide
from gapless.core.structured import Structured
from gapless.errors import CompilerBusy, InvalidRequest
from gapless.guides.deadlines import Deadlines

if TYPE_CHECKING:
    from gapless.guides.vocabulary import Vocabulary

NUM_THREADS = 2
MAX_THREADS = 8  # with those that are stuck
STACK_BYTES = 512 * 2**20  # reserved, not used: the system gives memory to the part that is touched
TIME_LIMIT_S = 10.0
LONGEST_WAIT = 1.5  # times the limit: for a thread that takes the grammar
MAX_KEPT = 1024  # grammars
MAX_KEPT_BYTES = 32 * 2**20  # of their sources together
MAX_STATE_BYTES = 512 * 2**20  # of the states and masks of automata together, which grow while they are used

_stack_lock = threading.Lock()  # the size of the next thread's stack is a setting of the process


class CompiledShape(Protocol):
    """A shape, ready for guides: a grammar or an automaton."""

    structured: Structured
    is_spent: bool  # it has reached a limit: compile it again

    @property
    def num_bytes(self) -> int:
        """Memory of its states and masks, as far as it is known."""

    def guide(self) -> Guide:
        """A guide at the begin of a text."""


@dataclass(eq=False, slots=True)
class _Job:
    """A grammar to compile."""

    structured: Structured
    future: Future[CompiledShape]
    has_begun: bool = False


class Compiler:
    """Grammars by their sources."""

    def __init__(self, load_vocabulary: Callable[[], Vocabulary], time_limit_s: float = TIME_LIMIT_S) -> None:
        """load_vocabulary: called once, by the first thread that needs it."""
        self._load_vocabulary = load_vocabulary
        self._time_limit_s = time_limit_s
        self._lock = threading.Lock()
        self._settle_lock = threading.RLock()  # callbacks of a future run inside it
        self._vocabulary_lock = threading.Lock()
        self._vocabulary: Vocabulary | None = None
        self._jobs: queue.SimpleQueue[_Job | Callable[[], None] | None] = queue.SimpleQueue()
        self._kept: OrderedDict[Structured, Future[CompiledShape]] = OrderedDict()  # the last used at the end
        self._kept_bytes = 0
        self._num_threads = 0
        self._deadlines = Deadlines()
        self.num_compiled = 0

    def start(self, structured: Structured) -> Future[CompiledShape]:
        """The grammar, now or later; a failure is InvalidRequest. A source that is known is not compiled again."""
        with self._lock:
            found = self._kept.get(structured)
            if found is not None and not _is_spent(found):
                self._kept.move_to_end(structured)
                return found
        future: Future[CompiledShape] = Future()
        future.set_running_or_notify_cancel()  # others may wait for it too: nobody can cancel it
        at_once = None if self._vocabulary is None else self._automaton(structured, at_once=True)
        if at_once is not None:
            future.set_result(at_once)
        with self._lock:
            found = self._kept.get(structured)
            if found is not None and not _is_spent(found):  # another thread was faster
                return found
            self._keep(structured, future)
            if at_once is not None:
                self.num_compiled += 1
                return future
            if self._num_threads < NUM_THREADS:
                self._add_thread()
        job = _Job(structured, future)
        self._limit_wait(job)
        self._jobs.put(job)
        return future

    def prepare(self) -> None:
        """Load the vocabulary in advance, on a thread of its own."""

        def load() -> None:
            with contextlib.suppress(InvalidRequest):  # whoever asks for a grammar is told
                self._loaded()

        threading.Thread(target=load, name="gapless-vocabulary", daemon=True).start()

    def close(self) -> None:
        """End the threads once they have nothing to do. Does not wait for them."""
        with self._lock:
            for _ in range(self._num_threads):
                self._jobs.put(None)
        self._deadlines.close()

    def _keep(self, structured: Structured, future: Future[CompiledShape]) -> None:
        self._kept_bytes += len(structured.text) if structured not in self._kept else 0
        self._kept[structured] = future
        while len(self._kept) > MAX_KEPT or (self._kept_bytes > MAX_KEPT_BYTES and len(self._kept) > 1):
            self._drop(next(iter(self._kept)))

    def _drop(self, structured: Structured) -> None:
        del self._kept[structured]
        self._kept_bytes -= len(structured.text)

    def _make_room(self, num_bytes: int) -> None:
        """Drop automata until the kept ones have so much less memory, those first that were used longest ago."""
        if num_bytes <= 0:
            return
        with self._lock:
            for structured, future in list(self._kept.items()):
                if num_bytes <= 0:
                    return
                if (size := _num_bytes(future)) > 0:
                    self._drop(structured)
                    num_bytes -= size

    def _add_thread(self) -> None:
        self._num_threads += 1
        with _stack_lock:
            before = threading.stack_size(STACK_BYTES)
            try:
                threading.Thread(target=self._work, name="gapless-grammar", daemon=True).start()
            finally:
                threading.stack_size(before)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if callable(job):
                with contextlib.suppress(InvalidRequest):  # it compiled before; the grammar goes on with what it has
                    job()
                continue
            if not (self._is_ready(job) and self._begin(job)):
                continue
            if not self._settle(job.future, self._result(job.structured)) and self._may_leave():
                return

    def _is_ready(self, job: _Job) -> bool:
        """Load what all grammars need. False if that fails; those who wait are told then."""
        try:
            self._loaded()
        except Exception as error:
            self._settle(job.future, _refusal(job.structured, error))
            return False
        return True

    def _begin(self, job: _Job) -> bool:
        """From now on it has the time limit to itself. False if it was refused while it waited."""
        with self._settle_lock:
            job.has_begun = not job.future.done()
        if job.has_begun:
            self._deadlines.add(self._time_limit_s, job.future, partial(self._give_up, job))
        return job.has_begun

    def _result(self, structured: Structured) -> CompiledShape | InvalidRequest:
        try:
            return self._compile(structured)
        except Exception as error:
            return _refusal(structured, error)

    def _compile(self, structured: Structured) -> CompiledShape:
        """The libraries are loaded here: an engine that is never asked for a shape does without them."""
        from gapless.guides.grammar import Grammar

        found = self._automaton(structured, at_once=False)
        return Grammar(structured, self._loaded(), self._jobs.put) if found is None else found

    def _automaton(self, structured: Structured, *, at_once: bool) -> CompiledShape | None:
        """None for shapes that have none, or none that is compiled at once."""
        from gapless.guides.automaton import automaton_of

        vocabulary = self._loaded()
        if vocabulary.bytes is not None:
            self._make_room(vocabulary.bytes.num_state_bytes - MAX_STATE_BYTES)
        return automaton_of(structured, vocabulary.bytes, vocabulary.num_words, at_once=at_once)

    def _may_leave(self) -> bool:
        """Whether a new thread has taken the place of this one, which was thought to be stuck."""
        with self._lock:
            if self._num_threads <= NUM_THREADS:
                return False
            self._num_threads -= 1
            return True

    def _loaded(self) -> Vocabulary:
        with self._vocabulary_lock:
            if self._vocabulary is None:
                found = self._load_vocabulary()
                _ = found.bytes  # made once too, under this lock, before anybody sees the vocabulary
                self._vocabulary = found
            return self._vocabulary

    def _limit_wait(self, job: _Job) -> None:
        seconds = LONGEST_WAIT * self._time_limit_s
        self._deadlines.add(seconds, job.future, partial(self._give_up_waiting, job))

    def _give_up_waiting(self, job: _Job) -> None:
        """Others took all the time: this says nothing about the grammar, so that the refusal is not kept."""
        if self._vocabulary_lock.locked():  # what all wait for is being loaded, which has a time limit of its own
            self._limit_wait(job)
            return
        with self._settle_lock:
            if job.has_begun:
                return
            with self._lock:
                if self._kept.get(job.structured) is job.future:
                    self._drop(job.structured)
            refusal = job.structured.refuse("too many others are being compiled; try again later")
            self._settle(job.future, CompilerBusy(str(refusal), refusal.param))

    def _give_up(self, job: _Job) -> None:
        refusal = job.structured.refuse(f"it takes more than {self._time_limit_s:g} seconds to compile")
        if self._settle(job.future, refusal):
            with self._lock:
                if self._num_threads < MAX_THREADS:
                    self._add_thread()

    def _settle(self, future: Future[CompiledShape], found: CompiledShape | InvalidRequest) -> bool:
        """Give the result to those who wait for it; False if they have one."""
        with self._settle_lock:
            if future.done():
                return False
            if isinstance(found, InvalidRequest):
                future.set_exception(found)
            else:
                self.num_compiled += 1
                future.set_result(found)
        return True


def _refusal(structured: Structured, error: Exception) -> InvalidRequest:
    return error if isinstance(error, InvalidRequest) else structured.refuse(f"{type(error).__name__}: {error}")


def _is_spent(future: Future[CompiledShape]) -> bool:
    return future.done() and future.exception() is None and future.result().is_spent


def _num_bytes(future: Future[CompiledShape]) -> int:
    return future.result().num_bytes if future.done() and future.exception() is None else 0
