"""The runner on the exact toy model: what reaches the model, and what the rows keep."""

from __future__ import annotations

import pytest
import torch

from gapless.attention.base import Attend
from gapless.core.scheduler import Scheduler
from gapless.device.cpu import CpuDevice, InlineDriver
from gapless.pipeline.executor import LocalExecutor
from toy import LIMITS, VOCAB, ToyModel, run_on, toy_requests, toy_runner, toy_truth


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int]]]:
    """Token ids and positions of every step."""
    found: list[tuple[list[int], list[int]]] = []
    forward = ToyModel.forward

    def noted(self: ToyModel, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        found.append((token_ids.tolist(), positions.tolist()))
        return forward(self, token_ids, positions, attend)

    monkeypatch.setattr(ToyModel, "forward", noted)
    return found


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_no_placeholder_ever_reaches_the_model(seen, depth: int) -> None:
    run_on(CpuDevice(seed=depth), toy_requests(), depth=depth)
    assert all(0 <= token < VOCAB for tokens, _ in seen for token in tokens)
    assert all(0 <= position < LIMITS.max_model_len for _, positions in seen for position in positions)
    assert all(len(tokens) <= LIMITS.max_batch_tokens for tokens, _ in seen)


def test_a_decode_reads_its_token_from_the_row_and_not_from_the_host(seen) -> None:
    """Two steps are launched before any token is known to the host; the second still gets the first one's sample."""
    device = CpuDevice(driver=InlineDriver())
    executor = LocalExecutor(device, toy_runner(device, LIMITS), LIMITS, 2)
    scheduler = Scheduler(LIMITS)
    request = toy_requests()[1]
    scheduler.add(request)
    for _ in range(2):
        executor.launch(scheduler.schedule())
    assert seen == [([7, 8], [0, 1]), ([toy_truth(request)[0]], [2])]


def test_a_step_without_samples_leaves_the_output_alone() -> None:
    device = CpuDevice(driver=InlineDriver())
    runner = toy_runner(device, LIMITS)
    scheduler = Scheduler(LIMITS)
    scheduler.add(toy_requests()[0])  # its prompt is longer than a step
    plan = scheduler.schedule()
    assert plan.num_samples == 0
    packed = torch.zeros(1000, dtype=torch.int32)
    filled = runner.fill(plan, packed.numpy())
    out = torch.full((4,), -5, dtype=torch.int32)
    runner.step(filled, packed, out)
    assert out.tolist() == [-5] * 4
    assert int(runner.rows.length[plan.chunks[0].row]) == 12


def test_the_rows_know_the_lengths_that_the_scheduler_promised() -> None:
    device = CpuDevice(driver=InlineDriver())
    runner = toy_runner(device, LIMITS)
    executor = LocalExecutor(device, runner, LIMITS, 1)
    scheduler = Scheduler(LIMITS)
    for request in toy_requests()[:4]:
        scheduler.add(request)
    while scheduler.has_requests:
        plan = scheduler.schedule()
        tokens = executor.collect(executor.launch(plan))
        rows = [row for row, request in enumerate(scheduler.rows.request) if request is not None]
        assert runner.rows.length[rows].tolist() == scheduler.rows.cursor[rows].tolist()
        for row in rows:
            count = int(scheduler.rows.num_blocks[row])
            assert runner.rows.blocks[0, row, :count].tolist() == scheduler.rows.blocks[row, :count, 0].tolist()
        scheduler.commit(plan, tokens)
