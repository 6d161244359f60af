"""The sampler's kernel against the torch sampler, under Triton's interpreter where there is no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from test_sampler import chi_square, make_seats, row_state

import oracles
from gapless.core.params import SamplingParams
from gapless.core.plan import NO_SAMPLE
from gapless.core.row_fields import ALL_NEEDS
from gapless.kernels.shortlist import ShortlistSizes
from gapless.runner.draw import pick
from gapless.runner.processors import SampledRows
from gapless.runner.row_store import RowState
from gapless.runner.sampler import sample

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB, NUM_PLACES = 150, 8
SMALL = ShortlistSizes(tile=4, span=8, chunk=4, first=4, room=32, block=64)  # every way through at this vocabulary
KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "drawn": SamplingParams(temperature=0.9),
    "cold": SamplingParams(temperature=0.01),
    "hot": SamplingParams(temperature=50.0),
    "top_k": SamplingParams(temperature=1.0, top_k=3),
    "all of top_k": SamplingParams(temperature=1.0, top_k=VOCAB),
    "top_p": SamplingParams(temperature=1.3, top_p=0.6),
    "narrow top_p": SamplingParams(temperature=1.0, top_p=1e-6),
    "min_p": SamplingParams(temperature=1.0, min_p=0.1),
    "all filters": SamplingParams(temperature=2.0, top_k=40, top_p=0.8, min_p=0.02),
}


def some_logits(rows: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(3)) * 3).to(dtype).to(DEVICE)


def on_device(seats: torch.Tensor) -> RowState:
    state = row_state(seats, vocab=VOCAB)
    return RowState(*(getattr(state, field.name).to(DEVICE) for field in fields(state)))


def sampled_rows(places: torch.Tensor, seats: torch.Tensor) -> SampledRows:
    return SampledRows(torch.arange(len(places), device=DEVICE), places, on_device(seats))


def both(logits: torch.Tensor, seats: torch.Tensor, needs: int, places: torch.Tensor) -> tuple[list[int], list[int]]:
    """Tokens of the kernel and of the torch sampler; all that a graph is recorded with runs, needed or not."""
    sampled = sampled_rows(places, seats)
    expected = sample(logits.clone(), sampled, needs)
    found = pick(logits, sampled, ALL_NEEDS, sizes=SMALL).tokens
    return found.tolist(), expected.tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_chooses_what_the_torch_sampler_chooses(kind: str, dtype: torch.dtype) -> None:
    count = NUM_PLACES
    seats = make_seats([KINDS[kind]] * count, seeds=range(count))
    found, expected = both(some_logits(count, dtype), *seats, torch.arange(count, device=DEVICE) + 7)
    assert found == expected


@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams(temperature=1.0, top_k=1)])
def test_the_best_of_logits_that_bfloat16_cannot_tell_apart(params: SamplingParams) -> None:
    logits = torch.full((24, VOCAB), -9.0, device=DEVICE)
    logits[:, 70], logits[:, 100] = 20.0, 20.01
    seats, _ = make_seats([params] * 24, seeds=range(24))
    sampled = sampled_rows(torch.arange(24, device=DEVICE), seats)
    assert set(pick(logits, sampled, ALL_NEEDS, sizes=SMALL).tokens.tolist()) == {100}


def test_rows_of_every_kind_share_a_batch() -> None:
    params = list(KINDS.values())
    seats = make_seats(params, seeds=[11] * len(params))
    found, expected = both(some_logits(len(params)), *seats, torch.full((len(params),), 5, device=DEVICE))
    assert found == expected


def test_equal_logits_at_the_floor_all_stay() -> None:
    logits = torch.full((24, VOCAB), -9.0, device=DEVICE)
    logits[:, [4, 70, 100, 140]] = 2.0
    seats = make_seats([SamplingParams(temperature=1.0, top_k=2)] * 24, seeds=range(24))
    found, expected = both(logits, *seats, torch.arange(24, device=DEVICE))
    assert found == expected
    assert set(found) == {4, 70, 100, 140}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stop_tokens_wait_for_min_tokens(temperature: float) -> None:
    logits = some_logits(2)
    best = logits.argmax(dim=1).tolist()
    params = [replace(KINDS["top_k"], temperature=temperature)] * 2
    seats = make_seats(params, seeds=[0, 0], stops=[[best[0]], [best[1]]], min_total=[9, 5])
    found, expected = both(logits, *seats, torch.full((2,), 6, device=DEVICE))
    assert found == expected
    assert found[0] != best[0]


@pytest.mark.parametrize("kind", ["drawn", "top_k", "top_p"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [torch.nan, -torch.inf, torch.inf])
def test_a_row_without_a_largest_logit_has_no_sample(kind: str, temperature: float, value: float) -> None:
    logits = some_logits(3)
    logits[1] = value
    seats = make_seats([replace(KINDS[kind], temperature=temperature)] * 3, seeds=[0, 1, 2])
    found, expected = both(logits, *seats, torch.arange(3, device=DEVICE))
    assert found == expected
    assert [token == NO_SAMPLE for token in found] == [False, True, False]


def test_logits_are_not_written() -> None:
    logits = some_logits(2)
    before = logits.clone()
    seats, _ = make_seats([KINDS["top_k"]] * 2, seeds=[0, 0], stops=[[3], [4]], min_total=[9, 9])
    pick(logits, sampled_rows(torch.zeros(2, dtype=torch.int64, device=DEVICE), seats), ALL_NEEDS, sizes=SMALL)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-38, 1e-39, 1e-44])
def test_very_low_temperatures_are_greedy(temperature: float) -> None:
    logits = some_logits(4)
    kinds = [SamplingParams(temperature=temperature), SamplingParams(temperature=temperature, top_k=3, top_p=0.9)] * 2
    seats, _ = make_seats(kinds, seeds=range(4))
    found = pick(logits, sampled_rows(torch.arange(4, device=DEVICE), seats), ALL_NEEDS, sizes=SMALL).tokens
    assert found.tolist() == logits.argmax(dim=1).tolist()


# -- rows of every kind, against the torch sampler -----------------------------------------------------------------

IS_GPU = DEVICE.type == "cuda"  # compiles for seconds what the interpreter just runs
SOME_SIZES = (SMALL, ShortlistSizes(tile=2, span=2, chunk=2, first=2, room=4, block=64), ShortlistSizes())[
    : 1 if IS_GPU else None
]
SOME_VOCABS = [VOCAB] if IS_GPU else [1, 2, 3, 37, 64, 65, VOCAB]


@st.composite
def rows(draw: st.DrawFn, vocab: int) -> np.ndarray:
    """Logits of one row: smooth, with many ties, peaked, all equal; with some that are -inf or NaN, but not all."""
    random = np.random.default_rng(draw(st.integers(0, 10**6)))
    kind = draw(st.sampled_from(["smooth", "tied", "peaked", "flat"]))
    logits = random.normal(0, draw(st.sampled_from([0.01, 1.0, 4.0])), vocab)
    logits = {"smooth": logits, "tied": logits.round(), "peaked": logits * 9, "flat": logits * 0 + 3}[kind]
    lost = random.random(vocab) < draw(st.sampled_from([0, 0, 0.3, 1]))
    lost[draw(st.integers(0, vocab - 1))] = False
    return np.where(lost, draw(st.sampled_from([-np.inf, np.nan])), logits).astype(np.float32)


@st.composite
def row_params(draw: st.DrawFn, vocab: int) -> SamplingParams:
    return SamplingParams(
        temperature=draw(st.sampled_from([0, 0.01, 0.7, 1.0, 100.0])),
        top_k=draw(st.sampled_from([0, 0, 1, 2, 5, vocab // 2, vocab, 2**31 - 1])),
        top_p=draw(st.sampled_from([1.0, 1.0, 1e-9, 0.1, 0.5, 0.95, 0.9999])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.001, 0.3, 1.0])),
    )


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[np.ndarray], list[SamplingParams], list[list[int]]]:
    vocab = draw(st.sampled_from(SOME_VOCABS))
    count = draw(st.integers(1, 3))
    stops = st.lists(st.integers(0, vocab - 1), max_size=min(4, vocab - 1))
    return tuple([draw(of) for _ in range(count)] for of in (rows(vocab), row_params(vocab), stops))  # type: ignore[return-value]


@given(batches(), st.sampled_from(SOME_SIZES), st.integers(0, 10**6))
@settings(max_examples=40)
def test_any_row_gets_the_token_of_the_torch_sampler(
    batch: tuple[Sequence[np.ndarray], Sequence[SamplingParams], Sequence[Sequence[int]]],
    sizes: ShortlistSizes,
    seed: int,
) -> None:
    logits, params, stops = batch
    count = len(logits)
    seats, needs = make_seats(params, range(seed, seed + count), stops, [99] * count)
    sampled = sampled_rows(torch.arange(count, device=DEVICE) + seed % 50, seats)
    given_ = torch.from_numpy(np.stack(logits)).to(DEVICE)
    found = pick(given_, sampled, ALL_NEEDS, sizes=sizes).tokens.tolist()
    judged = np.where(np.isnan(logits), -np.inf, np.stack(logits))  # NaN counts as nothing
    expected = sample(torch.from_numpy(judged).to(DEVICE), sampled, needs).tolist()
    for i, token in enumerate(found):
        asked = (judged[i], params[i], seed + i, i + seed % 50, stops[i])
        assert token == expected[i] or (expected[i] != NO_SAMPLE and not oracles.is_clear(*asked))


@pytest.mark.parametrize("kind", ["drawn", "all filters"])
def test_tokens_come_as_often_as_they_are_likely(kind: str) -> None:
    count = 20_000 if IS_GPU else 150
    params = replace(KINDS[kind], top_k=6 if KINDS[kind].top_k else 0)
    one = np.random.default_rng(8).normal(0, 1, 10).astype(np.float32)
    seats, _ = make_seats([params], seeds=[5])
    places = torch.arange(count, device=DEVICE)
    sampled = SampledRows(torch.zeros_like(places), places, on_device(seats))
    found = pick(torch.from_numpy(one).to(DEVICE).repeat(count, 1), sampled, ALL_NEEDS, sizes=SMALL).tokens
    shares = oracles.distribution(one, params)
    counts = np.bincount(found.cpu().numpy(), minlength=10)
    assert not counts[shares == 0].any()
    alive = shares > 0
    limit = {1: 11, 2: 14, 3: 17, 4: 19, 5: 21, 6: 23, 7: 25, 8: 27, 9: 28}  # beyond these once in 1000
    assert chi_square(counts[alive], shares[alive]) < limit[int(alive.sum()) - 1]
