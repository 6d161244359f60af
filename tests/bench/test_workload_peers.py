"""A peer does the same job; one that fails, or is too slow to wait for, is stopped and said to be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gapless.bench import workload_peers, workloads
from gapless.bench.workload_peers import PEER, PeerTask, PeerTime, _drain, _time
from gapless.bench.workloads import WorkloadRow


class Manager:
    """As much of transformers' manager as is used: gives back what it was told, then nothing."""

    def __init__(self, *results: Any, runs: bool = True) -> None:
        self._results = list(results)
        self._runs = runs
        self.stopped: list[bool] = []
        self.asked: dict[str, Any] = {}

    def add_requests(self, **asked: Any) -> None:
        self.asked = asked

    def get_result(self, timeout: float) -> Any:
        return self._results.pop(0) if self._results else None

    def is_running(self) -> bool:
        return self._runs

    def stop(self, *, hard_stop: bool) -> None:
        self.stopped.append(hard_stop)


def result(count: int, *, error: str | None = None, finished: bool = True) -> Any:
    return SimpleNamespace(generated_tokens=[1] * count, error=error, is_finished=lambda: finished)


def test_tokens_of_all_requests_are_counted() -> None:
    manager = Manager(result(2, finished=False), result(3), None, result(4))
    assert _drain(manager, [[1], [2]], 4, limit_s=60) == 7
    assert manager.asked == {"inputs": [[1], [2]], "max_new_tokens": 4}
    assert manager.stopped == []


def test_a_slow_peer_is_stopped() -> None:
    manager = Manager(result(3))
    with pytest.raises(TimeoutError, match=r"stopped after 0\.01 s; 1 of 2 requests of 4 tokens were done"):
        _drain(manager, [[1], [2]], 4, limit_s=0.01)


def test_a_peer_that_gives_unfinished_results_for_ever_is_stopped() -> None:
    manager = Manager()
    manager.get_result = lambda timeout: result(1, finished=False)  # type: ignore[method-assign]
    with pytest.raises(TimeoutError):
        _drain(manager, [[1]], 4, limit_s=0.01)


def test_the_last_result_may_come_late() -> None:
    assert _drain(Manager(result(3)), [[1]], 4, limit_s=0) == 3


def test_results_that_wait_are_taken_though_the_thread_has_ended() -> None:
    assert _drain(Manager(result(2, finished=False), result(3), runs=False), [[1]], 4, limit_s=60) == 3


def test_it_warms_up_with_few_tokens_before_the_clock_starts_and_never_flushes(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    now = 0.0
    drained: list[tuple[Any, ...]] = []

    def drain(manager: Any, *given: Any) -> int:
        nonlocal now
        now += 100 if not drained else 7
        drained.append(given)
        if given[0] == [[9]]:
            raise RuntimeError("no room")
        return 5

    manager = Manager()
    monkeypatch.setattr(workload_peers, "_drain", drain)
    monkeypatch.setattr(workload_peers, "time", SimpleNamespace(perf_counter=lambda: now))
    model = SimpleNamespace(
        config=SimpleNamespace(_attn_implementation="paged|sdpa"),
        continuous_batching_context_manager=lambda **_: nullcontext(manager),
    )
    assert _time(model, PeerTask([[1]], [[2, 3]], 300, limit_s=60)) == (7, 5, "paged|sdpa")
    assert drained == [([[1]], 16, 60), ([[2, 3]], 300, 60)]
    assert manager.stopped == []
    with pytest.raises(RuntimeError, match="no room"):
        _time(model, PeerTask([[1]], [[9]], 300, limit_s=60))
    assert manager.stopped == [True]


def test_errors_of_a_peer_are_raised() -> None:
    with pytest.raises(RuntimeError, match="no room"):
        _drain(Manager(result(0, error="no room")), [[1]], 4, limit_s=60)
    with pytest.raises(RuntimeError, match="the generation thread ended"):
        _drain(Manager(runs=False), [[1]], 4, limit_s=60)


def test_a_peer_gets_the_same_prompts_and_time_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[PeerTask] = []

    def peer(path: Path, tasks: Sequence[PeerTask]) -> Iterator[PeerTime | Exception]:
        given.extend(tasks)
        yield PeerTime(11.0, 32 * 1024, 2.0, 20.0, "paged|flash")
        yield TimeoutError("stopped after 120 s")

    monkeypatch.setattr(workloads, "time_generate_batch", peer)
    row, text = workloads._measure_peer(tmp_path, {"B": 5.0, "C": 1.0, "M": 3.0}, 4.4e12)
    assert isinstance(row, WorkloadRow)
    assert (row.workload, row.engine, row.depth) == ("B", PEER, None)
    assert row.ms_per_step == pytest.approx(11.0 / 1024 * 1e3)
    assert row.attention == f"attention of {PEER}: paged|flash"
    assert text == f"{PEER}, C: failed: TimeoutError: stopped after 120 s"
    assert [task.limit_s for task in given] == [150, 120]
    assert given[0].prompts == workloads.WORKLOADS["B"].prompts() != given[0].warm_up
    assert [task.max_tokens for task in given] == [1024, 256]


def test_transformers_does_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real one, on the CPU, with a small cache: by itself it would take most of the memory there is."""
    transformers: Any = pytest.importorskip("transformers")
    import torch

    generation: Any = import_module("transformers.generation")
    small = partial(generation.ContinuousBatchingConfig, num_blocks=16, max_batch_tokens=32)
    monkeypatch.setattr(generation, "ContinuousBatchingConfig", small)

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.generation_config = transformers.GenerationConfig()
    seconds, num_tokens, attention = _time(model, PeerTask([[1, 2, 3]], [[4, 5, 6], [7, 8, 9]], 5, limit_s=60))
    assert num_tokens == 10
    assert seconds > 0
    assert "paged" in attention
    with pytest.raises(TimeoutError, match="stopped after 1 s; 0 of 1 requests of 3000 tokens were done"):
        _time(model, PeerTask([[1, 2, 3]], [[4, 5, 6]], 3000, limit_s=1))
    assert workload_peers.is_installed()
