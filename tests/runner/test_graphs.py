"""Which steps have a graph, and what the ledger says of the others. Capture itself needs a GPU: tests/gpu."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton")

from gapless.device.cpu import CpuDevice, InlineDriver
from gapless.pipeline.executor import LocalExecutor
from gapless.runner.graphs import GraphRunner
from toy import LIMITS, ToyModel, check_toy_logprobs, run_toy, toy_requests, toy_runner, toy_truth


def test_steps_that_want_log_probabilities_run_without_a_graph_and_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """No graph is there: any step that was taken for a replay would raise."""
    monkeypatch.setattr(GraphRunner, "_capture_all", lambda self, progress: None)
    device = CpuDevice(driver=InlineDriver())
    inner = toy_runner(device, LIMITS)
    runner = GraphRunner(inner, ToyModel(), inner._attention, LIMITS)
    requests = toy_requests()
    for request in requests:
        request.params = replace(request.params, logprobs=2)
    outcome = run_toy(LocalExecutor(device, runner, LIMITS, 2), requests, depth=2)
    assert outcome.tokens == {request.id: toy_truth(request) for request in requests}
    for request in requests:
        check_toy_logprobs(request)
    assert set(runner.ledger) == {"no graph: prefill", "no graph: log-probabilities"}
    assert sum(runner.ledger.values()) == outcome.scheduler.counters.num_steps
