"""SmolLM2 on a real GPU: float32 equals transformers on every prompt of the parity suite, bfloat16 up to near-ties."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from gapless.core.outcome import TokenLogprob
from test_parity import COUNT, PARAMS, Reference, ask, load_once, make, reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
__all__ = ["load_once", "reference"]  # fixtures
NEAR = 0.1  # in log-probability
TOP = 5


@pytest.mark.parametrize(
    "options",
    [
        {"depth": 1},
        {"depth": 2},
        {"depth": 3},
        {"depth": 2, "batch_invariant": True},
        {"depth": 3, "max_batch_tokens": 16, "max_num_rows": 16},
        {"depth": 2, "num_blocks": 40, "max_batch_tokens": 128},
        {"depth": "auto"},
    ],
    ids=str,
)
def test_float32_equals_transformers(reference: Reference, options: dict[str, Any]) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    with make(device="cuda", **options) as llm:
        ask(llm, reference)
        ask(llm, reference, [31, 32, 33])  # their prefixes are in the cache now


@pytest.mark.parametrize("options", [{"depth": 2}, {"depth": 2, "batch_invariant": True}], ids=str)
def test_bfloat16_differs_at_near_ties_only(reference: Reference, options: dict[str, Any]) -> None:
    """Where tokens part for the first time, transformers finds our choice about as likely as any."""
    judge = copy.deepcopy(reference.model).to("cuda")
    model = copy.deepcopy(reference.model).to("cuda", torch.bfloat16)
    with make(device="cuda", dtype="bfloat16", **options) as llm:
        prompts = [list(question.tokens) for question in reference.questions]
        found = llm.generate(prompts, replace(PARAMS, logprobs=TOP))
    for question, completion in zip(reference.questions, found, strict=True):
        assert completion.error is None
        assert completion.logprobs is not None
        theirs = generate(model, question.tokens)
        pairs = enumerate(zip(completion.token_ids, theirs, strict=False))
        parting = next((i for i, (ours, other) in pairs if ours != other), None)
        if parting is not None:
            compare((judge, model), [*question.tokens, *theirs[:parting]], completion.logprobs[parting])


def generate(model: Any, prompt: tuple[int, ...]) -> list[int]:
    ids = torch.tensor([prompt], device="cuda")
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=COUNT, do_sample=False)
    return out[0, len(prompt) :].tolist()


def compare(models: tuple[Any, ...], tokens: list[int], ours: TokenLogprob) -> None:
    """The likeliest tokens are nearly the same, and in float32 or in bfloat16 ours is near the best.

    In bfloat16 either engine is off by as much as NEAR itself; float32 says which choices were close in truth. The
    last product is taken in float32 in any case: rounded to bfloat16, logits of 16 and more lie 0.125 apart.
    """
    gaps, common = [], []
    for model in models:
        with torch.inference_mode():
            hidden = model.model(torch.tensor([tokens], device="cuda")).last_hidden_state[0, -1].float()
            scores = (hidden @ model.lm_head.weight.float().T).log_softmax(dim=0)
        common.append(len(dict(ours.top).keys() & set(scores.topk(TOP).indices.tolist())))
        gaps.append(float(scores.max() - scores[ours.token]))
    assert max(common) >= TOP - 1
    assert min(gaps) < NEAR, f"token {len(tokens)}: {gaps}"


def test_float16_runs(reference: Reference) -> None:
    with make(device="cuda", dtype="float16", depth=2) as llm:
        found = llm.generate([list(question.tokens) for question in reference.questions], PARAMS)
    same = sum(item.token_ids == answer for item, answer in zip(found, reference.answers, strict=True))
    assert same > len(found) // 2  # the rest are near-ties
