"""Log-probabilities by kernels against those of torch, under Triton's interpreter where there is no GPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

import oracles
from gapless.core.outcome import TokenLogprob, token_logprob
from gapless.core.params import MAX_LOGPROBS
from gapless.core.plan import NO_SAMPLE, score_width
from gapless.kernels.shortlist import ShortlistSizes
from gapless.runner import logprobs
from gapless.runner.draw import score, score_samples

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUM, VOCAB, UNTOUCHED = 6, 150, -77
SMALL = ShortlistSizes(tile=4, span=8, chunk=4, first=4, room=32, block=64)


def make(scale: float = 3.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(NUM, VOCAB, generator=generator) * scale
    tokens = torch.randint(VOCAB, (NUM,), generator=generator)
    tokens[:2] = logits[:2].argmax(dim=1)
    return logits.to(DEVICE), tokens.to(DEVICE)


def run(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    num_top: int,
    places: Sequence[int] | None = None,
    sizes: ShortlistSizes = SMALL,
) -> torch.Tensor:
    """All that is written, and what stood there before."""
    out = torch.full((len(logits) * score_width(MAX_LOGPROBS),), UNTOUCHED, dtype=torch.int32, device=DEVICE)
    where = torch.tensor(range(len(logits)) if places is None else places, dtype=torch.int32, device=DEVICE)
    top = torch.tensor([num_top], dtype=torch.int32, device=DEVICE)
    score_samples(logits, tokens, where, top, out, sizes=sizes)
    return out.cpu()


def read(out: torch.Tensor, tokens: Sequence[int], num_top: int) -> list[TokenLogprob]:
    width = score_width(num_top)
    scores = out[: len(tokens) * width].view(-1, width).numpy()
    return [token_logprob(token, numbers.tobytes(), num_top) for token, numbers in zip(tokens, scores, strict=True)]


@pytest.mark.parametrize("num_top", [0, 1, 5, MAX_LOGPROBS])
@pytest.mark.parametrize("scale", [0.01, 3.0, 1000.0])
def test_equal_to_torch(num_top: int, scale: float) -> None:
    logits, tokens = make(scale)
    expected = read(logprobs.score(logits, tokens, num_top).cpu().view(-1), tokens.tolist(), num_top)
    for found, wanted in zip(read(run(logits, tokens, num_top), tokens.tolist(), num_top), expected, strict=True):
        assert (found.token, found.rank) == (wanted.token, wanted.rank)
        assert found.logprob == pytest.approx(wanted.logprob, rel=1e-6, abs=1e-5)
        assert [token for token, _ in found.top] == [token for token, _ in wanted.top]
        assert [value for _, value in found.top] == pytest.approx(
            [value for _, value in wanted.top], rel=1e-6, abs=1e-5
        )


def test_scores_go_where_they_are_wanted_and_nowhere_else() -> None:
    logits, tokens = make()
    alone = run(logits, tokens, 3).view(-1, 2)[: NUM * 4].reshape(NUM, 8)
    out = run(logits, tokens, 3, places=[2, -1, 0, -1, -1, 1])
    assert out[:24].view(3, 8).tolist() == alone[[2, 5, 0]].tolist()
    assert (out[24:] == UNTOUCHED).all()
    assert (run(logits, tokens, 3, places=[-1] * NUM) == UNTOUCHED).all()


def test_of_equals_the_lower_token_comes_first() -> None:
    logits, _ = make()
    logits[0] = 2.0  # more equals than a shortlist has room for
    logits[1, [140, 7, 70]] = 50.0
    logits[2, 8:] = -torch.inf
    tokens = torch.tensor([9, 70, 60, 0, 0, 0], device=DEVICE)
    flat, tied, few = read(run(logits, tokens, 10), tokens.tolist(), 10)[:3]
    assert (flat.rank, flat.logprob) == (1, pytest.approx(-np.log(VOCAB)))
    assert [token for token, _ in flat.top] == list(range(10))
    assert (tied.rank, [token for token, _ in tied.top][:3]) == (1, [7, 70, 140])
    assert (few.rank, few.logprob) == (9, -np.inf)
    assert [token for token, _ in few.top][8:] == [8, 9]  # the first of those that cannot come


def test_a_row_without_a_sample_harms_nobody() -> None:
    logits, tokens = make()
    expected = run(logits, tokens, 2)
    logits[1] = torch.nan
    tokens[1] = NO_SAMPLE
    found = run(logits, tokens, 2)
    width = score_width(2)
    assert torch.equal(found[:width], expected[:width])
    assert torch.equal(found[2 * width :], expected[2 * width :])


IS_GPU = DEVICE.type == "cuda"  # compiles for seconds what the interpreter just runs
SOME_SIZES = (SMALL, ShortlistSizes(tile=2, span=2, chunk=2, first=2, room=4, block=64), ShortlistSizes())


@given(
    st.integers(0, 10**6),
    st.sampled_from([VOCAB] if IS_GPU else [20, 37, 64, 65, 301]),
    st.integers(0, MAX_LOGPROBS),
    st.sampled_from(SOME_SIZES[: 1 if IS_GPU else None]),
    st.sampled_from(["smooth", "tied", "flat", "some -inf"]),
)
@settings(max_examples=12)
def test_any_row(seed: int, vocab: int, num_top: int, sizes: ShortlistSizes, kind: str) -> None:
    random = np.random.default_rng(seed)
    logits = random.normal(0, 3, (2, vocab)).astype(np.float32)
    logits = {"smooth": logits, "tied": logits.round(), "flat": logits * 0, "some -inf": logits}[kind]
    if kind == "some -inf":
        logits[:, 1:][random.random((2, vocab - 1)) < 0.8] = -np.inf
    tokens = random.integers(0, vocab, 2)
    out = run(torch.from_numpy(logits).to(DEVICE), torch.from_numpy(tokens).to(DEVICE), num_top, sizes=sizes)
    for row, found in enumerate(read(out, tokens.tolist(), num_top)):
        assert found.rank == int((logits[row] > logits[row, tokens[row]]).sum()) + 1
        assert [token for token, _ in found.top] == np.argsort(-logits[row], kind="stable")[:num_top].tolist()
        expected = torch.from_numpy(logits[row]).double().log_softmax(dim=0).numpy()
        chosen = [found.token, *(token for token, _ in found.top)]
        values = [found.logprob, *(value for _, value in found.top)]
        np.testing.assert_allclose(values, expected[chosen], rtol=1e-6, atol=1e-5)


def test_half_precision_logits_and_prompt_targets() -> None:
    logits, tokens = make()
    half = logits.bfloat16()
    for row, found in enumerate(read(score(half, tokens, 3).cpu().view(-1), tokens.tolist(), 3)):
        oracles.check_logprob(found, int(tokens[row]), half[row].float().cpu().numpy(), 3)
