"""Penalties, biases, masks and narrowed choices in captured steps: the same tokens at any depth and when preempted."""

from __future__ import annotations

import math
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from gapless import LLM, SamplingParams
from gapless.device.late import PREFIX
from tiny import write_dummy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
VOCAB = 1000
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"repetition_penalty": 0.6, "frequency_penalty": -0.5},
    {"frequency_penalty": 2.0, "presence_penalty": 1.0},
    {"logit_bias": {5: 6.0, 6: 5.0, 7: -100}, "repetition_penalty": 1.3},
    {"top_n_sigma": 1.5, "typical_p": 0.8},
    {"bad_token_ids": [3, 4], "bad_words": [[5, 5], [5, 6]], "logit_bias": {5: 9.0, 6: 9.0}},
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}
    sizes |= {"vocab_size": VOCAB, "max_position_embeddings": 1024, "head_dim": 32, "num_hidden_layers": 2}
    return write_dummy(tmp_path_factory.mktemp("dummy"), **sizes)


def generate(model: Path, **options: Any) -> tuple[list[tuple[int, ...]], LLM]:
    dice = random.Random(3)
    prompts = [[dice.randrange(1, VOCAB) for _ in range(dice.choice((1, 5, 60, 150)))] for _ in range(30)]
    values = [{"temperature": dice.choice((0.0, 0.8)), "max_tokens": dice.randint(5, 40)} for _ in prompts]
    params = [
        SamplingParams(seed=number, ignore_eos=True, **each, **KINDS[number % len(KINDS)])
        for number, each in enumerate(values)
    ]
    common = {"load_format": "dummy", "dtype": "bfloat16", "device": "cuda", "max_num_rows": 16, "max_model_len": 512}
    llm = LLM(model, batch_invariant=True, **common | options)
    return [found.token_ids for found in llm.generate(prompts, params)], llm


def test_tokens_are_the_same_at_any_depth_and_when_preempted(model: Path) -> None:
    alone, first = generate(model, depth=1)
    first.close()
    for options in ({"depth": 4}, {"depth": 3, "num_blocks": 36}):
        found, llm = generate(model, **options)
        ledger, preempted = llm.engine.monitor.ledger(), llm.stats().num_preemptions
        llm.close()
        assert found == alone
        assert bool(preempted) == ("num_blocks" in options)
        assert not [name for name in ledger if name.startswith((PREFIX, "no graph"))], ledger
    for number, tokens in enumerate(alone):
        if number % len(KINDS) == 5:
            assert not {3, 4} & set(tokens)
            assert not {(5, 5), (5, 6)} & set(pairwise(tokens))


def test_log_probabilities_of_processed_logits_come_from_replays(model: Path) -> None:
    """In one batch with those of the model's own. Each is the share that its filters and penalties leave the token."""
    modes = ("processed_logprobs", "raw_logprobs")
    kinds = ({"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.2}, {"typical_p": 0.6}, {"logit_bias": {5: 30.0}}, {})
    params = [
        SamplingParams(temperature=0.7, seed=7, max_tokens=12, ignore_eos=True, logprobs=20, logprobs_mode=mode, **kind)
        for kind in kinds
        for mode in modes
    ]
    common = {"load_format": "dummy", "dtype": "bfloat16", "device": "cuda", "max_num_rows": 16, "max_model_len": 512}
    with LLM(model, batch_invariant=True, **common) as llm:
        found = llm.generate([[3, 1, 4, 1, 5]] * len(params), params)
        ledger = llm.engine.monitor.ledger()
    assert not [name for name in ledger if name.startswith((PREFIX, "no graph"))], ledger
    for kind, processed, raw in zip(kinds, found[::2], found[1::2], strict=True):
        assert processed.token_ids == raw.token_ids
        for drawn, own in zip(processed.logprobs, raw.logprobs, strict=True):
            assert drawn.token == own.token
            assert math.isfinite(drawn.logprob)
            alive = [value for _, value in drawn.top if value > -math.inf]
            total = sum(math.exp(value) for value in alive)
            assert total < 1.0001
            if "top_k" in kind:
                assert total == pytest.approx(1, abs=1e-3)
                scaled = [value / 0.7 for _, value in own.top if value >= own.top[2][1]]  # equals of the third stay
                expected = [value - math.log(sum(map(math.exp, scaled))) for value in scaled]
                assert alive == pytest.approx(expected, abs=2e-3)
            if "logit_bias" in kind:
                assert drawn.token == 5
                assert drawn.logprob > own.logprob
