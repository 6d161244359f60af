"""The sampler's kernel against the torch sampler, under Triton's interpreter where there is no GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from test_sampler import make_store

from gapless.core.params import SamplingParams
from gapless.core.plan import NO_SAMPLE
from gapless.runner.draw_kernels import pick
from gapless.runner.row_store import RowStore
from gapless.runner.sampler import sample

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB, NUM_PLACES = 150, 8
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


def on_device(store: RowStore) -> RowStore:
    for name in ("floats", "top_k", "seed", "min_total", "stop_ids"):
        setattr(store, name, getattr(store, name).to(DEVICE))
    return store


def some_logits(rows: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(3)) * 3).to(dtype).to(DEVICE)


def both(
    logits: torch.Tensor, store: RowStore, places: torch.Tensor, *, min_tokens: bool = False
) -> tuple[list[int], list[int]]:
    rows = torch.arange(len(logits), device=DEVICE)
    expected = sample(logits.clone(), rows, places, store, random=True, filtered=True, min_tokens=min_tokens)
    bits = 16 if logits.dtype == torch.bfloat16 else 32
    found = pick(logits.clone(), rows, places, store, min_tokens=min_tokens, key_bits=bits, block=64)
    return found.tolist(), expected.tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_chooses_what_the_torch_sampler_chooses(kind: str, dtype: torch.dtype) -> None:
    count = NUM_PLACES
    store = on_device(make_store([KINDS[kind]] * count, seeds=range(count)))
    found, expected = both(some_logits(count, dtype), store, torch.arange(count, device=DEVICE) + 7)
    assert found == expected


@pytest.mark.parametrize("kind", KINDS)
def test_with_16_key_bits_tokens_are_drawn_from_rounded_logits(kind: str) -> None:
    count = NUM_PLACES
    store = on_device(make_store([KINDS[kind]] * count, seeds=range(count)))
    rows, places = torch.arange(count, device=DEVICE), torch.arange(count, device=DEVICE) + 7
    logits = some_logits(count)
    found = pick(logits.clone(), rows, places, store, key_bits=16, block=64)
    rounded = logits.bfloat16().float() if KINDS[kind].temperature else logits
    expected = sample(rounded, rows, places, store, random=True, filtered=True, min_tokens=False)
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams(temperature=1.0, top_k=1)])
def test_the_best_of_logits_that_bfloat16_cannot_tell_apart(params: SamplingParams) -> None:
    logits = torch.full((24, VOCAB), -9.0, device=DEVICE)
    logits[:, 70], logits[:, 100] = 20.0, 20.01
    store = on_device(make_store([params] * 24, seeds=range(24)))
    rows = torch.arange(24, device=DEVICE)
    assert set(pick(logits, rows, rows, store, key_bits=16, block=64).tolist()) == {100}


def test_rows_of_every_kind_share_a_batch() -> None:
    params = list(KINDS.values())
    store = on_device(make_store(params, seeds=[11] * len(params)))
    found, expected = both(some_logits(len(params)), store, torch.full((len(params),), 5, device=DEVICE))
    assert found == expected


def test_equal_logits_at_the_floor_all_stay() -> None:
    logits = torch.full((24, VOCAB), -9.0, device=DEVICE)
    logits[:, [4, 70, 100, 140]] = 2.0
    store = on_device(make_store([SamplingParams(temperature=1.0, top_k=2)] * 24, seeds=range(24)))
    found, expected = both(logits, store, torch.arange(24, device=DEVICE))
    assert found == expected
    assert set(found) == {4, 70, 100, 140}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stop_tokens_wait_for_min_tokens(temperature: float) -> None:
    logits = some_logits(2)
    best = logits.argmax(dim=1).tolist()
    params = [replace(KINDS["top_k"], temperature=temperature)] * 2
    store = on_device(make_store(params, seeds=[0, 0], stops=[[best[0]], [best[1]]], min_total=[9, 5]))
    found, expected = both(logits, store, torch.full((2,), 6, device=DEVICE), min_tokens=True)
    assert found == expected
    assert found[0] != best[0]


@pytest.mark.parametrize("kind", ["drawn", "top_k", "top_p"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [torch.nan, -torch.inf, torch.inf])
def test_a_row_without_a_largest_logit_has_no_sample(kind: str, temperature: float, value: float) -> None:
    logits = some_logits(3)
    logits[1] = value
    store = on_device(make_store([replace(KINDS[kind], temperature=temperature)] * 3, seeds=[0, 1, 2]))
    found, expected = both(logits, store, torch.arange(3, device=DEVICE))
    assert found == expected
    assert [token == NO_SAMPLE for token in found] == [False, True, False]
