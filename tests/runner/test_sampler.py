"""The sampler against plain Python: the same token for each row, whoever else is in the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import oracles
from gapless.core.baggage import IN_PROMPT, MOST
from gapless.core.guide import mask_words
from gapless.core.limits import Limits
from gapless.core.params import MAX_STOP_IDS, SamplingParams
from gapless.core.plan import NO_SAMPLE
from gapless.core.request import Request, RowTable, int_array
from gapless.core.row_fields import SEAT, need, write_seat
from gapless.device.cpu import CpuDevice, InlineDriver
from gapless.runner.processors import SampledRows, forbid_stops, lowest_kept
from gapless.runner.row_store import RowState, RowStore
from gapless.runner.sampler import draw, judged, sample, uniform

VOCAB = 40


class Always:
    """A guide that allows everything."""

    waits = False

    def advance(self, tokens: np.ndarray) -> None:
        pass

    def fill(self, out: np.ndarray) -> None:
        out[:] = -1


def make_seats(
    params: Sequence[SamplingParams],
    seeds: Sequence[int],
    stops: Sequence[Sequence[int]] | None = None,
    min_total: Sequence[int] | None = None,
    guides: Sequence[bool] | None = None,
) -> tuple[torch.Tensor, int]:
    """A seat for each row, and what any of them needs."""
    seats, needs = np.zeros(len(params), SEAT), 0
    for row, (values, seed) in enumerate(zip(params, seeds, strict=True)):
        stop_ids = tuple(stops[row]) if stops is not None else ()
        request = Request("r", int_array([1]), values, seed, stop_ids, limit=9)
        request.guide = Always() if guides is not None and guides[row] else None
        needs |= write_seat(seats, row, request)
        if min_total is not None:
            seats[row]["min_total"] = min_total[row]
            needs |= need("min_total")
    return torch.from_numpy(seats.view(np.int32).reshape(len(params), -1)), needs


def row_state(seats: torch.Tensor, masks: torch.Tensor | None = None, vocab: int = VOCAB) -> RowState:
    """The state of rows with these seats, and without anything else unless given."""
    store = RowStore(CpuDevice(driver=InlineDriver()), Limits(len(seats), 1, 1, 1, 1), vocab)
    store.seats[:-1] = seats
    if masks is not None:
        store.masks[:-1] = masks
    return store.state


def test_what_rounds_to_neutral_is_no_need() -> None:
    """The device has the number as float32."""
    almost = SamplingParams(temperature=1.0, top_p=1 - 1e-12)
    assert make_seats([almost], [0])[1] == need("temperature")
    assert make_seats([replace(almost, top_p=0.5)], [0])[1] == need("temperature", "top_p")


def run(logits: np.ndarray, params: Sequence[SamplingParams], seeds: Sequence[int], places: Sequence[int]) -> list[int]:
    seats, needs = make_seats(params, seeds)
    sampled = SampledRows(torch.arange(len(params)), torch.tensor(places), row_state(seats))
    return sample(torch.from_numpy(logits), sampled, needs).tolist()


def random_logits(seed: int, rows: int, vocab: int = VOCAB) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 2, (rows, vocab)).astype(np.float32)


# -- random numbers ------------------------------------------------------------------------------------------------


def test_the_mixer_is_splitmix64() -> None:
    """Published first outputs of the generator with seed 1234567."""
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    gamma = 0x9E3779B97F4A7C15
    assert [oracles.splitmix64((1234567 + n * gamma) % 2**64) for n in range(5)] == known


@given(st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**31)), min_size=1, max_size=20))
def test_uniform_numbers_are_those_of_plain_python(pairs: list[tuple[int, int]]) -> None:
    seeds, places = (torch.tensor(column) for column in zip(*pairs, strict=True))
    found = uniform(seeds, places).tolist()
    assert found == [oracles.uniform(seed, place) for seed, place in pairs]
    assert all(0 <= value < 1 for value in found)


def test_uniform_numbers_are_uniform_over_places_and_over_seeds() -> None:
    steps = torch.arange(20_000)
    still = torch.full_like(steps, 42)
    for seeds, places in ((still, steps), (steps, still), (-steps, still)):
        counts = torch.histc(uniform(seeds, places), 50, 0, 1).numpy()
        assert chi_square(counts, np.full(50, 1 / 50)) < 86  # 49 degrees of freedom: beyond this once in 1000
    pairs = uniform(still, steps)
    assert abs(float(torch.corrcoef(torch.stack((pairs[:-1], pairs[1:])))[0, 1])) < 0.03


def chi_square(counts: np.ndarray, shares: np.ndarray) -> float:
    expected = shares * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


# -- against the oracle --------------------------------------------------------------------------------------------


@st.composite
def row_params(draw: st.DrawFn) -> SamplingParams:
    return SamplingParams(
        temperature=draw(st.sampled_from([0, 0.2, 0.7, 1.0, 1.9])),
        top_k=draw(st.sampled_from([0, 0, 1, 2, 5, 39, 40, 41, 2**31 - 1])),
        top_p=draw(st.sampled_from([1.0, 1.0, 1e-6, 0.1, 0.5, 0.9, 0.999])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.001, 0.1, 0.5, 1.0])),
    )


@given(st.lists(row_params(), min_size=1, max_size=8), st.integers(0, 10**6), st.integers(0, 10**6))
def test_each_row_gets_the_oracles_token(params: list[SamplingParams], seed: int, place: int) -> None:
    logits = random_logits(seed, len(params))
    seeds = [seed * 31 + row for row in range(len(params))]
    places = [place + 3 * row for row in range(len(params))]
    found = run(logits, params, seeds, places)
    for row, asked in enumerate(zip(logits, params, seeds, places, strict=True)):
        assert found[row] == oracles.sample(*asked) or not oracles.is_clear(*asked)


@given(row_params(), st.integers(0, 10**6))
def test_what_is_kept_is_what_the_oracle_keeps(params: SamplingParams, seed: int) -> None:
    logits = random_logits(seed, 1)
    floor = lowest_kept(
        torch.from_numpy(logits), *(torch.tensor([value]) for value in (params.top_k, params.top_p, params.min_p))
    )
    kept = (logits >= floor.numpy()[:, None])[0]
    scaled = logits[0].astype(np.float64)
    assert kept.tolist() == oracles.kept_tokens(scaled, params).tolist() or not oracles.is_clear_cut(scaled, params)


@given(st.lists(row_params(), min_size=2, max_size=6), st.integers(0, 10**6), st.randoms(use_true_random=False))
def test_a_row_does_not_depend_on_the_others(params: list[SamplingParams], seed: int, random) -> None:
    """Alone, together, and in another order: the same token."""
    logits = random_logits(seed, len(params))
    seeds, places = list(range(seed, seed + len(params))), list(range(len(params)))
    together = run(logits, params, seeds, places)
    for row, values in enumerate(params):
        assert run(logits[row : row + 1], [values], [seeds[row]], [places[row]]) == [together[row]]
    order = list(range(len(params)))
    random.shuffle(order)
    mixed = run(logits[order], [params[i] for i in order], [seeds[i] for i in order], [places[i] for i in order])
    assert mixed == [together[i] for i in order]


def test_greedy_takes_the_first_of_the_likeliest() -> None:
    logits = np.zeros((3, VOCAB), np.float32)
    logits[0, [7, 9]] = 5
    logits[1, VOCAB - 1] = 1
    greedy = SamplingParams(temperature=0)
    assert run(logits, [greedy] * 3, [1, 2, 3], [0, 0, 0]) == [7, VOCAB - 1, 0]


def test_cold_and_warm_rows_mix() -> None:
    logits = random_logits(3, 2)
    cold, warm = SamplingParams(temperature=0), SamplingParams(temperature=1.5)
    for seed in range(20):
        first, second = run(logits, [cold, warm], [seed, seed], [0, 0])
        assert first == int(logits[0].argmax())
        assert second == oracles.sample(logits[1], warm, seed, 0)


def test_cold_rows_ignore_filters() -> None:
    logits = random_logits(4, 2)
    cold = SamplingParams(temperature=0, top_k=1, top_p=0.01, min_p=1.0)
    assert run(logits, [cold, SamplingParams(temperature=1)], [1, 2], [0, 0])[0] == int(logits[0].argmax())


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=1.0, top_k=4),
        SamplingParams(temperature=1.3, top_p=0.7),
        SamplingParams(temperature=1.0, min_p=0.2),
        SamplingParams(temperature=1.4, top_k=6, top_p=0.9, min_p=0.05),
    ],
    ids=lambda params: f"t{params.temperature}k{params.top_k}p{params.top_p}m{params.min_p}",
)
def test_tokens_come_as_often_as_they_are_likely(params: SamplingParams) -> None:
    count, vocab = 20_000, 10
    one = random_logits(8, 1, vocab) / 2
    tokens = run(np.repeat(one, count, 0), [params] * count, [5] * count, list(range(count)))
    shares = oracles.distribution(one[0], params)
    counts = np.bincount(tokens, minlength=vocab)
    assert not counts[shares == 0].any()
    alive = shares > 0
    limit = {1: 11, 2: 14, 3: 17, 4: 19, 5: 21, 6: 23, 7: 25, 8: 27, 9: 28}  # beyond these once in 1000
    assert chi_square(counts[alive], shares[alive]) < limit[int(alive.sum()) - 1]


def test_half_precision_logits_are_sampled_in_full_precision() -> None:
    logits = torch.from_numpy(random_logits(5, 4)).bfloat16()
    params = [SamplingParams(temperature=0.8, top_p=0.9)] * 4
    seats, needs = make_seats(params, [1, 2, 3, 4])
    found = sample(logits, SampledRows(torch.arange(4), torch.arange(4), row_state(seats)), needs)
    rows = logits.float().numpy()
    assert found.tolist() == [oracles.sample(rows[i], params[i], i + 1, i) for i in range(4)]


# -- stops ---------------------------------------------------------------------------------------------------------


def test_min_tokens_forbids_stops_until_enough_are_there() -> None:
    logits = random_logits(6, 3)
    best = logits.argmax(axis=1).tolist()
    second = np.argsort(-logits, axis=1)[:, 1].tolist()
    seats, needs = make_seats([SamplingParams(temperature=0)] * 3, [0] * 3, [[token] for token in best], [10, 10, 10])
    rows = torch.arange(3)

    def at(places: list[int], needs: int) -> list[int]:
        return sample(
            torch.from_numpy(logits), SampledRows(rows, torch.tensor(places), row_state(seats)), needs
        ).tolist()

    assert at([8, 9, 3], needs) == [second[0], best[1], second[2]]  # a token at place 9 is the tenth
    assert at([3] * 3, 0) == best


def test_all_stops_of_a_row_are_forbidden_and_nothing_else() -> None:
    logits = torch.zeros(2, VOCAB)
    stops = torch.full((2, MAX_STOP_IDS), -1, dtype=torch.int32)
    stops[0, :3] = torch.tensor([0, 5, VOCAB - 1])
    stops[1, :1] = 7
    fields = {"stop_ids": stops, "place": torch.tensor([3, 3]), "min_total": torch.tensor([5, 4])}
    found = forbid_stops(logits, fields)
    assert torch.nonzero(found[0] == -torch.inf).flatten().tolist() == [0, 5, VOCAB - 1]
    assert (found[1] == 0).all()


@given(st.integers(0, 10**6), st.sets(st.integers(0, VOCAB - 1), max_size=MAX_STOP_IDS))
def test_a_forbidden_token_is_never_drawn(seed: int, stops: set[int]) -> None:
    params = [SamplingParams(temperature=2.0, top_k=20)] * 16
    logits = random_logits(seed, 16)
    seats, needs = make_seats(params, range(16), [sorted(stops)] * 16, [99] * 16)
    rows = torch.arange(16)
    found = sample(torch.from_numpy(logits), SampledRows(rows, rows, row_state(seats)), needs).tolist()
    assert not set(found) & stops
    for row in range(16):
        asked = (logits[row], params[row], row, row, sorted(stops))
        assert found[row] == oracles.sample(*asked) or not oracles.is_clear(*asked)


# -- penalties and biases ------------------------------------------------------------------------------------------

ADJUSTED = {
    "repetition": {"repetition_penalty": 1.8},
    "more repetition": {"repetition_penalty": 0.6},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.7},
    "bias": {"logit_bias": {0: 2.5, 7: -100, VOCAB - 1: 100}},
    "all": {
        "repetition_penalty": 1.3,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.9,
        "logit_bias": {3: 1.0, 5: -1.0, 6: 0.5},
    },
    "none": {},
}


def rows_with(
    params: Sequence[SamplingParams],
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    vocab: int,
    guides: Sequence[bool] | None = None,
) -> tuple[RowStore, int]:
    """Rows whose owners know these tokens, as a plan brings them, and what any of them needs."""
    table = RowTable(len(params), 64, block_size=1)
    for row, (asked, prompt, output) in enumerate(zip(params, prompts, outputs, strict=True)):
        request = Request("r", int_array(prompt), asked, row, (), limit=60)
        request.tokens = int_array([*prompt, *output])
        request.guide = Always() if guides is not None and guides[row] else None
        table._free = [row]
        table.seat(request)
    rows = list(range(len(params)))
    baggage = table.baggage(rows)
    store = RowStore(CpuDevice(driver=InlineDriver()), Limits(len(params), 1, 1, 1, 1), vocab)
    store.counts[:] = -5  # of earlier owners
    store.seats[:-1] = torch.from_numpy(table.seat_words(rows))
    store.take_in(*(torch.from_numpy(part) for part in (baggage.count_rows, baggage.counts, baggage.biases)))
    return store, int(np.bitwise_or.reduce(table.needs))


@given(st.integers(0, 10**6), st.sampled_from([0.0, 1.3]), st.integers(0, 12), st.data())
def test_penalties_and_biases_are_those_of_the_oracle(seed: int, temperature: float, steps: int, data) -> None:
    """Also after tokens that the device alone has counted."""
    random = np.random.default_rng(seed)
    kinds = data.draw(st.lists(st.sampled_from(sorted(ADJUSTED)), min_size=1, max_size=5))
    params = [SamplingParams(temperature=temperature, **ADJUSTED[kind]) for kind in kinds]
    prompts = [random.integers(0, VOCAB, random.integers(1, 9)).tolist() for _ in kinds]
    outputs = [random.integers(0, VOCAB, random.integers(0, 9)).tolist() for _ in kinds]
    store, needs = rows_with(params, prompts, outputs, VOCAB)
    rows = torch.arange(len(kinds))
    for _ in range(steps):
        tokens = random.integers(0, 5, len(kinds))
        store.keep(rows, torch.from_numpy(tokens), needs)
        outputs = [[*output, token] for output, token in zip(outputs, tokens.tolist(), strict=True)]
    logits = random_logits(seed, len(kinds))
    places = torch.tensor([len(prompt) + len(output) for prompt, output in zip(prompts, outputs, strict=True)])
    found = sample(torch.from_numpy(logits), SampledRows(rows, places, store.state), needs).tolist()
    for row, asked in enumerate(params):
        wanted = oracles.adjust(logits[row], asked, prompts[row], outputs[row])
        given_ = (wanted, asked, row, int(places[row]))
        assert found[row] == oracles.sample(*given_) or not oracles.is_clear(*given_)


def test_a_count_stays_at_its_largest_and_no_sample_is_not_counted() -> None:
    store, needs = rows_with([SamplingParams(frequency_penalty=1.0)], [[3]], [[]], VOCAB)
    rows = torch.zeros(1, dtype=torch.int64)
    store.counts[0, 3] = MOST + IN_PROMPT - 1
    for token in (3, 3, 3, NO_SAMPLE, 4):
        store.keep(rows, torch.tensor([token]), needs)
    assert store.counts[0].nonzero().flatten().tolist() == [3, 4]
    assert store.counts[0, [3, 4]].tolist() == [MOST + IN_PROMPT, 1]


@pytest.mark.parametrize("kind", ["more repetition", "presence", "frequency", "bias", "all", "sigma", "typical"])
def test_adjusted_tokens_come_as_often_as_they_are_likely(kind: str) -> None:
    count, vocab = 20_000, 10
    changes = dict(ADJUSTED.get(kind) or NARROWED[kind])
    if "logit_bias" in changes:
        changes["logit_bias"] = {0: 0.8, 3: -1.0, 7: 0.5}
    params = SamplingParams(temperature=0.9, **changes)
    one, prompt, output = random_logits(8, 1, vocab) / 2, [1, 2, 2], [2, 4, 4, 4, 9]
    store, needs = rows_with([params], [prompt], [output], vocab)
    store.seats.view(torch.int64)[0, 0] = 5  # the seed
    sampled = SampledRows(torch.zeros(count, dtype=torch.int64), torch.arange(count), store.state)
    tokens = sample(torch.from_numpy(np.repeat(one, count, 0)), sampled, needs).numpy()
    shares = oracles.distribution(oracles.adjust(one[0], params, prompt, output), params)
    counts = np.bincount(tokens, minlength=vocab)
    assert not counts[shares == 0].any()
    assert chi_square(counts[shares > 0], shares[shares > 0]) < 28  # at most 9 degrees of freedom


NARROWED = {
    "sigma": {"top_n_sigma": 1.2},
    "typical": {"typical_p": 0.6},
    "both": {"top_n_sigma": 2.0, "typical_p": 0.8},
}


@given(st.integers(0, 10**6), st.sampled_from(sorted(NARROWED)), st.floats(0.01, 3), st.floats(0, 1))
def test_top_n_sigma_and_typical_p_are_those_of_the_oracle(seed: int, kind: str, top_n: float, share: float) -> None:
    changes = {name: top_n if name == "top_n_sigma" else share for name in NARROWED[kind]}
    params = SamplingParams(temperature=1.3, **changes)
    logits = random_logits(seed, 1)
    logits[0, seed % VOCAB] = -np.inf
    wanted = oracles.adjust(logits[0], params, [1], [])
    asked = (wanted, params, seed, 3)
    found = run(logits, [params], [seed], [3])[0]
    assert (
        found == oracles.sample(*asked)
        or not oracles.is_clear(*asked)
        or not oracles.is_clear_narrow(logits[0], params)
    )


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_processed_scores_are_of_the_distribution_and_others_of_the_model(temperature: float) -> None:
    changes = {"top_k": 9, "top_p": 0.9, "repetition_penalty": 1.4, "logit_bias": {3: 2.0}, "typical_p": 0.95}
    mode = {"logprobs": 3, "logprobs_mode": "processed_logprobs"}
    params = [SamplingParams(temperature=temperature, **changes, **more) for more in (mode, {"logprobs": 3})]
    prompts, outputs, logits = [[1, 2]] * 2, [[5, 5, 7]] * 2, random_logits(3, 2)
    store, needs = rows_with(params, prompts, outputs, VOCAB)
    sampled = SampledRows(torch.arange(2), torch.full((2,), 5), store.state)
    raw = torch.from_numpy(logits)
    found = judged(raw, raw, sampled, needs).log_softmax(dim=1).exp().numpy()
    wanted = oracles.adjust(logits[0], params[0], [1, 2], [5, 5, 7])
    own = oracles.distribution(wanted, params[0] if temperature else SamplingParams())
    np.testing.assert_allclose(found[0], own, atol=1e-6)
    np.testing.assert_allclose(found[1], oracles.distribution(logits[1], SamplingParams()), atol=1e-6)


# -- masks ---------------------------------------------------------------------------------------------------------


def bits_of(allowed: np.ndarray) -> torch.Tensor:
    """Masks [n, mask_words] int32 of booleans [n, vocab]."""
    filled = np.zeros((len(allowed), 32 * mask_words(allowed.shape[1])), np.uint8)
    filled[:, : allowed.shape[1]] = allowed
    return torch.from_numpy(np.packbits(filled, axis=1, bitorder="little").view(np.int32))


@given(st.integers(0, 10**6), st.sampled_from([1, 31, 32, 33, VOCAB]), st.sampled_from([0.0, 1.5]))
def test_a_row_with_a_guide_gets_what_its_mask_allows(seed: int, vocab: int, temperature: float) -> None:
    """A row without one ignores its mask, which may be that of an earlier owner."""
    random = np.random.default_rng(seed)
    logits, allowed = random_logits(seed, 6, vocab), random.random((6, vocab)) < 0.3
    allowed[range(6), random.integers(0, vocab, 6)] = True
    params = SamplingParams(temperature=temperature)
    seats, needs = make_seats([params] * 6, range(6), guides=[row % 2 == 0 for row in range(6)])
    sampled = SampledRows(torch.arange(6), torch.arange(6), row_state(seats, bits_of(allowed)))
    found = sample(torch.from_numpy(logits), sampled, needs).tolist()
    for row in range(6):
        forbidden = np.flatnonzero(~allowed[row]).tolist() if row % 2 == 0 else []
        asked = (logits[row], params, row, row, forbidden)
        assert found[row] == oracles.sample(*asked) or not oracles.is_clear(*asked)


# -- the edges -----------------------------------------------------------------------------------------------------


def test_a_draw_never_leaves_the_support() -> None:
    """Neither the lowest nor the highest uniform number falls on a token of no mass."""
    logits = torch.full((2, 6), -torch.inf)
    logits[:, 2:4] = 0.0
    assert draw(logits, torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)).tolist() == [2, 3]


@pytest.mark.parametrize("temperature", [1e-3, 1e-6, 1e-30, 1e-38, 1e-39, 1e-44])
def test_very_low_temperatures_are_greedy(temperature: float) -> None:
    logits = random_logits(9, 8)
    found = run(logits, [SamplingParams(temperature=temperature)] * 8, list(range(8)), [0] * 8)
    assert found == logits.argmax(axis=1).tolist()


def test_the_highest_temperature_is_nearly_uniform() -> None:
    count = 4000
    logits = np.repeat(random_logits(2, 1, 8), count, 0)
    tokens = run(logits, [SamplingParams(temperature=100)] * count, [1] * count, list(range(count)))
    assert np.bincount(tokens, minlength=8).min() > count / 8 * 0.8


@pytest.mark.parametrize("value", [np.nan, -np.inf, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_largest_logit_has_no_sample(temperature: float, value: float) -> None:
    logits = random_logits(1, 3)
    expected = run(logits, [SamplingParams(temperature=temperature, top_k=5)] * 3, [1, 2, 3], [4, 5, 6])
    logits[1] = value
    found = run(logits, [SamplingParams(temperature=temperature, top_k=5)] * 3, [1, 2, 3], [4, 5, 6])
    assert found == [expected[0], NO_SAMPLE, expected[2]]
    logits = random_logits(1, 1)
    logits[0, 7] = np.nan  # one token that the model cannot judge: no draw over such a row means anything
    assert run(logits, [SamplingParams(temperature=temperature)], [1], [4]) == [NO_SAMPLE]
