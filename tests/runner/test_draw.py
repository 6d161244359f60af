"""The sampler's kernel against the torch sampler, under Triton's interpreter where there is no GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from test_sampler import make_seats

from gapless.core.params import SamplingParams
from gapless.core.plan import NO_SAMPLE
from gapless.core.row_fields import ALL_NEEDS
from gapless.kernels.shortlist import ShortlistSizes
from gapless.runner.draw import pick
from gapless.runner.processors import SampledRows
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


def sampled_rows(places: torch.Tensor, seats: torch.Tensor) -> SampledRows:
    return SampledRows(torch.arange(len(places), device=DEVICE), places, seats.to(DEVICE))


def both(logits: torch.Tensor, seats: torch.Tensor, needs: int, places: torch.Tensor) -> tuple[list[int], list[int]]:
    """Tokens of the kernel and of the torch sampler; all that a graph is recorded with runs, needed or not."""
    sampled = sampled_rows(places, seats)
    expected = sample(logits.clone(), sampled, needs)
    found = pick(logits, sampled, ALL_NEEDS, sizes=SMALL)
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
    assert set(pick(logits, sampled, ALL_NEEDS, sizes=SMALL).tolist()) == {100}


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
