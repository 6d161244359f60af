"""The sampler once more, one row at a time, in plain Python and numpy, float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gapless.core.outcome import TokenLogprob
from gapless.core.params import SamplingParams

_MASK = 2**64 - 1


def splitmix64(state: int) -> int:
    """The output of Steele, Lea and Flood's generator for the state before its increment."""
    z = (state + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def uniform(seed: int, place: int) -> float:
    return (splitmix64((splitmix64(seed & _MASK) + place) & _MASK) >> 11) * 2.0**-53


def kept_tokens(scaled: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Which tokens top-k, then top-p of what is left, then min-p leave standing."""
    order = np.argsort(-scaled, kind="stable")
    kept = order[: params.top_k] if params.top_k else order
    if params.top_p < 1:
        probs = _softmax(scaled[kept])
        before = np.cumsum(probs) - probs
        kept = kept[before < params.top_p]
    mask = np.zeros(len(scaled), bool)
    mask[kept] = True
    probs = _softmax(scaled)
    return mask & (probs >= params.min_p * probs.max())


def distribution(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Probabilities of all tokens for a temperature above 0."""
    scaled = logits.astype(np.float64) / params.temperature
    return _softmax(np.where(kept_tokens(scaled, params), scaled, -np.inf))


def adjust(logits: np.ndarray, params: SamplingParams, prompt: Sequence[int], generated: Sequence[int]) -> np.ndarray:
    """Biases, then penalties for what was there before, token by token."""
    found = logits.astype(np.float64).copy()
    for token, bias in params.logit_bias:
        found[token] += bias
    for token in {*prompt, *generated}:
        found[token] *= params.repetition_penalty if found[token] < 0 else 1 / params.repetition_penalty
    for token in set(generated):
        count = sum(other == token for other in generated)
        found[token] -= params.presence_penalty + count * params.frequency_penalty
    return narrow(found, params) if params.temperature > 0 else found


def narrow(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """What top-n-sigma, then typical-p keep, others as -inf."""
    finite = logits[np.isfinite(logits)]
    if params.top_n_sigma > 0:
        logits = np.where(logits >= finite.max() - params.top_n_sigma * finite.std(), logits, -np.inf)
    if params.typical_p < 1:
        probs = _softmax(logits)
        alive = np.flatnonzero(probs > 0)
        information = -np.log(probs[alive])
        surprise = np.abs(information - (probs[alive] * information).sum())
        order = alive[np.argsort(surprise, kind="stable")]
        enough = np.flatnonzero(np.cumsum(probs[order]) >= params.typical_p)
        lost = order[enough[0] + 1 :] if len(enough) else order[:0]
        logits = logits.copy()
        logits[lost] = -np.inf
    return logits


def is_clear_narrow(logits: np.ndarray, params: SamplingParams) -> bool:
    """False where rounding decides what top-n-sigma and typical-p keep."""
    kept = [
        np.isfinite(narrow(logits.astype(np.float64), replace(params, **changes)))
        for changes in (
            {"typical_p": params.typical_p * (1 - 1e-5), "top_n_sigma": params.top_n_sigma * (1 - 1e-5)},
            {"typical_p": min(params.typical_p * (1 + 1e-5), 1.0), "top_n_sigma": params.top_n_sigma * (1 + 1e-5)},
        )
    ]
    return bool((kept[0] == kept[1]).all())


def sample(logits: np.ndarray, params: SamplingParams, seed: int, place: int, forbidden: Sequence[int] = ()) -> int:
    logits = logits.astype(np.float64).copy()
    logits[list(forbidden)] = -np.inf
    if params.temperature == 0:
        return int(np.argmax(logits))
    mass = np.cumsum(distribution(logits, params))
    return int(np.searchsorted(mass, uniform(seed, place) * mass[-1], side="right"))


def is_clear(logits: np.ndarray, params: SamplingParams, seed: int, place: int, forbidden: Sequence[int] = ()) -> bool:
    """False where float32 may rightly come to another token: a draw or a cut-off within 1e-6 of a boundary."""
    if params.temperature == 0:
        return True
    logits = logits.astype(np.float64).copy()
    logits[list(forbidden)] = -np.inf
    mass = np.cumsum(distribution(logits, params))
    return is_clear_cut(logits / params.temperature, params) and np.abs(mass - uniform(seed, place)).min() > 1e-6


def is_clear_cut(scaled: np.ndarray, params: SamplingParams) -> bool:
    """False where top-p or min-p cut within 1e-6 of a token's share."""
    ordered = -np.sort(-scaled)
    probs = _softmax(ordered[: params.top_k] if params.top_k else ordered)
    shares = _softmax(ordered) / _softmax(ordered).max()
    clear_p = params.top_p == 1 or np.abs(np.cumsum(probs) - probs - params.top_p).min() > 1e-6
    return bool(clear_p and (params.min_p in (0, 1) or np.abs(shares - params.min_p).min() > 1e-6))


def check_logprob(found: TokenLogprob | None, token: int, logits: np.ndarray, num_top: int, atol: float = 1e-5) -> None:
    """Assert that a log-probability is that of logits [vocab], within `atol`; close ones may change places."""
    assert found is not None
    expected = logits.astype(np.float64)
    expected -= expected.max()
    expected -= np.log(np.exp(expected).sum())
    assert found.token == token
    assert abs(found.logprob - expected[token]) <= atol, (found.logprob, expected[token])
    assert (expected > expected[token] + atol).sum() < found.rank <= (expected > expected[token] - atol).sum() + 1
    tops, values = [top for top, _ in found.top], [value for _, value in found.top]
    assert len(set(tops)) == len(tops) == num_top
    assert values == sorted(values, reverse=True)
    np.testing.assert_allclose(values, expected[tops], rtol=0, atol=atol)
    np.testing.assert_allclose(values, -np.sort(-expected)[:num_top], rtol=0, atol=atol)


def _softmax(values: np.ndarray) -> np.ndarray:
    powers = np.exp(values - values.max())
    return powers / powers.sum()
