"""Log-probabilities as torch's own log-softmax has them, whatever the batch is cut into."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import oracles
from gapless.core.outcome import TokenLogprob, token_logprob
from gapless.core.params import MAX_LOGPROBS
from gapless.core.plan import score_width
from gapless.runner.logprobs import score
from gapless.runner.step import Targets, write_scores

NUM, VOCAB = 7, 301


def make(seed: int = 0, scale: float = 5.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(NUM, VOCAB, generator=generator) * scale
    return logits, torch.randint(VOCAB, (NUM,), generator=generator)


def read(scores: torch.Tensor, tokens: torch.Tensor, num_top: int) -> list[TokenLogprob]:
    return [token_logprob(t, s.tobytes(), num_top) for t, s in zip(tokens.tolist(), scores.numpy(), strict=True)]


@pytest.mark.parametrize("num_top", [0, 1, 5, MAX_LOGPROBS])
@pytest.mark.parametrize("scale", [0.01, 5.0, 1000.0])
def test_equal_to_log_softmax(num_top: int, scale: float) -> None:
    logits, tokens = make(scale=scale)
    tokens[0] = logits[0].argmax()
    scores = score(logits, tokens, num_top)
    assert (scores.shape, scores.dtype) == ((NUM, score_width(num_top)), torch.int32)
    expected = logits.log_softmax(dim=1)
    for row, found in enumerate(read(scores, tokens, num_top)):
        assert found.logprob == pytest.approx(float(expected[row, found.token]), rel=1e-6, abs=1e-5)
        assert found.rank == int((expected[row].argsort(descending=True) == found.token).nonzero()) + 1
        assert [token for token, _ in found.top] == expected[row].topk(num_top).indices.tolist()
        assert [value for _, value in found.top] == pytest.approx(
            expected[row].topk(num_top).values.tolist(), rel=1e-6, abs=1e-5
        )


def test_half_precision_logits_are_scored_in_float32() -> None:
    logits, tokens = make()
    half = logits.bfloat16()
    for row, found in enumerate(read(score(half, tokens, 3), tokens, 3)):
        oracles.check_logprob(found, int(tokens[row]), half[row].float().numpy(), 3)


def test_equals_share_a_rank_and_a_certain_token_is_certain() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[1, 4] = 1e4
    flat, certain = read(score(logits, torch.tensor([9, 4]), 1), torch.tensor([9, 4]), 1)
    assert (flat.rank, flat.logprob) == (1, pytest.approx(-np.log(VOCAB)))
    assert certain == TokenLogprob(4, 0.0, 1, ((4, 0.0),))


def test_a_row_is_read_with_fewer_than_the_step_gave() -> None:
    logits, tokens = make()
    few, many = score(logits, tokens, 2), score(logits, tokens, MAX_LOGPROBS)
    assert read(many, tokens, 2) == read(few, tokens, 2)


@pytest.mark.parametrize("slice_size", [1, 3, NUM, 100])
def test_slices_bound_the_logits_and_change_nothing(slice_size: int) -> None:
    logits, tokens = make()
    places = torch.arange(NUM - 1, -1, -1) * 2
    sizes: list[int] = []

    def logits_of(chosen: torch.Tensor) -> torch.Tensor:
        sizes.append(len(chosen))
        return logits[chosen // 2]

    out = torch.full((NUM, score_width(4)), -1, dtype=torch.int32)
    write_scores(out.view(-1), 4, logits[:0], tokens[:0], Targets(tokens, places, logits_of, slice_size))
    assert read(out, tokens, 4) == read(score(logits.flip(0), tokens, 4), tokens, 4)
    assert max(sizes) <= slice_size
    assert sum(sizes) == NUM


def test_no_places_no_logits() -> None:
    def never(hidden: torch.Tensor) -> torch.Tensor:
        raise AssertionError

    nothing = torch.empty(0, dtype=torch.int64)
    out = torch.empty(0, dtype=torch.int32)
    write_scores(out, 0, torch.ones(0, 5), nothing, Targets(nothing, nothing, never, 4))
