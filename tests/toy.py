"""The real pipeline and runner under a toy model that is exact: no rounding, no near-ties.

The toy's KV cache holds tokens; its hidden state is a hash of a row's history, read back through the block table; its
logits are numbers drawn from that hash. So every token is a function of the prompt and the sampling parameters, and a
wrong row, block, position, order or buffer shows as a wrong token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

import oracles
from gapless.attention.base import Attend, AttentionBatch, Rotation
from gapless.core.guide import mask_words
from gapless.core.limits import Limits
from gapless.core.outcome import Commit, Finished, TokenLogprob, completion_logprobs, prompt_logprobs
from gapless.core.params import SamplingParams
from gapless.core.request import Request, int_array
from gapless.core.scheduler import Scheduler
from gapless.device.base import Buffer, Device
from gapless.guides.masks import fill_mask
from gapless.pipeline.depth import FixedDepth
from gapless.pipeline.executor import Executor, LocalExecutor
from gapless.pipeline.loop import run_loop
from gapless.proof.rule import Rule
from gapless.runner.runner import Runner
from gapless.runner.sampler import pick, uniform
from gapless.runner.step import Step

VOCAB = 61
LIMITS = Limits(num_rows=4, num_blocks=24, block_size=4, max_batch_tokens=12, max_model_len=48)


@cache
def _powers() -> torch.Tensor:
    powers = [pow(0x9E3779B97F4A7C15, i + 1, 2**64) for i in range(4 * LIMITS.max_model_len)]
    return torch.tensor([p - 2**64 if p >= 2**63 else p for p in powers])


def _logits(hidden: torch.Tensor) -> torch.Tensor:
    return (uniform(hidden[:, None], torch.arange(VOCAB)) * 8).float()


@dataclass
class ToyKV:
    """What the runner needs of a KV store."""

    buffer: Buffer


class ToyModel:
    vocab_size = VOCAB

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        return attend(0, token_ids, None)  # type: ignore[arg-type]  # tokens stand for heads, unrotated

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return _logits(hidden)

    def few_layers(self) -> ToyModel:
        return self


class ToyAttention:
    """Stores tokens, and gives each of the step's tokens the hash of its row up to itself."""

    def __init__(self, pool: torch.Tensor, block_size: int) -> None:
        self._pool = pool
        self._size = block_size

    def begin(self, batch: AttentionBatch) -> Attend:
        def attend(layer: int, heads: torch.Tensor, rotation: Rotation) -> torch.Tensor:
            self._pool[batch.slots[0]] = heads.long()
            decodes = zip(batch.tables[0][batch.decode_rows], batch.decode_lengths, strict=True)
            out = torch.zeros_like(heads, dtype=torch.int64)
            for i, (table, length) in enumerate(decodes):
                out[i] = self._terms(table)[:length].sum()
            starts, ends = batch.chunk_starts, batch.chunk_ends
            chunks = zip(batch.tables[0][batch.chunk_rows], batch.chunk_offsets, starts, ends, strict=True)
            for table, offset, start, end in chunks:
                out[offset : offset + end - start] = self._terms(table)[:end].cumsum(0)[start:]
            return out

        return attend

    def _terms(self, table: torch.Tensor) -> torch.Tensor:
        tokens = self._pool.view(-1, self._size)[table].view(-1)
        return (tokens + 1) * _powers()[: len(tokens)]


def toy_runner(device: Device, limits: Limits) -> Runner:
    kv = device.buffer("kv", ((limits.num_blocks + 1) * limits.block_size,), torch.int64)
    attention = ToyAttention(kv.tensor, limits.block_size)
    return Runner(device, limits, ToyKV(kv), Step(ToyModel(), attention, pick))  # type: ignore[arg-type]


def toy_truth(request: Request, rule: Rule | None = None) -> list[int]:
    """The tokens that the toy gives to a request, without the engine."""
    tokens: list[int] = request.prompt.tolist()
    guide = rule.guide() if rule is not None else None
    while len(tokens) < request.limit:
        terms = (torch.tensor(tokens) + 1) * _powers()[: len(tokens)]
        logits: np.ndarray = _logits(terms.sum()[None])[0].numpy()
        if guide is not None:
            mask = np.zeros(mask_words(VOCAB), np.int32)
            fill_mask(guide, mask)
            allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB]
            logits = np.where(allowed, logits, -np.inf)
        early = len(tokens) + 1 - request.num_prompt <= request.params.min_tokens
        forbidden = request.stop_ids if early else ()
        logits = oracles.adjust(logits, request.params, tokens[: request.num_prompt], tokens[request.num_prompt :])
        tokens.append(oracles.sample(logits, request.params, request.seed, len(tokens), forbidden))
        if tokens[-1] in request.stop_ids:
            break
        if guide is not None:
            guide.advance(int_array(tokens[-1:]))
            if guide.is_over:
                break
    return tokens[request.num_prompt :]


def check_toy_logprobs(request: Request) -> None:
    """Assert that a request that ended has the log-probabilities of the toy, computed here in float64."""
    tokens, wanted = request.tokens.tolist(), request.params
    found: list[TokenLogprob | None] = list(prompt_logprobs(request) or [None] * request.num_prompt)
    found += completion_logprobs(request, len(tokens) - request.num_prompt) or [None] * len(tokens)
    for index, token in enumerate(tokens):
        num_top = wanted.prompt_logprobs if index < request.num_prompt else wanted.logprobs
        if num_top is None or index == 0:
            assert found[index] is None
            continue
        terms = (torch.tensor(tokens[:index]) + 1) * _powers()[:index]
        logits = _logits(terms.sum()[None])[0].numpy()
        if wanted.logprobs_mode == "processed_logprobs" and index >= request.num_prompt:
            logits = _drawn_from(request, logits, tokens[:index])
        oracles.check_logprob(found[index], token, logits, num_top)


def _drawn_from(request: Request, logits: np.ndarray, tokens: list[int]) -> np.ndarray:
    """The logarithms of the probabilities by which a token is drawn after these."""
    count, params = request.num_prompt, request.params
    logits = oracles.adjust(logits, params, tokens[:count], tokens[count:])
    if len(tokens) + 1 - count <= params.min_tokens:
        logits[list(request.stop_ids)] = -np.inf
    shares = oracles.distribution(logits, params if params.temperature > 0 else SamplingParams(temperature=1))
    with np.errstate(divide="ignore"):
        return np.log(shares)


def toy_request(id: str, prompt: Sequence[int], *, seed: int = 0, limits: Limits = LIMITS, **params: object) -> Request:
    sampling = SamplingParams.from_dict({"max_tokens": 8, "temperature": 0, **params})
    limit = min(len(prompt) + sampling.max_tokens, limits.max_model_len)
    return Request(id, int_array(prompt), sampling, seed, sampling.stop_token_ids, limit)


def toy_requests() -> list[Request]:
    """A mixed workload: greedy and random, short and long, with stops, penalties that
    make repetitions likely, and prefixes in common."""
    shared = list(range(1, 14))
    return [
        toy_request("a", [*shared, 20], max_tokens=9),
        toy_request("b", [7, 8], max_tokens=12, temperature=0.9, seed=5, logit_bias={7: 3, 8: -100, 9: 2.5}),
        toy_request("c", [*shared, 30], max_tokens=6, temperature=0.7, top_k=5, seed=-6),
        toy_request("d", [3, 1, 4, 1, 5], max_tokens=10, stop_token_ids=(9, 19, 29, 39, 49, 59), min_tokens=2),
        toy_request("e", [*shared, 20, 21], max_tokens=7, repetition_penalty=0.7),
        toy_request("f", [60] * 17, max_tokens=8, temperature=1.1, stop_token_ids=tuple(range(0, 48, 4)), seed=7),
        toy_request("g", [11], max_tokens=16, frequency_penalty=-1.5, presence_penalty=-1),
    ]


@dataclass(frozen=True)
class Outcome:
    """What a run brought: tokens and reasons by request, and how it came about."""

    tokens: Mapping[str, list[int]]
    reasons: Mapping[str, str]
    scheduler: Scheduler


def run_toy(
    executor: Executor,
    requests: Sequence[Request],
    *,
    depth: int,
    limits: Limits = LIMITS,
    check: bool = True,
    chunk_cost: float = 0.0,
) -> Outcome:
    """Run requests that arrive one a turn, and close the executor."""
    scheduler = Scheduler(limits, chunk_cost=chunk_cost)
    waiting = list(requests)
    finished: dict[str, Finished] = {}

    def admit(idle: bool) -> bool:
        if check:
            scheduler.check()
        if waiting:
            scheduler.add(waiting.pop(0))
        return bool(waiting) or scheduler.has_requests

    def deliver(commit: Commit) -> None:
        finished.update({item.request.id: item for item in commit.finished})

    try:
        run_loop(scheduler, executor, FixedDepth(depth), admit, deliver)
    finally:
        executor.close()
    tokens = {id: item.request.tokens[item.request.num_prompt :].tolist() for id, item in finished.items()}
    return Outcome(tokens, {id: item.reason for id, item in finished.items()}, scheduler)


ExecutorMaker = Callable[[Device, Runner, Limits, int], Executor]


def run_on(
    device: Device,
    requests: Sequence[Request],
    *,
    depth: int,
    limits: Limits = LIMITS,
    make: ExecutorMaker = LocalExecutor,
    chunk_cost: float = 0.0,
) -> Outcome:
    """Run requests on a device with as many slots as the depth says."""
    executor = make(device, toy_runner(device, limits), limits, depth)
    return run_toy(executor, requests, depth=depth, limits=limits, chunk_cost=chunk_cost)
