"""The engine as its clients see it: who is told what, also when a step fails, a callback raises, or the engine dies."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fakes import check_empty
from gapless.config import EngineOptions
from gapless.core.outcome import Finished, Progress
from gapless.core.params import MAX_STOP_IDS, SamplingParams
from gapless.core.request import Request
from gapless.errors import EngineClosed, InvalidRequest, StepFailed
from gapless.models.source import resolve
from gapless.pipeline.engine import Engine, derive_seed
from tiny import CPU, greedy

TIMEOUT_S = 20.0
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
LONG = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)
News = queue.SimpleQueue[Progress | Finished]


@pytest.fixture
def make_engine(tiny_dir: Path) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(**options: Any) -> Engine:
        values = CPU | {"model": str(tiny_dir), "depth": 2, "num_blocks": 64, "check": True} | options
        made.append(Engine(EngineOptions(**values), resolve(tiny_dir)))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def submit(engine: Engine, prompt: list[int], params: SamplingParams = GREEDY, *, streams: bool = False) -> News:
    news: News = queue.SimpleQueue()
    engine.submit(engine.make_request(prompt, params, streams=streams), news.put)
    return news


def last(news: News) -> Finished:
    while not isinstance(item := news.get(timeout=TIMEOUT_S), Finished):
        pass
    return item


def output(finished: Finished) -> tuple[int, ...]:
    return tuple(finished.request.tokens[finished.request.num_prompt :].tolist())


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "never happened"
        time.sleep(0.001)


def break_steps(engine: Engine, monkeypatch: pytest.MonkeyPatch, failing: Callable[[Any], bool]) -> None:
    runner = engine._parts.built.runner
    step = runner.step

    def broken(filled, packed_plan, out):
        if failing(filled.plan):
            raise RuntimeError("the device said no")
        step(filled, packed_plan, out)

    monkeypatch.setattr(runner, "step", broken)


# -- the usual -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3, "auto"])
def test_what_comes_back_is_what_the_model_says(make_engine, tiny_dir: Path, depth: int | str) -> None:
    engine = make_engine(depth=depth)
    prompts = [[5, 6, 7], [9] * 20, [1], [30, 40, 50, 60]]
    waiting = [submit(engine, prompt) for prompt in prompts]
    for prompt, news in zip(prompts, waiting, strict=True):
        finished = last(news)
        assert (output(finished), finished.reason) == (greedy(tiny_dir, prompt, 12, ()).tokens, "length")


def test_a_stream_gets_each_token_and_then_the_end(make_engine) -> None:
    engine = make_engine()
    news = submit(engine, [5, 6, 7], streams=True)
    tokens = []
    while isinstance(item := news.get(timeout=TIMEOUT_S), Progress):
        tokens.append(item.token)
    assert (tuple(tokens), item.reason) == (output(item), "length")
    assert len(tokens) == 12


def test_stats_count_and_their_difference_describes_a_run(make_engine) -> None:
    engine = make_engine(depth=1)
    last(submit(engine, [5, 6, 7]))
    before = engine.monitor.stats()
    last(submit(engine, [5, 6, 8, 9]))
    run = engine.monitor.stats() - before
    assert (run.num_prompt_tokens, run.num_generated, run.num_steps, run.num_overrun) == (4, 12, 12, 0)
    assert 0 < run.busy_s < run.time_s < TIMEOUT_S


def test_seeds_of_requests_without_one_come_from_the_engines() -> None:
    seeds = [derive_seed(7, number) for number in range(1000)]
    assert len(set(seeds)) == 1000
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
    assert derive_seed(7, 3) == derive_seed(7, 3) != derive_seed(8, 3)


def test_the_stop_tokens_of_model_and_request_are_joined(make_engine) -> None:
    engine = make_engine()
    assert engine.make_request([1], SamplingParams(stop_token_ids=(5, 0, 5))).stop_ids == (0, 5)
    assert engine.make_request([1], SamplingParams(stop_token_ids=(5,), ignore_eos=True)).stop_ids == (5,)
    with pytest.raises(InvalidRequest, match=f"17 stop and end-of-sequence tokens; at most {MAX_STOP_IDS}"):
        engine.make_request([1], SamplingParams(stop_token_ids=tuple(range(1, 17))))


# -- aborts and close ----------------------------------------------------------------------------------------------


def test_abort_ends_a_request_with_what_it_has(make_engine, tiny_dir: Path) -> None:
    engine = make_engine()
    news = submit(engine, [5, 6, 7], LONG, streams=True)
    first = news.get(timeout=TIMEOUT_S)
    engine.abort(first.request.id)
    finished = last(news)
    tokens = output(finished)
    assert finished.reason == "abort"
    assert 0 < len(tokens) < 100
    assert tokens == greedy(tiny_dir, [5, 6, 7], 100, ()).tokens[: len(tokens)]
    eventually(lambda: not engine._scheduler.has_requests)


def test_an_unknown_id_is_ignored(make_engine) -> None:
    engine = make_engine()
    engine.abort("nobody")
    assert last(submit(engine, [5, 6, 7])).reason == "length"


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_close_in_the_middle_tells_everybody_and_ends(make_engine, depth: int) -> None:
    engine = make_engine(depth=depth, max_num_rows=2)
    waiting = [submit(engine, [n, n + 1], LONG, streams=True) for n in range(5)]
    waiting[0].get(timeout=TIMEOUT_S)
    engine.close()
    assert {last(news).reason for news in waiting} <= {"abort", "length"}
    check_empty(engine._scheduler)
    assert not engine._thread.is_alive()


def test_close_twice_and_submit_after(make_engine) -> None:
    engine = make_engine()
    request = engine.make_request([1, 2], GREEDY)
    engine.close()
    engine.close()
    with pytest.raises(EngineClosed, match="the engine is closed"):
        engine.submit(request, print)


def test_close_leaves_no_thread_behind(make_engine) -> None:
    before = set(threading.enumerate())
    engine = make_engine()
    last(submit(engine, [5, 6, 7]))
    engine.close()
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("gapless")]


# -- trouble -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_failed_step_fails_its_requests_and_no_others(make_engine, monkeypatch, tiny_dir: Path, depth: int) -> None:
    engine = make_engine(depth=depth, max_num_rows=2)
    break_steps(engine, monkeypatch, lambda plan: plan.step == 7)
    prompts = [[n + 1, n + 2, n + 3] for n in range(6)]
    finished = [last(news) for news in [submit(engine, prompt) for prompt in prompts]]
    failed = [item for item in finished if item.reason == "error"]
    assert 1 <= len(failed) <= 2
    for prompt, item in zip(prompts, finished, strict=True):
        tokens = greedy(tiny_dir, prompt, 12, ()).tokens
        if item.reason == "error":
            assert isinstance(item.error, StepFailed)
            assert "step 7 failed on the device: the device said no" in str(item.error)
            assert output(item) == tokens[: len(output(item))]
        else:
            assert output(item) == tokens
    assert output(last(submit(engine, prompts[0]))) == greedy(tiny_dir, prompts[0], 12, ()).tokens


def test_a_device_that_always_fails_leaves_nobody_waiting(make_engine, monkeypatch) -> None:
    engine = make_engine(depth=3, max_num_rows=2)
    break_steps(engine, monkeypatch, lambda plan: True)
    finished = [last(news) for news in [submit(engine, [n + 1]) for n in range(5)]]
    assert {item.reason for item in finished} == {"error"}


def test_the_same_request_twice_fails_the_second_and_nobody_else(make_engine, tiny_dir: Path) -> None:
    engine = make_engine()
    request = engine.make_request([5, 6, 7], LONG)
    first, second = queue.SimpleQueue(), queue.SimpleQueue()
    engine.submit(request, first.put)
    engine.submit(request, second.put)
    refused = last(second)
    assert refused.reason == "error"
    assert str(refused.error) == f"request {request.id!r} was submitted before; make a new one"
    assert output(last(first)) == greedy(tiny_dir, [5, 6, 7], 100, ()).tokens


@pytest.mark.parametrize("kind", [ZeroDivisionError, SystemExit, KeyboardInterrupt])
def test_a_callback_that_raises_harms_only_itself(make_engine, tiny_dir: Path, caplog, kind: type) -> None:
    engine = make_engine()

    def bad(*news: Progress | Finished) -> None:
        raise kind("in the client's code")

    with caplog.at_level(logging.CRITICAL, "gapless.pipeline.inbox"):
        engine.submit(engine.make_request([1, 2, 3], LONG, streams=True), bad)
        engine.submit(engine.make_request([2, 2, 3], LONG), lambda news: None, on_start=bad)
        engine.ping(bad)
        good = last(submit(engine, [5, 6, 7]))
    assert output(good) == greedy(tiny_dir, [5, 6, 7], 12, ()).tokens
    eventually(lambda: not engine._scheduler.has_requests)


def die(engine: Engine, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    schedule = engine._scheduler.schedule
    calls = iter(range(10**6))

    def broken():
        if next(calls) >= after:
            raise KeyError("a bug in the scheduler")
        return schedule()

    monkeypatch.setattr(engine._scheduler, "schedule", broken)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_when_the_engine_dies_everybody_is_told(make_engine, monkeypatch, caplog, depth: int) -> None:
    engine = make_engine(depth=depth, max_num_rows=2)
    die(engine, monkeypatch, after=5)
    with caplog.at_level(logging.CRITICAL, "gapless.pipeline.engine"):
        requests = [engine.make_request([n + 1, n + 2], LONG) for n in range(5)]
        news: News = queue.SimpleQueue()
        for request in requests:
            try:
                engine.submit(request, news.put)
            except EngineClosed:
                news.put(Finished(request, "error", EngineClosed("the engine died: refused")))
        finished = [last(news) for _ in requests]
        engine._thread.join(TIMEOUT_S)
    assert {item.request.id for item in finished} == {request.id for request in requests}
    for item in finished:
        assert (item.reason, type(item.error)) == ("error", EngineClosed)
        assert "the engine died" in str(item.error)
    assert not engine._thread.is_alive()


def test_a_death_in_the_middle_of_a_seat_leaves_nobody_waiting(make_engine, monkeypatch, caplog) -> None:
    """The scheduler then holds half a request: it is neither in the queue nor in a row. It was announced."""
    engine = make_engine(max_num_rows=2, check=False)
    seat = engine._scheduler.rows.seat
    started: list[int] = []

    def broken(request: Request) -> int:
        if request.prompt[0] == 9:
            raise OverflowError("a bug in the row table")
        return seat(request)

    monkeypatch.setattr(engine._scheduler.rows, "seat", broken)
    with caplog.at_level(logging.CRITICAL, "gapless.pipeline.engine"):
        running = submit(engine, [1, 2], LONG, streams=True)
        running.get(timeout=TIMEOUT_S)
        request = engine.make_request([9, 9], GREEDY)
        culprit: News = queue.SimpleQueue()
        engine.submit(request, culprit.put, lambda: started.append(9))
        found = [last(running), last(culprit)]
        engine._thread.join(TIMEOUT_S)
    assert [item.reason for item in found] == ["error", "error"]
    assert "the engine died: a bug in the row table" in str(found[1].error)
    assert len(output(found[0])) > 0  # what was known of it came back with it
    assert started == [9]


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_is_told_that_it_has_no_engine(make_engine) -> None:
    engine = make_engine()
    request = engine.make_request([1, 2], GREEDY)
    read, write = os.pipe()
    with engine._lock:  # somebody may be submitting at that very moment
        pid = os.fork()
    if pid == 0:
        signal.alarm(int(TIMEOUT_S))  # an end to it, should it wait all the same
        for ask in (lambda: engine.make_request([1, 2], GREEDY), lambda: engine.submit(request, print)):
            with contextlib.suppress(EngineClosed):
                ask()
                os.write(write, b"accepted ")
        engine.close()
        os.write(write, b"closed")
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        assert pipe.read() == b"closed"
    assert os.waitpid(pid, 0)[1] == 0
    assert last(submit(engine, [1, 2])).reason == "length"  # the parent's goes on


def test_after_it_died_submit_says_why_and_close_is_no_trouble(make_engine, monkeypatch, caplog) -> None:
    engine = make_engine()
    die(engine, monkeypatch, after=0)
    with caplog.at_level(logging.CRITICAL, "gapless.pipeline.engine"):
        assert last(submit(engine, [1, 2])).reason == "error"
        engine._thread.join(TIMEOUT_S)
    with pytest.raises(EngineClosed) as caught:
        submit(engine, [1, 2])
    assert isinstance(caught.value.__cause__, KeyError)
    engine.close()


def test_what_is_still_in_the_inbox_when_it_dies_is_told_too(make_engine, monkeypatch, caplog) -> None:
    engine = make_engine()
    entered, release = threading.Event(), threading.Event()

    def broken():
        entered.set()
        assert release.wait(TIMEOUT_S)
        raise KeyError("a bug in the scheduler")

    monkeypatch.setattr(engine._scheduler, "schedule", broken)
    with caplog.at_level(logging.CRITICAL, "gapless.pipeline.engine"):
        first = submit(engine, [1, 2])
        assert entered.wait(TIMEOUT_S)
        second = submit(engine, [3, 4])  # the loop is busy dying
        release.set()
        assert [last(first).reason, last(second).reason] == ["error", "error"]


def test_the_checking_mode_checks(make_engine, monkeypatch, caplog) -> None:
    engine = make_engine(check=True)
    with caplog.at_level(logging.CRITICAL, "gapless.pipeline.engine"):
        news = submit(engine, [1, 2], LONG, streams=True)
        news.get(timeout=TIMEOUT_S)
        engine._scheduler.pool._references[7] += 1
        finished = last(news)
    assert "reference counts differ" in str(finished.error)


def test_a_request_cannot_be_made_of_bad_tokens(make_engine) -> None:
    engine = make_engine()
    with pytest.raises(InvalidRequest, match="prompt: token id 97 at index 1 is not in the vocabulary of 97") as caught:
        engine.make_request([1, 97], GREEDY)
    assert caught.value.param == "prompt"
    with pytest.raises(InvalidRequest, match="stop_token_ids: token id 97 at index 0 is not in") as caught:
        engine.make_request([1], SamplingParams(stop_token_ids=(97,)))
    assert caught.value.param == "stop_token_ids"
    assert isinstance(engine.make_request([0, 96], GREEDY), Request)


# -- a server's needs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_known", [1, 5, 11])
def test_a_request_goes_on_after_tokens_of_another_engine(make_engine: Callable[..., Engine], num_known: int) -> None:
    """Same tokens, same count, same end, as if it had never been interrupted."""
    engine = make_engine()
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=9, ignore_eos=True)
    whole = output(last(submit(engine, [5, 6, 7], params)))
    request = engine.make_request([5, 6, 7], params, streams=True, generated=whole[:num_known])
    news: News = queue.SimpleQueue()
    engine.submit(request, news.put)
    told = []
    while isinstance(item := news.get(timeout=TIMEOUT_S), Progress):
        told.append(item.token)
    assert tuple(told) == whole[num_known:]
    assert output(item) == whole
    assert item.reason == "length"


def test_nothing_left_to_generate_is_refused(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    with pytest.raises(InvalidRequest, match="leave nothing to generate"):
        engine.make_request([1], SamplingParams(max_tokens=3), generated=[1, 2, 3])
    with pytest.raises(InvalidRequest, match="vocabulary"):
        engine.make_request([1], SamplingParams(max_tokens=3), generated=[999])


def test_a_request_is_announced_before_it_runs(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    order: queue.SimpleQueue[object] = queue.SimpleQueue()
    request = engine.make_request([1, 2, 3], GREEDY, streams=True)
    engine.submit(request, order.put, lambda: order.put("starts"))
    assert order.get(timeout=TIMEOUT_S) == "starts"
    assert isinstance(order.get(timeout=TIMEOUT_S), Progress)


def test_ping_is_answered_by_the_loop_idle_or_not(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    for params in (None, LONG):
        if params is not None:
            submit(engine, [1, 2, 3], params)
        answered = threading.Event()
        engine.ping(answered.set)
        assert answered.wait(TIMEOUT_S)


def test_the_pulse_tells_idle_from_stuck(make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    eventually(lambda: engine.pulse().idle)
    go_on = threading.Event()
    step = engine._parts.built.runner.step
    monkeypatch.setattr(engine._parts.built.runner, "step", lambda *args: (go_on.wait(TIMEOUT_S), step(*args)))
    news = submit(engine, [1, 2, 3])
    eventually(lambda: engine.monitor.load().num_running == 1)
    eventually(lambda: (first := engine.pulse()) == (time.sleep(0.05), engine.pulse())[1] and not first.idle)
    answered = threading.Event()
    engine.ping(answered.set)
    assert not answered.wait(0.05)
    go_on.set()
    assert answered.wait(TIMEOUT_S)
    last(news)
    eventually(lambda: engine.pulse().idle)
    assert engine.monitor.load().num_running == 0
