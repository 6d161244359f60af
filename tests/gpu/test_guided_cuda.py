"""Guided requests on a real GPU: masks between two graphs, at any depth, and nothing for the first time after ready."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gapless import LLM, RowFacts, SamplingParams
from gapless.core.guide import mask_words
from gapless.core.outcome import Finished, Progress
from gapless.core.request import Request, int_array
from gapless.device.late import PREFIX
from gapless.proof.rule import Rule
from tiny import write_dummy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
VOCAB = 1000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}
    sizes |= {"vocab_size": VOCAB, "max_position_embeddings": 1024, "head_dim": 32, "num_hidden_layers": 3}
    return write_dummy(tmp_path_factory.mktemp("dummy"), **sizes)


def open_llm(model: Path, **options: Any) -> LLM:
    common = {"load_format": "dummy", "dtype": "bfloat16", "device": "cuda", "max_num_rows": 16, "max_model_len": 512}
    return LLM(model, **common | options)


def asks() -> list[tuple[list[int], SamplingParams, Rule | None]]:
    """Free and guided requests, greedy and drawn, some of them scored; every third has no guide."""
    dice = random.Random(3)
    found = []
    for number in range(40):
        prompt = [dice.randrange(1, VOCAB) for _ in range(dice.choice((1, 5, 60, 200)))]
        params = SamplingParams(
            max_tokens=dice.randint(5, 40),
            temperature=dice.choice((0.0, 0.8)),
            seed=number,
            ignore_eos=True,
            logprobs=dice.choice((None, None, 3)),
        )
        rule = Rule(number, waits=number % 5 > 0) if number % 3 else None
        found.append((prompt, params, rule))
    return found


def run(llm: LLM, wanted: Sequence[tuple[list[int], SamplingParams, Rule | None]]) -> list[tuple[int, ...]]:
    """The tokens of each request, all submitted at once."""
    over, finished = threading.Event(), dict[str, Finished]()
    requests: list[Request] = []
    for prompt, params, rule in wanted:
        request = llm.engine.make_request(prompt, params)
        request.guide = None if rule is None else rule.guide()
        requests.append(request)

    def deliver(news: Progress | Finished) -> None:
        if isinstance(news, Finished):
            finished[news.request.id] = news
            if len(finished) == len(requests):
                over.set()

    for request in requests:
        llm.engine.submit(request, deliver)
    assert over.wait(120)
    assert [finished[request.id].error for request in requests] == [None] * len(requests)
    return [tuple(request.tokens[request.num_prompt :].tolist()) for request in requests]


def forbidden(rule: Rule, tokens: Sequence[int]) -> int:
    """How many of the tokens the rule does not allow."""
    guide, mask, count = rule.guide(), np.zeros(mask_words(VOCAB), np.int32), 0
    for token in tokens:
        guide.fill(mask)
        count += not mask[token // 32] >> (token % 32) & 1
        guide.advance(int_array([token]))
    return count


def test_tokens_are_allowed_and_those_of_depth_1(model: Path) -> None:
    """Batch-invariant, so that a token depends on its request alone; the free ones are those without neighbours."""
    with open_llm(model, batch_invariant=True, depth=1) as llm:
        first = run(llm, asks())
        free = run(llm, [ask for ask in asks() if ask[2] is None])
    for (_, params, rule), tokens in zip(asks(), first, strict=True):
        assert len(tokens) == params.max_tokens
        assert rule is None or forbidden(rule, tokens) == 0
    assert [tokens for (_, _, rule), tokens in zip(asks(), first, strict=True) if rule is None] == free
    for options in ({"depth": 2}, {"depth": 3}, {"depth": 2, "num_blocks": 60}, {"depth": 2, "check": True}):
        with open_llm(model, batch_invariant=True, **options) as llm:
            assert run(llm, asks()) == first, options
            assert not options.get("num_blocks") or llm.stats().num_preemptions > 0


class NoEcho:
    """The last token does not come again; on the device, without a wait."""

    name, needs_newest = "no-echo", True

    def applies(self, params: SamplingParams) -> bool:
        return params.temperature == 0

    def __call__(self, logits: torch.Tensor, rows: Sequence[RowFacts]) -> torch.Tensor:
        last = torch.tensor([int(row.tokens[-1]) for row in rows], pin_memory=True).to("cuda", non_blocking=True)
        return logits.scatter_(1, last[:, None], -torch.inf)


class Broken(NoEcho):
    name = "broken"

    def __call__(self, logits: torch.Tensor, rows: Sequence[RowFacts]) -> torch.Tensor:
        raise KeyError("no")


def test_processors_between_two_replays(model: Path) -> None:
    free_asks = [(prompt, params, None) for prompt, params, _ in asks()]
    first: list[tuple[int, ...]] | None = None
    with open_llm(model, batch_invariant=True, depth=2) as llm:
        free = run(llm, free_asks)
    for depth in (1, 2, 3):
        with open_llm(model, batch_invariant=True, depth=depth, logits_processors=[NoEcho()]) as llm:
            torch.cuda.set_sync_debug_mode("error")
            try:
                found = run(llm, free_asks)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert [key for key in llm.engine.monitor.ledger() if key.startswith("no graph")] == []
        first = first or found
        assert found == first
    for (prompt, params, _), tokens, other in zip(free_asks, found, free, strict=True):
        if params.temperature == 0:
            assert all(a != b for a, b in pairwise([prompt[-1], *tokens]))
        else:
            assert tokens == other
    with open_llm(model, batch_invariant=True, depth=2, logits_processors=[Broken()]) as llm:
        completions = llm.generate([ask[0] for ask in free_asks], [ask[1] for ask in free_asks])
    for completion, other, (_, params, _) in zip(completions, free, free_asks, strict=True):
        if params.temperature == 0:
            assert completion.error == "logits processor broken failed: KeyError: 'no'"
        else:
            assert completion.token_ids == other


def test_every_step_is_replayed_and_nothing_is_new_or_waits(model: Path) -> None:
    with open_llm(model, depth=2, trace=True) as llm:
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = run(llm, asks())
        finally:
            torch.cuda.set_sync_debug_mode("default")
        ledger = llm.engine.monitor.ledger()
        timeline = llm.engine.monitor.timeline()
    assert [key for key in ledger if key.startswith((PREFIX, "no graph"))] == []
    for (_, _, rule), tokens in zip(asks(), found, strict=True):
        assert rule is None or forbidden(rule, tokens) == 0
    between = timeline.steps.idle_masks
    assert (between >= 0).all()
    assert between.max() > 0
    assert (between <= timeline.steps.compute_end - timeline.steps.compute_begin).all()
