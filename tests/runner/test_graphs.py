"""Steps from graphs, and what the ledger says of the others. Capture itself needs a GPU: tests/gpu."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from gapless.core.limits import Limits
from gapless.core.params import SamplingParams
from gapless.core.plan import Plan
from gapless.core.processor import RowFacts
from gapless.core.request import IntArray, Request
from gapless.device.cpu import CpuDevice, InlineDriver
from gapless.pipeline.executor import LocalExecutor
from gapless.runner import capture, graphs, ladder
from gapless.runner.draw import pick
from gapless.runner.fill import Filled
from gapless.runner.graphs import GraphRunner
from gapless.runner.ladder import decode_shapes, mixed_shapes
from gapless.runner.step import Sampler
from toy import LIMITS, check_toy_logprobs, run_toy, toy_request, toy_requests, toy_runner, toy_truth


class Played:
    """Stands for a graph: a replay runs again what was recorded."""

    def __init__(self, body: Callable[[], None]) -> None:
        body()  # as capturing does
        self._body = torch.inference_mode()(body)
        self.num_replays, self.is_ready = 0, False

    def instantiate(self) -> None:
        self.is_ready = True

    def replay(self) -> None:
        assert self.is_ready
        self.num_replays += 1
        self._body()


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "record", lambda body, pool, stream: Played(body))
    for name in ("graph_pool_handle", "Stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 0))
    monkeypatch.setattr(ladder, "FEW_TOKENS", (2, 5, 9))
    monkeypatch.setattr(ladder, "MIXED_ROWS", (1, 3))


def graph_runner(
    device: CpuDevice,
    progress: Callable[[int, int], None] | None = None,
    limits: Limits = LIMITS,
    *,
    processed: bool = False,
    sampler: Sampler | None = None,
) -> GraphRunner:
    inner = toy_runner(device, limits)
    inner._step.sampler = sampler or inner._step.sampler
    return GraphRunner(inner, inner._step, limits, device, progress, processed=processed)


def run_with_graphs(requests: list[Request], limits: Limits = LIMITS, sampler: Sampler | None = None) -> GraphRunner:
    """All steps through a graph runner; every token must be the true one."""
    device = CpuDevice(driver=InlineDriver())
    runner = graph_runner(device, limits=limits, sampler=sampler)
    outcome = run_toy(LocalExecutor(device, runner, limits, 2), requests, depth=2, limits=limits)
    assert outcome.tokens == {request.id: toy_truth(request) for request in requests}
    assert runner._runner.rows.length[-1] == 0
    return runner


@pytest.mark.usefixtures("no_gpu")
def test_every_step_is_a_replay() -> None:
    assert not run_with_graphs(toy_requests()).ledger


@pytest.mark.usefixtures("no_gpu")
def test_a_step_of_each_kind_was_replayed_before_any_is_needed() -> None:
    runner = graph_runner(CpuDevice(driver=InlineDriver()))
    kinds = {(shape.has_chunks, is_plain) for shape, is_plain in runner._graphs}
    replayed = [key for key, found in runner._graphs.items() if all(graph.num_replays for graph in found.graphs)]
    assert kinds == {(True, False), (True, True), (False, True), (False, False)}
    assert {(shape.has_chunks, is_plain) for shape, is_plain in replayed} == kinds
    assert len(replayed) == len(kinds)
    assert runner._runner.rows.length.sum() == 0


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("wanted", [{}, {"logprobs": 1}, {"presence_penalty": 0.5}], ids=str)
def test_greedy_rows_without_scores_have_a_shorter_half(wanted: dict[str, Any]) -> None:
    """With chunks and without: the last graph of a step is that of its kind, after the one replay at the start."""
    request = toy_request("a", [7, 8, 9, 1, 2, 3], max_tokens=5)
    request.params = replace(request.params, **wanted)
    runner = run_with_graphs([request])
    count: Counter[tuple[bool, bool]] = Counter()
    for (shape, is_plain), captured in runner._graphs.items():
        count[shape.has_chunks, is_plain] += captured.graphs[-1].num_replays  # type: ignore[attr-defined]
    is_plain = not wanted
    assert count == {(True, is_plain): 2, (False, is_plain): 5, (True, not is_plain): 1, (False, not is_plain): 1}


@pytest.mark.usefixtures("no_gpu")
def test_padding_is_counted() -> None:
    """A chunk of two tokens has a shape of its own, and so have decode steps of one row."""
    assert run_with_graphs([toy_request("a", [7, 8], max_tokens=5)]).num_padding == 0
    assert run_with_graphs([toy_request("a", [7, 8, 9], max_tokens=5)]).num_padding == 2  # in a shape of five


@pytest.mark.usefixtures("no_gpu")
def test_log_probabilities_of_samples_come_from_replays() -> None:
    """Of some requests, with different numbers of likeliest tokens."""
    requests = toy_requests()
    for request, num_top in zip(requests, (2, None, 0, 20, 1), strict=False):
        request.params = replace(request.params, logprobs=num_top)
    assert not run_with_graphs(requests).ledger
    for request in requests:
        check_toy_logprobs(request)


@pytest.mark.usefixtures("no_gpu")
def test_log_probabilities_of_processed_logits_come_from_replays() -> None:
    """Beside those of raw ones, of a row without any, and with the sampler's kernels."""
    requests = toy_requests()[1:4]
    modes: tuple[dict[str, Any], ...] = ({"logprobs_mode": "processed_logprobs"}, {})
    requests += [toy_request("z", [7, 8], max_tokens=4, temperature=0.9, logit_bias={7: 3}, seed=3)]
    for request, mode in zip(requests, (*modes, *modes[:1]), strict=False):
        request.params = replace(request.params, logprobs=7, **mode)
    assert not run_with_graphs(requests, sampler=pick).ledger
    for request in requests:
        check_toy_logprobs(request)


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("num_top", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_log_probabilities_of_prompts_are_of_what_replays_leave(num_top: int) -> None:
    """More targets than one slice has, and fewer; beside scores of samples."""
    requests = toy_requests()
    for request in requests:
        wanted = {"prompt_logprobs": num_top} | ({"logprobs": 1} if request.id in "ace" else {})
        request.params = replace(request.params, **wanted)
    assert not run_with_graphs(requests).ledger
    for request in requests:
        check_toy_logprobs(request)


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("sizes", [{"num_rows": 1, "max_batch_tokens": 1}, {"num_rows": 1}, {"max_batch_tokens": 3}])
def test_engines_of_the_smallest_sizes(sizes: dict[str, int]) -> None:
    """One row, one token a step, and fewer tokens than rows."""
    requests = toy_requests()[:3]
    for request in requests:
        request.params = replace(request.params, logprobs=1, prompt_logprobs=2)
    assert not run_with_graphs(requests, replace(LIMITS, **sizes)).ledger
    for request in requests:
        check_toy_logprobs(request)


@pytest.mark.usefixtures("no_gpu")
def test_the_same_rows_again_are_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
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
    run_with_graphs(toy_requests())
    assert 0.2 * len(sizes) < sizes.count(0) < len(sizes)


@pytest.mark.usefixtures("no_gpu")
def test_what_the_budget_leaves_out_is_padded_further(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest step's memory was set aside. The largest decode shape comes next, so that no step misses a graph."""
    monkeypatch.setattr(capture, "BUDGET_BYTES", 10)
    free = iter([100, *range(40, 0, -12)])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (next(free), 0))
    runner = run_with_graphs(toy_requests())
    assert runner.cost.num_shapes == 2
    assert "2 of" in str(runner.cost)
    assert (len(runner._mixed_shapes), len(runner._decode_shapes)) == (1, 1)
    assert not runner.ledger


@pytest.mark.usefixtures("no_gpu")
def test_decode_steps_without_a_graph_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "BUDGET_BYTES", 0)
    assert set(run_with_graphs(toy_requests()).ledger) == {"no graph: none was captured"}


@pytest.mark.usefixtures("no_gpu")
def test_compiling_for_long_leaves_the_budget_to_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """On few cores and with an empty cache, kernels take minutes. Without graphs every step would be slow."""
    rehearse = GraphRunner._rehearse

    def slowly(self: GraphRunner, *args: Any) -> None:
        rehearse(self, *args)
        self.cost.began_s -= 10 * capture.BUDGET_S

    monkeypatch.setattr(GraphRunner, "_rehearse", slowly)
    cost = graph_runner(CpuDevice(driver=InlineDriver())).cost
    assert cost.num_shapes == cost.num_wanted
    assert cost.seconds > 10 * capture.BUDGET_S


class Favour:
    """Raises the logits of tokens that depend on the last known one."""

    name, needs_newest = "favour", True

    def applies(self, params: SamplingParams) -> bool:
        return True

    def __call__(self, logits: torch.Tensor, rows: Sequence[RowFacts]) -> torch.Tensor:
        for index, row in enumerate(rows):
            logits[index, int(row.tokens[-1]) % 7 :: 7] += 4
        return logits


@pytest.mark.usefixtures("no_gpu")
def test_processors_come_between_two_replays() -> None:
    """The same tokens as without graphs, beside rows that have no processor."""
    found = []
    for make in (toy_runner, partial(graph_runner, processed=True)):
        device, requests = CpuDevice(driver=InlineDriver()), toy_requests()[:4]
        for request in requests[::2]:
            request.processors = (Favour(),)
        runner = make(device, limits=LIMITS)
        outcome = run_toy(LocalExecutor(device, runner, LIMITS, 2), requests, depth=2)
        found.append(outcome.tokens)
        assert not runner.ledger
    assert found[0] == found[1]
    assert [found[0][r.id] == toy_truth(r) for r in requests] == [False, True, False, True]


class BrokenGraph:
    """A capture that an error within it has ended, as CUDA ends it."""

    def __init__(self, keep_graph: bool) -> None:
        assert keep_graph

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        pass

    def capture_end(self) -> None:
        raise RuntimeError("operation failed due to a previous error during capture")


def test_an_error_within_a_capture_is_the_one_that_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise MemoryError("mine")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", BrokenGraph)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    with pytest.raises(MemoryError, match="mine"):
        capture.record(fail, None, None)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="previous error"):
        capture.record(lambda: None, None, None)  # type: ignore[arg-type]


@pytest.mark.usefixtures("no_gpu")
def test_progress_counts_shapes() -> None:
    told: list[tuple[int, int]] = []
    runner = graph_runner(CpuDevice(driver=InlineDriver()), lambda done, total: told.append((done, total)))
    total = len(decode_shapes(LIMITS)) + len(mixed_shapes(LIMITS))
    assert told == [(done + 1, total) for done in range(total)]
    assert runner.cost.num_shapes == runner.cost.num_wanted == total
