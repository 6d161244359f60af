"""Log-probabilities of what tokens are drawn from, by kernels, against those of torch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from test_adjust import KINDS as ADJUSTED
from test_adjust import scene
from test_draw import DEVICE, IS_GPU, SMALL, SOME_SIZES, VOCAB, row_params, sampled_rows, some_logits
from test_draw import KINDS as FILTERED
from test_draw import rows as logit_rows
from test_sampler import make_seats
from test_score_samples import UNTOUCHED, read

from gapless.core.outcome import TokenLogprob
from gapless.core.params import MAX_LOGPROBS, SamplingParams
from gapless.core.plan import score_width
from gapless.core.row_fields import ALL_NEEDS
from gapless.kernels.shortlist import ShortlistSizes
from gapless.runner import logprobs
from gapless.runner.draw import pick, score_samples
from gapless.runner.processors import SampledRows
from gapless.runner.row_store import seat_columns
from gapless.runner.sampler import judged

PROCESSED = {"logprobs": 3, "logprobs_mode": "processed_logprobs"}


def by_kernels(
    logits: torch.Tensor, sampled: SampledRows, num_top: int, sizes: ShortlistSizes = SMALL
) -> tuple[torch.Tensor, list[TokenLogprob]]:
    """Tokens, and their scores."""
    count = len(logits)
    drawn = pick(logits, sampled, ALL_NEEDS, sizes=sizes)
    out = torch.full((count * score_width(MAX_LOGPROBS),), UNTOUCHED, dtype=torch.int32, device=DEVICE)
    places = torch.arange(count, dtype=torch.int32, device=DEVICE)
    top = torch.tensor([num_top], dtype=torch.int32, device=DEVICE)
    score_samples(logits, drawn.tokens, places, top, out, drawn.basis, sizes=sizes)
    return drawn.tokens, read(out.cpu(), drawn.tokens.tolist(), num_top)


def compare(
    logits: torch.Tensor, sampled: SampledRows, needs: int, num_top: int, sizes: ShortlistSizes = SMALL
) -> list[TokenLogprob]:
    tokens, found = by_kernels(logits, sampled, num_top, sizes)
    expected = judged(logits, logits, sampled, needs)
    own = logprobs.score(expected, tokens.clamp(min=0), 0).cpu()
    shares, ranked = expected.log_softmax(dim=1).cpu().numpy(), np.argsort(-expected.cpu().numpy(), kind="stable")
    for row, one in enumerate(found):
        assert one.rank == int(own[row, 1])
        likeliest = ranked[row, :num_top]  # of equals, those of no probability included, the lower token
        assert [token for token, _ in one.top] == likeliest.tolist()
        values = [one.logprob, *(value for _, value in one.top)]
        np.testing.assert_allclose(values, shares[row, [one.token, *likeliest]], rtol=1e-5, atol=2e-5)
    return found


@pytest.mark.parametrize("num_top", [0, 3, MAX_LOGPROBS])
def test_of_filtered_rows_in_any_mode(num_top: int) -> None:
    """Every second row wants those of the model."""
    params = [replace(kind, **mode) for kind in FILTERED.values() for mode in (PROCESSED, {"logprobs": 3})]
    seats, needs = make_seats(params, seeds=range(len(params)))
    sampled = sampled_rows(torch.full((len(params),), 5, device=DEVICE), seats)
    found = compare(some_logits(len(params)), sampled, needs, num_top)
    assert num_top < 20 or found[2 * list(FILTERED).index("top_k")].top[3][1] == -np.inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_of_adjusted_rows(temperature: float, dtype: torch.dtype) -> None:
    """Masks, biases, penalties, narrowed choices, and the ban on stop tokens."""
    kinds = list(ADJUSTED)
    sampled, needs, _ = scene(kinds, temperature, vocab=VOCAB)
    columns = seat_columns(sampled.state.seats)
    columns["processed_scores"][:] = 1
    columns["stop_ids"][:] = -1
    columns["stop_ids"][::3, 0], columns["min_total"][::3] = 5, 99
    logits = some_logits(len(kinds), dtype)
    compare(logits, sampled, needs | ALL_NEEDS, 6)


@given(st.data(), st.sampled_from(SOME_SIZES), st.integers(0, 10**6), st.sampled_from([0, 4, 20]))
@settings(max_examples=25)
def test_of_any_row(data: st.DataObject, sizes: ShortlistSizes, seed: int, num_top: int) -> None:
    vocab = data.draw(st.sampled_from([VOCAB] if IS_GPU else [20, 37, 64, VOCAB]))
    given_ = np.nan_to_num(data.draw(logit_rows(vocab)), nan=-np.inf, neginf=-np.inf)
    params = replace(data.draw(row_params(vocab)), top_p=1.0, **PROCESSED)
    seats, needs = make_seats([params], [seed])
    sampled = sampled_rows(torch.tensor([7], device=DEVICE), seats)
    compare(torch.from_numpy(given_[None]).to(DEVICE), sampled, needs, num_top, sizes)


def test_a_row_without_a_sample_harms_nobody() -> None:
    logits = some_logits(3)
    seats, _ = make_seats([SamplingParams(temperature=1.0, top_k=4, **PROCESSED)] * 3, seeds=range(3))
    sampled = sampled_rows(torch.arange(3, device=DEVICE), seats)
    _, expected = by_kernels(logits, sampled, 2)
    for value in (torch.nan, torch.inf, -torch.inf):
        logits[1] = value
        _, found = by_kernels(logits, sampled, 2)
        assert [found[0], found[2]] == [expected[0], expected[2]]
