"""Plays requests on a real engine in real time, each when it is due, and keeps when its tokens came."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence

from gapless.core.outcome import Finished, Progress
from gapless.core.params import SamplingParams
from gapless.pipeline.engine import Engine
from gapless.sim.arrivals import Arrival, prompt_of
from gapless.sim.replica import Served


def replay(engine: Engine, arrivals: Sequence[Arrival], seed: int = 0) -> list[Served]:
    """Submit each request at its time and wait for all. Prompts of different seeds share nothing."""
    vocab_size = engine.resolved.model.vocab_size
    requests = []
    for number, arrival in enumerate(arrivals):
        params = SamplingParams(max_tokens=arrival.num_output, temperature=0, ignore_eos=True)
        prompt = prompt_of(arrival, seed * 1_000_003 + number, vocab_size)
        requests.append(engine.make_request(prompt, params, streams=True))
    served = [Served(arrival, 0) for arrival in arrivals]
    over, left = threading.Event(), [len(served)]
    began = time.perf_counter()
    for request, each in zip(requests, served, strict=True):
        time.sleep(max(began + each.arrival.at_s - time.perf_counter(), 0.0))
        engine.submit(request, _listener(each, began, left, over))
    over.wait()
    return served


def _listener(served: Served, began: float, left: list[int], over: threading.Event) -> Callable[..., None]:
    """Runs on the loop's thread only, so it may count without a lock."""

    def hear(event: Progress | Finished) -> None:
        now = time.perf_counter() - began
        if isinstance(event, Progress):
            served.first_s = now if math.isnan(served.first_s) else served.first_s
            return
        served.end_s, served.num_cached = now, event.request.num_cached
        left[0] -= 1
        if left[0] == 0:
            over.set()

    return hear
