"""Requests that wait for their grammar: held by the scheduler until it is compiled, while all others run.

The compiler works on threads of its own and tells through the inbox when it is done. What it made is given to the
request on the loop's thread.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from gapless.core.outcome import Finished
from gapless.core.params import SamplingParams
from gapless.core.request import Request
from gapless.core.scheduler import Scheduler
from gapless.guides.compiler import CompiledShape, Compiler
from gapless.guides.tokens import join

REASON = "compiling grammar"


class Grammars:
    """Gives each request its guide."""

    def __init__(self, compiler: Compiler, scheduler: Scheduler, announce: Callable[[Request], None]) -> None:
        """announce: called by any thread when the grammar of a request is compiled, or refused."""
        self._compiler = compiler
        self._scheduler = scheduler
        self._announce = announce

    def start(self, params: SamplingParams) -> Future[CompiledShape] | None:
        """Begin to compile, on any thread; None where there is nothing to compile."""
        return None if params.structured is None else self._compiler.start(params.structured)

    def attend(self, request: Request) -> Finished | None:
        """Give the request its guide, or hold it until there is one. Returns its end if the grammar is refused."""
        future = self.start(request.params)
        if future is None:
            return None
        if not future.done():
            self._scheduler.hold(request.id, REASON)
            future.add_done_callback(lambda _: self._announce(request))
            return None
        if (error := future.exception()) is not None:
            return self._scheduler.abort(request.id, "error", error)
        request.guide = join(request.guide, future.result().guide())
        self._scheduler.release(request.id)
        return None
