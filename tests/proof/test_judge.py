"""The two comparisons, and what counts as a tie."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from three_asks import Inexact, schedule_of, stage, three_asks

import gapless.runner.sampler
from gapless.core.params import SamplingParams
from gapless.proof.judge import ALONE, SAME_BATCHES, Judge
from gapless.proof.report import Tally
from gapless.proof.schedule import Schedule
from gapless.proof.stage import ModelStage
from gapless.proof.tie import is_tie, next_logits
from gapless.runner.row_store import RowStore

__all__ = ["stage"]  # a fixture
GREEDY = SamplingParams(max_tokens=6, temperature=0)
ASKS = three_asks(GREEDY)
SCHEDULE = schedule_of(ASKS)


def inexact(stage: ModelStage) -> Inexact:
    return Inexact(stage.model, stage.resolved, stage.room, stage.tokenizer)


def late_token(original):
    """A row's token is replaced one step after it was written, every now and then."""
    calls: list[int] = []

    def advance(self: RowStore, packed, tokens: torch.Tensor, needs: int) -> None:
        original(self, packed, tokens, needs)
        calls.append(1)
        if len(calls) % 7 == 0:
            self.last_token[packed.sample_rows.long()] = 3

    return advance


def test_a_right_run_is_right_by_both_comparisons(stage: ModelStage) -> None:
    alone, same = Judge(stage, 6), Judge(inexact(stage), 6)
    assert (alone.comparison, same.comparison) == (ALONE, SAME_BATCHES)
    for judge in (alone, same):
        verdict = judge.verdict(SCHEDULE)
        assert verdict.trouble is None
        assert verdict.num_compared == 18
    assert same.verdict(replace(SCHEDULE, depth=1)).num_compared == 0  # nothing to compare it with


@pytest.mark.parametrize("kind", ["alone", "same batches"])
def test_a_wrong_token_is_found_and_told(stage: ModelStage, kind: str) -> None:
    judge = Judge(stage if kind == "alone" else inexact(stage), 6)
    for ask in ASKS:
        judge.alone(ask)
    judge.verdict(replace(SCHEDULE, depth=1))
    with patch.object(RowStore, "advance", late_token(RowStore.advance)):
        trouble = judge.verdict(SCHEDULE).trouble
    assert trouble is not None
    assert trouble.kind == "tokens"
    assert "differs at" in trouble.message


def test_batches_that_differ_are_not_compared(stage: ModelStage) -> None:
    """At depth 2 a row is given back one step later, so that with one row everything after comes later too."""
    judge = Judge(inexact(stage), 6)
    verdict = judge.verdict(replace(SCHEDULE, num_rows=1, asks=(*ASKS, replace(ASKS[0], id="again", abort=3))))
    assert verdict.trouble is None
    assert verdict.num_compared > 0


def test_a_chunk_that_samples_is_another_batch_than_one_that_does_not(stage: ModelStage) -> None:
    """A preempted request comes back with one token less at depth 2, so that the same chunk is its last one there."""
    long = replace(ASKS[0], prompt=tuple(range(13)), params=replace(GREEDY, max_tokens=5))
    short = replace(ASKS[1], prompt=(1,), arrival=0)
    tight = {"num_rows": 2, "num_blocks": 2, "block_size": 16, "max_batch_tokens": 2, "max_model_len": 38}
    schedule = Schedule((long, short), **tight, prefix_cache=False, depth=2)
    verdict = Judge(inexact(stage), 6).verdict(schedule)
    assert verdict.played.counters.num_preemptions > 0
    assert verdict.trouble is None
    assert verdict.num_apart > 0


def test_a_clear_difference_is_no_tie(stage: ModelStage) -> None:
    logits = next_logits(stage, ASKS[0].prompt)
    best, second = logits.topk(2).indices.tolist()
    assert is_tie(stage, ASKS[0], (), best)
    assert not is_tie(stage, ASKS[0], (), second)


def test_two_equal_logits_are_a_tie(stage: ModelStage) -> None:
    logits = next_logits(stage, ASKS[0].prompt)
    best, second, third = logits.topk(3).indices.tolist()
    logits[second] = logits[best] - 1e-6
    with patch("gapless.proof.tie.next_logits", return_value=logits):
        assert is_tie(stage, ASKS[0], (), second)
        assert not is_tie(stage, ASKS[0], (), third)


def test_a_draw_on_the_border_of_two_tokens_is_a_tie(stage: ModelStage) -> None:
    ask = replace(ASKS[0], params=replace(GREEDY, temperature=1.0), seed=3)
    logits = next_logits(stage, ask.prompt)
    mass = logits.double().softmax(0).cumsum(0)
    border = int(logits.argmax())
    for place, expected in ((float(mass[border]), True), (float(mass[border] - 0.05), False)):
        with patch.object(
            gapless.runner.sampler, "uniform", lambda seed, at, place=place: torch.full((64,), place).double()
        ):
            found = {token for token in (border, border + 1) if is_tie(stage, ask, (), token)}
        assert (len(found) == 2) == expected


def test_alone_is_cut_to_fewer_tokens(stage: ModelStage) -> None:
    judge = Judge(stage, 6)
    whole, half = judge.alone(ASKS[0]), judge.alone(replace(ASKS[0], params=replace(GREEDY, max_tokens=3)))
    assert (half.tokens, half.reason) == (whole.tokens[:3], "length")


def test_ties_are_believed_while_they_are_few() -> None:
    assert Tally(num_compared=10_000, num_ties=5).passed
    assert Tally(num_compared=1000, num_ties=5).why_not == "more ties than rounding explains"
    assert Tally().why_not == "no token was compared"
    assert not Tally(num_compared=9, num_conflicts=1).passed
