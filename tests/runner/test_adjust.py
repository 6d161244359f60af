"""The kernels that adjust logits against the processors in torch, under Triton's interpreter where there is no GPU."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from test_sampler import ADJUSTED, Always, bits_of, chi_square, random_logits, rows_with

import oracles
from gapless.core.params import SamplingParams
from gapless.core.plan import NO_SAMPLE
from gapless.core.row_fields import ALL_NEEDS, need
from gapless.kernels.adjust import adjust
from gapless.kernels.shortlist import ShortlistSizes
from gapless.runner.draw import ADJUSTED as NEEDS_COPY
from gapless.runner.draw import pick
from gapless.runner.processors import PROCESSORS, SampledRows
from gapless.runner.row_store import RowState, seat_columns
from gapless.runner.sampler import sample

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
IS_GPU = DEVICE.type == "cuda"
VOCAB = 70
SMALL = ShortlistSizes(tile=4, span=8, chunk=4, first=4, room=32, block=32)
KINDS = {
    **ADJUSTED,
    "sigma": {"top_n_sigma": 1.0},
    "wide sigma": {"top_n_sigma": 50.0},
    "typical": {"typical_p": 0.4},
    "hardly typical": {"typical_p": 0.0},
    "narrow": {"typical_p": 0.8, "top_n_sigma": 1.5, "repetition_penalty": 1.4, "logit_bias": {1: 2.0}, "top_k": 9},
    "typical and top-p": {"typical_p": 0.6, "top_p": 0.7},
}


def scene(
    kinds: list[str], temperature: float, *, vocab: int = VOCAB, masked: int = 2
) -> tuple[SampledRows, int, list[SamplingParams]]:
    """A row of each kind, every `masked`-th with a mask, after some known tokens; and what any of them needs."""
    random = np.random.default_rng(len(kinds))
    params = [SamplingParams(temperature=temperature, **KINDS[kind]) for kind in kinds]
    prompts = [random.integers(0, vocab, 4).tolist() for _ in kinds]
    outputs = [random.integers(0, vocab, 6).tolist() for _ in kinds]
    store, needs = rows_with(params, prompts, outputs, vocab, guides=[row % masked == 1 for row in range(len(kinds))])
    allowed = random.random((len(kinds) + 1, vocab)) < 0.6
    allowed[:, 5] = True
    store.masks[:] = bits_of(allowed)
    state = RowState(*(getattr(store.state, field.name).to(DEVICE) for field in fields(RowState)))
    rows = torch.arange(len(kinds), device=DEVICE)
    return SampledRows(rows, rows + 10, state), needs, params


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_copy_is_what_the_processors_make_of_the_logits(dtype: torch.dtype) -> None:
    kinds = list(KINDS)
    sampled, needs, _ = scene(kinds, 1.0)
    logits = torch.from_numpy(random_logits(4, len(kinds), VOCAB)).to(DEVICE, dtype)
    logits[0, 3], logits[1, 4] = -torch.inf, torch.nan
    before = logits.clone()
    state = sampled.state
    found = adjust(
        logits, sampled.rows, sampled.places, seat_columns(state.seats), state.masks, state.counts, state.biases, 32
    )
    wanted = logits.float()
    for processor in PROCESSORS:
        if processor.needs & NEEDS_COPY:
            wanted = processor.apply(wanted, sampled.fields(needs))
    is_adjusted = seat_columns(state.seats)["adjusted"][:-1] != 0
    assert [kind for kind, is_ in zip(kinds, is_adjusted.tolist(), strict=True) if not is_] == ["none"]
    torch.testing.assert_close(found[is_adjusted], wanted[is_adjusted], rtol=1e-5, atol=1e-5, equal_nan=True)
    assert torch.equal(torch.nan_to_num(logits), torch.nan_to_num(before))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("masked", [2, pytest.param(99, marks=pytest.mark.slow)])
def test_tokens_are_those_of_the_torch_sampler(temperature: float, masked: int) -> None:
    kinds = list(KINDS)
    sampled, needs, _ = scene(kinds, temperature, masked=masked)
    for seed in range(9 if IS_GPU else 1):
        logits = torch.from_numpy(random_logits(seed, len(kinds), VOCAB)).to(DEVICE)
        expected = sample(logits, sampled, needs).tolist()
        assert pick(logits, sampled, ALL_NEEDS, sizes=SMALL).tokens.tolist() == expected


@st.composite
def typical_rows(draw: st.DrawFn) -> np.ndarray:
    """Logits of one row: smooth, peaked, with many ties, all equal, with a few far away or none at all."""
    vocab = draw(st.sampled_from([VOCAB] if IS_GPU else [1, 2, 33, VOCAB, 300]))
    random = np.random.default_rng(draw(st.integers(0, 10**6)))
    logits = random.normal(0, draw(st.sampled_from([1e-6, 0.3, 3.0, 30.0])), vocab)
    kind = draw(st.sampled_from(["smooth", "ties", "flat", "far", "lost"]))
    if kind == "far":
        logits[random.random(vocab) < 0.3] -= 1e30
    if kind == "lost":
        logits[1:][random.random(vocab - 1) < 0.7] = -np.inf
    return {"ties": logits.round(), "flat": logits * 0 + 5}.get(kind, logits)[None].astype(np.float32)


@given(typical_rows(), st.sampled_from([0.0, 1e-6, 0.1, 0.5, 0.9, 0.999, 0.9999999]))
@settings(max_examples=60)
def test_typical_p_keeps_as_many_as_it_takes(logits: np.ndarray, share: float) -> None:
    """All tokens within some distance of the entropy, those that tie included, and none of the farthest too many."""
    vocab = logits.shape[1]
    store, _ = rows_with([SamplingParams(temperature=1.0, typical_p=share)], [[0]], [[]], vocab)
    state = RowState(*(getattr(store.state, field.name).to(DEVICE) for field in fields(RowState)))
    rows, shared = torch.zeros(1, dtype=torch.int64, device=DEVICE), (state.masks, state.counts, state.biases)
    found = adjust(torch.from_numpy(logits).to(DEVICE), rows, rows, seat_columns(state.seats), *shared, 32)
    is_kept = found[0].cpu().numpy() > -np.inf
    below = (logits[0] - logits.max()).astype(np.float64)
    shares = np.exp(below) / np.exp(below).sum()
    alive = np.isfinite(below)
    distance = np.where(alive, np.abs(below - (shares * np.where(alive, below, 0)).sum()), np.inf)
    rounding = 1e-5 * (1 + np.abs(below).max(initial=0, where=alive & (below > -1e3)))
    assert is_kept.any()
    assert not (is_kept & ~alive).any()
    farthest = distance[is_kept].max()
    assert farthest <= distance[~is_kept].min(initial=np.inf) + rounding
    assert shares[is_kept].sum() >= share * (1 - 1e-5) - rounding * 1e-2
    nearer = is_kept & (distance < farthest - rounding)
    assert shares[nearer].sum() <= share + 1e-5 or not nearer.any()


def test_the_padding_row_is_not_narrowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its seat is all zeros, which is a typical-p of 0."""
    sampled, _, _ = scene(["typical"], 1.0, masked=99)
    padding = torch.tensor([1], device=DEVICE)
    left = torch.arange(VOCAB, device=DEVICE)[None].float()
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, **how: left.clone() if len(sizes) == 2 else empty(*sizes, **how))
    state = sampled.state
    shared = state.masks, state.counts, state.biases
    assert torch.equal(adjust(left, padding, padding, seat_columns(state.seats), *shared), left)


def test_stop_tokens_that_may_not_come_yet_do_not_count() -> None:
    """Not in the spread of the logits, not in their entropy."""
    kinds = ["sigma", "typical"]
    sampled, needs, _ = scene(kinds, 1.0, masked=99)
    logits = torch.from_numpy(random_logits(3, 2, VOCAB)).to(DEVICE)
    logits[:, 7] = 30.0
    columns = seat_columns(sampled.state.seats)
    columns["stop_ids"][:] = -1
    columns["stop_ids"][:, 0], columns["min_total"][:] = 7, 99
    needs |= need("min_total")
    expected = sample(logits, sampled, needs).tolist()
    assert pick(logits, sampled, ALL_NEEDS, sizes=SMALL).tokens.tolist() == expected
    assert 7 not in expected


def test_a_row_without_a_largest_logit_has_no_sample() -> None:
    kinds = ["all", "sigma", "typical", "narrow"]
    sampled, _, _ = scene(kinds, 1.0, masked=99)
    for value in (torch.nan, -torch.inf, torch.inf):
        logits = torch.full((len(kinds), VOCAB), value, device=DEVICE)
        assert pick(logits, sampled, ALL_NEEDS, sizes=SMALL).tokens.tolist() == [NO_SAMPLE] * len(kinds)


@pytest.mark.parametrize("kind", ["all", "sigma", "typical"])
def test_tokens_come_as_often_as_they_are_likely(kind: str) -> None:
    count, vocab = 20_000 if IS_GPU else 8, 10  # the interpreter is slow
    changes = dict(KINDS[kind]) | ({"logit_bias": {0: 0.8, 3: -1.0}} if kind == "all" else {})
    params = SamplingParams(temperature=0.9, **changes)
    one, prompt, output = random_logits(8, 1, vocab) / 2, [1, 2, 2], [2, 4, 4, 4, 9]
    store, _ = rows_with([params], [prompt], [output], vocab)
    state = RowState(*(getattr(store.state, field.name).to(DEVICE) for field in fields(RowState)))
    places = torch.arange(count, device=DEVICE)
    sampled = SampledRows(torch.zeros_like(places), places, state)
    found = pick(torch.from_numpy(np.repeat(one, count, 0)).to(DEVICE), sampled, ALL_NEEDS, sizes=SMALL).tokens
    shares = oracles.distribution(oracles.adjust(one[0], params, prompt, output), params)
    counts = np.bincount(found.cpu().numpy(), minlength=vocab)
    assert not counts[shares == 0].any()
    assert not IS_GPU or chi_square(counts[shares > 0], shares[shares > 0]) < 28


def test_a_guide_alone_needs_the_copy() -> None:
    store, needs = rows_with([replace(SamplingParams(), temperature=0)], [[1]], [[]], VOCAB, guides=[True])
    assert (needs, int(seat_columns(store.seats)["adjusted"][0])) == (need("masked"), 1)
    assert Always.waits is False
