"""Engines that are installed generate exactly what was asked, and in float32 what Gapless does."""

import importlib.util
from pathlib import Path

import pytest

from gapless.bench.job import BenchJob, ContestTask, Output, random_prompts
from gapless.bench.peers import LOADERS, PEERS, gapless
from gapless.bench.worker import last_line, run_round
from tiny import VOCAB_SIZE, greedy

NUM_TOKENS = 12


def task_for(path: Path, name: str, batch: int) -> ContestTask:
    job = BenchJob(str(path), 1, NUM_TOKENS, random_prompts(3, 9, VOCAB_SIZE))
    contender = gapless("float32", "2") if name == "gapless" else next(peer for peer in PEERS if peer.name == name)
    return ContestTask(job, contender, str(path), "fp32", batch)


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("name", ["gapless", "generate", "generate_batch"])
def test_torch_engines_say_what_the_oracle_says(tiny_dir: Path, name: str, batch: int) -> None:
    if name != "gapless":
        pytest.importorskip("transformers")
    task = task_for(tiny_dir, name, batch)
    engine = LOADERS[name](task)
    first, second = run_round(engine, task), run_round(engine, task)
    assert first.tokens == [list(greedy(tiny_dir, p, NUM_TOKENS, stop=()).tokens) for p in task.job.prompts]
    assert second.tokens == first.tokens
    assert engine.weights == "fp32"
    assert first.seconds > 0
    assert first.peak_bytes > 2**20


def test_gapless_tells_how_it_overlapped(tiny_dir: Path) -> None:
    task = task_for(tiny_dir, "gapless", 3)
    overlap = run_round(LOADERS["gapless"](task), task).overlap
    assert overlap is not None
    assert (overlap.depth, overlap.num_wasted) == (2, 0)
    assert overlap.num_steps >= NUM_TOKENS
    assert 0 < overlap.device_share <= 1
    assert overlap.host_share is None or 0 <= overlap.host_share <= 1.01


@pytest.mark.parametrize(
    ("num_tokens", "message"),
    [([12, 12], "2 results for 3 prompts"), ([12, 11, 12], "prompt 1: 11 tokens came out instead of 12")],
)
def test_too_few_tokens_are_an_error(tiny_dir: Path, num_tokens: list[int], message: str) -> None:
    class Short:
        weights = "fp32"

        def run(self) -> Output:
            return Output(num_tokens, None)

    with pytest.raises(RuntimeError, match=message):
        run_round(Short(), task_for(tiny_dir, "gapless", 1))


def test_an_error_is_told_by_its_last_line() -> None:
    assert last_line(ValueError("a\nb")) == "b"
    assert last_line(KeyError("x")) == "KeyError: 'x'"


def test_every_contender_has_a_loader() -> None:
    assert {peer.name for peer in PEERS} | {"gapless"} == set(LOADERS)
    assert all(peer.module and peer.package for peer in PEERS)
    assert importlib.util.find_spec(gapless("auto", "auto").module) is not None
