"""The GPU workloads by peers: vLLM or transformers in a process of their own, from this environment or a different one.

A peer gets the same config.json, prompts and lengths, and does each job twice. One that fails or is too slow is a line
of text, and the next job starts it again.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gapless.bench import peer_worker
from gapless.bench.line_process import LineProcess, ProcessFailed
from gapless.bench.workload_jobs import WORKLOADS
from gapless.bench.workload_rows import Rates, WorkloadRow, timed_row

PEER_LABELS = {"vllm": "vLLM", "transformers": "transformers"}
START_S = 900.0  # most seconds to load a peer
PATIENCE, PATIENCE_S = 15, 120  # limit of a job: this many times our time, and at least this many seconds


@dataclass(frozen=True, slots=True)
class PeerPlace:
    """Where a peer is installed."""

    name: str
    python: str = sys.executable
    pythonpath: str | None = None  # replaces PYTHONPATH

    def environment(self) -> dict[str, str]:
        values = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false"}
        return values if self.pythonpath is None else {**values, "PYTHONPATH": self.pythonpath}


def measure_peer(
    place: PeerPlace, model: Path, ours: Mapping[str, float], rates: Rates, log: Path, held: int
) -> Iterator[WorkloadRow | str]:
    """The workloads that we did, with the seconds that we took for both runs. A text says what a peer could not do.

    held: bytes of device memory that are in use without any peer.
    """
    label = PEER_LABELS[place.name]
    works = [WORKLOADS[name] for name in ours]
    start = {
        "peer": place.name,
        "model": str(model),
        "device": "cuda",
        "max_num_rows": max(work.max_num_rows for work in works),
        "max_model_len": max(work.length for work in works),
    }
    with _PeerProcess(place, start, log) as process:
        for name, our_s in ours.items():
            if place.name == "transformers" and WORKLOADS[name].logprobs is not None:
                yield f"{label}, {name}: not run: it returns no log-probabilities of other tokens"
                continue
            try:
                found = process.run(_job(name), max(PATIENCE_S, PATIENCE * our_s))
            except ProcessFailed as error:
                yield f"{label}, {name}: failed: {error}"
                if process.never_started:
                    return
                continue
            (first_s, seconds), note = found["seconds"], found["note"]
            engine = f"{label} {process.version}"
            peak_gib = (device_memory() - held) / 2**30
            row = timed_row(name, engine, first_s, seconds, rates, start_s=process.start_s, peak_gib=peak_gib)
            yield replace(row, attention=f"{engine}: {note}" if note else "")


def _job(name: str) -> dict[str, Any]:
    work = WORKLOADS[name]
    return {
        "prompts": work.prompts(),
        "counts": work.counts(),
        "sampling": work.sampling(),
        "max_num_rows": work.max_num_rows,
    }


class _PeerProcess:
    """A peer that is started when it has something to do, and again after it died."""

    def __init__(self, place: PeerPlace, start: dict[str, Any], log: Path) -> None:
        self.version = ""
        self.start_s = 0.0
        self._place, self._start, self._log = place, start, log
        self._process: LineProcess | None = None

    @property
    def never_started(self) -> bool:
        return not self.version

    def run(self, job: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """Its answer. Raises ProcessFailed."""
        process = self._process or self._begin()
        try:
            return self._ask(process, job, limit_s)
        except ProcessFailed:
            self.close()  # even where it still answers: nobody knows its state
            raise

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None

    def __enter__(self) -> _PeerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self) -> LineProcess:
        began = time.perf_counter()
        command = [self._place.python, str(Path(peer_worker.__file__).resolve())]
        self._process = LineProcess(command, self._place.environment(), self._log, peer_worker.MARK)
        try:
            self.version = self._ask(self._process, self._start, START_S)["version"]
        except ProcessFailed:
            self.close()
            raise
        self.start_s = time.perf_counter() - began
        return self._process

    def _ask(self, process: LineProcess, question: dict[str, Any], limit_s: float) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(process.ask(json.dumps(question) + "\n", limit_s))
        if "error" in answer:
            raise ProcessFailed(answer["error"])
        return answer


def device_memory() -> int:
    """Bytes of device memory in use, by whomever."""
    from gapless.device.cuda import memory_in_use

    return memory_in_use()
