"""The callbacks of requests that are not over, and how news reach them. The loop's thread alone touches them."""

from __future__ import annotations

from collections.abc import Callable

from gapless.core.outcome import Commit, Finished
from gapless.core.request import Request
from gapless.pipeline.inbox import Submit, call_safely


class Subscribers:
    """Tells each client what came of its request. One whose callback raises has its request ended."""

    def __init__(self, abort: Callable[[str], None]) -> None:
        self._abort = abort
        self._submitted: dict[str, Submit] = {}

    def add(self, message: Submit) -> None:
        self._submitted[message.request.id] = message

    def announce(self, request: Request) -> None:
        """The scheduler is about to give the request a row."""
        on_start = self._submitted[request.id].on_start
        if on_start is not None and not call_safely(on_start):
            self._abort(request.id)

    def deliver(self, commit: Commit) -> None:
        """Tell the clients of a step what it brought."""
        for progress in commit.progress:
            if not call_safely(self._submitted[progress.request.id].deliver, progress):
                self._abort(progress.request.id)
        for finished in commit.finished:
            self.end(finished)

    def end(self, finished: Finished) -> None:
        call_safely(self._submitted.pop(finished.request.id).deliver, finished)

    def fail(self, error: BaseException) -> None:
        """End all of them with this error."""
        for message in self._submitted.values():
            refuse(message, error)


def refuse(message: Submit, error: BaseException) -> None:
    """Tell a client that its request ended before it was taken in, or with the engine."""
    call_safely(message.deliver, Finished(message.request, "error", error))
