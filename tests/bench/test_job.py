"""The job is the same each time, and what crosses the pipe comes back as it was."""

import pytest

from gapless.bench.job import (
    BenchJob,
    Contender,
    ContestTask,
    EngineFailure,
    EngineLoaded,
    Overlap,
    Round,
    decode_answer,
    decode_task,
    encode,
    random_prompts,
)

CONTENDER = Contender("gapless", "Gapless", "gapless", "gapless", "fp32", mode="2")


def test_prompts_are_fixed_and_in_the_anchors_range() -> None:
    prompts = random_prompts(16, 64, 49152)
    assert prompts == random_prompts(16, 64, 49152)
    assert [len(prompt) for prompt in prompts] == [64] * 16
    assert all(1000 <= token < 30000 for prompt in prompts for token in prompt)
    assert len({tuple(prompt) for prompt in prompts}) == 16


@pytest.mark.parametrize("vocab_size", [1, 97, 1000, 1001, 5000])
def test_prompts_stay_in_a_small_vocabulary(vocab_size: int) -> None:
    assert all(0 <= token < vocab_size for prompt in random_prompts(8, 32, vocab_size) for token in prompt)


@pytest.mark.parametrize(
    "answer",
    [
        EngineLoaded("1.0", "bf16"),
        Round(1.5, 2**30, [[1, 2], [3, 4]], Overlap(2, 10, 0, 0.99, None)),
        Round(1.5, 2**30, None, None),
        EngineFailure("ValueError: a\nb"),
    ],
)
def test_answers_cross_the_pipe(answer: EngineLoaded | Round | EngineFailure) -> None:
    line = encode(answer)
    assert line.count("\n") == 1
    assert decode_answer(line) == answer


def test_tasks_cross_the_pipe() -> None:
    task = ContestTask(BenchJob("m", 1, 4, [[1, 2], [3, 4], [5, 6]]), CONTENDER, "/m", "fp32", batch=2)
    assert decode_task(encode(task)) == task
    assert task.waves() == [[[1, 2], [3, 4]], [[5, 6]]]
    assert (task.job.length, task.job.num_tokens) == (6, 12)


def test_other_lines_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown answer 'ContestTask'"):
        decode_answer('{"kind": "ContestTask"}')
    with pytest.raises(ValueError, match="expected a ContestTask"):
        decode_task(encode(EngineFailure("no")))
