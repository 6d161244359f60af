"""A few template processes side by side, so that one slow chat template does not hold up the chats of others.

Each is driven by a thread of its own. Knows asyncio; what is rendered, and how long it may take, is `render_process`'s.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from gapless.text.render_process import RenderProcess, TemplateSource

T = TypeVar("T")
NUM_PROCESSES = 4
NUM_SLOW = 2  # of them may be at work on something slow at the same time; a third slow one is refused


class RenderPool:
    def __init__(self, source: TemplateSource, timeout_s: float) -> None:
        slow = threading.BoundedSemaphore(NUM_SLOW)
        self._all = [RenderProcess(source, timeout_s, slow) for _ in range(NUM_PROCESSES)]
        self._idle = deque(self._all)  # those that run are at the right
        self._threads = ThreadPoolExecutor(NUM_PROCESSES, "render")

    @property
    def pids(self) -> list[int]:
        """Of the processes that run."""
        return [process.pid for process in self._all if process.pid is not None]

    async def start(self) -> None:
        """Start one process; others are started when they are needed."""
        await self.run(RenderProcess.start)

    async def run(self, act: Callable[[RenderProcess], T]) -> T:
        """Act on an idle process, in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._with_idle, act)

    def _with_idle(self, act: Callable[[RenderProcess], T]) -> T:
        process = self._idle.pop()  # there are as many processes as threads
        try:
            return act(process)
        finally:
            (self._idle.append if process.pid is not None else self._idle.appendleft)(process)

    def close(self) -> None:
        """End all processes, once the renderings at work are over."""
        self._threads.shutdown(cancel_futures=True)
        for process in self._all:
            process.close()
