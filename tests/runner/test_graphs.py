"""Which steps have a graph, and what the ledger says of the others. Capture itself needs a GPU: tests/gpu."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from gapless.core.plan import Plan
from gapless.core.request import IntArray, Request
from gapless.device.cpu import CpuDevice, InlineDriver
from gapless.kernels.tilings import MAX_ROWS, choose_tiling
from gapless.pipeline.executor import LocalExecutor
from gapless.runner import graphs
from gapless.runner.fill import Filled
from gapless.runner.graphs import GraphRunner, ladder, warm_up_shapes
from toy import LIMITS, check_toy_logprobs, run_toy, toy_requests, toy_runner, toy_truth


class Played:
    """Stands for a graph: a replay runs again what was recorded."""

    def __init__(self, body: Callable[[], None]) -> None:
        body()  # as capturing does
        self.replay = torch.inference_mode()(body)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_record", lambda body, pool, stream: Played(body))
    for name in ("graph_pool_handle", "Stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 0))
    monkeypatch.setattr(graphs, "CHUNK_TOKENS", (2, 5, 9))
    monkeypatch.setattr(graphs, "MIXED_ROWS", (1, 3))
    monkeypatch.setattr(graphs, "NUM_CHUNKS", 3)


def run_with_graphs(requests: list[Request], *, mixed: bool) -> GraphRunner:
    """All steps through a graph runner; every token must be the true one."""
    device = CpuDevice(driver=InlineDriver())
    inner = toy_runner(device, LIMITS)
    runner = GraphRunner(inner, inner._step, LIMITS, mixed=mixed)
    outcome = run_toy(LocalExecutor(device, runner, LIMITS, 2), requests, depth=2)
    assert outcome.tokens == {request.id: toy_truth(request) for request in requests}
    assert inner.rows.length[-1] == 0
    return runner


@pytest.mark.usefixtures("no_gpu")
def test_decode_steps_are_replays_and_prefill_is_counted() -> None:
    runner = run_with_graphs(toy_requests(), mixed=False)
    assert set(runner.ledger) == {"no graph: prefill"}


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("mixed", [False, True])
def test_the_same_rows_again_are_not_sent_again(mixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And every token is still the true one, over new blocks, rows that come and go, and steps of other kinds."""
    sizes: list[int] = []
    fill = GraphRunner.fill

    def watched(self: GraphRunner, plan: Plan, out: IntArray) -> Filled:
        filled = fill(self, plan, out)
        sizes.append(filled.size)
        if filled.size == 0:
            assert not plan.chunks
            assert not len(plan.new_blocks)
        return filled

    monkeypatch.setattr(GraphRunner, "fill", watched)
    run_with_graphs(toy_requests(), mixed=mixed)
    assert 0.2 * len(sizes) < sizes.count(0) < len(sizes)


@pytest.mark.usefixtures("no_gpu")
def test_mixed_steps_are_replays_of_padded_plans() -> None:
    """Steps with more chunk tokens or chunks than any captured shape still run, and are counted."""
    plain = run_with_graphs(toy_requests(), mixed=False)
    mixed = run_with_graphs(toy_requests(), mixed=True)
    assert mixed.ledger["no graph: prefill"] < plain.ledger["no graph: prefill"]
    assert mixed.cost.num_graphs == mixed.cost.num_wanted == 2 * (len(ladder(LIMITS.num_rows)) + 9)


@pytest.mark.usefixtures("no_gpu")
def test_what_the_budget_leaves_out_is_padded_further(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "BUDGET_BYTES", 10)
    free = iter(range(100, 0, -6))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (next(free), 0))
    runner = run_with_graphs(toy_requests(), mixed=True)
    assert runner.cost.num_graphs == 4  # the two largest decode shapes
    assert "of" in str(runner.cost)


@pytest.mark.usefixtures("no_gpu")
def test_steps_that_want_log_probabilities_run_without_a_graph_and_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """No graph is there: any step that was taken for a replay would raise."""
    monkeypatch.setattr(GraphRunner, "_capture_all", lambda self, wanted, report: None)
    device = CpuDevice(driver=InlineDriver())
    inner = toy_runner(device, LIMITS)
    runner = GraphRunner(inner, inner._step, LIMITS)
    requests = toy_requests()
    for request in requests:
        request.params = replace(request.params, logprobs=2)
    outcome = run_toy(LocalExecutor(device, runner, LIMITS, 2), requests, depth=2)
    assert outcome.tokens == {request.id: toy_truth(request) for request in requests}
    for request in requests:
        check_toy_logprobs(request)
    assert set(runner.ledger) == {"no graph: prefill", "no graph: log-probabilities"}
    assert sum(runner.ledger.values()) == outcome.scheduler.counters.num_steps


@pytest.mark.parametrize(("hidden", "inner"), [(1024, 3072), (2048, 8192), (4096, 14336)])
def test_no_prompt_needs_a_kernel_that_was_not_compiled_at_the_start(hidden: int, inner: int) -> None:
    """Captures and the first steps go through every way in which products are cut."""
    roles = [
        (4096, hidden, False, False),
        (hidden, 2048, False, True),
        (inner, hidden, True, False),
        (hidden, inner, False, True),
    ]

    def cut(num_rows: int) -> set[tuple[int, object]]:
        tilings = [choose_tiling(num_rows, n, k, gated=gated, adds=adds) for n, k, gated, adds in roles]
        return set(enumerate(tilings))

    limits = replace(LIMITS, max_batch_tokens=2048, max_model_len=2048)
    sizes = [shape.num_decodes + shape.num_chunk_tokens for shape in warm_up_shapes(limits)]
    compiled = set().union(*map(cut, [1, *sizes]))
    for num_rows in range(1, MAX_ROWS + 50):
        assert {item for item in cut(num_rows) if item[1] is not None} <= compiled, num_rows


def test_short_limits_are_warmed_up_with_what_fits() -> None:
    (shape,) = warm_up_shapes(replace(LIMITS, max_batch_tokens=8, max_model_len=64))
    assert shape.num_chunk_tokens == 8


@pytest.mark.usefixtures("no_gpu")
def test_progress_counts_what_is_compiled_and_what_is_captured() -> None:
    """Compiling for the first steps takes as long as capturing, and is within the same budget."""
    told: list[tuple[int, int]] = []
    inner = toy_runner(CpuDevice(driver=InlineDriver()), LIMITS)
    runner = GraphRunner(inner, inner._step, LIMITS, lambda done, total: told.append((done, total)))
    total = len(warm_up_shapes(LIMITS)) + len(ladder(LIMITS.num_rows))
    assert told == [(done + 1, total) for done in range(total)]
    assert runner.cost.num_graphs == runner.cost.num_wanted == 2 * len(ladder(LIMITS.num_rows))


def test_the_ladder_ends_at_the_limit() -> None:
    assert ladder(1) == [1]
    assert ladder(33)[-2:] == [32, 33]
    assert max(ladder(1000)) == 1000
