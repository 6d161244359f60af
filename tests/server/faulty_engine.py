"""An engine process with faults that a prompt can ask for: a kill, a hang, an error in a step, before it, in a seat."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from gapless.core.request import RowTable
from gapless.runner.native_runner import NativeRunner
from gapless.runner.runner import Runner
from gapless.server.engine_process import main
from tiny import ids

STEP_S = 0.005  # at least: so that there is time to disturb a run
KILLS, HANGS, RAISES, DIES, SEAT = (ids(text) for text in ("~~~~", "^^^^", "````", "{{{{", "}}}}"))


def asks_for(plan: Any, fault: list[int]) -> bool:
    return any(has(chunk.tokens.tolist(), fault) for chunk in plan.chunks)


def has(text: list[int], fault: list[int]) -> bool:
    return any(text[i : i + len(fault)] == fault for i in range(len(text)))


def faulty(step: Any) -> Any:
    def run(self: Any, filled: Any, *rest: Any) -> None:
        plan = filled.plan
        if asks_for(plan, KILLS):
            os.kill(os.getpid(), signal.SIGKILL)
        if asks_for(filled.plan, HANGS):
            threading.Event().wait()
        if asks_for(filled.plan, RAISES):
            raise RuntimeError("the device said no")
        time.sleep(STEP_S)
        step(self, filled, *rest)

    return run


def mortal(fill: Any) -> Any:
    def run(self: Any, plan: Any, *rest: Any) -> Any:
        assert not asks_for(plan, DIES), "the loop itself is broken"
        return fill(self, plan, *rest)

    return run


def fragile(seat: Any) -> Any:
    def run(self: Any, request: Any) -> Any:
        if has(request.prompt.tolist(), SEAT):
            raise OverflowError("no such row")
        return seat(self, request)

    return run


if __name__ == "__main__":
    RowTable.seat = fragile(RowTable.seat)  # type: ignore[method-assign]
    for kind in (Runner, NativeRunner):
        kind.step = faulty(kind.step)  # type: ignore[method-assign]
        kind.fill = mortal(kind.fill)  # type: ignore[method-assign]
    main(int(sys.argv[1]), int(sys.argv[2]))
