"""When two log-probabilities are the same, and what is said of those that are not."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from three_asks import Inexact, schedule_of, stage, three_asks

import gapless.runner.runner
import gapless.runner.step
from gapless.core.facts import Facts
from gapless.core.outcome import TokenLogprob
from gapless.core.params import SamplingParams
from gapless.proof.judge import Judge
from gapless.proof.report import Tally
from gapless.proof.scores import ROUNDING, Asked, RequestScores, is_near
from gapless.proof.stage import ModelStage
from gapless.runner.step import Targets

__all__ = ["stage"]  # a fixture
SCORE = TokenLogprob(7, -1.5, 3, ((1, -0.5), (2, -1.25), (7, -1.5), (9, -1.5)))
PARAMS = SamplingParams(max_tokens=5, temperature=0, logprobs=2, prompt_logprobs=3)
ASKS = three_asks(PARAMS)
SCHEDULE = schedule_of(ASKS)


def judge_of(stage: ModelStage, kind: str) -> Judge:
    """One that knows already what is right."""
    same = Inexact(stage.model, stage.resolved, stage.room, stage.tokenizer)
    judge = Judge(stage if kind == "alone" else same, 6)
    for ask in ASKS:
        judge.alone(ask)
    judge.verdict(replace(SCHEDULE, depth=1))
    return judge


@pytest.mark.parametrize(
    ("changes", "rounding", "near"),
    [
        ({}, 0.0, True),
        ({"logprob": -1.5 - 1e-5}, 0.0, False),
        ({"logprob": -1.5 - 1e-5}, ROUNDING, True),
        ({"logprob": -1.51}, ROUNDING, False),
        ({"logprob": float("nan")}, ROUNDING, False),
        ({"token": 8}, ROUNDING, False),
        ({"rank": 4}, ROUNDING, True),
        ({"rank": 4}, 0.0, False),
        ({"rank": 5}, ROUNDING, False),
        ({"top": SCORE.top[:2]}, 0.0, False),  # fewer than asked for
        ({"top": (SCORE.top[0], SCORE.top[1], (9, -1.5))}, 0.0, True),  # as likely as the one in its place
        ({"top": (SCORE.top[0], SCORE.top[1], (5, -1.5))}, 0.0, True),  # the next in line may be as likely too
        ({"top": (SCORE.top[1], SCORE.top[0], SCORE.top[2])}, ROUNDING, False),
        ({"top": (SCORE.top[0], (1, -1.25), SCORE.top[2])}, ROUNDING, False),  # one token twice
    ],
)
def test_what_is_near(changes: dict[str, object], rounding: float, near: bool) -> None:
    got = replace(SCORE, **{"top": SCORE.top[:3], **changes})
    assert is_near(got, SCORE, 3, rounding) == near


def test_what_was_cut_off_may_be_missing_in_the_prompt_and_nowhere_else() -> None:
    right = RequestScores((SCORE, SCORE), (None, SCORE, SCORE))
    params = replace(PARAMS, logprobs=4, prompt_logprobs=4)
    cut = Asked(params, RequestScores((), (None, SCORE, None)), right, 0, is_whole=False)
    assert cut.compare(0) == (1, None)
    assert replace(cut, is_whole=True).compare(0)[1].startswith("prompt token 3 has no log-probability, alone -1.5")
    assert replace(cut, num_tokens=1).compare(0)[1].startswith("token 1 has no log-probability")
    assert replace(cut, params=replace(PARAMS, logprobs=None, prompt_logprobs=None), num_tokens=2).compare(0) == (
        0,
        None,
    )


@pytest.mark.parametrize("kind", ["alone", "same batches"])
def test_log_probabilities_are_compared(stage: ModelStage, kind: str) -> None:
    verdict = judge_of(stage, kind).verdict(SCHEDULE)
    assert verdict.trouble is None
    assert verdict.num_scores == 3 * (8 + 5)
    tally = Tally()
    tally.add(verdict)
    assert tally.num_scores == 39


@pytest.mark.parametrize("kind", ["alone", "same batches"])
@pytest.mark.parametrize("part", ["prompt", "token"])
def test_a_wrong_log_probability_is_found_and_told(stage: ModelStage, kind: str, part: str) -> None:
    judge, original, steps = judge_of(stage, kind), gapless.runner.runner.write_scores, []

    def write_scores(out: torch.Tensor, num_top: int, logits, tokens, targets: Targets, by=None) -> None:
        steps.append(1)
        targets = replace(targets, places=targets.places.flip(0)) if len(steps) == 3 else targets
        original(out, num_top, logits, tokens, targets, by)

    def score(logits: torch.Tensor, tokens: torch.Tensor, num_top: int) -> torch.Tensor:
        steps.append(1)
        return scored(logits.roll(1, 0) if len(steps) > 5 else logits, tokens, num_top)

    scored = gapless.runner.step.score
    is_prompt = part == "prompt"
    module, name = (gapless.runner.runner, "write_scores") if is_prompt else (gapless.runner.step, "score")
    with patch.object(module, name, write_scores if is_prompt else score):
        trouble = judge.verdict(SCHEDULE).trouble
    assert trouble is not None
    assert trouble.kind == "log-probabilities"
    assert ("step" if kind == "same batches" else f"{part} ") in trouble.message


def test_a_stream_must_tell_what_the_request_ends_with(stage: ModelStage) -> None:
    judge, original = judge_of(stage, "alone"), Facts._progress

    def progress(self: Facts, sampled, tokens):
        found = original(self, sampled, tokens)
        return tuple(replace(news, logprob=replace(news.logprob, rank=99)) for news in found)

    with patch.object(Facts, "_progress", progress):
        trouble = judge.verdict(SCHEDULE).trouble
    assert trouble is not None
    assert "streamed something else than it ended with" in trouble.message


def test_alone_serves_all_who_ask_for_less(stage: ModelStage) -> None:
    judge = Judge(stage, 6)
    plain = replace(PARAMS, logprobs=None, prompt_logprobs=None)
    first = judge.alone(replace(ASKS[0], params=plain))
    with patch.object(Judge, "_run_alone", side_effect=AssertionError("ran again")):
        assert judge.alone(replace(ASKS[0], params=replace(plain, logprobs=1), seed=5)) == first
        with pytest.raises(AssertionError, match="ran again"):
            judge.alone(ASKS[0])
